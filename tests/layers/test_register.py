"""`register_layer`: a user's own layer in every method, by an adapter of a few lines."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from secondorder import KFAC
from tests.support.kfac import assert_close, labels, noise, plain_kfac, train_step
from tests.support.layer_cases import CASES, Gain, GainAdapter, Own
from tests.support.models import seeded_build, vectors
from tests.support.oracles.kfac import expected_factors
from tests.support.oracles.layers import (
    check_block,
    follows_fallback,
    step_of,
    train,
)

N, S, D = 4, 3, 4
REGISTERED = CASES["registered"]


class UnscaledAdapter(GainAdapter):
    """Forgets the gain."""

    def __init__(self, module: Gain, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.gain = 1.0


def fresh() -> type[Gain]:
    """A type that no other test has registered."""

    class Mine(Gain):
        pass

    return Mine


def problem(kind: type[Gain]) -> tuple[Own, Tensor, Tensor]:
    return seeded_build(lambda: Own(kind)), noise(N, S, D), labels(N, 3)


def check_own(opt: KFAC) -> None:
    """The factors are those of the registered layer in the table of cases, which is this network."""
    check_block(opt, "own", REGISTERED.factors(REGISTERED.model())["own"])


def test_before_it_is_registered_the_reason_names_the_way():
    """And an optimizer that is there already keeps its blocks."""
    kind = fresh()
    model, x, y = problem(kind)
    opt = plain_kfac(model, lr=0.1)
    assert follows_fallback(opt, "own.kernel", "register_layer")
    assert follows_fallback(opt, "own.offset", "register_layer")
    secondorder.register_layer(kind, GainAdapter)
    train(opt, model, (x,), y, F.cross_entropy)
    assert set(opt.blocks) == {"head"}


def test_a_second_registration_replaces_the_first_and_subclasses_follow_the_nearest():
    twice, base = fresh(), fresh()

    class Derived(base):
        pass

    class Further(Derived):
        pass

    for kind, adapter in ((twice, UnscaledAdapter), (twice, GainAdapter), (base, UnscaledAdapter)):
        secondorder.register_layer(kind, adapter)
    secondorder.register_layer(Derived, GainAdapter)
    for kind in (twice, Further):
        model, x, y = problem(kind)
        opt = plain_kfac(model)
        train(opt, model, (x,), y, F.cross_entropy)
        check_own(opt)


def test_a_subclass_with_a_forward_of_its_own_takes_the_fallback_and_says_why():
    base = fresh()

    class Changed(base):
        def forward(self, x):
            return super().forward(x).square()

    secondorder.register_layer(base, GainAdapter)
    model, x, y = problem(Changed)
    opt = plain_kfac(model, lr=0.1)
    assert follows_fallback(opt, "own.kernel", "Changed", "overrides")
    F.cross_entropy(model(x), y).backward()
    ((gradient, moved),) = step_of(opt, [model.own.kernel])
    assert_close(moved, 0.1 * gradient)


class Rescaled(nn.Linear):
    """A linear layer whose forward is its own, so that Linear's rows would be wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(2 * x, self.weight, self.bias)


