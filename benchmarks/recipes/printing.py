"""Recipes as text: tables, a line of Python, and a line for the shell."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.recipes.building import adamw, from_flat, layer_keywords, second_order, sgd, window_keywords
from benchmarks.recipes.types import RATES, Method, Recipe, Schedule, Settings
from benchmarks.report import Table
from secondorder.methods.names import METHODS, resolve
from secondorder.methods.presets import PRESETS

RULES = {
    "constant": "rates do not depend on the batch size",
    "sqrt": "rates × √(batch size / that of the recipe)",
    "linear": "rates × (batch size / that of the recipe)",
}
WORLDS = (1, 2, 4, 8, 16, 32, 64)  # numbers of ranks in the table of scaled rates
_COURSES = {"constant": "constant", "cosine": "cosine to nothing", "linear": "linear to nothing",
            "trapezoid": "constant, then linear to nothing at the end"}  # fmt: skip
_CLASSES = {sgd: "torch.optim.SGD", adamw: "torch.optim.AdamW"}


def schedule_text(schedule: Schedule, epochs: float | None = None) -> str:
    if schedule.shape == "steps":
        numbers = ", ".join(f"{(epochs or 100) * share:.4g}" for share in schedule.milestones)
        course = f"× {schedule.gamma:g} after " + (f"epochs {numbers}" if epochs else f"{numbers} % of the run")
    else:
        course = _COURSES[schedule.shape]
    if not schedule.warmup:
        return course
    length = f"{epochs * schedule.warmup:.4g} epochs" if epochs else f"{100 * schedule.warmup:.4g} % of the run"
    return f"warm-up over {length}, then {course}"


def recipe_table(title: str, recipe: Recipe, own_batch_size: int, steps: str) -> Table:
    size = recipe.batch_size or own_batch_size
    rows = [(key, _formatted(value)) for key, value in recipe.settings.items()]
    rows += [(f"workload: {key}", _formatted(value)) for key, value in recipe.workload.items()]
    rows += [
        ("learning rate", schedule_text(recipe.schedule, recipe.epochs)),
        ("batch size", f"{recipe.world} × {size} = {recipe.world * size}"),
        ("length", steps),
        ("other batch sizes", RULES[recipe.rule]),
        ("source", recipe.source),
        *([("note", recipe.note)] if recipe.note else []),
    ]
    return Table(title, ("", "recipe"), rows)


def scaled_table(
    recipe: Recipe, world: int, batch_size: int, own_batch_size: int, fixed: tuple[str, ...] = ()
) -> Table:
    rates = [key for key in RATES if key not in fixed and isinstance(recipe.settings.get(key), float | int)]
    rows = []
    for ranks in sorted({*WORLDS, world, recipe.world}):
        scaled = recipe.at(ranks, batch_size, own_batch_size).settings
        mark = " ←" if ranks == world else ""
        rows.append((f"{ranks}{mark}", str(ranks * batch_size), *(_formatted(scaled[key]) for key in rates)))
    heads = ("ranks", "batch size (total)", *rates)
    caption = f"With {batch_size} examples per rank. The other keywords do not change."
    return Table("The same for other numbers of ranks", heads, rows, caption)


def shell_line(words: Sequence[str], world: int) -> str:
    module = ["-m", "benchmarks", *words]
    return shlex.join(
        ["torchrun", "--standalone", "--nproc-per-node", str(world), *module] if world > 1 else ["python", *module]
    )


def python_line(method: Method, settings: Settings) -> str | None:
    construct = method.construct
    if construct in _CLASSES:
        betas = {key: settings.get(key, usual) for key, usual in (("beta1", 0.9), ("beta2", 0.999))}
        own: dict[str, Any] = {key: value for key, value in settings.items() if key not in betas}
        own |= {} if len(own) == len(settings) else {"betas": tuple(betas.values())}
        return _call(_CLASSES[construct], "model.parameters()", own)
    if not isinstance(construct, partial) or construct.func is not second_order:
        return None
    (name,) = construct.args
    if name in PRESETS:
        return _call("secondorder.create", f'"{name}", model', settings)
    known, options = resolve(name)
    windowed = known in ("mfac", "sparse_mfac", "ggt")
    kind = METHODS[known]
    keywords = from_flat(kind, window_keywords(settings) if windowed else layer_keywords(settings))
    if isinstance(keywords.get("comm", options.get("comm")), str):  # the constructor needs a strategy object
        return _call("secondorder.create", f'"{name}", model', keywords)
    return _call(f"secondorder.{kind.__name__}", "model", {**options, **keywords})


def _call(function: str, first: str | None, keywords: Mapping[str, Any]) -> str:
    words = [*([] if first is None else [first]), *(f"{key}={_code(value)}" for key, value in keywords.items())]
    return f"{function}({', '.join(words)})"


def _code(value: Any) -> str:
    if isinstance(value, type):
        return f"torch.nn.{value.__name__}"
    if isinstance(value, list | tuple):
        inner = ", ".join(_code(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if is_dataclass(value) and not isinstance(value, type):
        chosen = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
        return _call(f"secondorder.{type(value).__name__}", None, chosen)
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def _formatted(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
