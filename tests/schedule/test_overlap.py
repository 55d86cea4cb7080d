"""Refreshes that overlap with training: what is adopted when, whatever the thread does."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, RefreshOptions
from secondorder.curvature import factors
from secondorder.curvature import refresh as module
from secondorder.curvature.factorization import factorise
from tests.support.building import built
from tests.support.models import mlp
from tests.support.oracles.kfac import pi_factors
from tests.support.quadratic import flat

INTERVAL, LAG = 20, 2
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eigen": (KFAC, {"inverse_method": "eigen"}),
    "cholesky": (KFAC, {"inverse_method": "cholesky"}),
    "packed": (KFAC, {"inverse_method": "cholesky", "factor_storage": "packed"}),
    "ekfac": (EKFAC, {}),
    "recompute": (EKFAC, {"transport": "recompute"}),
    "running": (EKFAC, {"estimator": "running"}),
}
every_method = pytest.mark.parametrize("name", METHODS)


def _make(name: str, model: nn.Module, **options: Any) -> Any:
    kind, chosen = METHODS[name]
    settings = {"lr": 0.02, "damping": 0.1, "factor_update_steps": 1, "inv_update_steps": INTERVAL, "overlap": True}
    return built(kind, model, **{**settings, **chosen, **options})


def _step(model: nn.Module, opt: Any, t: int) -> None:
    p, generator = next(model.parameters()), torch.Generator().manual_seed(t)
    x, y = (torch.randn(8, n, dtype=p.dtype, generator=generator).to(p.device) for n in (5, 3))
    opt.zero_grad()
    (model(x) - y).square().mean().backward()
    opt.step()


def _train(model: nn.Module, opt: Any, start: int, stop: int, after: Callable[[int], None] = lambda t: None) -> None:
    for t in range(start, stop):
        _step(model, opt, t)
        after(t)


def _begun(name: str, stop: int = INTERVAL + 1, **options: Any) -> tuple[nn.Module, Any]:
    """A model and its optimizer after some steps, by default with a refresh in progress."""
    model = mlp((5, 6, 3))
    opt = _make(name, model, **options)
    _train(model, opt, 0, stop)
    return model, opt


def _rises(model: nn.Module, opt: Any, start: int, stop: int, key: str = "refreshes") -> list[int]:
    """The steps at which a counter of the first block increases."""
    counts = [_states(opt)[0][key]]
    _train(model, opt, start, stop, lambda t: counts.append(_states(opt)[0][key]))
    return [start + i for i, (old, new) in enumerate(pairwise(counts)) if new > old]


def _states(opt: Any) -> list[dict[str, Any]]:
    return [opt.state[block.owner] for block in opt.blocks.values()]


def _undisturbed(name: str, stop: int = 2 * INTERVAL + 5) -> Tensor:
    return flat(_begun(name, stop)[0].parameters())


def _found(opt: Any) -> list[Tensor]:
    """The result of a refresh of every block, as matrices that do not depend on signs of eigenvectors."""
    found = []
    for block in opt.blocks.values():
        state = opt.state[block.owner]
        for side in "ag":
            if f"inverse_{side}" in state:
                found.append(state[f"inverse_{side}"].clone())
            else:
                basis, values = state[f"basis_{side}"], state[f"eigenvalues_{side}"]
                found.append(basis @ torch.diag(values) @ basis.T)
    return found


def _wanted(opt: Any) -> list[Tensor]:
    """The same from the current factors, by explicit inverses."""
    wanted = []
    for block in opt.blocks.values():
        a, g = (block.factor(side).clone() for side in "ag")
        if block.group.get("inverse_method") == "cholesky":
            g, a = map(torch.linalg.inv, pi_factors(g, a, block.group["damping"]))
        wanted += [a, g]
    return wanted


@pytest.mark.parametrize(
    ("name", "interval", "lag"),
    [*((name, INTERVAL, LAG) for name in METHODS), ("eigen", 3, 1), ("ekfac", 1, 1), ("cholesky", 1, 1)],
)
def test_the_factors_of_one_step_are_adopted_a_fixed_number_of_steps_later(name: str, interval: int, lag: int) -> None:
    model, opt = _begun(name, 0, inv_update_steps=interval)
    factors, in_force = [], []

    def look(t: int) -> None:
        factors.append(_wanted(opt))
        in_force.append(_found(opt))

    steps = 3 * interval + lag + 1
    _train(model, opt, 0, steps, look)
    for t in range(steps):
        begun = (t - lag) // interval * interval  # the last refresh that has been adopted
        for found, wanted in zip(in_force[t], factors[max(begun, 0)], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


class _Lazy:
    """Replaces the thread: all work is done when its result is needed."""

    def submit(self, work: Callable[[], Any], device: torch.device) -> Any:
        return _Later(work)

    def close(self) -> None:
        """There is no thread."""


class _Later:
    is_here = True

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result = lambda tensors: work()
        self.wait = lambda: None


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in METHODS),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("cholesky", "ekfac")),
    ],
)
def test_results_do_not_depend_on_how_long_the_work_takes(name: str, device: str) -> None:
    """On a GPU, the work has a stream of its own."""
    found = []
    for lazy in (False, True):
        model = mlp((5, 6, 3)).to(device)
        opt = _make(name, model)
        if lazy:
            opt.preconditioner.refresher.background = _Lazy()
        _train(model, opt, 0, 2 * INTERVAL + 5)
        found.append(flat(model.parameters()))
    assert torch.equal(*found)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that all work in the thread waits for."""
    event, plain, main = threading.Event(), module.factorise, threading.current_thread()

    def held(*args: Any) -> Any:
        if threading.current_thread() is not main:
            assert event.wait(60), "the gate was never opened"
        return plain(*args)

    monkeypatch.setattr(module, "factorise", held)
    yield event
    event.set()


