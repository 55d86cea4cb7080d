"""Gradients that a user keeps outside `.grad` between micro-batches: the statistics of all of them count, or none.

The oracle is the curvature of the whole batch, from the per-example gradients of autograd in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import EKFAC, KFAC, MFAC, CommOpt, HyLo
from secondorder.capture.backwards import REPLACED
from tests.support.grid import each
from tests.support.kfac import all_factors, assert_factors, plain_kfac
from tests.support.oracles.kfac import expected_factors
from tests.support.oracles.ranks import distance
from tests.support.pool import Pool, device_of

PARTS = 4
EVERY_STEP = {KFAC: ("factor_update_steps", "inv_update_steps"), HyLo: ("update_steps",)}
EVERY_STEP[EKFAC] = EVERY_STEP[KFAC]

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 10)).double()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(10, (64,), generator=generator)


def losses(model: nn.Module) -> list[Callable[[], Tensor]]:
    """The losses of the micro-batches, each divided by their number."""
    x, y = batch()
    return [
        lambda a=a, b=b: F.cross_entropy(model(a), b) / PARTS  # type: ignore[misc]
        for a, b in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True)
    ]


def collect(model: nn.Module, gradients: Callable[[int, Callable[[], Tensor]], list[Tensor]]) -> None:
    """Add up in buffers what a way to compute gradients gives, and put that into `.grad`."""
    buffers = [torch.zeros_like(p) for p in model.parameters()]
    for number, loss in enumerate(losses(model)):
        for buffer, g in zip(buffers, gradients(number, loss), strict=True):
            buffer += g
    for p, buffer in zip(model.parameters(), buffers, strict=True):
        p.grad = buffer


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for loss in losses(model):
        loss().backward()


def returned(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    collect(model, lambda _, loss: list(torch.autograd.grad(loss(), list(model.parameters()))))


def returned_and_clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def clipped(_: int, loss: Callable[[], Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(loss(), list(model.parameters()))
        return [g * 0.1 for g in found]

    collect(model, clipped)


def reset_to_none(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def taken(_: int, loss: Callable[[], Tensor]) -> list[Tensor]:
        loss().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    collect(model, taken)


def reset_by_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def taken(_: int, loss: Callable[[], Tensor]) -> list[Tensor]:
        optimizer.zero_grad()
        loss().backward()
        return [p.grad.clone() for p in model.parameters()]

    collect(model, taken)


def added_to_the_last(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    *first, last = losses(model)
    buffers = [torch.zeros_like(p) for p in model.parameters()]
    for loss in first:
        loss().backward()
        for buffer, p in zip(buffers, model.parameters(), strict=True):
            buffer += p.grad
            p.grad = None
    last().backward()
    for buffer, p in zip(buffers, model.parameters(), strict=True):
        p.grad += buffer


def in_turn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def taken(number: int, loss: Callable[[], Tensor]) -> list[Tensor]:
        if number % 2 == 0:
            return list(torch.autograd.grad(loss(), list(model.parameters())))
        loss().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    collect(model, taken)


def reset_to_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def taken(_: int, loss: Callable[[], Tensor]) -> list[Tensor]:
        loss().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=False)
        return found

    collect(model, taken)


def probe(model: nn.Module) -> Tensor:
    x, y = batch(7)
    return F.cross_entropy(model(x[:9]), y[:9])


def after_a_batch_that_was_given_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    probe(model).backward()
    model.zero_grad()
    accumulated(model, optimizer)


def after_one_that_was_given_up_and_clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    after_a_batch_that_was_given_up(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def after_the_optimizer_gave_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    probe(model).backward()
    optimizer.zero_grad()
    accumulated(model, optimizer)


def after_a_probe(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.grad(probe(model), list(model.parameters()))
    accumulated(model, optimizer)


def before_a_probe(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accumulated(model, optimizer)
    torch.autograd.grad(probe(model), list(model.parameters()))


def clipped_each_time(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for loss in losses(model):
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


RIGHT = [
    accumulated, returned, returned_and_clipped, reset_to_zeros, after_a_batch_that_was_given_up,
    after_one_that_was_given_up_and_clipped, after_the_optimizer_gave_up, after_a_probe, before_a_probe,
    clipped_each_time,
]  # fmt: skip
LEFT_OUT = [reset_to_none, reset_by_the_optimizer, added_to_the_last, in_turn]


@pytest.mark.parametrize("loop", RIGHT)
def test_factors_are_those_of_the_whole_batch(loop: Loop) -> None:
    expected = expected_factors(net(), *batch(), F.cross_entropy)
    model = net()
    optimizer = plain_kfac(model)
    for _ in range(2):  # the second step begins with the gradients of the first
        loop(model, optimizer)
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        assert_factors(all_factors(optimizer, model), expected)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(values[n])
        model.zero_grad()


@each(method=[KFAC, EKFAC, HyLo], loop=LEFT_OUT)
def test_left_out_with_one_warning_and_back_at_the_next_step(method: type, loop: Loop) -> None:
    model = net()
    optimizer = method(model, lr=0.0, **dict.fromkeys(EVERY_STEP[method], 1))
    loop(model, optimizer)
    with pytest.warns(UserWarning, match=r"set_to_none=False.*torch\.autograd\.grad") as caught:
        optimizer.step()
    assert len(caught) == 1
    assert [optimizer.state[b.owner]["factor_updates"] for b in optimizer.blocks.values()] == [0, 0]
    assert REPLACED in optimizer.describe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.zero_grad()
        loop(model, optimizer)
        optimizer.step()  # told once
        optimizer.zero_grad()
        accumulated(model, optimizer)
        optimizer.step()
    assert [optimizer.state[b.owner]["factor_updates"] for b in optimizer.blocks.values()] == [1, 1]


@pytest.mark.parametrize("method", [EKFAC, HyLo])
def test_returned_gradients_make_the_same_steps(method: type) -> None:
    found = []
    for loop in (accumulated, returned):
        model = net()
        optimizer = method(model, lr=0.1, **dict.fromkeys(EVERY_STEP[method], 1))
        for _ in range(3):
            optimizer.zero_grad()
            loop(model, optimizer)
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_a_window_takes_what_is_in_grad() -> None:
    for loop in (*RIGHT, *LEFT_OUT):
        model = net()
        optimizer = MFAC(model, lr=0.0, window_size=4)
        loop(model, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


@pytest.mark.parametrize("kind", ["returned", "reset", "mixed"])
def test_observed_statistics_follow_the_same_rules(kind: str) -> None:
    x, y = batch()
    found = []
    for elsewhere in (False, True):
        model = net()
        optimizer = plain_kfac(model, fisher="exact", lr=0.0)
        buffers = [torch.zeros_like(p) for p in model.parameters()]
        for number, (a, b) in enumerate(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True)):
            outputs = model(a)
            optimizer.observe(outputs, "categorical")
            loss = F.cross_entropy(outputs, b) / PARTS
            if elsewhere and (kind == "returned" or (kind == "mixed" and number % 2)):
                gradients = list(torch.autograd.grad(loss, list(model.parameters())))
            else:
                loss.backward()
                gradients = [p.grad for p in model.parameters()]
                if elsewhere and kind == "reset":
                    model.zero_grad()
            for buffer, g in zip(buffers, gradients, strict=True):
                buffer += g
        if elsewhere:
            for p, buffer in zip(model.parameters(), buffers, strict=True):
                p.grad = buffer
        if elsewhere and kind != "returned":
            with pytest.warns(UserWarning, match="are not those that its last backward passes left"):
                optimizer.step()
            assert [optimizer.state[b.owner]["factor_updates"] for b in optimizer.blocks.values()] == [0, 0]
        else:
            optimizer.step()
            found.append(all_factors(optimizer, model))
    if kind == "returned":
        assert_factors(found[1], found[0])


@pytest.mark.parametrize("gives_up", [False, True])
def test_unscaling_by_a_grad_scaler_does_not_count_as_a_replacement(gives_up: bool) -> None:
    expected = expected_factors(net(), *batch(), F.cross_entropy)
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = plain_kfac(model, grad_scaler=scaler)
    if gives_up:
        scaler.scale(probe(model)).backward()
        model.zero_grad()
    for loss in losses(model):
        scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    scaler.step(optimizer)
    assert_factors(all_factors(optimizer, model), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks
# ---------------------------------------------------------------------------------------------------------------------


def on_ranks(rank: int, world: int, kind: str, cut: bool) -> tuple[Tensor | None, int]:
    """Curvature of the last layer after a step in which a batch was given up, or rank 0 kept gradients; warnings."""
    model = net().to(device_of(rank))
    if cut:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    average = kind == "kept"
    optimizer = plain_kfac(model, lr=0.0, comm=CommOpt(average_gradients=average))
    wrapped = model if cut or average else DDP(model)
    x, y = (t.chunk(world)[rank].to(device_of(rank)) for t in batch())
    if kind == "given up":
        F.cross_entropy(wrapped(x[:3]), y[:3]).backward()
        model.zero_grad()
    buffers = [torch.zeros_like(p) for p in model.parameters()]
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(wrapped(a), b) / 2).backward()
        if kind == "kept" and rank == 0:
            for buffer, p in zip(buffers, model.parameters(), strict=True):
                buffer += p.grad
                p.grad = None
    if kind == "kept" and rank == 0:
        for buffer, p in zip(buffers, model.parameters(), strict=True):
            p.grad = buffer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    said = sum(REPLACED in str(w.message) for w in caught)
    return (optimizer.dense_curvature("2") if optimizer.comm.estimates(1) else None), said


@pytest.mark.parametrize("cut", [False, True], ids=["ddp", "fully_shard"])
def test_a_batch_that_all_ranks_gave_up_leaves_no_trace(pool: Pool, cut: bool) -> None:
    """Averaging, or cutting, after the backward pass does not count as a replacement."""
    expected = expected_factors(net(), *batch(), F.cross_entropy)["2"]
    for found, said in pool.run(on_ranks, "given up", cut, world=2):
        assert not said
        if found is not None:
            assert distance(found, torch.kron(expected[1], expected[0])) < 1e-9


def test_a_rank_that_keeps_gradients_elsewhere_contributes_nothing(pool: Pool) -> None:
    x, y = batch()
    expected = expected_factors(net(), x.chunk(2)[1], y.chunk(2)[1], F.cross_entropy)["2"]
    answers = pool.run(on_ranks, "kept", False, world=2)
    assert [said for _, said in answers] == [1, 0]
    for found, _ in answers:
        if found is not None:
            assert distance(found, torch.kron(expected[1], expected[0])) < 1e-9
