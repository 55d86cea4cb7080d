"""Complex parameters and sparse gradients use the fallback, which treats them as torch's optimizers do.

A window treats complex numbers as pairs of real ones, and sparse gradients as dense.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.contract.test_fallback import CASES
from tests.support.building import built
from tests.support.contract import RULES
from tests.support.methods import Method, Variant
from tests.support.models import fit
from tests.support.tasks import Shadow, assert_all_close, assert_changed, assert_identical, snapshot, values

LAYERWISE = pytest.mark.option("skip_layers", "fallback")
WINDOWED = pytest.mark.option("window_size")


FALLBACKS = ("no momentum", "default is sgd", "nesterov", "maximize", "adamw decay")


SHAPES = (3, 2), (4,)


def draw(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.complex128) for shape in shapes]


@LAYERWISE
@pytest.mark.cover(case=FALLBACKS, foreach=[False, True, None])
def test_fallback_of_complex_parameters_agrees_with_torch(method: Method, case: str, foreach: bool | None) -> None:
    keywords, reference = CASES[case]
    parameters = [nn.Parameter(value) for value in draw(0, *SHAPES)]
    optimizer = method.build(nn.Linear(2, 2), parameters, foreach=foreach, **keywords)
    shadow = Shadow(parameters, reference)
    for step in range(5):
        for parameter, gradient in zip(parameters, draw(1 + step, *SHAPES), strict=True):
            parameter.grad = gradient
        shadow.step()
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in parameters], shadow.values(), rtol=1e-12, atol=1e-14)


class Phase(nn.Module):
    """A complex linear map between two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.turn = nn.Linear(4, 4, dtype=torch.complex64)
        self.last = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.turn(self.first(inputs).to(self.turn.weight.dtype)).abs())


def test_a_complex_layer_trains_and_its_checkpoint_has_only_real_curvature(method: Method, variant: Variant) -> None:
    model = Phase()
    optimizer, before = method.build(model, **variant.keywords), values(model)
    fit(model, optimizer, 5, 3, steps=4)
    assert_changed(model, before)
    for name, p in model.named_parameters():
        state, is_plain = optimizer.state[p], method.layerwise and name.startswith("turn")
        assert not is_plain or state.keys() == {"step", "momentum_buffer"}
        assert not any(state[key].dtype.is_complex for key in state.keys() & variant.dtypes(torch.float32).keys())
        reals = torch.view_as_real(p).numel() if p.is_complex() else p.numel()
        assert "window" not in state or state["window"].numel() == method.keywords["window_size"] * reals
    second = method.build(Phase(), **variant.keywords)
    second.load_state_dict(optimizer.state_dict())
    assert_identical(snapshot(second), snapshot(optimizer))


def trained_as_pairs(method: Method, pairs: bool, **keywords: Any) -> list[torch.Tensor]:
    """Train complex parameters or the equivalent pairs of real ones, and return the values as pairs."""
    parameters = [nn.Parameter(torch.view_as_real(value) if pairs else value) for value in draw(0, *SHAPES, ())]
    optimizer = built(method.cls, parameters, **{**method.keywords, **keywords})
    for step in range(6):
        for parameter, gradient in zip(parameters, draw(1 + step, *SHAPES, ()), strict=True):
            parameter.grad = torch.view_as_real(gradient) if pairs else gradient
        optimizer.step()
    return [p.detach() if pairs else torch.view_as_real(p.detach()) for p in parameters]


WITH_PAIRS = ("plain", "nesterov", "decoupled-decay", "inner-adamw", "graft-sgd", "graft-adam", "clipped", "ema")


@WINDOWED
@pytest.mark.cover(foreach=[False, True])
@pytest.mark.rules({name: RULES[name] for name in WITH_PAIRS})
def test_window_treats_complex_numbers_as_pairs(method: Method, rule: str, foreach: bool) -> None:
    keywords = {**RULES[rule], "foreach": foreach}
    turned, paired = (trained_as_pairs(method, pairs, **keywords) for pairs in (False, True))
    torch.testing.assert_close(turned, paired, rtol=1e-12, atol=1e-14)


class Lookup(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 3, sparse=sparse)
        self.head = nn.Linear(3, 2)
        self.double()

    def fill(self, step: int) -> torch.Tensor:
        """Compute the gradients of a step, and return that of the table, in which some rows occur several times."""
        generator = torch.Generator().manual_seed(step)
        self.zero_grad()
        indices = torch.randint(9, (6,), generator=generator)
        F.cross_entropy(self.head(self.embed(indices)), torch.randint(2, (6,), generator=generator)).backward()
        gradient = self.embed.weight.grad
        assert gradient.is_sparse == self.embed.sparse
        return gradient


def check_sparse(method: Method, **keywords: Any) -> None:
    """Sparse gradients have the same effect as dense ones, and are neither replaced nor written to."""
    results = []
    for sparse in (True, False):
        model = Lookup(sparse)
        skip = {"skip_layers": (nn.Embedding,)} if method.layerwise and not sparse else {}
        optimizer = method.build(model, **keywords, **skip)
        for step in range(6):
            gradient = model.fill(step)
            before = gradient.clone()
            optimizer.step()
            assert model.embed.weight.grad is gradient
            assert_identical(gradient.to_dense(), before.to_dense())
        results.append(values(model))
        assert_changed(model, values(Lookup()))
    assert_all_close(*results)


@LAYERWISE
@pytest.mark.cover(
    rule={"plain": {"momentum": 0.0}, "momentum": {}, "adamw": {"fallback": "adamw", "fallback_lr": 0.01}},
    foreach=[False, None],
)
def test_fallback_treats_sparse_gradients_as_dense(method: Method, rule: dict[str, Any], foreach: bool | None) -> None:
    """`torch.optim.AdamW` refuses them. Here, rows without an index still decay and have moments."""
    check_sparse(method, foreach=foreach, **rule)


@WINDOWED
@pytest.mark.cover(foreach=[False, True, None], maximize=[False, True])
def test_window_treats_sparse_gradients_as_dense(
    method: Method, variant: Variant, foreach: bool | None, maximize: bool
) -> None:
    check_sparse(method, foreach=foreach, maximize=maximize, weight_decay=0.1, **variant.keywords)


def test_non_finite_sparse_gradient_drops_the_step(method: Method) -> None:
    for bad in (float("nan"), float("inf")):
        model = Lookup()
        optimizer, before = method.build(model, momentum=0.0), values(model)
        model.embed.weight.grad = model.fill(0) * bad
        optimizer.step()
        assert_identical(values(model), before)
