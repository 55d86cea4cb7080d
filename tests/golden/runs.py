"""The table of runs of one process: a name for each, and what makes it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secondorder import HybridOpt, LowRank, MemOpt, ParamScheduler, TopK
from secondorder.switching import Always, EpochList, GradNormChange, LRChange, ProbeError
from tests.contract import tasks
from tests.contract.methods import METHODS
from tests.golden.traces import Events, Training, path, state_of, trace_of

Setup = Callable[[nn.Module, Any], Any]
BY_NAME = {method.name: method for method in METHODS}
BY_TASK = {task.name: task for task in tasks.TASKS}
PLANS = {"one": (1,), "hybrid of 4": (4, HybridOpt(0.5)), "memory of 3": (3, MemOpt(), 8), "own of 2": (2,)}


@dataclass(frozen=True)
class Run:
    """A run of one process.

    Attributes:
        method: Name of the method of the contract, whose settings are taken.
        keywords: Settings beyond these.
        task: Name of the task.
        way: How a step is taken, see `Training`.
        before: What is done before a step.
        steps: Number of steps.
        dtype: Of the parameters.
        micro: Micro-batches of a step.
        copies: Whether the run is saved and copied in the middle.
        groups: Makes the first argument of the optimizer from the model; None: the model itself.
    """

    method: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    task: str = "transformer"
    way: str = "plain"
    before: Events = field(default_factory=dict)
    steps: int = 10
    dtype: torch.dtype = torch.float64
    micro: int = 1
    copies: bool = False
    groups: Callable[[nn.Module], Any] | None = None

    def training(self, model: nn.Module | None = None) -> Training:
        task = BY_TASK[self.task]
        model = task.model(self.dtype) if model is None else model
        params = self.groups(model) if self.groups else None
        optimizer = BY_NAME[self.method].build(model, params, **self.keywords)
        return self.around(model, optimizer)

    def around(self, model: nn.Module, optimizer: Any) -> Training:
        task = BY_TASK[self.task]
        return Training(
            model, optimizer, lambda step: task.batch(step, self.dtype), self.way, self.micro, dict(self.before)
        )

    def trace(self) -> dict[str, Any]:
        with mended():
            return trace_of(self.training, self.steps, PLANS, partial(copied, self) if self.copies else None)


def copied(run: Run, training: Training, step: int, trace: dict[str, Any]) -> None:
    """Go on with what was saved and loaded, with copies, with a copy of a copy, and with a pickle."""
    random = torch.get_rng_state()
    for name, made in {"loaded": loaded, "copy": twice(1), "copy of a copy": twice(2), "pickle": pickled}.items():
        torch.set_rng_state(random)
        model, optimizer = made(run, training)
        found: dict[str, Any] = {"at first": state_of(optimizer.state_dict())}
        with mended():
            path(run.around(model, optimizer), step, run.steps, found)
        trace[name] = {**found, "state": state_of(optimizer.state_dict()), "describe": optimizer.describe()}
    torch.set_rng_state(random)


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def loaded(run: Run, training: Training) -> tuple[nn.Module, Any]:
    fresh = run.training()
    fresh.model.load_state_dict(training.model.state_dict())
    fresh.optimizer.load_state_dict(through_a_file(training.optimizer.state_dict()))
    return fresh.model, fresh.optimizer


def twice(times: int) -> Callable[[Run, Training], tuple[nn.Module, Any]]:
    def copies(run: Run, training: Training) -> tuple[nn.Module, Any]:
        pair = training.model, training.optimizer
        for _ in range(times):
            pair = copy.deepcopy(pair)
        pair[1].attach(pair[0])
        return pair

    return copies


def pickled(run: Run, training: Training) -> tuple[nn.Module, Any]:
    model, optimizer = pickle.loads(pickle.dumps((training.model, training.optimizer)))
    optimizer.attach(model)
    return model, optimizer


# ---------------------------------------------------------------------------------------------------------------------
# Events
# ---------------------------------------------------------------------------------------------------------------------


def setting(**values: Any) -> Callable[[Training], None]:
    """Write into all groups."""

    def event(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group.update(values)

    return event


def spoiled(training: Training) -> None:
    """The next batch has a gradient that is not finite."""
    batch = training.batch

    def bad(step: int) -> tuple[Tensor, Tensor]:
        training.batch = batch
        inputs, targets = batch(step)
        inputs[-1] = torch.nan
        return inputs, targets

    training.batch = bad


def steep(training: Training) -> None:
    """The closure of the next step returns more at every call, so that the step is judged to be a bad one."""
    closure, calls = training._closure, 0

    def rising(step: int) -> Any:
        nonlocal calls
        calls += 1
        found = closure(step)
        rise = 0.0 if calls == 1 else 1e3
        return (found[0] + rise, found[1]) if isinstance(found, tuple) else found + rise

    training._closure = rising  # type: ignore[method-assign]


def calm(training: Training) -> None:
    training.__dict__.pop("_closure", None)


_right = {name: getattr(torch.linalg, name) for name in ("eigh", "cholesky_ex", "cholesky", "qr")}


@contextmanager
def mended() -> Iterator[None]:
    """Leave the factorisations as they were found."""
    found = {name: getattr(torch.linalg, name) for name in _right}
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(torch.linalg, name, function)


def breaking(*names: str) -> Callable[[Training], None]:
    """Have factorisations fail from now on; none of them if there is no name."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.linalg.LinAlgError("made to fail")

    def event(training: Training) -> None:
        for name, right in _right.items():
            setattr(torch.linalg, name, fail if name in names else right)

    return event


