"""Trainer and Accelerate under torchrun: train to the end; train again until a rank is killed; resume from its files.

    torchrun --max-restarts 1 --nproc-per-node 2 tests/integrations/scripts/trainer_ranks.py FOLDER [METHOD]

On the first attempt, all runs but the last are stopped early, and a rank is killed during the last one. The second
attempt has nothing but their files. Every rank writes its results.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from secondorder import CommOpt, MemOpt
from secondorder.integrations.accelerate import consolidate_before_save
from secondorder.integrations.transformers import SecondOrderCallback, decay_groups
from secondorder.optimizer import SecondOrderOptimizer
from tests.integrations import sentences
from tests.integrations.sentences import METHODS, Sentences, classifier

STEPS, EVERY, END = 8, 3, 5
CASES = [(framework, strategy) for framework in ("transformers", "accelerate") for strategy in ("comm", "mem")]
STRATEGIES: dict[str, Callable[[], Any]] = {"comm": CommOpt, "mem": MemOpt}
HELD = {"second_order", "kernel", "window", "error"}  # kinds of memory that strategies spread over the ranks
CHOSEN = sys.argv[2] if len(sys.argv) > 2 else "kfac"


class StoppedError(Exception):
    """Ends a run early without killing the process, which has further runs to start."""


def arguments(folder: Path) -> TrainingArguments:
    return sentences.arguments(
        folder, ddp_backend="gloo", per_device_train_batch_size=4, max_steps=STEPS, save_strategy="steps",
        save_steps=EVERY, gradient_accumulation_steps=2, warmup_steps=2,
    )  # fmt: skip


def optimizer_of(model: nn.Module, strategy: str) -> SecondOrderOptimizer:
    method, options = METHODS[CHOSEN]
    return method(decay_groups(model, 0.1), module=model, comm=STRATEGIES[strategy](), **options)


class EndAt(TrainerCallback):
    """Ends a run after a step."""

    def __init__(self, step: int, end: Callable[[], None]) -> None:
        self.step, self.end = step, end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.end()


def with_trainer(folder: Path, strategy: str, end: Callable[[], None] | None, *, resume: bool) -> dict[str, Any]:
    args = arguments(folder)
    model = classifier()
    optimizer = optimizer_of(model, strategy)
    callbacks: list[TrainerCallback] = [SecondOrderCallback()]
    if end is not None:
        callbacks.append(EndAt(END, end))
    trainer = Trainer(model, args, train_dataset=Sentences(64), optimizers=(optimizer, None), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{EVERY}") if resume else None)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return outcome(model, optimizer, losses)


def with_accelerate(folder: Path, strategy: str, end: Callable[[], None] | None, *, resume: bool) -> dict[str, Any]:
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    bare = classifier()
    optimizer = optimizer_of(bare, strategy)
    data = Sentences(64)
    tensors = data.batch(0, len(data))
    loader = DataLoader(TensorDataset(*tensors.values()), batch_size=4)
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=2 * STEPS)
    model, prepared, loader, schedule = accelerator.prepare(bare, optimizer, loader, schedule)
    consolidate_before_save(accelerator, prepared)
    if resume:
        accelerator.load_state(str(folder / f"step-{EVERY}"))
    losses = []
    for step, batch in enumerate(loader):
        if step < (EVERY if resume else 0):
            continue
        if end is not None and step == END:
            end()
        loss = model(**dict(zip(tensors, batch, strict=True))).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        prepared.step()
        schedule.step()
        prepared.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        if step + 1 == EVERY:
            accelerator.save_state(str(folder / f"step-{EVERY}"))
    return outcome(bare, optimizer, losses)


def outcome(model: nn.Module, optimizer: SecondOrderOptimizer, losses: list[float]) -> dict[str, Any]:
    """Return the results of a run on this rank."""
    model.eval()
    data = Sentences(16, seed=1)
    with torch.no_grad():
        loss = model(**data.batch(0, len(data))).loss.item()
    found = {
        "loss": loss,
        "losses": losses,
        "parameters": float(sum(p.detach().double().abs().sum() for p in model.parameters())),
        "step": optimizer.diagnostics()["step"],
        "held": sum(n for key, n in optimizer.memory_usage().items() if key in HELD),
        "used": max(int(s.get("refreshes", s.get("count", 0))) for s in optimizer.state.values()),
        "fallback": sum("fallback" in line for line in optimizer.describe().splitlines()),
    }
    optimizer.close()
    return found


RUNS = {"transformers": with_trainer, "accelerate": with_accelerate}


def die() -> None:
    """Kill this process without any cleanup: it does not even close its files."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    raise StoppedError


def main(folder: Path) -> None:
    arguments(folder)  # creates the process group
    rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    whole, answers = folder / f"whole-{rank}.json", {}
    if first:
        for framework, strategy in CASES:
            name = f"{framework}-{strategy}"
            answers[name] = RUNS[framework](folder / f"{name}-whole", strategy, None, resume=False)
        whole.write_text(json.dumps(answers), encoding="utf-8")
        dist.barrier()
        for framework, strategy in CASES:
            last = (framework, strategy) == CASES[-1]
            end = die if last and rank == 1 else stop if not last else None
            with suppress(StoppedError):
                RUNS[framework](folder / f"{framework}-{strategy}", strategy, end, resume=False)
        raise AssertionError("a rank should have died")
    for framework, strategy in CASES:
        name = f"{framework}-{strategy}"
        answers[name] = RUNS[framework](folder / name, strategy, None, resume=True)
    (folder / f"resumed-{rank}.json").write_text(json.dumps(answers), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
