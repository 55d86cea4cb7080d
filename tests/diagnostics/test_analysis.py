"""`Analysis` changes nothing, writes one line per event, and its numbers are those of dense matrices in float64."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder import EKFAC, KFAC, MFAC, HyLo, RowOptions
from secondorder.diagnostics import Analysis, read_events, rowtaps
from tests.support.building import built
from tests.support.grid import each
from tests.support.kfac import hook_counts
from tests.support.oracles import hylo as oracle
from tests.support.tasks import CNN, MLP, TASKS, Task, assert_identical, backward, snapshot, train, values

Make = Callable[..., Any]
_USUAL = {"lr": 0.05, "momentum": 0.9, "damping": 0.01}
_FACTORS = {**_USUAL, "factor_update_steps": 2, "inv_update_steps": 4}
METHODS: dict[str, Make] = {
    "kfac": partial(KFAC, **_FACTORS),
    "ekfac": partial(EKFAC, **_FACTORS),
    "hylo": partial(HyLo, **_USUAL, update_steps=2, rank_fraction=0.5),
}
PLAIN_KFAC = partial(KFAC, lr=0.1)
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
COLUMNS = {
    "rank": (
        "step", "layer", "m", "d_i", "d_o", "rank90", "eff_rank", "sigma_max", "sigma_sum", "damping_over_sigma1",
        "process",
    ),
    "trend": ("step", "epoch", "layer", "grad_norm", "update_norm", "rel_change", "mode", "process"),
    "error": ("step", "layer", "mode", "r", "rel_error", "cos", "kid_energy", "kis_ess", "process"),
    "profile": (
        "step", "rank", "world", "capture_ms", "select_ms", "exchange_ms", "kernel_ms", "invert_ms", "statistics_ms",
        "refresh_ms", "share_ms", "precondition_ms", "update_ms", "wire_bytes", "state_bytes", "peak_bytes", "process",
    ),
}  # fmt: skip
#: Stages that are not inside others.
OUTER = ("capture", "exchange", "statistics", "refresh", "share", "precondition", "update")
Vector = np.ndarray[Any, np.dtype[np.float64]]


def events(folder: Path, tool: str, **wanted: Any) -> list[dict[str, Any]]:
    """Events of a tool with the given values."""
    found = read_events(folder / f"{tool}.jsonl")
    return [event for event in found if all(event[key] == value for key, value in wanted.items())]


@contextmanager
def watching(
    folder: Path, tools: Any = tuple(COLUMNS), make: Make = PLAIN_KFAC, task: Task = MLP, **options: Any
) -> Iterator[tuple[nn.Module, Any, Analysis]]:
    """A model of a task, its optimizer and their analysis."""
    model = task.model()
    optimizer = make(model)
    with Analysis(optimizer, folder, tools, **options) as analysis:
        yield model, optimizer, analysis


def watch(
    folder: Path, tools: Any, make: Make = PLAIN_KFAC, task: Task = MLP, *, steps: int = 1, **options: Any
) -> tuple[Any, Analysis]:
    """Train some steps under an analysis."""
    with watching(folder, tools, make, task, **options) as (model, optimizer, analysis):
        train(model, optimizer, task, steps)
    return optimizer, analysis


def one(folder: Path, tool: str, **wanted: Any) -> dict[str, Any]:
    (event,) = events(folder, tool, **wanted)
    return event


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float) -> None:
    """Equal events, floating-point numbers up to rounding."""
    assert len(found) == len(expected) > 0
    for event, other in zip(found, expected, strict=True):
        assert event.keys() == other.keys()
        for key, value in other.items():
            assert event[key] == (pytest.approx(value, rel=rel, abs=1e-12) if isinstance(value, float) else value), key


# -------------------------------------------------------------------------------------------------------- Dense oracles
class Dense:
    """A layer's curvature ``F = Σ u uᵀ`` from the gradients of single examples, and updates from it.

    Attributes:
        groups: Rows ``[Γ, n, p]`` for the Fisher of the mean loss.
        u: Those of the first group.
    """

    def __init__(self, model: nn.Module, name: str, inputs: Tensor, targets: Tensor) -> None:
        self._rows = oracle.layer_rows(model, name, inputs, targets, F.cross_entropy)
        self.groups: Vector = self._rows.numpy() / len(inputs) ** 0.5
        self.u, self._v = self.groups[0], self._rows[0].mean(0)

    def exact(self, damping: float) -> Vector:
        return oracle.sngd(self._rows[:1], self._v, damping)[0].numpy()

    def interpolated(self, damping: float, r: int) -> tuple[Vector, float]:
        """KID and the share of the trace."""
        kernel = self._rows[0] @ self._rows[0].T
        pivots = oracle.greedy(kernel, r)
        rest = oracle.interpolation(kernel, pivots)[1]
        update = oracle.kid_operator(self._rows[0], pivots, damping) @ self._v
        return update.numpy(), float(1 - rest.trace() / kernel.trace())

    def sampled(self, damping: float, r: int, weights: Vector) -> Iterator[tuple[Vector, float]]:
        """KIS and its effective sample size, for every choice of r examples that could be drawn."""
        for chosen in combinations(range(len(self.u)), r):
            omega = weights[list(chosen)]
            kept = omega[:, None] * self.u[list(chosen)]
            update = np.linalg.solve(kept.T @ kept + damping * np.eye(len(self._v)), self._v.numpy())
            yield update, float((omega**2).sum() ** 2 / (omega**4).sum())

    def systematic_weights(self, r: int) -> Vector:
        return 1 / np.sqrt(oracle.inclusion((self._rows[0] ** 2).sum(1), r).numpy())


def errors(update: Vector, exact: Vector) -> tuple[float, float]:
    """Relative error and cosine."""
    cos = update @ exact / np.linalg.norm(update) / np.linalg.norm(exact)
    return float(np.linalg.norm(update - exact) / np.linalg.norm(exact)), float(cos)


def measured(event: dict[str, Any]) -> tuple[float, float]:
    return event["rel_error"], event["cos"]


# ---------------------------------------------------------------------------------------------- training is unchanged
def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


WATCHED = [*TASKS, Task("noisy", noisy, MLP.draw)]


@each(task={task.name: task for task in WATCHED}, make=METHODS)
def test_parameters_state_and_random_numbers_are_identical(make: Make, task: Task, tmp_path: Path) -> None:
    found = []
    for watched in (True, False):
        model = task.model()
        optimizer = make(model)
        torch.manual_seed(1)
        with Analysis(optimizer, tmp_path, every=2) if watched else nullcontext():
            train(model, optimizer, task, 5)
        found.append({"model": values(model), "state": snapshot(optimizer), "random": torch.get_rng_state()})
    assert_identical(found[0], found[1])
    assert {e["layer"] for e in events(tmp_path, "rank")} == set(optimizer.blocks)


@pytest.mark.parametrize("cls", [KFAC, EKFAC])
def test_steps_that_may_be_rejected_are_identical_too(cls: Any, tmp_path: Path) -> None:
    """Their closure runs again at other parameters, which must not be captured and must not discard the step's rows."""
    found = []
    for watched in (True, False):
        model = MLP.model()
        optimizer = built(cls, model, lr=0.1, damping=0.1, adaptive_damping=True, damping_interval=1, reject_steps=True)
        with Analysis(optimizer, tmp_path, every=1, rank_fraction=0.5) if watched else nullcontext():
            for step in range(3):
                closure = partial(backward, model, optimizer, MLP, step)
                assert (optimizer.step(closure=closure) if step == 1 else optimizer.step(closure)) is not None
            found.append({"model": values(model), "state": snapshot(optimizer)})
    assert_identical(found[0], found[1])
    assert [event["m"] for event in events(tmp_path, "rank")] == [6] * 6
    dense = Dense(MLP.model(), "first", *MLP.batch(0))
    assert one(tmp_path, "rank", step=0, layer="first")["sigma_sum"] == pytest.approx((dense.u**2).sum(), rel=1e-12)