def freezing(prefix: str, frozen: bool = True) -> Callable[[Training], None]:
    def event(training: Training) -> None:
        for name, p in training.model.named_parameters():
            if name.startswith(prefix):
                p.requires_grad_(not frozen)
                p.grad = None

    return event


def saving(name: str) -> Callable[[Training], None]:
    def event(training: Training) -> None:
        training.extra[name] = state_of(training.optimizer.state_dict())

    return event


def reloading(training: Training) -> None:
    """Load what is saved at once into the same optimizer."""
    training.optimizer.load_state_dict(through_a_file(training.optimizer.state_dict()))


def scheduled(training: Training) -> None:
    """A schedule that takes a step before every further one."""
    rising = "eps" if "damping" not in training.optimizer.param_groups[0] else "damping"
    schedule = ParamScheduler(training.optimizer, **{"lr": lambda t: 0.9**t, rising: lambda t: 1.1**t})
    training.before = {**{step: lambda _: schedule.step() for step in range(1, 20)}, **training.before}


def looking(training: Training) -> None:
    """A forward in evaluation, and one whose backward never comes."""
    training.model.eval()
    with torch.no_grad():
        training.model(training.batch(50)[0])
    training.model.train()
    training.model(training.batch(51)[0])


def masking(training: Training) -> None:
    """Leave the last position of every sequence out of the statistics, from now on."""
    model, optimizer = training.model, training.optimizer
    plain_backward = training._backward

    def masked(inputs: Tensor, targets: Tensor) -> float:
        keep = torch.ones(inputs.shape[:2], dtype=torch.bool)
        keep[:, -1] = False
        with optimizer.mask(keep):
            return plain_backward(inputs, targets)

    assert model is not None
    training._backward = masked  # type: ignore[method-assign]


def keeping(training: Training) -> None:
    """Note the names and bits of the directions of the next steps."""
    with training.optimizer.keep_directions() as kept:
        training.extra["directions"] = kept
        training.extra["loss of a step between"] = training.step(100)
        training.extra["directions"] = dict(kept)


def late_group(model: nn.Module) -> Any:
    named = list(model.named_parameters())
    return [{"params": named[:3]}, {"params": named[3:], "lr": 0.02, "weight_decay": 0.01}]