@every_method
def test_steps_before_the_adoption_do_not_wait(name: str, gate: threading.Event) -> None:
    model, opt = _begun(name, INTERVAL + LAG)  # with a wait this would never end
    before = _found(opt)
    assert opt.memory_usage()["pending"] > 0
    gate.set()
    _train(model, opt, INTERVAL + LAG, INTERVAL + LAG + 1)
    assert any(not torch.equal(x, y) for x, y in zip(before, _found(opt), strict=True))


def test_checkpoints_and_close_do_not_wait_for_a_refresh(gate: threading.Event) -> None:
    _, opt = _begun("eigen")
    assert opt.state_dict()["state"][0]["adopt_at"] == INTERVAL + LAG
    gate.set()
    opt.close()
    assert opt.memory_usage()["pending"] == 0


def _fail(*args: Any) -> Any:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize("at", ["the work", "its beginning"])
def test_an_error_is_raised_when_the_result_is_needed(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = _begun("eigen", INTERVAL)
    if at == "the work":
        monkeypatch.setattr(module, "factorise", _fail)
    else:
        monkeypatch.setattr(opt.preconditioner.refresher.background, "submit", _fail)
    _train(model, opt, INTERVAL, INTERVAL + LAG)
    with pytest.raises(RuntimeError, match="out of luck"):
        _train(model, opt, INTERVAL + LAG, INTERVAL + LAG + 1)


@pytest.mark.parametrize("how", ["forgotten", "error"])
def test_a_refresh_that_is_discarded_is_computed_again_from_its_copies_or_forgotten(how: str) -> None:
    model, opt = _begun("eigen", INTERVAL + LAG)
    refresher, blocks = opt.preconditioner.refresher, list(opt.blocks.values())
    assert refresher.jobs.keys() == {*blocks}
    if how == "forgotten":
        refresher.forget(blocks)
        assert [state["adopt_at"] for state in _states(opt)] == [0, 0]
    else:
        blocks[0].runtime.step = INTERVAL + LAG
        with pytest.raises(ValueError, match="in a step"), refresher.adopting(blocks):
            raise ValueError("in a step")
    assert not refresher.jobs
    rises = _rises(model, opt, INTERVAL + LAG, INTERVAL + LAG + 2)
    assert rises == ([] if how == "forgotten" else [INTERVAL + LAG])
    if how == "error":
        assert torch.equal(flat(model.parameters()), _undisturbed("eigen", INTERVAL + LAG + 2))


def _not_ok(*args: Any) -> Any:
    return {key: (tensors, torch.zeros_like(ok)) for key, (tensors, ok) in factorise(*args).items()}


def test_a_first_refresh_that_failed_waits_for_another_estimate_and_the_limit_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "factorise", _not_ok)
    (model, opt), failed = _begun("eigen", 0, factor_update_steps=4, max_failures=3), []
    _train(model, opt, 0, 5, lambda t: failed.append(opt.preconditioner.refresher.failed))
    assert failed == [2, 2, 2, 2, 4]
    assert [state["refreshes"] for state in _states(opt)] == [0, 0]
    with pytest.raises(RuntimeError, match="could not be factorized 3 times in a row"):
        _train(model, opt, 5, 9)


