"""Lightning under torchrun: a run is killed on the first attempt and resumes from its last checkpoint.

Arguments: a folder, and the strategy of the optimizer or ``sharded`` for a run in two parts with FSDP2. Every rank
writes its results to ``answer-<rank>.json``.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from secondorder import CommOpt, MemOpt
from secondorder.integrations.lightning import SecondOrderCallback
from tests.integrations.lightning_models import METHODS, Module, trainer
from tests.integrations.small import batches

STRATEGIES = {"comm": CommOpt, "mem": MemOpt}
EPOCHS, KILLED_AT = 4, 8  # three steps per epoch and rank


class Mortal(Module):
    """A module whose last rank dies in the middle of an epoch of the first attempt."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and self.global_step == KILLED_AT and self.global_rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Unaware(DDPStrategy):
    """A strategy that overrides how Lightning collects the state of optimizers."""

    def optimizer_state(self, optimizer: Any) -> Any:
        return optimizer.state_dict()


def fit(
    module: Module,
    epochs: int,
    *,
    folder: Path | None = None,
    callback: bool = True,
    strategy: Callable[[], Any] = DDPStrategy,
) -> Module:
    """Train, starting from the last checkpoint of the folder if there is one."""
    callbacks: list[Any] = [SecondOrderCallback()] if callback else []
    callbacks += [ModelCheckpoint(folder, save_last=True)] if folder else []
    saves = folder is not None
    fitted = trainer(epochs, devices=2, strategy=strategy(), callbacks=callbacks, enable_checkpointing=saves)
    last = None if folder is None or not (folder / "last.ckpt").exists() else folder / "last.ckpt"
    fitted.fit(module, batches(), ckpt_path=last, weights_only=True if last else None)
    return module


def same(found: nn.Module, expected: nn.Module) -> bool:
    return all(map(torch.equal, found.parameters(), expected.parameters()))


def killed_and_resumed(folder: Path, make: Callable[[nn.Module], Any]) -> dict[str, Any]:
    resumed = fit(Mortal(make), EPOCHS, folder=folder / "killed")
    whole = fit(Module(make), EPOCHS)
    return {
        "first step": 3 * EPOCHS - len(resumed.losses),
        "same losses": resumed.losses == whole.losses[-len(resumed.losses) :],
        "same bits": same(resumed.network, whole.network),
    }


def saved_and_resumed(folder: Path, make: Callable[[nn.Module], Any], **how: Any) -> bool:
    """Return whether a run in two parts ends like an uninterrupted one."""
    begun = fit(Module(make), 2, folder=folder, **how)
    resumed = fit(Module(make), EPOCHS, folder=folder, **how)
    whole = fit(Module(make), EPOCHS)
    return begun.losses + resumed.losses == whole.losses and same(resumed.network, whole.network)


class Sharded(Module):
    def configure_model(self) -> None:
        if isinstance(next(self.network.parameters()), DTensor):
            return  # called again when a checkpoint is loaded
        mesh = self.device_mesh["data_parallel"]
        for layer in self.network:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.network, mesh=mesh)


def losses_sharded(method: str, epochs: int, distributed: bool, file: Path | None = None) -> list[float]:
    """Train from the checkpoint if the file exists, and write it otherwise."""
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=distributed)
    module, found = Sharded(METHODS[method]), file is not None and file.exists()
    fitted = trainer(epochs, devices=2, strategy=strategy, callbacks=[SecondOrderCallback()])
    fitted.fit(module, batches(), ckpt_path=file if found else None)
    if file is not None and not found:
        fitted.save_checkpoint(file)
    return module.losses


def sharded(folder: Path) -> dict[str, Any]:
    """Return whether a run in two parts ends like an uninterrupted one, with one file and with a folder."""
    warnings.filterwarnings("error", ".*is partial")
    answer = {}
    for method, distributed in (("kfac", False), ("kfac", True), ("sparse_mfac", True)):
        file = folder / f"{method}-{distributed}.ckpt"
        begun = losses_sharded(method, EPOCHS // 2, distributed, file)
        resumed = losses_sharded(method, EPOCHS, distributed, file)
        answer[file.stem] = begun + resumed == losses_sharded(method, EPOCHS, False)
    return answer


def replicated(folder: Path, strategy: str) -> dict[str, Any]:
    makers = {name: lambda m, make=make: make(m, comm=STRATEGIES[strategy]()) for name, make in METHODS.items()}
    answer: dict[str, Any] = {"killed": killed_and_resumed(folder, makers["kfac"])}
    for name in ("ekfac", "sparse_mfac", "hylo"):
        # Lightning's own strategy gathers the state without the callback.
        answer[name] = saved_and_resumed(folder / name, makers[name], callback=False)
    answer["unaware"] = saved_and_resumed(folder / "unaware", makers["kfac"], strategy=Unaware)
    return answer


if __name__ == "__main__":
    where, how = Path(sys.argv[1]), sys.argv[2]
    found = sharded(where) if how == "sharded" else replicated(where, how)
    (where / f"answer-{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
