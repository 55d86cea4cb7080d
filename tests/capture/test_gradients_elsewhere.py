"""Gradients that a user keeps outside `.grad` between micro-batches: all of their statistics count, or none.

The oracle is the curvature of the whole batch, from the per-example gradients of autograd in float64.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import EKFAC, KFAC, MFAC, CommOpt, HyLo
from secondorder.capture.backwards import REPLACED
from tests.support.building import built
from tests.support.grid import each
from tests.support.kfac import all_factors, assert_factors, labels, noise, plain_kfac
from tests.support.models import mlp
from tests.support.networks import Recomputing
from tests.support.oracles.kfac import expected_factors
from tests.support.oracles.ranks import distance
from tests.support.pool import Pool, device_of
from tests.support.warned import messages_of, silent

PARTS = 4
EVERY_STEP = {kind: {"factor_update_steps": 1, "inv_update_steps": 1} for kind in (KFAC, EKFAC)}
EVERY_STEP[HyLo] = {"update_steps": 1}

Loop = Callable[[nn.Module, Any], None]


def net() -> nn.Sequential:
    return mlp((6, 64, 10))


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return Recomputing.apply(super().forward, x, *self.parameters())


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    return noise(64, 6, seed=seed), labels(64, 10, seed)


def losses(model: nn.Module, optimizer: Any) -> list[Callable[[], Tensor]]:
    """The losses of the micro-batches, each divided by their number; `observe` is for the test of the exact Fisher."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        optimizer.observe(outputs, "categorical")
        return F.cross_entropy(outputs, y) / PARTS

    return [partial(loss, a, b) for a, b in zip(*(part.chunk(PARTS) for part in batch()), strict=True)]


def returned(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss(), list(model.parameters())))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def taken(model: nn.Module, loss: Callable[[], Tensor], **reset: bool) -> list[Tensor]:
    """What a backward pass leaves in `.grad`, which is then reset."""
    loss().backward()
    found = gradients(model)
    model.zero_grad(**reset)
    return found


def collect(model: nn.Module, gradients: Iterable[list[Tensor]]) -> None:
    """Put the sum of the gradients of micro-batches into `.grad`."""
    for p, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
        p.grad = sum(parts)


def accumulated(model: nn.Module, optimizer: Any) -> None:
    for loss in losses(model, optimizer):
        loss().backward()


def kept(way: Callable[[nn.Module, Any], list[Tensor]]) -> Loop:
    """A loop that keeps the gradients which ``way`` returns for each micro-batch."""
    return lambda model, optimizer: collect(model, [way(model, loss) for loss in losses(model, optimizer)])


def reset_to_none_and_evaluated(model: nn.Module, optimizer: Any) -> None:
    kept(taken)(model, optimizer)
    with optimizer.pause_capture():
        probe(model)


def reset_by_the_optimizer(model: nn.Module, optimizer: Any) -> None:
    found = []
    for loss in losses(model, optimizer):
        optimizer.zero_grad()
        loss().backward()
        found.append(gradients(model))
    collect(model, found)


def in_turn(model: nn.Module, optimizer: Any) -> None:
    ways = (returned, taken) * 2
    collect(model, [way(model, loss) for way, loss in zip(ways, losses(model, optimizer), strict=True)])


def added_to_the_last(model: nn.Module, optimizer: Any) -> None:
    *first, last = losses(model, optimizer)
    parts = [taken(model, loss) for loss in first]
    last().backward()
    collect(model, [*parts, gradients(model)])


def probe(model: nn.Module) -> Tensor:
    x, y = batch(7)
    return F.cross_entropy(model(x[:9]), y[:9])


def after_batches_that_were_given_up(model: nn.Module, optimizer: Any) -> None:
    for given_up_by in (model, optimizer):
        probe(model).backward()
        given_up_by.zero_grad()
    accumulated(model, optimizer)


