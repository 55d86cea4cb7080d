"""The methods of the contract tests: to test a new one, add an entry to `METHODS`.

A test that needs a keyword which not every method has is marked `@pytest.mark.option("keyword", ...)`. All layer
methods, which need the module, have `skip_layers`: those with factors have `factor_update_steps`, and those with rows
of examples have `update_steps`. Window methods, which cover every parameter, have `window_size`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, LowRank, SparseMFAC, TopK
from secondorder.preconditioners.keywords import OBJECTS, flat_names
from secondorder.switching import GradNormChange
from tests.support import storages
from tests.support.building import built
from tests.support.storages import Factored, Kept, Sizes, Sparse, Storage, kronecker, shapes, squares
from tests.support.tasks import Task, covered_layers, displacements, train, values

Units = Callable[[nn.Module], dict[str, list[str]]]


@dataclass(frozen=True)
class Variant:
    """Options that change the state of a block."""

    name: str  # in the ids of the tests
    keywords: Mapping[str, Any]
    owner_state: frozenset[str]  # keys of the parameter that owns a block, in addition to those of every parameter
    sizes: Sizes  # the correct numbers of bytes for a model and a dtype, by kind of `memory_usage()`
    lacking: Callable[[nn.Module], set[str]] = lambda layer: set()  # keys that the owner of a layer's block has not
    own_state: Callable[[Tensor], set[str]] = lambda parameter: set()  # keys of a covered parameter, owner or not
    dtypes: Callable[[torch.dtype], Mapping[str, torch.dtype]] = lambda compute: {}  # by key, for that of computations
    units: Units = covered_layers  # names of the parameters that share one block, the owner first, by its name
    heavy_ball: bool = True  # whether momentum averages directions (and not gradients)
    lingers: bool = False  # whether error feedback or momentum moves a parameter whose gradient is zero
    excludes: frozenset[str] = frozenset()  # keywords that cannot be combined with the options
    narrow: bool = False  # whether one task is enough, because the computation is the same for all types of layers
    first_state: frozenset[str] = frozenset()  # keys of the very first parameter, which all blocks share
    lazy: bool = False  # whether sizes are unknown before the first batch

    def of(self, layer: nn.Module) -> frozenset[str]:
        """State keys of the owner of the block of a layer."""
        return self.owner_state - self.lacking(layer)


@dataclass(frozen=True)
class Method:
    """One optimizer class, with settings under which a few steps go through every stage."""

    name: str  # in the ids of the tests
    cls: type[Optimizer]
    keywords: Mapping[str, Any]
    variants: tuple[Variant, ...]  # the first one has the same effect as the settings alone
    landmark: str  # a state key of the first and the fourth parameter of the `Mlp` that loading requires
    damping: str = "damping"  # its keyword: with a huge value, the direction is ∇ divided by it
    layerwise: bool = True  # whether blocks are layers, which needs the module; otherwise, every parameter is covered
    eager: Mapping[str, Any] = field(default_factory=dict)  # settings under which every step updates the estimate
    apart: Mapping[str, Any] = field(default_factory=dict)  # settings under which groups do not share a block
    partial: tuple[str, ...] = ("factors", "none")  # kinds of checkpoints that leave curvature out
    leave_out: Mapping[str, Any] = field(default_factory=dict)  # settings for a fallback in every task: see `left_out`
    foreign: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values that only other methods support
    capture_keyword: str = "factor_update_steps"  # the steps between two updates of the estimate
    refresh_keyword: str = "inv_update_steps"  # the steps between two refreshes; 0 switches preconditioning off
    #: The smallest number of entries that a step stores before it is taken, given the model.
    pending: Callable[[nn.Module], int] = lambda model: sum(map(squares, shapes(model)))

    def accepts(self, *keywords: str) -> bool:
        return set(keywords) <= _keywords(self.cls)

    @property
    def family(self) -> str:
        """The kind of state; methods of a family share most of their code."""
        if not self.layerwise:
            return "window"
        return "factors" if self.accepts("factor_update_steps") else "rows"

    def knows(self, rule: Mapping[str, Any]) -> bool:
        """Whether the method has these keywords, and supports their values."""
        return self.accepts(*rule) and not any(value in self.foreign.get(key, ()) for key, value in rule.items())

    def build(self, model: nn.Module, params: Any = None, **keywords: Any) -> Any:
        """The optimizer of a model: from the module itself, or from `params`, with `module=` if it needs one."""
        merged = {**self.keywords, **keywords}
        if params is None:
            return built(self.cls, model, **merged)
        return built(self.cls, params, **({"module": model} if self.layerwise else {}) | merged)

    def start(
        self, task: Task, steps: int = 0, *, params: Callable[[nn.Module], Any] | None = None, **keywords: Any
    ) -> tuple[Any, Any]:
        """A model of a task and its optimizer, which gets `params(model)` if `params` is given, after some steps."""
        model = task.model()
        optimizer = self.build(model, params and params(model), **keywords)
        train(model, optimizer, task, steps)
        return model, optimizer

    def trained(self, task: Task, steps: int = 5, **keywords: Any) -> dict[str, Tensor]:
        """The parameters after some steps, with the keywords of `start`."""
        return values(self.start(task, steps, **keywords)[0])

    def moves(
        self, task: Task, steps: int, *, between: Callable[[Any], Any] | None = None, **keywords: Any
    ) -> list[dict[str, Tensor]]:
        """The change of each step, taken from the initial parameters, with the keywords of `start`.

        `between` is called with the optimizer after each step.
        """
        model, optimizer = self.start(task, **keywords)
        return list(displacements(model, optimizer, task, steps, between and partial(between, optimizer)))

    def bare_moves(self, task: Task, steps: int, *, params: Any = None, between: Any = None, **keywords: Any) -> Any:
        """The same with the keywords of `bare`, which `keywords` override."""
        return self.moves(task, steps, params=params, between=between, **self.bare(**keywords))

    def every(self, steps: int, capture: int | None = None) -> dict[str, Any]:
        """Keywords of a layer method for a refresh after `steps` steps, and an update after `capture` steps."""
        return {self.capture_keyword: capture or max(steps, 1), self.refresh_keyword: steps}

    def bare(self, **keywords: Any) -> dict[str, Any]:
        """Keywords under which a step does nothing but subtract `lr` times the preconditioned gradient."""
        plain = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "kl_clip": None}
        return {key: value for key, value in plain.items() if self.accepts(key)} | keywords

    def covered(self, model: nn.Module) -> set[str]:
        """Names of the parameters that are preconditioned."""
        names = {name for name, _ in model.named_parameters()}
        return {name for own in covered_layers(model).values() for name in own} if self.layerwise else names

    def left_out(self, model: nn.Module) -> list[str]:
        """Names of the parameters that use the fallback under `leave_out`, in order."""
        covered = self.covered(model)
        names = [name for name, _ in model.named_parameters()]
        return [name for name in names if (name not in covered if self.layerwise else name.endswith("bias"))]


@cache
def _keywords(cls: type[Optimizer]) -> frozenset[str]:
    return frozenset({*inspect.signature(cls).parameters} - OBJECTS.keys() | flat_names(cls).keys() | {"fallback"})


# ------------------------------------------------------------------------------------------- Layer methods with factors

_COUNTERS = {"factor_updates", "refreshes", "scale_updates", "adopt_at"}
_WEIGHTS = {"factor_weight", "scale_weight"}
_FACTORS = {"factor_a", "factor_g", "factor_weight", "factor_updates", "refreshes"}
_EIGEN = frozenset(_FACTORS | {"basis_a", "basis_g", "eigenvalues_a", "eigenvalues_g"})
_CHOLESKY = frozenset(_FACTORS | {"inverse_a", "inverse_g"})
_SCALED = _EIGEN | {"scale", "scale_weight", "scale_updates"}
_BEGUN = {"begun_a", "begun_g", "adopt_at"}
_KFAC_EIGEN = kronecker({"factors": squares, "second_order": storages.bases})
_KFAC_RANK = kronecker({"factors": squares, "second_order": partial(storages.leading, rank=1)})
_KFAC_CHOLESKY = kronecker({"factors": squares, "second_order": squares})
_SCALES = {"second_order": storages.bases, "scale": storages.entries}
_EKFAC = kronecker({"factors": squares, **_SCALES})
_KFAC_OVERLAP = kronecker({"factors": lambda block: 2 * squares(block), "second_order": squares})
_EKFAC_OVERLAP = kronecker({"factors": lambda block: 2 * squares(block), **_SCALES})


def _layer_variant(
    name: str,
    keywords: Mapping[str, Any],
    state: frozenset[str],
    sizes: Sizes,
    *,
    over_gradients: bool = False,
    narrow: bool = False,
    own_size: bool = False,
) -> Variant:
    """A variant of a layer method.

    With ``over_gradients``, momentum averages the gradients of blocks instead of their directions. With ``own_size``,
    the method fixes the size of steps, so that ``kl_clip`` does not apply.
    """
    own = {"gradient_momentum", "gradient_updates"} if over_gradients else set()

    def dtypes(compute: torch.dtype) -> dict[str, torch.dtype]:
        keys = (state | own) - _COUNTERS - {"gradient_updates"}
        return {**dict.fromkeys(keys, compute), **dict.fromkeys(keys & _WEIGHTS, torch.float64)}

    excludes = ("graft", "inner", "nesterov") * over_gradients + ("kl_clip",) * own_size
    return Variant(
        name, keywords, state, sizes,
        lacking=lambda layer: {"basis_a"} if isinstance(layer, nn.Embedding) else set(),  # its factor is diagonal
        own_state=lambda parameter: own, dtypes=dtypes, heavy_ball=not over_gradients, lingers=over_gradients,
        excludes=frozenset(excludes), narrow=narrow,
    )  # fmt: skip


# ---------------------------------------------------------------------------------- Layer methods with rows of examples

_EXAMPLES = 6  # of the largest batch of all tasks; smaller batches are padded with rows of zeros
_COMMON = frozenset({"factor_updates", "refreshes"})
_ROWS_ALONE = frozenset({"rows_a", "rows_g", "kernel", "interpolated"})
_INSTEAD = (_EIGEN | {"rows_instead", "positions_instead"}) - _COMMON


def _row_variant(
    name: str,
    keywords: Mapping[str, Any],
    rows: int,
    *,
    first_state: frozenset[str] = frozenset(),
    narrow: bool = True,
    **kept: Any,
) -> Variant:
    """A variant of a method with R rows of every block; ``kept`` has further arguments of `Kept`."""
    what = Kept(rows, **kept)
    state = _COMMON | _ROWS_ALONE | {"kernel_damping"} | (_INSTEAD if what.substitutes else frozenset())

    def lacking(layer: nn.Module) -> set[str]:
        if not what.substitutes:
            return set()
        return set(_ROWS_ALONE if what.factors_for(layer) else _INSTEAD)

    def dtypes(compute: torch.dtype) -> dict[str, torch.dtype]:
        double = {"kernel", "kernel_damping", "factor_weight"}
        numbers = state - _COMMON - {"interpolated", "rows_instead", "positions_instead"}
        return {key: torch.float64 if key in double else compute for key in numbers}

    return Variant(
        name, keywords, state, storages.kept_rows(what), lacking,
        dtypes=dtypes, narrow=narrow, first_state=first_state, lazy=not what.at_once,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- Window methods

_ROWS = 4  # of every window, so that a few steps fill the ring


def _window_variant(
    name: str,
    keywords: Mapping[str, Any],
    storage: Storage | None = None,
    *,
    units: Units = storages.one_unit,
    over_gradients: bool = False,
    heavy_ball: bool = True,
) -> Variant:
    """A variant of a window method with a storage of rows, and with momentum over gradients, directions or both."""
    storage = storage or Storage()
    return Variant(
        name, keywords, storages.UNIT_STATE | (storages.MOMENTUM_STATE if over_gradients else set()),
        storages.window_sizes(storage, _ROWS, units),
        own_state=lambda parameter: storage.keys(parameter) | ({"gradient_momentum"} if over_gradients else set()),
        dtypes=storage.dtypes, units=units, heavy_ball=heavy_ball,
        lingers=over_gradients or isinstance(storage, (Sparse, Factored)),
    )  # fmt: skip


_ANY_WINDOW = {"lr": 0.05, "momentum": 0.9, "window_size": _ROWS}
_WINDOWED: dict[str, Any] = {
    "layerwise": False,
    "apart": {"partition": "group"},
    "partial": ("none",),
    "leave_out": {"skip_biases": True},
    "foreign": {"momentum_mode": ("post",)},
}
# blocks of 8, so that the tiny parameters have full blocks, short blocks, or both
_FEW, _FEWER = TopK(density=0.3, block_size=8), TopK(density=0.2, block_size=8)
_ANY_FACTORS = {"lr": 0.05, "momentum": 0.9, "damping": 0.01, "factor_update_steps": 2, "inv_update_steps": 4}
# ε far above rounding errors, which a small ε amplifies, as in Adam
_ROOT = {"estimator": "running", "momentum_mode": "pre", "power": 0.5, "fallback_eps": 1e-3}
_AUTO = {"mode": "auto", "switch": GradNormChange(eta=0.25, period_steps=1, hold=0)}

METHODS = (
    Method(
        "kfac",
        KFAC,
        _ANY_FACTORS,
        variants=(
            _layer_variant("eigen", {"inverse_method": "eigen"}, _EIGEN, _KFAC_EIGEN),
            _layer_variant("cholesky", {"inverse_method": "cholesky"}, _CHOLESKY, _KFAC_CHOLESKY),
            _layer_variant("stagger", {"inverse_method": "eigen", "stagger": True}, _EIGEN, _KFAC_EIGEN),
            _layer_variant("rank", {"inverse_rank": 1}, _EIGEN, _KFAC_RANK, narrow=True),
            _layer_variant(
                "overlap", {"inverse_method": "cholesky", "overlap": True}, _CHOLESKY | _BEGUN, _KFAC_OVERLAP,
                narrow=True,
            ),
        ),
        landmark="factor_a",
        eager={"factor_update_steps": 1},
    ),
    Method(
        "ekfac",
        EKFAC,
        _ANY_FACTORS,
        variants=(
            _layer_variant("intra", {}, _SCALED, _EKFAC),
            _layer_variant("running", {"estimator": "running"}, _SCALED, _EKFAC, narrow=True),
            _layer_variant("pre", _ROOT, _SCALED, _EKFAC, over_gradients=True),
            _layer_variant(
                "spectral", {**_ROOT, "orthogonalize": True}, _SCALED, _EKFAC,
                over_gradients=True, narrow=True, own_size=True,
            ),
            _layer_variant("overlap", {"overlap": True}, _SCALED | _BEGUN, _EKFAC_OVERLAP, narrow=True),
            _layer_variant("qr", {"basis_update": "qr"}, _SCALED | {"off_diagonal"}, _EKFAC, narrow=True),
        ),
        landmark="scale",
        eager={"factor_update_steps": 1},
        foreign={"momentum_mode": ("heavy_ball", "ema"), "fisher": ("forward_only",)},
    ),
    Method(
        "hylo",
        HyLo,
        {
            "lr": 0.05, "momentum": 0.9, "damping": 0.1, "mode": "kid", "update_steps": 2, "rank_fraction": 0.5,
            "batch_size": _EXAMPLES,
        },
        variants=(
            _row_variant("kid", {}, 3, narrow=False),
            _row_variant("kis", {"mode": "kis"}, 3),
            _row_variant("sngd", {"mode": "sngd"}, _EXAMPLES),
            _row_variant("auto", _AUTO, 3, first_state=frozenset({"switch_state"})),
            _row_variant("kfac", {"kfac_when_cheaper": True, "rank_fraction": 0.8}, 5, substitutes=True),
            # so few rows that every batch has enough examples
            _row_variant("lazy", {"approx": "expand", "batch_size": None, "max_rank": 2}, 2, at_once=False),
        ),
        landmark="rows_g",
        eager={"update_steps": 1},
        partial=("none",),
        foreign={
            "weight_decay_mode": ("legacy", "both"),
            "fisher": ("forward_only", "exact"),  # "exact" needs a loss with a single output
        },
        capture_keyword="update_steps",
        refresh_keyword="update_steps",
        pending=lambda model: _EXAMPLES * sum(block.n_a - 1 + block.n_g for block in shapes(model)),
    ),
    Method(
        "mfac",
        MFAC,
        {**_ANY_WINDOW, "damping": 0.1},
        variants=(
            _window_variant("dense", {}),
            _window_variant("bf16", {"window_dtype": torch.bfloat16}, Storage(torch.bfloat16)),
            _window_variant("layer", {"partition": "layer"}, units=storages.unit_per_module),
            _window_variant("lowrank", {"compression": LowRank(rank=1)}, Factored(rank=1)),
            _window_variant("pre", {"momentum_mode": "pre"}, over_gradients=True, heavy_ball=False),
        ),
        landmark="window",
        **_WINDOWED,
    ),
    Method(
        "sparse",
        SparseMFAC,
        {**_ANY_WINDOW, "damping": 0.1, "compression": _FEW},
        variants=(
            _window_variant("blocks", {}, Sparse(density=0.3, block=8)),
            _window_variant("4bit", {"compression": replace(_FEW, error_bits=4)}, Sparse(density=0.3, block=8, bits=4)),
        ),
        landmark="window_idx",
        **_WINDOWED,
    ),
    Method(
        "ggt",
        GGT,
        {**_ANY_WINDOW, "eps": 0.1},
        variants=(
            _window_variant("dense", {}),
            _window_variant("betas", {"betas": (0.9, 0.99)}, over_gradients=True),
            _window_variant("topk", {"compression": _FEWER}, Sparse(density=0.2, block=8)),
        ),
        landmark="window",
        damping="eps",
        **_WINDOWED,
    ),
)  # fmt: skip
