"""Run the fragments of the documentation that need names from a surrounding script."""

import datetime
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import secondorder
from secondorder import KFAC, DedicatedWorkers, HybridOpt
from tests.support.code_blocks import PAGES, examples, name_of
from tests.support.models import mlp
from tests.support.pool import Pool

#: Code of the fragments, by page.
FRAGMENTS = {name_of(page): [b.code for b in examples(page) if "fragment" in b.marks] for page in PAGES}


def _run(page: str, number: int = 0, **names: Any) -> dict[str, Any]:
    """Run a fragment with the given names, and return all names afterwards."""
    exec(compile(FRAGMENTS[page][number], f"{page}, fragment {number}", "exec"), names)
    return names


def _model() -> nn.Module:
    return mlp((4, 6, 3)).float()


def test_every_fragment_is_run_in_this_file() -> None:
    expected = {"SECURITY.md": 1, "docs/quickstart.md": 1, "docs/nodes.md": 2, "docs/strategies.md": 1}
    assert {page: len(codes) for page, codes in FRAGMENTS.items() if codes} == expected


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")
def test_a_scaler_is_assigned() -> None:
    names = _run("docs/quickstart.md", torch=torch, KFAC=KFAC, model=_model())
    assert names["opt"].grad_scaler is names["scaler"]
    names["opt"].close()


def test_a_checkpoint_loads_without_code(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opt = KFAC(_model())
    torch.save(opt.state_dict(), "checkpoint.pt")
    opt.load_state_dict(_run("SECURITY.md", torch=torch)["state"])
    opt.close()


def _script_of_a_rank(rank: int, world: int) -> tuple[int, int]:
    """Use the existing process group of the pool. Two ranks form a node."""
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        names = _run(
            "docs/nodes.md", dist=SimpleNamespace(init_process_group=lambda *args, **kwargs: None), gpu=False,
            device="cpu", make_model=_model, data=range(12), os=os, secondorder=secondorder, HybridOpt=HybridOpt,
            timedelta=datetime.timedelta, DistributedDataParallel=DistributedDataParallel,
            DistributedSampler=DistributedSampler,
        )  # fmt: skip
    opt = names["opt"]
    names["wrapped"](torch.randn(5, 4)).square().mean().backward()
    opt.step()
    found = opt.comm.grid.workers, len(list(names["sampler"]))
    opt.close()
    return found


def _on_a_mesh(rank: int, world: int) -> tuple[int, int]:
    names = _run(
        "docs/nodes.md", 1, init_device_mesh=lambda device, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs),
        nodes=2, ranks_per_node=2, model=_model(), KFAC=KFAC, HybridOpt=HybridOpt,
    )  # fmt: skip
    names["model"](torch.randn(5, 4)).square().mean().backward()
    for p in names["model"].parameters():
        torch.distributed.all_reduce(p.grad)
    names["opt"].step()
    found = names["opt"].comm.grid.workers, 3
    names["opt"].close()
    return found


@pytest.mark.parametrize("script", [_script_of_a_rank, _on_a_mesh])
def test_ranks_of_two_nodes(pool: Pool, script: Any) -> None:
    assert pool.run(script, world=4) == [(2, 3)] * 4  # one gradient worker per node, and a quarter of the data per rank


def _with_roles(rank: int, world: int) -> tuple[str, list[float]]:
    def part_of_the_data(rank: int, world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(6):
            yield torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)

    names = _run(
        "docs/strategies.md", DedicatedWorkers=DedicatedWorkers, KFAC=KFAC, model=_model(),
        part_of_the_data=part_of_the_data, cross_entropy=cross_entropy,
    )  # fmt: skip
    return names["comm"].role, torch.cat([p.flatten() for p in names["model"].parameters()]).tolist()


def test_ranks_of_three_roles(pool: Pool) -> None:
    found = pool.run(_with_roles, world=4)
    assert [role for role, _ in found] == ["gradient", "gradient", "factor", "inverse"]
    assert found[0][1] == found[1][1]