def flat_list(model: nn.Module) -> Any:
    return list(model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------

EVERY = {"factor_update_steps": 1, "inv_update_steps": 2}
MODEL = {"likelihood": "categorical", "damping": 0.1, **EVERY}
RUNNING = {"estimator": "running", **EVERY}
PRE = {"estimator": "running", "momentum_mode": "pre", "power": 0.5, "fallback_eps": 1e-3}

#: Settings that K-FAC and EK-FAC share.
LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {"damping": None, "factor_update_steps": None, "inv_update_steps": None},
    "reduce": {"approx": "reduce"},
    "relative": {"damping_mode": "relative", "damping": 0.1},
    "warm-up": {"refresh_warmup": True, "factor_update_steps": 2, "inv_update_steps": 6},
    "no warm-up": {"refresh_warmup": False, "factor_update_steps": 2, "inv_update_steps": 6},
    "stagger": {"stagger": True},
    "overlap": {"overlap": True},
    "overlap stagger": {"overlap": True, "stagger": True},
    "packed": {"factor_storage": "packed"},
    "packed overlap": {"factor_storage": "packed", "overlap": True},
    "bfloat16": {"factor_dtype": torch.bfloat16, "inv_dtype": torch.float32},
    "packed bfloat16": {"factor_dtype": torch.bfloat16, "factor_storage": "packed"},
    "max dim": {"max_factor_dim": 5},
    "all diagonal": {"max_factor_dim": 1},
    "diagonal norms": {"norm_curvature": "diagonal"},
    "updates": {"weighting": "update", "burnin_steps": 2},
    "per step": {"decay_per_step": True, "factor_decay": 0.9},
    "few examples": {"factor_batch_size": 2},
    "few positions": {"factor_positions": 2},
    "decay as curvature": {"weight_decay": 0.1, "weight_decay_in_curvature": True},
    "decay": {"weight_decay": 0.1, "nesterov": True},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    "power": {"power": 0.5},
    "orthogonal": {"graft": "adam", "orthogonalize": True, "kl_clip": None},
    "graft sgd": {"graft": "sgd"},
    "graft adamw": {"graft": "adamw", "weight_decay": 0.1, "fallback_lr": 0.01},
    "inner adamw": {"inner": "adamw", "weight_decay": 0.1},
    "clips": {"clip_norm": 0.5, "clip_value": 0.05, "kl_clip": 1e-4},
    "foreach": {"foreach": True, "fallback": "adamw"},
    "skipped": {"skip_layers": ("qkv", nn.Embedding), "fallback": "adam", "betas": (0.8, 0.9)},
    "factors only": {"checkpoint_curvature": "factors"},
    "nothing saved": {"checkpoint_curvature": "none"},
    "seed": {"deterministic_seed": 7, "factor_batch_size": 2},
    "sum": {"loss_reduction": "sum"},
    "off": {"inv_update_steps": 0},
}
FISHERS: dict[str, dict[str, Any]] = {
    "mc": {"fisher": "mc", "fisher_samples": 2},
    "signs": {"fisher": "curvature_prop"},
    "exact": {"fisher": "exact"},
    "forward": {"fisher": "forward_only"},
}
JUDGED: dict[str, tuple[str, dict[str, Any], Events]] = {
    "adaptive": ("loss", {"adaptive_damping": True, "damping_interval": 2, **MODEL}, {}),
    "reject": ("loss", {"reject_steps": True, **MODEL}, {4: steep, 5: calm}),
    "reject pre": ("loss", {"reject_steps": True, **MODEL, "inner": "adam"}, {4: steep, 5: calm}),
    "calibrate": ("loss", {"calibrate_damping": True, **MODEL}, {}),
    "calibrate reject": ("loss", {"calibrate_damping": True, "reject_steps": True, **MODEL}, {5: steep, 6: calm}),
    "quadratic": ("outputs", {"quadratic_model": True, **MODEL}, {}),
    "quadratic all": (
        "outputs",
        {"quadratic_model": True, "adaptive_damping": True, "include_damping_in_model": True, "reject_steps": True,
         "damping_interval": 2, **MODEL},
        {6: steep, 7: calm},
    ),
}  # fmt: skip
LIFE: dict[str, Events] = {
    "groups written": {3: setting(damping=0.2, kl_clip=None), 6: setting(lr=0.01, momentum=0.5)},
    "interval shorter": {3: setting(factor_update_steps=1, inv_update_steps=1)},
    "interval longer": {2: setting(factor_update_steps=3, inv_update_steps=6), 7: setting(factor_update_steps=1)},
    "off and on": {3: setting(inv_update_steps=0), 6: setting(inv_update_steps=2)},
    "failures": {4: breaking("eigh", "cholesky_ex", "cholesky", "qr"), 7: breaking()},
    "frozen": {3: freezing("qkv"), 6: freezing("qkv", False)},
    "reloaded": {3: reloading, 7: reloading},
    "schedule": {0: scheduled},
    "looks": {0: looking, 2: looking, 3: looking},
    "mask": {0: masking},
    "directions": {3: keeping},
}
SWITCHES = {
    "norm": GradNormChange(eta=0.05, period_steps=2, hold=0),
    "rate": LRChange(hold=1, period_steps=2),
    "epochs": EpochList([(0, 1), (2, 3)], 2),
    "error": ProbeError(layers=2, threshold=0.2),
    "always": Always("sngd"),
}
HYLO: dict[str, dict[str, Any]] = {
    "energy": {"rank_energy": 0.7, "mode": "kis"},
    "energy kid": {"rank_energy": 0.9},
    "energy lazy": {"rank_energy": 0.7, "batch_size": None},
    "lazy": {"batch_size": None},
    "lazy sngd": {"batch_size": None, "mode": "sngd", "approx": "expand"},
    "expand": {"approx": "expand", "batch_size": None},
    "replacement": {"mode": "kis", "kis_sampling": "replacement"},
    "unweighted": {"mode": "kis", "kis_sampling": "unweighted"},
    "uniform": {"mode": "kis", "kis_sampling": "uniform"},
    "pivot qr": {"kid_pivoting": "qr", "kid_residual": "full"},
    "pivot score": {"kid_pivoting": "score", "kid_residual": "none"},
    "conv": {"conv_scale": "hylo"},
    "relative": {"damping_mode": "relative", "normalize_damping": True},
    "clip": {"kl_clip": 1e-3, "weight_decay": 0.1, "weight_decay_mode": "reg"},
    "graft": {"graft": "adam", "clip_norm": 0.5},
    "inner": {"inner": "adamw", "nesterov": False},
    "max rank": {"max_rank": 2},
    "cheaper": {"kfac_when_cheaper": True, "rank_fraction": 0.6},
    "cheaper lazy": {"kfac_when_cheaper": True, "rank_fraction": 0.8, "batch_size": None},
    "none saved": {"checkpoint_curvature": "none"},
    "defaults": {"damping": 1.0, "mode": "auto", "rank_fraction": 0.1, "batch_size": None},
}
FEW = TopK(density=0.3, block_size=8)
STORAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("mfac", {}),
    "bf16": ("mfac", {"window_dtype": torch.bfloat16}),
    "lowrank": ("mfac", {"compression": LowRank(1)}),
    "lowrank bf16": ("mfac", {"compression": LowRank(2), "window_dtype": torch.bfloat16}),
    "topk": ("mfac", {"compression": FEW}),
    "sparse": ("sparse", {}),
    "sparse 8bit": ("sparse", {"compression": TopK(density=0.3, block_size=8, error_bits=8)}),
    "sparse no feedback": ("sparse", {"compression": TopK(density=0.3, block_size=8, error_feedback=False)}),
    "ggt": ("ggt", {}),
    "ggt topk": ("ggt", {"compression": FEW}),
    "ggt decay": ("ggt", {"betas": (0.9, 0.95), "bias_correction": True, "sgd_weight": 0.1}),
}
WINDOW: dict[str, dict[str, Any]] = {
    "ema": {"momentum_mode": "ema"},
    "pre": {"momentum_mode": "pre", "weight_decay": 0.1},
    "nesterov": {"nesterov": True},
    "legacy": {"weight_decay": 0.1, "weight_decay_mode": "legacy"},
    "reg": {"weight_decay": 0.1, "weight_decay_mode": "reg"},
    "both": {"weight_decay": 0.1, "weight_decay_mode": "both"},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "eigh": {"solver": "eigh", "damping": 1e-5},
    "cholesky": {"solver": "cholesky", "scale": "window"},
    "relative": {"damping_mode": "relative"},
    "graft": {"graft": "adam", "weight_decay": 0.1},
    "inner": {"inner": "adamw", "clip_norm": 0.1},
    "left out": {"skip_norm_layers": True, "skip_biases": True, "fallback": "adamw"},
    "none saved": {"checkpoint_curvature": "none"},
    "foreach": {"foreach": True, "maximize": True},
    "defaults": {"window_size": 1024, "momentum": 0.0, "lr": 0.001},
}


