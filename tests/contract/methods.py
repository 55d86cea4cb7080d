"""The methods under contract: a new one joins by adding one entry to `METHODS`.

A test that needs a keyword which not every method has says so with `@pytest.mark.option("keyword", ...)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from secondorder import KFAC

Size = Callable[[int, int], int]


@dataclass(frozen=True)
class Variant:
    """A choice that changes what the state of a block holds.

    Args:
        name: In the ids of the tests.
        keywords: What makes the choice.
        owner_state: State keys of the parameter that owns a block, beyond those that every parameter has.
        numbers: By kind of `memory_usage()`: how many numbers a block holds, from `n_a` and `n_g`.
    """

    name: str
    keywords: Mapping[str, Any]
    owner_state: frozenset[str]
    numbers: Mapping[str, Size] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """One optimizer class, with settings under which a handful of steps goes through every stage."""

    name: str
    cls: type[Optimizer]
    keywords: Mapping[str, Any]
    variants: tuple[Variant, ...]
    needs_module: bool = True

    def accepts(self, keyword: str) -> bool:
        return keyword in inspect.signature(self.cls).parameters

    def build(self, model: nn.Module, params: Any = None, **keywords: Any) -> Any:
        """The optimizer of a model: from the module itself, or from `params` with `module=` where it needs one."""
        merged = {**self.keywords, **keywords}
        if params is None:
            return self.cls(model, **merged)
        return self.cls(params, **({"module": model} if self.needs_module else {}), **merged)

    def bare(self, **keywords: Any) -> dict[str, Any]:
        """Keywords under which a step subtracts `lr` times the preconditioned gradient and nothing else happens."""
        plain = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "kl_clip": None}
        return {key: value for key, value in plain.items() if self.accepts(key)} | keywords


_COUNTERS = {"factor_updates", "refreshes"}
_FACTORS = {"factor_a", "factor_g", "factor_weight"} | _COUNTERS
_EIGEN = frozenset(_FACTORS | {"basis_a", "basis_g", "eigenvalues_a", "eigenvalues_g"})
_CHOLESKY = frozenset(_FACTORS | {"inverse_a", "inverse_g"})


def _squares(n_a: int, n_g: int) -> int:
    return n_a * n_a + n_g * n_g


def _bases(n_a: int, n_g: int) -> int:
    return _squares(n_a, n_g) + n_a + n_g


_KFAC_EIGEN = {"factors": _squares, "second_order": _bases}
_KFAC_CHOLESKY = {"factors": _squares, "second_order": _squares}

METHODS = (
    Method(
        "kfac",
        KFAC,
        {"lr": 0.05, "momentum": 0.9, "damping": 0.01, "factor_update_steps": 2, "inv_update_steps": 4},
        variants=(
            Variant("eigen", {"inverse_method": "eigen"}, _EIGEN, _KFAC_EIGEN),
            Variant("cholesky", {"inverse_method": "cholesky"}, _CHOLESKY, _KFAC_CHOLESKY),
            Variant("stagger", {"inverse_method": "eigen", "stagger": True}, _EIGEN, _KFAC_EIGEN),
        ),
    ),
)