def test_outcomes_that_arrive_later_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch, "Event", lambda device: arrived)
    _, opt = _begun("eigen", 1)
    refresher, block = opt.preconditioner.refresher, opt.blocks["0"]
    refresher.run([block], lambda blocks, host_checks: torch.tensor([False]), look=False)
    assert refresher.failed == 0
    for _ in range(2):
        refresher.settle()
        assert (refresher.failed, refresher.failures) == (1, {block.name: 1})


def test_factors_that_cannot_be_factorized_leave_the_last_good_curvature() -> None:
    model, opt = _begun("eigen", INTERVAL)
    for state in _states(opt):
        state["factor_a"].fill_(float("inf"))
    before = _found(opt)
    _train(model, opt, INTERVAL, INTERVAL + LAG + 1)
    torch.testing.assert_close(_found(opt), before)
    assert opt.diagnostics()["refresh_failures"] == 2


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_checkpoints_load_with_and_without_overlap(before: bool, after: bool) -> None:
    (model, opt), other = _begun("eigen", overlap=before), mlp((5, 6, 3))
    loaded = _make("eigen", other, overlap=after)
    loaded.load_state_dict(opt.state_dict())
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(_found(opt), _found(loaded), rtol=0, atol=0)
    _train(other, loaded, INTERVAL + 1, 2 * INTERVAL + 5)
    assert loaded.state_dict()["state"][0]["refreshes"] >= 2


def test_after_a_skipped_step_the_next_one_adopts() -> None:
    model, opt = _begun("eigen", INTERVAL + LAG)
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    opt.step()
    assert _states(opt)[0]["refreshes"] == 1
    assert _rises(model, opt, INTERVAL + LAG + 1, INTERVAL + LAG + 2) == [INTERVAL + LAG + 1]


@every_method
def test_a_model_may_be_cast_while_a_refresh_is_in_progress(name: str) -> None:
    model = mlp((5, 6, 3)).float()
    opt = _make(name, model)
    _train(model.double(), opt, 0, INTERVAL + 1)
    before = _found(opt)
    _train(model.float(), opt, INTERVAL + 1, INTERVAL + LAG + 1)
    found = _found(opt)
    assert found[0].dtype == torch.float32
    assert any(not torch.allclose(x.float(), y) for x, y in zip(before, found, strict=True))


