"""Runs whose checkpoints are kept in `tests/checkpoint_files`, for later versions to load.

`python -m tests.support.saved_runs` writes missing files. It never changes an existing file, which an older version
saved.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, LowRank, MemOpt, SparseMFAC, TopK
from secondorder.switching import GradNormChange
from tests.support.building import built
from tests.support.pool import Pool
from tests.support.tasks import values

FOLDER = Path(__file__).parents[1] / "checkpoint_files"
SAVED_AT, END, EXAMPLES = 5, 8, 8
TOKENS, WIDTH, LENGTH, CLASSES = 5, 3, 2, 4


class Net(nn.Module):
    """Layers of four kinds, and a parameter that no layer method covers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 2, padding=1)
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.conv(self.norm(self.embed(tokens)).mT).mT[:, :LENGTH]
        return self.head(torch.tanh(hidden) * self.gain)


@dataclass(frozen=True)
class Saved:
    """A run that was saved after `SAVED_AT` steps."""

    cls: type[Any]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1  # number of ranks that saved, under `MemOpt`
    together: bool = False  # whether one file contains the state of all ranks, to be loaded by any number of ranks
    split: bool = False  # whether the parameters are in two groups

    def start(self) -> tuple[nn.Module, Any]:
        """The model and its optimizer before the first step."""
        torch.manual_seed(0)
        model = Net().double()
        return model, self.start_on(model)

    def start_on(self, model: nn.Module) -> Any:
        comm = {"comm": MemOpt(average_gradients=True)} if torch.distributed.is_initialized() else {}
        if not self.split:
            return built(self.cls, model, **self.keywords, **comm)
        named = list(model.named_parameters())
        groups = [{"params": named[:4]}, {"params": named[4:], "lr": 0.02, "weight_decay": 0.01}]
        return built(self.cls, groups, module=model, **self.keywords, **comm)


_FACTORS = {"lr": 0.05, "damping": 0.01, "factor_update_steps": 2, "inv_update_steps": 4}
_ROWS = {"lr": 0.05, "damping": 0.1, "update_steps": 2, "mode": "kid", "rank_fraction": 0.5}
_WINDOW = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "window_size": 4}
_GGT = {"lr": 0.05, "momentum": 0.9, "eps": 0.1, "window_size": 4}
_SPARSE = TopK(density=0.3, block_size=8)
_BITS = TopK(density=0.3, block_size=8, error_bits=4)

