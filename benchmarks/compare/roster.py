"""Who can take part in a comparison: the methods of this package, their variants, and the optimizers of others."""

from dataclasses import replace
from pathlib import Path
from typing import cast

from benchmarks.peers import PEERS
from benchmarks.recipes import METHODS, Method, Recipe
from benchmarks.workloads import Size, Workload, WorkloadName, make_workload


def find(name: str) -> Method:
    everyone: dict[str, Method] = {**PEERS, **{str(key): method for key, method in METHODS.items()}}
    if name not in everyone:
        raise ValueError(f"optimizers must be of {', '.join(everyone)}, got {name!r}")
    return everyone[name]


def recipe_on(name: str, workload: Workload, size: Size, data_dir: Path) -> Recipe:
    """Return the recipe of an optimizer for the workload that all of a comparison train, in one process.

    A recipe may hold for other numbers of ranks and examples: its rates then follow its rule. Fields of the workload
    that belong to it cannot be given to one optimizer alone: the note names them where the workload has other values.
    """
    recipe = find(name).recipe(workload.name, size)
    own = make_workload(cast("WorkloadName", workload.name), data_dir, size).batch_size
    other = [f"{key}={value}" for key, value in recipe.workload.items() if getattr(workload, key, None) != value]
    if other:
        told = f"published with {', '.join(other)}, which {'are' if len(other) > 1 else 'is'} not applied here"
        recipe = replace(recipe, note="; ".join(text for text in (recipe.note, told) if text))
    if recipe.batch_size is None and recipe.world == 1 and workload.batch_size == own:
        return recipe
    return recipe.at(1, workload.batch_size, own)
