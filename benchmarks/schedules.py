"""Learning-rate schedules of the recipes, stepped once per optimizer step."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.recipes.types import Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    warmup = math.ceil(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    if schedule.shape == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * share)
    if schedule.shape == "linear":
        return 1 - share
    if schedule.shape == "steps":
        return float(schedule.gamma ** sum(step >= milestone * steps for milestone in schedule.milestones))
    return 1.0


def make_schedule(schedule: Schedule, steps: int, optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: factor(schedule, min(step, steps), steps))
