"""Lightning under torchrun with FSDP2: a run in two parts, and one in one part.

Argument: folder. Every rank writes what it found to ``answer-<rank>.json``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from secondorder.integrations.lightning import SecondOrderCallback
from tests.integrations.lightning_models import METHODS, Module, trainer
from tests.integrations.small import batches

EPOCHS = 4
CASES = {"kfac": (False, True), "sparse_mfac": (True,)}


class Sharded(Module):
    def configure_model(self) -> None:
        if isinstance(next(self.network.parameters()), DTensor):
            return  # called again when a checkpoint is loaded
        mesh = self.device_mesh["data_parallel"]
        for layer in self.network:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.network, mesh=mesh)


def fit(method: str, epochs: int, distributed: bool, file: Path | None = None) -> Sharded:
    """Train, from a checkpoint if it is there, and write it otherwise."""
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=distributed)
    module = Sharded(METHODS[method])
    fitted = trainer(epochs, devices=2, strategy=strategy, callbacks=[SecondOrderCallback()])
    found = file is not None and file.exists()
    fitted.fit(module, batches(), ckpt_path=file if found else None)
    if file is not None and not found:
        fitted.save_checkpoint(file)
    return module


def main(folder: Path) -> None:
    warnings.filterwarnings("error", ".*is partial")
    answer = {}
    for method, kinds in CASES.items():
        whole = fit(method, EPOCHS, False).losses
        for distributed in kinds:
            file = folder / f"{method}-{distributed}.ckpt"
            begun = fit(method, EPOCHS // 2, distributed, file).losses
            answer[file.stem] = begun + fit(method, EPOCHS, distributed, file).losses == whole
    (folder / f"answer-{dist.get_rank()}.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