def contract() -> Iterator[tuple[str, Run]]:
    for method in METHODS:
        for variant in method.variants:
            for task in tasks.TASKS:
                yield (
                    f"{method.name}-{variant.name}-{task.name}",
                    Run(method.name, variant.keywords, task.name, steps=8, copies=True),
                )


def layers() -> Iterator[tuple[str, Run]]:
    for name in ("kfac", "ekfac"):
        for label, keywords in LAYER_OPTIONS.items():
            yield f"{name}-{label}", Run(name, keywords)
        for label, keywords in FISHERS.items():
            for approx in ("expand", "reduce"):
                yield f"{name}-{label}-{approx}", Run(name, {**keywords, "approx": approx}, way="observe")
        for label, (way, keywords, events) in JUDGED.items():
            yield f"{name}-{label}", Run(name, keywords, "mlp", way, events)
            yield f"{name}-{label}-float", Run(name, keywords, "cnn", way, events, dtype=torch.float32)
        for label, events in LIFE.items():
            yield f"{name}-{label}", Run(name, before=events, copies=label in ("frozen", "failures"))
        yield f"{name}-poison", Run(name, task="mlp", before={3: spoiled})
        yield f"{name}-micro", Run(name, micro=2)
        yield f"{name}-groups", Run(name, groups=late_group, copies=True)
        yield f"{name}-list", Run(name, groups=flat_list)
        yield f"{name}-float", Run(name, task="cnn", dtype=torch.float32, copies=True)
        yield f"{name}-bfloat16 model", Run(name, task="mlp", dtype=torch.bfloat16)
        yield f"{name}-overlap interval", Run(name, {"overlap": True, "inv_update_steps": 3}, steps=12, copies=True)
    for way in ("exact", "pi"):
        for inverse in ("eigen", "cholesky"):
            yield f"kfac-{inverse}-{way}", Run("kfac", {"inverse_method": inverse, "damping_split": way})
    for label in ("packed", "packed overlap", "bfloat16", "max dim", "power", "stagger", "relative", "overlap"):
        keywords = {**LAYER_OPTIONS[label], "inverse_method": "cholesky"}
        yield f"kfac-cholesky-{label}", Run("kfac", keywords, copies=label == "packed overlap")
    for label, events in LIFE.items():
        yield f"kfac-cholesky-{label}", Run("kfac", {"inverse_method": "cholesky"}, before=events)
    for transport in ("project", "kfac", "recompute", "none"):
        for update in ("eigh", "qr"):
            keywords = {"transport": transport, "basis_update": update, "inv_update_steps": 2, "full_every": 3}
            yield f"ekfac-{transport}-{update}", Run("ekfac", keywords, steps=12)
            failing = {6: breaking("eigh", "qr"), 9: breaking()}
            yield f"ekfac-{transport}-{update}-failing", Run("ekfac", keywords, before=failing, steps=12)
    for label, more in {
        "calibrate running": {"calibrate_damping": True, **MODEL, **RUNNING},
        "adaptive running": {"adaptive_damping": True, "damping_interval": 2, **MODEL, **RUNNING},
        "reject pre momentum": {"reject_steps": True, **PRE, **MODEL},
    }.items():
        yield f"ekfac-{label}", Run("ekfac", more, "mlp", "loss", {5: steep, 6: calm} if "reject" in label else {})
    for label, more in {
        "rare scale": {"scale_update_steps": 3},
        "rare scale running": {"scale_update_steps": 3, **RUNNING},
        "scale decay": {"scale_decay": 0.5},
        "few scale": {"scale_batch_size": 2},
        "token": {"token_is_example": True},
        "pre weight decay": {**PRE, "weight_decay": 0.1},
        "pre overlap": {**PRE, "overlap": True},
        "running failing": RUNNING,
        "qr stagger": {"basis_update": "qr", "stagger": True},
    }.items():
        events = {4: breaking("eigh"), 7: breaking()} if "failing" in label else {}
        yield f"ekfac-{label}", Run("ekfac", more, before=events)


