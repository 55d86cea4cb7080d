"""``features``: train a network on images for some steps, and save what its last layer sees of every image.

The file is what the workload ``features`` takes: a convex problem on inputs that a network has made.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.commands.options import Common
from benchmarks.recipes import COSINE, AliasName, MethodName, find_method
from benchmarks.runner import WINDOW, Trainer
from benchmarks.schedules import make_schedule
from benchmarks.settings import parse_settings
from benchmarks.workloads import Size, make_workload
from benchmarks.workloads.base import evaluating
from benchmarks.workloads.feature_files import INPUTS, TARGETS
from benchmarks.workloads.resnet20 import ResNet20
from benchmarks.workloads.vgg import VGG16
from secondorder import SecondOrderOptimizer

CifarWorkload = Literal["resnet20", "resnet32", "resnet110", "vgg16"]


@dataclass
class Features(Common):
    """Train a network on small images, and save the inputs of its last layer as an .npz file."""

    workload: CifarWorkload = "resnet20"
    """What to train."""
    optimizer: MethodName | AliasName = "adamw"
    """Whose recipe to train with; the learning rate follows a cosine."""
    set: tuple[str, ...] = ()
    """Keywords that replace the recipe's, such as lr=0.3."""
    steps: int = 1000
    """Optimizer steps."""
    size: Size = "cpu"
    """Size of the model and of the batch."""
    workload_set: tuple[str, ...] = ()
    """Fields of the workload that are changed, such as augment=crops."""
    device: str = "cpu"
    """Where to train."""
    out: Path | None = None
    """The file; unset: <data-dir>/features/<workload>.npz."""

    def run(self) -> int:
        """Run the command.

        Returns:
            0, or 1 when the loss was no longer finite and there is no file.

        Raises:
            ValueError: When the number of steps is no positive one.
        """
        if self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        torch.set_num_threads(self.threads)
        changes = parse_settings(self.workload_set)
        workload = make_workload(self.workload, self.data_dir, self.size, changes=changes)
        assert isinstance(workload, ResNet20 | VGG16)
        trainer = self._trained(workload)
        loss = trainer.history.loss_at(len(trainer.history.losses))
        print(f"{self.workload}, {trainer.history.label}: mean loss of the last {WINDOW} steps {loss:.4g}")
        if trainer.diverged:
            return 1
        print(f"{workload.metric} {trainer.evaluate(everything=True)[workload.metric]:.4g}")
        target = self.out or self.data_dir / "features" / f"{self.workload}.npz"
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:  # numpy would add an ending to a mere name
            np.savez(file, **feature_arrays(trainer.model, workload, trainer.precision.device))
        report.print_path("features", target)
        return 0

    def _trained(self, workload: ResNet20 | VGG16) -> Trainer:
        method, changes = find_method(self.optimizer), parse_settings(self.set)
        make = partial(method.build, workload=self.workload, changes=changes)
        closure = method.needs_closure(self.workload, changes)
        schedule = partial(make_schedule, COSINE, self.steps)
        trainer = Trainer(method.label, workload, make, self.seed, schedule, closure, device=self.device)
        with report.progress_bar() as progress:
            task = progress.add_task(f"{self.workload}, {method.label}", total=self.steps)
            for _ in range(self.steps):
                trainer.step()
                progress.advance(task)
                if trainer.diverged:
                    break
        if isinstance(trainer.optimizer, SecondOrderOptimizer):
            trainer.optimizer.close()
        return trainer


def feature_arrays(model: nn.Module, workload: ResNet20 | VGG16, device: torch.device) -> dict[str, Any]:
    """Return what the last layer of a model sees of every image.

    Args:
        model: The model, whose last ``nn.Linear`` returns the logits.
        workload: Has the images.
        device: Where the model is.

    Returns:
        Arrays ``inputs``, ``targets``, ``test_inputs`` and ``test_targets``.
    """
    arrays: dict[str, Any] = {}
    for train, inputs_name, targets_name in zip((True, False), INPUTS, TARGETS, strict=True):
        labels: list[Tensor] = []
        with last_inputs(model) as seen, evaluating(model):
            for images, targets in workload.in_order(train):
                model(images.to(device))
                labels.append(targets)
        arrays |= {inputs_name: torch.cat(seen).numpy(), targets_name: torch.cat(labels).numpy()}
    return arrays


@contextmanager
def last_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of the last linear layer.

    Args:
        model: The model.

    Yields:
        A list that grows by a tensor ``[batch, features]`` with every forward pass.
    """
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().float().cpu()))
    try:
        yield seen
    finally:
        handle.remove()
