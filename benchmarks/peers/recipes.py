"""Recipes of third-party optimizers: the settings from which a search for their learning rates starts.

They are derived from the rates of AdamW in ``benchmarks/recipes``, so that new workloads have recipes automatically.
"""

from collections.abc import Callable

from benchmarks.recipes.building import settings_of
from benchmarks.recipes.tuned import OURS
from benchmarks.recipes.types import CONSTANT, COSINE, Recipe, Schedule, Settings

WARMUP = Schedule("constant", 0.05)
"""Schedule of averaging methods: a warm-up over a twentieth of the run, then a constant rate."""

_CONTROL = "the rates and groups of the recipe of ekfac_orthogonal, with the identity in place of its curvature"
_HERE = "learning rates tuned here on digits, autoencoder and chargpt of size smoke"
_MUON = f"{_HERE}, AdamW's rate from its own recipe; everything else from github.com/KellerJordan/Muon, README"
_SOAP = f"{_HERE}; betas, decay and interval from github.com/nikhilvyas/SOAP, README"
_SHAMPOO = (
    "grafted from Adam at AdamW's own learning rate, as in github.com/facebookresearch/optimizers, README, example 2"
)
_KRON = f"{_HERE}; github.com/evanatyourservice/kron_torch, README, recommends a third of AdamW's rate for long runs"
_SINGD = f"{_HERE}; normalized steps of the factors, as the package's documentation recommends"
_SCHEDULE_FREE = (
    "three times AdamW's learning rate; github.com/facebookresearch/schedule_free, README, recommends 1 to 10 times"
)
_KFAC_PYTORCH = (
    "defaults of examples/torch_cifar10_resnet.py from github.com/gpauloski/kfac-pytorch; kl_clip, which determines "
    "the step length, was tuned here for autoencoder at size smoke"
)
_META_SHAMPOO = (
    "grafted from Adam at AdamW's own learning rate: github.com/facebookresearch/optimizers, README, example 2"
)
_LBFGS = "torch.optim.LBFGS with its own line search"
_GAUSS_NEWTON = "the damping of Levenberg and Marquardt, with the thresholds of Nocedal and Wright"
_IST_MFAC = f"{_HERE}; damping from github.com/IST-DASLab/M-FAC, optim.py, except for autoencoder"

_OF_CONTROL = ("lr", "momentum", "plain_layers", "plain_lr", "orthogonal_dtype")
"""Keywords that the control shares with ``ekfac_orthogonal``."""
_OVER_WORDS = ("chargpt", "multi30k", "gpt2_small")
"""Workloads whose loss is also a mean over the positions of sequences."""


def _recipes(
    settings: Callable[[str, float], Settings],
    source: str,
    schedule: Schedule = COSINE,
    searched: tuple[str, ...] = ("lr",),
    note: str = "",
) -> dict[str, Recipe]:
    own = schedule is not COSINE
    rates = {name: float(recipe.settings["lr"] or 0) for name, recipe in OURS["adamw"].recipes.items()}
    return {
        name: Recipe(settings(name, rate), source, schedule, searched=searched, own_schedule=own, note=note)
        for name, rate in rates.items()
    }


def _times(rate: float, factor: float) -> float:
    return float(f"{rate * factor:.3g}")


def _interval(workload: str) -> int:
    """Return the steps between two updates. Tiny matrices are updated as often as in the methods of this package."""
    return 1 if workload == "poisson" else 10


def _muon(_: str, rate: float) -> Settings:
    return {"lr": 0.05, "adamw_lr": rate, "weight_decay": 0.01}


def _soap(workload: str, rate: float) -> Settings:
    # The autoencoder's gradients span few directions, so early whitened steps consist mostly of noise.
    factor = 10 if workload == "autoencoder" else 3
    return {"lr": _times(rate, factor), "weight_decay": 0.01, "precondition_frequency": _interval(workload)}


def _shampoo(workload: str, rate: float) -> Settings:
    return {"lr": rate, "graft": "rmsprop", "block_size": 512, "every": _interval(workload), "use_svd": True}


def _singd(workload: str, rate: float) -> Settings:
    return {
        "lr": 0.01 if workload == "autoencoder" else 0.1,
        "adamw_lr": rate,
        "normalize_lr_cov": True,
        "loss_average": "batch+sequence" if workload in _OVER_WORDS else "batch",
    }


def _kfac_pytorch(workload: str, _: float) -> Settings:
    root = 0.1 if workload == "autoencoder" else 0.0316
    settings = settings_of(f"lr=0.1 momentum=0.9 damping=0.003 clip_root={root} factor_update_steps=1")
    return {**settings, "inv_update_steps": _interval(workload)}


def _meta_shampoo(_: str, rate: float) -> Settings:
    return {"lr": rate, "max_preconditioner_dim": 1024, "precondition_frequency": 10, "start_preconditioning_step": 10}


def _ist_mfac(workload: str, _: float) -> Settings:
    # The rate depends on 1 / damp, and a loss that is summed over pixels has large gradients.
    rates = {"lr": 1.0, "damp": 1.0} if workload == "autoencoder" else {"lr": 3e-3, "damp": 1e-5}
    return {**rates, "momentum": 0.9, "window_size": 128}


_TWIN = {name: recipe.settings for name, recipe in OURS["ekfac_orthogonal"].recipes.items()}
ORTHOGONAL = {
    name: Recipe({key: twin[key] for key in _OF_CONTROL if key in twin}, _CONTROL, searched=("lr", "plain_lr"))
    for name, twin in _TWIN.items()
}
MUON = _recipes(_muon, _MUON, searched=("lr", "adamw_lr"))
MUON_SHORT = _recipes(
    lambda *given: {**_muon(*given), "momentum": 0.85},
    f"{_MUON}, except for the momentum, which is lower because the runs are short",
    searched=("lr", "adamw_lr"),
)
SOAP = _recipes(_soap, _SOAP)
SHAMPOO = _recipes(_shampoo, _SHAMPOO)
PSGD_KRON = _recipes(lambda _, rate: {"lr": _times(rate, 3)}, _KRON)
SINGD = _recipes(_singd, _SINGD, searched=("lr", "adamw_lr"))
SCHEDULE_FREE = _recipes(
    lambda _, rate: {"lr": _times(rate, 3)},
    _SCHEDULE_FREE,
    WARMUP,
    note="it has no schedule except its own warm-up; training losses are measured where it takes gradients, and the "
    "held-out metric at the averaged weights",
)
KFAC_PYTORCH = _recipes(_kfac_pytorch, _KFAC_PYTORCH, searched=("lr", "clip_root"))
# Only for full-batch training, because the noise of a batch misleads the line search.
LBFGS = {
    "poisson": Recipe(
        {"lr": 1.0, "history_size": 30, "line_search_fn": "strong_wolfe"}, _LBFGS, CONSTANT, own_schedule=True,
        note="a step has up to 4 iterations",
    )
}  # fmt: skip
GAUSS_NEWTON = {"poisson": Recipe({"damping": 0.1}, _GAUSS_NEWTON, CONSTANT, searched=("damping",), own_schedule=True)}
DISTRIBUTED_SHAMPOO = _recipes(_meta_shampoo, _META_SHAMPOO)
IST_MFAC = _recipes(_ist_mfac, _IST_MFAC)