def hooks(model: nn.Module, optimizer: Any) -> list[Any]:
    of_steps = [*optimizer._optimizer_step_pre_hooks], [*optimizer._optimizer_step_post_hooks]
    return [hook_counts(model), *of_steps, optimizer.stage_clock, [*optimizer._record.kept]]


@every_method
def test_gradients_are_unchanged_and_closing_removes_every_hook(make: Make, tmp_path: Path) -> None:
    model = MLP.model()
    optimizer = make(model)
    without = hooks(model, optimizer)
    analysis = Analysis(optimizer, tmp_path, every=1)
    assert hooks(model, optimizer) != without
    backward(model, optimizer, MLP, 0)
    before = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    optimizer.step()
    for p, (grad, value) in zip(model.parameters(), before, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)
    counted = dict(analysis.events)
    assert counted["rank"] == 2
    backward(model, optimizer, MLP, 1)
    analysis.close()
    analysis.close()
    assert hooks(model, optimizer) == without
    optimizer.step()
    assert analysis.events == counted
    with pytest.raises(KeyError, match="stop"), Analysis(optimizer, tmp_path):
        raise KeyError("stop")
    assert hooks(model, optimizer) == without


@pytest.mark.parametrize(
    ("tools", "steps"), [(tuple(COLUMNS), [0, 3, 6]), ("trend", []), (("profile", "trend"), [])], ids=str
)
def test_rows_are_collected_only_for_tools_and_steps_that_need_them(
    tools: Any, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, original = set(), rowtaps.ExampleRows
    with watching(tmp_path, tools, every=3) as (model, optimizer, analysis):
        monkeypatch.setattr(
            rowtaps, "ExampleRows", lambda *args, **kw: made.add(optimizer.steps) or original(*args, **kw)
        )
        train(model, optimizer, MLP, 7)
    assert sorted(made) == steps
    wanted = {tools} if isinstance(tools, str) else set(tools)
    assert {path.stem for path in tmp_path.iterdir()} == set(analysis.events) == wanted


# ------------------------------------------------------------------------------------------------- lines and columns
@every_method
def test_each_event_is_a_line_with_the_columns_in_order(make: Make, tmp_path: Path) -> None:
    sampling = ("systematic", "uniform")
    with watching(tmp_path, make=make, every=2, kis_sampling=sampling) as (model, optimizer, analysis):
        for step in range(5):
            train(model, optimizer, MLP, 1, start=step)
            assert len(events(tmp_path, "rank")) == 2 * (step // 2 + 1)  # on disk already
    layers, steps = ["first", "second"], [0, 2, 4]
    assert analysis.events == {"rank": 6, "trend": 6, "error": 27, "profile": 3}
    for tool, columns in COLUMNS.items():
        lines = [json.loads(line) for line in (tmp_path / f"{tool}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(lines) == analysis.events[tool]
        assert all(tuple(line) == columns for line in lines)
        assert lines == events(tmp_path, tool)
    assert lines_of_layers(tmp_path) == [(step, layer) for step in steps for layer in layers]
    modes = ["kid", "kis", "uniform KIS"]
    assert [(e["layer"], e["mode"]) for e in events(tmp_path, "error", step=2)] == [
        (layer, mode) for layer in [*layers, "all"] for mode in modes
    ]
    assert [e["step"] for e in events(tmp_path, "profile")] == steps


def lines_of_layers(folder: Path) -> list[tuple[int, str]]:
    """Step and layer of the lines of two tools, which must agree."""
    rank, trend = ([(e["step"], e["layer"]) for e in events(folder, tool)] for tool in ("rank", "trend"))
    assert rank == trend
    return rank


def test_uncovered_frozen_and_skipped_parameters_have_no_lines(tmp_path: Path) -> None:
    model = CNN.model()
    model.get_submodule("second").requires_grad_(False)
    optimizer = KFAC(model, lr=0.1, skip_layers="head")
    with Analysis(optimizer, tmp_path, every=1):
        train(model, optimizer, CNN, 1)
        model.get_submodule("second").requires_grad_(True)
        train(model, optimizer, CNN, 1)
        model.get_submodule("first").requires_grad_(False)
        train(model, optimizer, CNN, 1)
    assert lines_of_layers(tmp_path) == [(0, "first"), (1, "first"), (1, "second"), (2, "second")]


@every_method
def test_a_resumed_run_appends_the_lines_of_an_uninterrupted_one(make: Make, tmp_path: Path) -> None:
    tools, options = ("rank", "trend", "error"), {"every": 2, "epoch_steps": 3}
    with watching(tmp_path / "whole", tools, make, **options) as (model, optimizer, _):
        train(model, optimizer, MLP, 8)
    with watching(tmp_path / "parts", tools, make, **options) as (model, optimizer, _):
        train(model, optimizer, MLP, 5)
    resumed = MLP.model()
    resumed.load_state_dict(model.state_dict())
    other = make(resumed)
    other.load_state_dict(snapshot(optimizer))
    with Analysis(other, tmp_path / "parts", tools, **options) as analysis:
        train(resumed, other, MLP, 3, start=5)
    assert analysis.events == {"rank": 2, "trend": 2, "error": 6}
    for tool in tools:
        assert events(tmp_path / "parts", tool) == events(tmp_path / "whole", tool)
    assert [e["epoch"] for e in events(tmp_path / "whole", "trend", layer="first")] == [0, 0, 1, 2]


def test_broken_lines_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rank.jsonl"
    path.write_text('{"step": 0, "layer": "fi', encoding="utf-8")
    assert read_events(path) == []  # still being written
    assert not caplog.records
    with watching(tmp_path, "rank") as (model, optimizer, _):
        train(model, optimizer, MLP, 11)
    expected = [(step, layer) for step in (0, 10) for layer in ("first", "second")]
    assert [(e["step"], e["layer"]) for e in read_events(path)] == expected
    assert "line 1" in caplog.text


# -------------------------------------------------------------------------------------------------------------- rank
def assert_spectrum(event: dict[str, Any], groups: Vector, damping: float) -> None:
    """The event has the figures of the kernel's eigenvalues, of all groups together."""
    sigma = np.sort(np.concatenate([np.linalg.svd(u, compute_uv=False) ** 2 for u in groups]))[::-1]
    shares = sigma[sigma > 0] / sigma.sum()
    assert event["rank90"] == next(k for k in range(1, len(sigma) + 1) if sigma[:k].sum() >= 0.9 * sigma.sum())
    assert event["eff_rank"] == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-9)
    assert event["sigma_max"] == pytest.approx(sigma[0], rel=1e-10)
    assert event["sigma_sum"] == pytest.approx(sigma.sum(), rel=1e-10)
    assert event["damping_over_sigma1"] == pytest.approx(damping / sigma[0], rel=1e-10)


@each(approx=["reduce", "expand"], make=METHODS)
def test_rank_of_linear_layers(make: Make, approx: str, tmp_path: Path) -> None:
    with watching(tmp_path, "rank", partial(make, damping=0.02), every=1, approx=approx) as (model, optimizer, _):
        for step in range(2):
            dense = {name: Dense(model, name, *MLP.batch(step)) for name in ("first", "second")}
            train(model, optimizer, MLP, 1, start=step)
            for name, (d_i, d_o) in {"first": (6, 4), "second": (5, 3)}.items():
                event = one(tmp_path, "rank", step=step, layer=name)
                assert (event["m"], event["d_i"], event["d_o"], event["process"]) == (6, d_i, d_o, 0)
                assert_spectrum(event, dense[name].groups, 0.02)


def test_rank_of_convolutions_with_groups(tmp_path: Path) -> None:
    layers = nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    model = nn.Sequential(*layers).double()
    inputs, targets = torch.randn(5, 4, 3, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    dense = Dense(model, "0", inputs, targets)
    optimizer = KFAC(model, lr=0.1)
    with Analysis(optimizer, tmp_path, approx="expand", damping=0.05, rank_fraction=1.0):
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    assert_spectrum(one(tmp_path, "rank", layer="0"), dense.groups, 0.05)
    assert {(event["r"], event["rel_error"] < 1e-12) for event in events(tmp_path, "error")} == {(5, True)}


@pytest.mark.parametrize("cls", [KFAC, HyLo])
def test_relative_damping_is_a_multiple_of_the_mean_eigenvalue(cls: Any, tmp_path: Path) -> None:
    """The mean is over one eigenvalue for each parameter or one for each example, depending on the method."""
    dense = Dense(MLP.model(), "first", *MLP.batch(0))
    watch(tmp_path, "rank", partial(cls, lr=0.1, damping=3.0, damping_mode="relative"))
    eigenvalues = dense.u.shape[1] if cls is KFAC else len(dense.u)
    assert_spectrum(one(tmp_path, "rank", layer="first"), dense.groups, 3.0 * (dense.u**2).sum() / eigenvalues)


# ------------------------------------------------------------------------------------------------------------- error
@each(r=[1, 3, 5], make=METHODS)
def test_error_of_interpolation(make: Make, r: int, tmp_path: Path) -> None:
    dense = {name: Dense(MLP.model(), name, *MLP.batch(0)) for name in ("first", "second")}
    watch(tmp_path, "error", make, rank_fraction=r / 6)
    updates, references = [], []
    for name, layer in dense.items():
        event = one(tmp_path, "error", layer=name, mode="kid")
        update, energy = layer.interpolated(0.01, r)
        updates.append(update)
        references.append(layer.exact(0.01))
        assert measured(event) == pytest.approx(errors(update, references[-1]), rel=1e-7)
        assert event["kid_energy"] == pytest.approx(energy, rel=1e-9)
        assert (event["r"], event["kis_ess"]) == (r, None)
    total = one(tmp_path, "error", layer="all", mode="kid")
    assert measured(total) == pytest.approx(errors(np.concatenate(updates), np.concatenate(references)), rel=1e-7)
    assert (total["r"], total["kid_energy"], total["kis_ess"]) == (r, None, None)


@pytest.mark.parametrize("sampling", ["systematic", "unweighted", "uniform"])
def test_error_of_sampling_is_that_of_a_possible_draw(sampling: str, tmp_path: Path) -> None:
    damping, r = 0.01, 3
    layer = Dense(MLP.model(), "first", *MLP.batch(0))
    weights = layer.systematic_weights(r) if sampling == "systematic" else np.full(6, (6 / r) ** 0.5)
    watch(tmp_path, "error", partial(KFAC, lr=0.1, damping=damping), rank_fraction=0.5, kis_sampling=sampling)
    event = one(tmp_path, "error", layer="first", mode="kis" if sampling == "systematic" else f"{sampling} KIS")
    assert (event["r"], event["kid_energy"]) == (r, None)
    reference, found = layer.exact(damping), (*measured(event), event["kis_ess"])
    possible = [(*errors(update, reference), ess) for update, ess in layer.sampled(damping, r, weights)]
    assert sum(found == pytest.approx(choice, rel=1e-8) for choice in possible) == 1


def test_draws_depend_only_on_the_seed(tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)
        watch(tmp_path / str(number), "error", steps=3, every=1, rank_fraction=0.5, seed=seed)
        found.append([e["rel_error"] for e in events(tmp_path / str(number), "error", mode="kis")])
    assert found[0] == found[1] != found[2]


@each(task={task.name: task for task in TASKS}, approx=["reduce", "expand"])
def test_with_all_rows_there_is_no_error(task: Task, approx: str, tmp_path: Path) -> None:
    optimizer, _ = watch(tmp_path, "error", task=task, damping=0.1, rank_fraction=1.0, approx=approx)
    found = events(tmp_path, "error")
    assert {e["layer"] for e in found} == {*optimizer.blocks, "all"}
    assert max(e["rel_error"] for e in found) < 1e-10
    assert min(e["cos"] for e in found) == pytest.approx(1, abs=1e-12)


# ------------------------------------------------------------------------------------------------- trend and profile
@every_method
def test_norms_of_gradients_and_directions(make: Make, tmp_path: Path) -> None:
    before: dict[str, float] = {}
    with watching(tmp_path, ("rank", "trend"), make, every=2, epoch_steps=2) as (model, optimizer, _):
        for step in range(4):
            backward(model, optimizer, MLP, step)
            with optimizer.keep_directions() as kept:  # the user may keep them, too
                optimizer.step()
            assert set(kept) == {"first.weight", "first.bias", "second.weight", "second.bias"}
            for name in ("first", "second") if step % 2 == 0 else ():
                layer, event = model.get_submodule(name), one(tmp_path, "trend", step=step, layer=name)
                norm = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None]).norm().item()
                length = torch.cat([kept[f"{name}.{own}"].flatten() for own in ("weight", "bias")]).norm().item()
                assert event["grad_norm"] == pytest.approx(norm, rel=1e-12)
                assert event["update_norm"] == pytest.approx(length, rel=1e-12)
                assert event["rel_change"] == (pytest.approx(norm / before[name] - 1, rel=1e-9) if before else None)
                assert event["epoch"] == step // 2
            if step % 2 == 0:
                before = {e["layer"]: e["grad_norm"] for e in events(tmp_path, "trend", step=step)}
    train(model, optimizer, MLP, 1, start=4)
    assert not optimizer._record.kept


def test_directions_that_were_kept_before_are_not_mistaken_for_new_ones(tmp_path: Path) -> None:
    with watching(tmp_path, "trend", every=1) as (model, optimizer, _), optimizer.keep_directions():
        train(model, optimizer, MLP, 1)
        for group in optimizer.param_groups:
            group["inv_update_steps"] = 0
        train(model, optimizer, MLP, 1)
    assert [e["update_norm"] is None for e in events(tmp_path, "trend", layer="first")] == [False, True]
    assert {e["mode"] for e in events(tmp_path, "trend")} == {"kfac"}


@every_method
def test_stages_are_parts_of_the_step(make: Make, tmp_path: Path) -> None:
    with watching(tmp_path, "profile", make, every=2) as (model, optimizer, _):
        for step in range(4):
            start = time.perf_counter()
            train(model, optimizer, MLP, 1, start=step)
            wall = (time.perf_counter() - start) * 1e3
            if step % 2 == 0:
                event = one(tmp_path, "profile", step=step)
                times = {key: value for key, value in event.items() if key.endswith("_ms")}
                assert all(value >= 0 for value in times.values())
                assert sum(times[f"{stage}_ms"] for stage in OUTER) < wall
                assert sum(times[f"{stage}_ms"] for stage in ("select", "kernel", "invert")) <= times["refresh_ms"]
                assert event["state_bytes"] == optimizer.memory_usage()["total"]
                assert (event["rank"], event["world"], event["wire_bytes"], event["peak_bytes"]) == (0, 1, 0, None)
    first = events(tmp_path, "profile")[0]
    assert all(first[f"{stage}_ms"] > 0 for stage in ("capture", "statistics", "refresh", "precondition", "update"))


# ------------------------------------------------------------------------------ lines are those of a plain loop
Loop = Callable[[nn.Module, Any], Any]


def plainly(model: nn.Module, optimizer: Any) -> None:
    train(model, optimizer, MLP, 2)


def compiled(model: nn.Module, optimizer: Any) -> None:
    torch.compiler.reset()
    train(torch.compile(model, backend="eager"), optimizer, MLP, 2)  # type: ignore[arg-type]


def scaled(model: nn.Module, optimizer: Any) -> None:
    for step in range(2):
        optimizer.zero_grad()
        optimizer.grad_scaler.scale(MLP.loss(model, step)).backward()
        optimizer.grad_scaler.step(optimizer)
        optimizer.grad_scaler.update()


def in_parts(reduction: str, parts: int) -> Loop:
    """A loop with micro-batches, each with its share of a loss that is a mean."""

    def loop(model: nn.Module, optimizer: Any) -> None:
        for step in range(2):
            optimizer.zero_grad()
            for x, y in zip(*(t.chunk(parts) for t in MLP.batch(step)), strict=True):
                loss = F.cross_entropy(model(x), y, reduction=reduction)
                (loss / parts if reduction == "mean" else loss).backward()
            optimizer.step()

    return loop


def skipping(set_to_none: bool) -> Loop:
    """A loop in which a batch is given up before each step, as if a loss scaler had found an overflow."""

    def loop(model: nn.Module, optimizer: Any) -> None:
        for step in range(2):
            backward(model, optimizer, MLP, 7)
            optimizer.zero_grad(set_to_none=set_to_none)
            MLP.loss(model, step).backward()
            optimizer.step()

    return loop


def pausing(model: nn.Module, optimizer: Any) -> None:
    """Train with forwards and a backward in pauses, whose gradients are discarded."""
    for step in range(2):
        optimizer.zero_grad()
        with optimizer.pause_capture():
            penalty = MLP.loss(model, 3) * 0
            torch.autograd.grad(MLP.loss(model, 4), list(model.parameters()))
        (MLP.loss(model, step) + penalty).backward()
        optimizer.step()


LOOPS: dict[str, tuple[Loop, Loop, dict[str, Any]]] = {
    "compiled": (compiled, plainly, {}),
    "scaled": (scaled, plainly, {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**12)}),
    "micro-batches": (in_parts("mean", 3), in_parts("mean", 1), {"lr": 0.01}),
    "skipped": (skipping(True), plainly, {}),
    "skipped, gradients of zeros": (skipping(False), plainly, {}),
    "pauses": (pausing, plainly, {}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_lines_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    *loops, keywords = LOOPS[name]
    tools = ("rank", "trend", "error")
    for folder, loop in zip(("found", "expected"), loops, strict=True):
        own = keywords if loop is not plainly else {k: v for k, v in keywords.items() if k != "grad_scaler"}
        make = partial(built, KFAC, **{"lr": 0.1, "damping": 0.1, **own})
        with watching(tmp_path / folder, tools, make, every=1, rank_fraction=0.5) as (model, optimizer, _):
            loop(model, optimizer)
    for tool in tools:
        assert_alike(events(tmp_path / "found", tool), events(tmp_path / "expected", tool), rel=1e-8)


def test_a_summed_loss_in_micro_batches_has_the_rank_of_its_mean(tmp_path: Path) -> None:
    for reduction, parts in (("mean", 1), ("sum", 3)):
        make = partial(KFAC, lr=0.0, loss_reduction=reduction, damping=0.1)
        with watching(tmp_path / reduction, make=make) as (model, optimizer, _):
            in_parts(reduction, parts)(model, optimizer)
    assert_alike(events(tmp_path / "sum", "rank"), events(tmp_path / "mean", "rank"), rel=1e-10)
    for a, b in zip(events(tmp_path / "mean", "error"), events(tmp_path / "sum", "error"), strict=True):
        assert b["rel_error"] == pytest.approx(a["rel_error"], rel=1e-8)  # the gradient is n times as long


def test_padding_is_left_out_by_the_mask_of_the_optimizer(tmp_path: Path) -> None:
    inputs = torch.randn(3, 4, 5, dtype=torch.float64)
    keep = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    found = []
    for junk in (0.0, 100.0):
        task = Task("padded", lambda: nn.Sequential(nn.Linear(5, 3)), MLP.draw)
        x = torch.where(keep.bool()[..., None], inputs, junk)
        with watching(tmp_path / str(junk), "rank", task=task, approx="expand") as (model, optimizer, _):
            with optimizer.mask(keep):
                out = model(x)
            out.square().mean((-1, -2)).mean().backward()  # padded positions have a gradient, which must not count
            optimizer.step()
        found.append(events(tmp_path / str(junk), "rank"))
    assert_alike(found[1], found[0], rel=1e-12)


def test_single_precision_is_measured_in_double(tmp_path: Path) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        model, folder = MLP.model(dtype), tmp_path / str(dtype)
        optimizer = KFAC(model, lr=0.1, damping=0.01)
        with Analysis(optimizer, folder, rank_fraction=0.5):
            train(model, optimizer, MLP, 1)
        found.append([e for tool in ("rank", "error") for e in events(folder, tool)])
    assert_alike(*found, rel=1e-4)


def test_an_analysis_may_begin_later_and_share_its_optimizer(tmp_path: Path) -> None:
    """Its first step is measured, whatever its number."""
    with watching(tmp_path / "a", every=1) as (model, optimizer, first):
        train(model, optimizer, MLP, 3)
        with Analysis(optimizer, tmp_path / "b", ("rank", "error"), every=5):
            train(model, optimizer, MLP, 5, start=3)
        train(model, optimizer, MLP, 1, start=8)
    assert first.events["rank"] == 18
    for tool in ("rank", "error"):
        assert events(tmp_path / "b", tool) == [e for e in events(tmp_path / "a", tool) if e["step"] in (3, 5)] != []


# ---------------------------------------------------------------------------------- batches without useful numbers
@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0])
def test_a_batch_of_zeros_or_one_that_is_not_finite_gives_lines_without_numbers(factor: float, tmp_path: Path) -> None:
    with watching(tmp_path, every=1) as (model, optimizer, _):
        (MLP.loss(model, 0) * factor).backward()
        optimizer.step()
        train(model, optimizer, MLP, 1)
    *_, last = events(tmp_path, "rank", layer="first")
    assert last["sigma_sum"] > 0
    event = one(tmp_path, "rank", layer="first", step=0)
    rank = 0 if factor == 0 else None
    assert (event["m"], event["rank90"], event["eff_rank"], event["damping_over_sigma1"]) == (6, rank, rank, None)
    of_layers = events(tmp_path, "error", step=0)
    assert {e["rel_error"] for e in of_layers} == {None}
    if factor != 0:
        assert {(e["layer"] == "all", e["cos"], e["kis_ess"]) for e in of_layers} == {(False, None, None)}
        assert one(tmp_path, "trend", layer="first", step=0)["grad_norm"] is None
        assert one(tmp_path, "trend", layer="first", step=1)["rel_change"] is None


def test_steps_and_layers_without_gradients_have_no_lines(tmp_path: Path) -> None:
    with watching(tmp_path) as (model, optimizer, analysis):
        optimizer.step()
        assert set(analysis.events.values()) == {0}
        backward(model, optimizer, MLP, 0)
        model.get_submodule("first").zero_grad()
        optimizer.step()
    assert [e["step"] for e in events(tmp_path, "profile")] == [0]
    assert lines_of_layers(tmp_path) == [(0, "second")]


def test_a_layer_without_rows_is_reported_as_refused(tmp_path: Path) -> None:
    task = Task("bag", lambda: nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2)), MLP.draw)
    with watching(tmp_path, task=task, approx="expand") as (model, optimizer, analysis):
        assert set(optimizer.blocks) == {"0", "1"}
        model(torch.randint(9, (6, 3))).square().mean().backward()
        optimizer.step()
    assert {e["layer"] for e in events(tmp_path, "rank")} == {"1"}
    assert {e["layer"] for e in events(tmp_path, "trend")} == {"0", "1"}
    assert set(analysis.refused) == {"0"}