class RescaledAdapter(secondorder.Adapter):
    def __init__(self, module: Rescaled, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.d_out, self.d_in = module.weight.shape

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        yield 2 * x.reshape(-1, self.d_in)

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return g.reshape(-1, self.d_out)

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        return 2 * x.reshape(examples, -1, self.d_in)

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return g.reshape(examples, -1, self.d_out)


def test_a_subclass_of_a_torch_layer_with_a_forward_of_its_own_can_be_registered_itself():
    class Mine(Rescaled):
        pass

    def build() -> nn.Module:
        return nn.Sequential(Mine(4, 5), nn.Tanh(), nn.Linear(5, 3))

    class Doubled(nn.Module):
        """The same network, the doubling in front of an ordinary layer."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

        def forward(self, x):
            return self.inner(2 * x)

    x, y = vectors()
    before = plain_kfac(seeded_build(build))
    assert follows_fallback(before, "0.weight", "Mine", "overrides")
    plain = seeded_build(Doubled)
    expected = expected_factors(plain, x, y, F.cross_entropy)
    secondorder.register_layer(Mine, RescaledAdapter)
    model = seeded_build(build)
    model.load_state_dict(plain.inner.state_dict())
    opt = plain_kfac(model)
    train_step(opt, model, x, y, F.cross_entropy)
    check_block(opt, "0", expected["inner.0"])
    check_block(opt, "2", expected["inner.2"])


def test_a_refusal_of_the_adapter_is_the_reason_in_describe():
    class Picky(GainAdapter):
        @staticmethod
        def refusal(module: nn.Module) -> str:
            return "its gain is too large" if module.gain > 2 else ""

    kind = fresh()
    secondorder.register_layer(kind, Picky)
    model, *_ = problem(kind)
    assert follows_fallback(plain_kfac(model), "own.kernel", "its gain is too large")
    kind.gain = 1.0
    assert "own" in plain_kfac(problem(kind)[0]).blocks


def test_a_parameter_besides_weight_and_bias_is_said():
    kind = fresh()

    class Extra(kind):
        def __init__(self, *sizes) -> None:
            super().__init__(*sizes)
            self.scale = nn.Parameter(torch.ones(()))

    secondorder.register_layer(kind, GainAdapter)
    model, x, y = problem(Extra)
    opt = plain_kfac(model, lr=0.1)
    assert follows_fallback(opt, "own.scale", "besides")
    train(opt, model, (x,), y, F.cross_entropy)


def test_rows_that_cannot_be_told_apart_leave_the_layer_to_the_fallback():
    """What the adapter says when asked for examples becomes the reason; expand does not ask."""

    class Shared(Own):
        def __init__(self, kind) -> None:
            super().__init__(kind)
            self.register_buffer("table", torch.randn(S, D))

        def forward(self, x):
            return self.head(torch.tanh(x[..., :3] + self.own(self.table)).mean(1))

    kind = fresh()
    secondorder.register_layer(kind, GainAdapter)
    model, x, y = seeded_build(lambda: Shared(kind)), noise(N, S, D), labels(N, 3)
    opt = plain_kfac(model, lr=0.1, approx="reduce")
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match="its rows belong to no example"):
        ((gradient, moved),) = step_of(opt, [model.own.kernel])
    assert_close(moved, 0.1 * gradient)
    model = seeded_build(lambda: Shared(kind))
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    assert "own" in opt.blocks
    opt.dense_curvature("own")


def test_it_counts_for_skip_layers_and_checkpoints():
    kind = fresh()
    secondorder.register_layer(kind, GainAdapter)
    model, x, y = problem(kind)
    assert set(plain_kfac(model, skip_layers=(kind,)).blocks) == {"head"}
    opt = plain_kfac(model, lr=0.1, momentum=0.9)
    for _ in range(2):
        train(opt, model, (x,), y, F.cross_entropy)
    other = problem(kind)[0]
    other.load_state_dict(model.state_dict())
    resumed = plain_kfac(other, lr=0.1, momentum=0.9)
    resumed.load_state_dict(opt.state_dict())
    for _ in range(2):
        train(opt, model, (x,), y, F.cross_entropy)
        train(resumed, other, (x,), y, F.cross_entropy)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_arguments_of_a_wrong_kind_are_refused():
    for kind in (nn.Linear(2, 2), "Linear", int, None, F.linear):
        with pytest.raises(TypeError, match="module_type"):
            secondorder.register_layer(kind, GainAdapter)
    for adapter in (int, "GainAdapter", None, Gain, lambda module: None, GainAdapter(Gain(2, 3), True, True)):
        with pytest.raises(TypeError, match="adapter"):
            secondorder.register_layer(fresh(), adapter)