def with_a_penalty(model: nn.Module, optimizer: Any) -> None:
    after_batches_that_were_given_up(model, optimizer)
    with optimizer.pause_capture():
        probe(model).mul(3).backward()


def between_probes(model: nn.Module, optimizer: Any) -> None:
    returned(model, partial(probe, model))
    accumulated(model, optimizer)
    returned(model, partial(probe, model))


def clipped_each_time(model: nn.Module, optimizer: Any) -> None:
    for loss in losses(model, optimizer):
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def clipped_after_others(model: nn.Module, optimizer: Any) -> None:
    after_batches_that_were_given_up(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def compared(model: nn.Module, value: Tensor) -> Tensor:
    """Compare the gradients of two terms at the last layer before the backward pass, as the loss of VQGAN does."""
    for term in (value, 2 * value):
        torch.autograd.grad(term, model[2].weight, retain_graph=True)
    return value


def weighted_by_gradients(model: nn.Module, optimizer: Any) -> None:
    for loss in losses(model, optimizer):
        compared(model, loss()).backward()


def reset_after_comparing(model: nn.Module, optimizer: Any) -> None:
    x, y = batch()
    value = compared(model, F.cross_entropy(model(x), y))
    optimizer.zero_grad()
    value.backward()


RIGHT: dict[str, Loop] = {
    "accumulated": accumulated,
    "weighted by gradients": weighted_by_gradients,
    "reset after comparing": reset_after_comparing,
    "by grad": kept(returned),
    "by grad, clipped": kept(lambda model, loss: [g * 0.1 for g in returned(model, loss)]),
    "reset to zeros": kept(partial(taken, set_to_none=False)),
    "after batches that were given up": after_batches_that_were_given_up,
    "between probes": between_probes,
    "clipped each time": clipped_each_time,
    "clipped after others": clipped_after_others,
    "with a penalty": with_a_penalty,
}
LEFT_OUT: dict[str, Loop] = {
    "reset to None": kept(taken),
    "reset to None and evaluated": reset_to_none_and_evaluated,
    "reset by the optimizer": reset_by_the_optimizer,
    "added to the last": added_to_the_last,
    "in turn": in_turn,
}
METHODS = [KFAC, EKFAC, HyLo]


def updates(optimizer: Any) -> list[int]:
    return [optimizer.state[b.owner]["factor_updates"] for b in optimizer.blocks.values()]


def dense_after(method: type, loop: Loop) -> dict[str, Tensor]:
    """The curvature after two steps; the second begins with the gradients of the first."""
    model = net()
    optimizer = built(method, model, lr=0.0, **EVERY_STEP[method])
    for _ in range(2):
        loop(model, optimizer)
        with silent():
            optimizer.step()
        model.zero_grad()
    return {name: optimizer.dense_curvature(name) for name in optimizer.blocks}


@each(method=METHODS, loop=RIGHT)
def test_curvature_is_that_of_the_whole_batch(method: type, loop: Loop) -> None:
    found, expected = dense_after(method, loop), dense_after(method, accumulated)
    if method is KFAC:
        pairs = expected_factors(net(), *batch(), F.cross_entropy)
        expected = {name: torch.kron(B, A) for name, (A, B) in pairs.items()}
    assert found.keys() == expected.keys()
    for name, curvature in expected.items():
        assert distance(found[name], curvature) < 1e-9


@each(method=METHODS, loop=LEFT_OUT)
def test_left_out_with_one_warning_and_back_at_the_next_step(method: type, loop: Loop) -> None:
    model = net()
    optimizer = built(method, model, lr=0.0, **EVERY_STEP[method])
    loop(model, optimizer)
    with pytest.warns(UserWarning, match=r"set_to_none=False.*torch\.autograd\.grad") as caught:
        optimizer.step()
    assert len(caught) == 1
    assert updates(optimizer) == [0, 0]
    assert REPLACED in optimizer.describe()
    with silent():
        optimizer.zero_grad()
        loop(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        accumulated(model, optimizer)
        optimizer.step()
    assert updates(optimizer) == [1, 1]


def test_gradients_of_two_losses_through_one_forward_are_left_out_with_a_warning() -> None:
    model = net()
    optimizer = plain_kfac(model)
    value = F.cross_entropy(model(batch()[0]), batch()[1])
    collect(model, [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for _ in range(2)])
    with pytest.warns(UserWarning, match=r"torch\.autograd\.grad was called twice for one forward pass"):
        optimizer.step()


@pytest.mark.parametrize(("loop", "counted"), [(accumulated, 1), (kept(returned), 1), (in_turn, 0)])
def test_a_layer_that_is_recomputed_counts_like_the_others(loop: Loop, counted: int) -> None:
    """A ``Function`` returns its gradients to the pass that called it, whose own destination decides."""
    model = nn.Sequential(*net(), Recomputed(nn.Linear(10, 10).double()), nn.Linear(10, 10).double())
    optimizer = plain_kfac(model)
    loop(model, optimizer)
    with silent() if counted else pytest.warns(UserWarning, match="set_to_none=False"):
        optimizer.step()
    assert set(updates(optimizer)) == {counted}


def test_a_window_takes_what_is_in_grad() -> None:
    for loop in (RIGHT | LEFT_OUT).values():
        model = net()
        optimizer = MFAC(model, lr=0.0, window_size=4)
        loop(model, optimizer)
        with silent():
            optimizer.step()


def test_observed_statistics_follow_the_same_rules() -> None:
    found = {}
    for name in ("accumulated", "by grad", "reset to None", "in turn"):
        model = net()
        optimizer = plain_kfac(model, fisher="exact", lr=0.0)
        (RIGHT | LEFT_OUT)[name](model, optimizer)
        warns = pytest.warns(UserWarning, match="are not those that its last backward passes left")
        with warns if name in LEFT_OUT else nullcontext():
            optimizer.step()
        assert updates(optimizer) == [int(name in RIGHT)] * 2
        found[name] = all_factors(optimizer, model)
    assert_factors(found["by grad"], found["accumulated"])


def on_ranks(rank: int, world: int, kind: str) -> tuple[Tensor | None, int]:
    """Curvature of the last layer, and the number of warnings; a batch is given up, or rank 0 keeps gradients."""
    model = net().to(device_of(rank))
    average = kind == "kept"
    optimizer = plain_kfac(model, lr=0.0, comm=CommOpt(average_gradients=average))
    wrapped = model if average else DDP(model)
    x, y = (t.chunk(world)[rank].to(device_of(rank)) for t in batch())
    if kind == "given up":
        F.cross_entropy(wrapped(x[:3]), y[:3]).backward()
        model.zero_grad()
    parts = []
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        value = F.cross_entropy(wrapped(a), b) / 2
        if kind == "kept" and rank == 0:
            parts.append(taken(model, lambda value=value: value))
        else:
            value.backward()
    if parts:
        collect(model, parts)
    count = sum(REPLACED in text for text in messages_of(optimizer.step))
    return (optimizer.dense_curvature("2") if optimizer.comm.estimates(1) else None), count


@pytest.mark.parametrize("kind", ["given up", "kept"])
def test_batches_given_up_and_gradients_kept_on_ranks(pool: Pool, kind: str) -> None:
    """A batch that all ranks gave up has no effect, and a rank that keeps gradients elsewhere contributes nothing."""
    x, y = batch()
    counted = slice(32, None) if kind == "kept" else slice(None)
    A, B = expected_factors(net(), x[counted], y[counted], F.cross_entropy)["2"]
    answers = pool.run(on_ranks, kind, world=2)
    assert [count for _, count in answers] == ([1, 0] if kind == "kept" else [0, 0])
    for found, _ in answers:
        if found is not None:
            assert distance(found, torch.kron(B, A)) < 1e-9