@pytest.mark.filterwarnings("ignore:.*nothing was captured")
def test_a_group_may_be_added_before_the_step(tmp_path: Path) -> None:
    model = MLP.model()
    first, second = model.get_submodule("first"), model.get_submodule("second")
    optimizer = KFAC([*second.parameters()], module=model, lr=0.1)
    with Analysis(optimizer, tmp_path, every=1):
        MLP.loss(model, 0).backward()
        optimizer.add_param_group({"params": [*first.parameters()]})
        optimizer.step()
        train(model, optimizer, MLP, 1)
    assert [(e["step"], e["layer"]) for e in events(tmp_path, "rank")][-2:] == [(1, "first"), (1, "second")]
    assert len(events(tmp_path, "trend")) == 4


def test_the_scale_of_convolutions_is_that_of_the_method(tmp_path: Path) -> None:
    sums = {}
    for scale in ("exact", "hylo"):
        watch(tmp_path / scale, "rank", partial(HyLo, lr=0.1, rows=RowOptions(conv_scale=scale)), CNN)
        sums[scale] = {e["layer"]: e["sigma_sum"] for e in events(tmp_path / scale, "rank")}
    ratios = {name: value / sums["hylo"][name] for name, value in sums["exact"].items()}
    assert ratios == pytest.approx({"first": 16.0**2, "second": 4.0**2, "head": 1.0})


