"""A process group of more than one rank is refused by name until the strategies exist; one rank is no group."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.contract.methods import METHODS, Method
from tests.contract.tasks import Task, assert_identical, train, values

SECONDS = 120

SCRIPT = """
import importlib, sys
from datetime import timedelta
import torch
import torch.distributed as dist

rank, path, classes = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
dist.init_process_group(
    "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
for module, name in (path.rsplit(".", 1) for path in classes):
    model = torch.nn.Linear(3, 2)
    hooks = len(model._forward_hooks) + len(model._forward_pre_hooks)
    try:
        getattr(importlib.import_module(module), name)(model)
    except NotImplementedError as error:
        print(name, "REFUSED", len(model._forward_hooks) + len(model._forward_pre_hooks) - hooks, error)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Of each of two ranks: what every class says, by its name."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    classes = [f"{method.cls.__module__}.{method.cls.__name__}" for method in METHODS]
    arguments = [str(tmp_path_factory.mktemp("group") / "rendezvous"), *classes]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [rank.communicate(timeout=SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, err) in zip(ranks, results, strict=True):
        assert rank.returncode == 0, err
    return [dict(line.split(" ", 1) for line in out.splitlines() if " " in line) for out, _ in results]


def test_two_ranks_are_refused(method: Method, answers: list[dict[str, str]]) -> None:
    for of_rank in answers:
        said = of_rank[method.cls.__name__]
        assert said.startswith("REFUSED 0 ")
        assert "process" in said or "rank" in said


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_group_of_one_rank_trains_as_without(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    train(model, method.build(model), mlp, 5)
    dist_free = method.build(twin)
    train(twin, dist_free, mlp, 5)
    assert_identical(values(model), values(twin))
