"""The optimizers that the benchmarks compare, and the recipe of each on each workload.

An entry in :data:`METHODS` makes a method available in every command. A recipe contains constructor keywords, their
source, a schedule, and a rule for other numbers of ranks and batch sizes. Further entries of the same optimizer,
:data:`VARIANTS`, compare other ways to use it.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, get_args

from benchmarks.recipes.building import second_order
from benchmarks.recipes.published import PUBLISHED
from benchmarks.recipes.tuned import OURS
from benchmarks.recipes.types import Method, MethodName, Variant
from secondorder.methods.names import ALIASES

AliasName = Literal[
    "eigen", "inverse", "eigen_dp", "inverse_dp", "dp_kfac", "kgmfac", "lrmfac", "r1mfac", "ksggt", "kdggt",
    "kid", "kis", "sngd",
]  # fmt: skip
"""Names of :data:`secondorder.methods.names.ALIASES`."""
VARIANTS: tuple[MethodName, ...] = get_args(Variant)
"""Further recipes of optimizers: the preset for scripts with AdamW, EKFAC with either exponent, damping that adapts to
the loss, and orthogonalized steps."""
WINDOW_METHODS: tuple[MethodName, ...] = ("mfac", "sparse_mfac", "ggt")
"""Methods that keep a window of past gradients."""
METHODS: dict[MethodName, Method] = {
    name: replace(method, published=PUBLISHED.get(name, {})) for name, method in OURS.items()
}


def find_method(name: MethodName | AliasName) -> Method:
    if name in METHODS:
        return METHODS[name]
    alias = ALIASES[name]
    known = next(method for key, method in METHODS.items() if key == alias.method)
    kept = {
        workload: replace(recipe, settings={k: v for k, v in recipe.settings.items() if k not in alias.options})
        for workload, recipe in known.recipes.items()
    }
    return replace(known, label=f"{known.label} ({name})", construct=partial(second_order, name), recipes=kept)