# ---------------------------------------------------------------------------------------------------------- refusals
def test_invalid_options_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model = MLP.model()
    optimizer = KFAC(model, lr=0.1)
    before = hooks(model, optimizer)
    for keyword, value, error in [
        ("tools", ("rank", "speed"), ValueError),
        ("tools", (3,), TypeError),
        ("every", 0, ValueError),
        ("every", 1.5, TypeError),
        ("rank_fraction", 0.0, ValueError),
        ("rank_fraction", 1.5, ValueError),
        ("max_rank", 0, ValueError),
        ("damping", 0.0, ValueError),
        ("epoch_steps", 0, ValueError),
        ("approx", "exact", ValueError),
        ("kis_sampling", "best", ValueError),
        ("seed", -1, ValueError),
    ]:
        with pytest.raises(error, match=keyword):
            Analysis(optimizer, tmp_path / "new", **{keyword: value})
        assert hooks(model, optimizer) == before
        assert not (tmp_path / "new").exists()


def test_methods_without_layers_closed_optimizers_and_those_that_are_already_timed_are_refused(tmp_path: Path) -> None:
    optimizer, others = KFAC(MLP.model(), lr=0.1), (MFAC(MLP.model()), torch.optim.SGD(MLP.model().parameters(), 0.1))
    for other in others:
        with pytest.raises(TypeError, match=type(other).__name__):
            Analysis(other, tmp_path)
    with Analysis(optimizer, tmp_path), pytest.raises(RuntimeError, match="timed already"):
        Analysis(optimizer, tmp_path)
    with Analysis(optimizer, tmp_path):
        pass
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        Analysis(optimizer, tmp_path)