@pytest.mark.parametrize(("first", "then"), [("eigen", "cholesky"), ("cholesky", "eigen")])
def test_a_refresh_of_another_inverse_method_is_not_adopted(first: str, then: str) -> None:
    model, opt = _begun(first)
    opt.param_groups[0].update(inverse_method=then, damping_split="pi" if then == "cholesky" else "exact")
    wanted: list[Tensor] = []
    _train(model, opt, INTERVAL + 1, INTERVAL + 2, lambda t: wanted.extend(_wanted(opt)))
    _train(model, opt, INTERVAL + 2, INTERVAL + LAG + 2)
    torch.testing.assert_close(_found(opt), wanted)


def test_intervals_may_change_while_a_refresh_is_in_progress() -> None:
    model, opt = _begun("eigen")
    opt.param_groups[0]["inv_update_steps"] = 50
    assert _rises(model, opt, INTERVAL + 1, 60) == [INTERVAL + LAG, 55]


def test_newer_curvature_is_not_replaced_by_an_older_refresh() -> None:
    model, opt = _begun("cholesky")
    opt._trust.set_damping([0.3])  # makes new inverses, as adaptive damping does
    wanted = _wanted(opt)
    _train(model, opt, INTERVAL + 1, INTERVAL + LAG + 1)
    torch.testing.assert_close(_found(opt), wanted)


def test_the_scale_is_measured_again_in_every_adopted_basis() -> None:
    model, opt = _begun("recompute", 0, factor_update_steps=10, scale_update_steps=10)
    rises = _rises(model, opt, 0, 2 * INTERVAL + LAG + 1, "scale_updates")
    assert rises == [0, 10, 20, INTERVAL + LAG, 30, 40, 2 * INTERVAL + LAG]
    assert _states(opt)[0]["scale_weight"] == 8.0  # of this step's examples alone


def test_blocks_with_short_intervals_do_not_wait_for_those_with_long_ones() -> None:
    model = mlp((5, 6, 3))
    first, last = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": last, "inv_update_steps": 40}, {"params": first, "inv_update_steps": 10}]
    opt = KFAC(groups, module=model, lr=0.02, damping=0.1, factor_update_steps=1, overlap=True)
    _train(model, opt, 0, 41)
    jobs = [opt.preconditioner.refresher.jobs[block] for block in opt.blocks.values()]
    assert jobs[0] is not jobs[1]
    assert [state["adopt_at"] for state in _states(opt)] == [41, 44]


def test_a_fork_continues_from_the_copies_and_close_ends_the_thread() -> None:
    model, opt = _begun("eigen")
    for job in opt.preconditioner.refresher.jobs.values():
        job._process = -1  # as in a child process, where the thread does not exist
    opt.preconditioner.refresher.background._process = -1
    _train(model, opt, INTERVAL + 1, INTERVAL + LAG + 1)
    assert torch.equal(flat(model.parameters()), _undisturbed("eigen", INTERVAL + LAG + 1))
    _, other = _begun("eigen")
    thread = other.preconditioner.refresher.background._thread
    other.close()
    assert thread is not None
    assert thread._shutdown


def test_overlap_needs_memory_for_copies_of_the_factors() -> None:
    plain, overlapping = (_make("eigen", mlp((5, 6, 3)), overlap=o).memory_usage() for o in (False, True))
    assert overlapping["factors"] == 2 * plain["factors"]
    assert overlapping["second_order"] == plain["second_order"]


def test_incompatible_options_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="overlap=True computes a basis from scratch, but basis_update='qr' improves"):
        EKFAC(mlp((5, 6, 3)), overlap=True, refresh=RefreshOptions(basis_update="qr"))
    with pytest.raises(TypeError, match="overlap"):
        KFAC(mlp((5, 6, 3)), overlap="yes")
    assert "Drop overlap=True" in (KFAC(mlp((5, 6, 3)), overlap=True).reason_against_roles() or "")
    monkeypatch.setattr(factors, "DEVICES", ())
    with pytest.raises(ValueError, match="needs a device that does two things at a time, and cpu does not"):
        KFAC(mlp((5, 6, 3)), overlap=True)