def hylo() -> Iterator[tuple[str, Run]]:
    for label, keywords in HYLO.items():
        for task in ("cnn", "transformer"):
            yield f"{label}-{task}", Run("hylo", keywords, task, copies=True)
    for label, policy in SWITCHES.items():
        keywords = {"mode": "auto", "switch": policy}
        yield f"switch-{label}", Run("hylo", keywords, before={4: setting(lr=0.005)}, steps=12, copies=True)
    for fisher in ("mc", "curvature_prop"):
        yield fisher, Run("hylo", {"fisher": fisher}, way="observe")
    form = {"kfac_when_cheaper": True, "mode": "sngd", "update_steps": 0}
    for change, batch_size in ((4, None), (6, None), (6, 4)):
        keywords = {**form, "batch_size": batch_size}
        events = {0: growing(8), change: setting(update_steps=2), change + 1: saving("changed"), change + 2: reloading}
        label = f"form from step {change}" + (" lazy" if batch_size is None else "")
        yield label, Run("hylo", keywords, before=events, copies=True)
    yield "more rows", Run("hylo", {"batch_size": None}, before={3: growing(3), 5: saving("more"), 7: growing(1)})
    for label, events in LIFE.items():
        if not label.startswith("interval"):
            written = {k: e for k, e in events.items() if label != "off and on"}
            yield label, Run("hylo", before=written)
    yield "interval", Run("hylo", before={3: setting(update_steps=1), 6: setting(update_steps=3)})
    yield "poison", Run("hylo", task="mlp", before={3: spoiled})
    yield "micro", Run("hylo", {"batch_size": None}, micro=2)
    yield "float", Run("hylo", task="cnn", dtype=torch.float32, copies=True)
    yield "groups", Run("hylo", groups=late_group, copies=True)