RUNS: dict[str, Saved] = {
    "kfac-eigen": Saved(KFAC, {**_FACTORS, "inverse_method": "eigen"}, split=True),
    "kfac-cholesky": Saved(KFAC, {**_FACTORS, "inverse_method": "cholesky", "graft": "adam"}),
    "kfac-packed": Saved(KFAC, {**_FACTORS, "factor_storage": "packed", "factor_dtype": torch.bfloat16}),
    "kfac-overlap": Saved(KFAC, {**_FACTORS, "inverse_method": "cholesky", "overlap": True}),
    "kfac-factors": Saved(KFAC, {**_FACTORS, "checkpoint_curvature": "factors"}),
    "kfac-none": Saved(KFAC, {**_FACTORS, "checkpoint_curvature": "none"}),
    "ekfac-intra": Saved(EKFAC, {**_FACTORS, "fallback": "adamw"}),
    "ekfac-running": Saved(EKFAC, {**_FACTORS, "estimator": "running", "momentum_mode": "pre", "power": 0.5}),
    "ekfac-qr": Saved(EKFAC, {**_FACTORS, "basis_update": "qr"}),
    "ekfac-factors": Saved(EKFAC, {**_FACTORS, "checkpoint_curvature": "factors"}),
    "hylo-kid": Saved(HyLo, {**_ROWS, "batch_size": EXAMPLES}),
    "hylo-auto": Saved(HyLo, {**_ROWS, "mode": "auto", "switch": GradNormChange(eta=0.1, period_steps=2, hold=0)}),
    "hylo-cheaper": Saved(HyLo, {**_ROWS, "kfac_when_cheaper": True, "rank_fraction": 0.8}),
    "mfac-dense": Saved(MFAC, _WINDOW),
    "mfac-bfloat16": Saved(MFAC, {**_WINDOW, "window_dtype": torch.bfloat16, "momentum_mode": "pre"}),
    "mfac-lowrank": Saved(MFAC, {**_WINDOW, "compression": LowRank(1), "partition": "layer"}),
    "sparse-4bit": Saved(SparseMFAC, {**_WINDOW, "compression": _BITS}),
    "ggt-momentum": Saved(GGT, {**_GGT, "betas": (0.9, 0.95)}),
    "ggt-topk": Saved(GGT, {**_GGT, "compression": _SPARSE}),
    "kfac-ranks": Saved(KFAC, _FACTORS, world=2),
    "kfac-together": Saved(KFAC, _FACTORS, world=2, together=True),
    "ekfac-ranks": Saved(EKFAC, _FACTORS, world=2),
    "ekfac-together": Saved(EKFAC, _FACTORS, world=2, together=True),
    "hylo-ranks": Saved(HyLo, {**_ROWS, "batch_size": EXAMPLES // 2}, world=2),
    "hylo-together": Saved(HyLo, {**_ROWS, "mode": "sngd"}, world=2, together=True),
    "mfac-ranks": Saved(MFAC, _WINDOW, world=2),
    "mfac-together": Saved(MFAC, _WINDOW, world=2, together=True),
    "mfac-layer-ranks": Saved(MFAC, {**_WINDOW, "partition": "layer"}, world=2),
    "sparse-ranks": Saved(SparseMFAC, {**_WINDOW, "compression": _SPARSE}, world=2),
}


def train(model: nn.Module, optimizer: Any, first: int, last: int, rank: int = 0, world: int = 1) -> None:
    """Take the steps from ``first`` to ``last`` on this rank's part of each batch."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(TOKENS, (EXAMPLES, LENGTH), generator=generator)
        targets = torch.randint(CLASSES, (EXAMPLES, LENGTH), generator=generator)
        optimizer.zero_grad()
        outputs = model(tokens.chunk(world)[rank])
        F.cross_entropy(outputs.flatten(0, 1), targets.chunk(world)[rank].flatten()).backward()
        optimizer.step()


def lines(saved: Mapping[str, Any]) -> dict[str, list[str]]:
    """One line per entry of a state dict, in order: key, dtype, shape and a hash of the bits."""
    return {str(i): [f"{key} {_line(value)}" for key, value in own.items()] for i, own in saved["state"].items()}


def _line(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    bits = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(bits).hexdigest()[:16]}"


def written(rank: int, world: int, name: str) -> dict[str, Any]:
    """Train, save and continue; return the checkpoint of this rank with the final parameters."""
    run = RUNS[name]
    model, optimizer = run.start()
    train(model, optimizer, 0, SAVED_AT, rank, world)
    if run.together:
        optimizer.consolidate_state_dict(None)
    found = copy.deepcopy({"weights": values(model), "optimizer": optimizer.state_dict()})
    if run.keywords.get("checkpoint_curvature") == "none":
        optimizer = run.start_on(model)
        optimizer.load_state_dict(found["optimizer"])
    train(model, optimizer, SAVED_AT, END, rank, world)
    return found | {"after": values(model)}


def continued(rank: int, world: int, name: str, file: str) -> dict[str, Any]:
    """Load and continue; return this rank's state after loading and its final parameters."""
    found = torch.load(FOLDER / file, weights_only=True)
    model, optimizer = RUNS[name].start()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.load_state_dict(found["weights"])
    optimizer.load_state_dict(found["optimizer"])
    loaded = optimizer.state_dict()
    answer = {"lines": lines(loaded), "groups": [{**g, "params": len(g["params"])} for g in loaded["param_groups"]]}
    train(model, optimizer, SAVED_AT, END, rank, world)
    return answer | {"after": values(model)}


def continued_in_parts(rank: int, world: int, name: str) -> dict[str, Any]:
    """The same for a rank that loads the file of the rank with the same number."""
    return continued(rank, world, name, f"{name}-{rank}.pt")


def write(pool: Pool) -> None:
    """Write the missing files, and the state that is expected after loading them."""
    FOLDER.mkdir(exist_ok=True)
    expected = json.loads(file.read_text()) if (file := FOLDER / "expected.json").exists() else {}
    for name, run in RUNS.items():
        if list(FOLDER.glob(f"{name}*.pt")):
            continue
        saved = [written(0, 1, name)] if run.world == 1 else pool.run(written, name, world=run.world)
        for rank, found in enumerate(saved if run.world > 1 and not run.together else saved[:1]):
            path = f"{name}-{rank}.pt" if run.world > 1 and not run.together else f"{name}.pt"
            torch.save(found, FOLDER / path)
        if run.world > 1 and not run.together:
            expected[name] = [answer["lines"] for answer in pool.run(continued_in_parts, name, world=run.world)]
        else:
            expected[name] = [continued(0, 1, name, f"{name}.pt")["lines"]]
    file.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    write(Pool())
