"""Training under torchrun that saves, may be killed, and goes on from what was saved.

Arguments: folder, strategy, how to save (``one`` file for all, or ``each`` rank its own, or ``dcp``), step at which the
last rank is killed on the first attempt (-1: never).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.oracles.ranks import STRATEGIES, TASKS, Run, build, descend, shard

STEPS, EVERY = 12, 4
RUN = Run(method="kfac_eigen")


class Store:
    """Checkpoints in a folder; a file is there whole or not at all."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how, self.rank = folder, how, dist.get_rank()

    def save(self, model: nn.Module, optimizer: Any, step: int) -> None:
        if self.how == "one":
            optimizer.consolidate_state_dict(to=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*partial")
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
        if self.how == "dcp":
            checkpoint.save(state, checkpoint_id=self.folder / f"step-{step}")
        elif self.how == "each" or self.rank == 0:
            self._write(state, f"rank-{self.rank}.pt")
        dist.barrier()
        if self.how == "dcp" and self.rank == 0:
            self._write(step, "latest.pt")

    def _write(self, state: Any, name: str) -> None:
        torch.save(state, self.folder / f"{name}.new")
        os.replace(self.folder / f"{name}.new", self.folder / name)

    def load(self, model: nn.Module, optimizer: Any) -> int:
        if self.how == "dcp":
            if not (self.folder / "latest.pt").exists():
                return 0
            step = torch.load(self.folder / "latest.pt", weights_only=True)
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 0}
            checkpoint.load(state, checkpoint_id=self.folder / f"step-{step}")
        else:
            file = self.folder / f"rank-{self.rank if self.how == 'each' else 0}.pt"
            if not file.exists():
                return 0
            state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        return int(state["step"])


def train(rank: int, world: int, folder: Path, strategy: str, how: str, killed_at: int) -> dict[str, Any]:
    """Train to the end, from the last checkpoint if there is one; where this began, and the last loss."""
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    model = DDP(TASKS[RUN.task].model())
    optimizer = build(RUN.method, model, STRATEGIES[strategy]())
    store = Store(folder, how)
    started_at = store.load(model.module, optimizer)
    for step in range(started_at, STEPS):
        if first_attempt and step == killed_at and rank == world - 1:
            optimizer.preconditioner.refresh_due = lambda: os.kill(os.getpid(), signal.SIGKILL)  # between two messages
        descend(model, optimizer, shard(RUN.batch(step), rank, world), RUN)
        if (step + 1) % EVERY == 0:
            store.save(model.module, optimizer, step + 1)
    inputs, targets = RUN.batch(STEPS)
    loss = RUN.loss(model.module(inputs), targets)
    optimizer.close()
    return {"loss": loss.item(), "started_at": started_at}


def main(folder: Path, *words: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    answer = train(rank, dist.get_world_size(), folder, *words)
    (folder / f"answer-{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