def growing(times: int) -> Callable[[Training], None]:
    """Batches of so many as at first from now on."""

    def event(training: Training) -> None:
        original = training.extra.setdefault("batch", training.batch)
        training.batch = lambda step: tuple(  # type: ignore[assignment]
            torch.cat(parts) for parts in zip(*(original(step + 20 * i) for i in range(times)), strict=True)
        )

    return event


def windows() -> Iterator[tuple[str, Run]]:
    for label, (method, keywords) in STORAGES.items():
        for partition in ("global", "group", "layer"):
            chosen = {**keywords, "partition": partition}
            yield f"{label}-{partition}", Run(method, chosen, groups=None if partition != "group" else late_group)
        yield f"{label}-cnn-float", Run(method, keywords, "cnn", dtype=torch.float32, copies=True)
        plainly = Run(method, keywords, steps=12)
        yield f"{label}-resized", replace(plainly, before={6: resized(plainly, 2), 8: resized(plainly, 6)})
        yield f"{label}-size written", replace(plainly, before={6: setting(window_size=2), 8: setting(window_size=6)})
        yield f"{label}-poison", Run(method, keywords, "mlp", before={2: spoiled})
        yield f"{label}-frozen", Run(method, keywords, before={3: freezing("qkv"), 6: freezing("qkv", False)})
    for method in ("mfac", "sparse", "ggt"):
        for label, keywords in WINDOW.items():
            if BY_NAME[method].accepts(*keywords):
                yield f"{method}-{label}", Run(method, keywords)
        for label in ("schedule", "directions", "reloaded", "looks"):
            yield f"{method}-{label}", Run(method, before=LIFE[label], task="cnn")


def resized(run: Run, size: int) -> Callable[[Training], None]:
    """Go on with a window of another size, through a checkpoint."""

    def event(training: Training) -> None:
        saved = through_a_file(training.optimizer.state_dict())
        training.optimizer.close()
        fresh = replace(run, keywords={**run.keywords, "window_size": size}).training(training.model)
        fresh.optimizer.load_state_dict(saved)
        training.optimizer = fresh.optimizer

    return event


SETS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "contract": contract, "layers": layers, "hylo": hylo, "windows": windows,
}  # fmt: skip
