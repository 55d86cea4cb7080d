"""The optimizers that the benchmarks compare, and the recipe of each on each workload.

An entry in :data:`METHODS` makes a method available in every command. A recipe contains constructor keywords, their
source, a schedule, and a rule for other numbers of ranks and batch sizes. Further entries of the same optimizer,
:data:`VARIANTS`, compare other ways to use it.
"""

from dataclasses import replace
from functools import partial
from typing import get_args

from benchmarks.recipes.building import second_order
from benchmarks.recipes.published import PUBLISHED
from benchmarks.recipes.tuned import OURS
from benchmarks.recipes.types import Method, MethodName, Own, Variant
from secondorder.methods.names import ALIASES

VARIANTS: tuple[Variant, ...] = get_args(Variant)
"""Further recipes of optimizers: the preset for scripts with AdamW, EKFAC with either exponent, damping that adapts to
the loss, and orthogonalized steps."""
WINDOW_METHODS: tuple[MethodName, ...] = ("mfac", "sparse_mfac", "ggt")  # methods that keep a window of past gradients
OWN: tuple[MethodName, ...] = get_args(Own)  # optimizers of torch and methods of this package, without variants
METHODS: dict[str, Method] = {name: replace(method, published=PUBLISHED.get(name, {})) for name, method in OURS.items()}


def find_method(name: str) -> Method:
    """Return a method by its name or by one of :data:`secondorder.methods.names.ALIASES`."""
    if name in METHODS:
        return METHODS[name]
    alias = ALIASES[name]
    known = METHODS[alias.method]
    kept = {
        workload: replace(recipe, settings={k: v for k, v in recipe.settings.items() if k not in alias.options})
        for workload, recipe in known.recipes.items()
    }
    return replace(known, label=f"{known.label} ({name})", construct=partial(second_order, name), recipes=kept)
