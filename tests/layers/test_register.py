"""`register_layer`: a user's own layer in every method, by an adapter of a few lines."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from tests.support.kfac import assert_close, labels, noise, plain_kfac, train_step, twin
from tests.support.models import seeded_build, vectors
from tests.support.oracles.kfac import expected_factors, solve_exact
from tests.support.oracles.layers import (
    Tape,
    check_block,
    expected_pairs,
    follows_fallback,
    singles,
    step_of,
    train,
)

N, S, D = 5, 3, 4


class Gain(nn.Module):
    """``gain · (kernelᵀ x) + offset``, whose parameters have names of their own."""

    gain = 3.0

    def __init__(self, d_in: int, d_out: int, offset: bool = True) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(d_in, d_out) / 2)
        self.offset = nn.Parameter(torch.randn(d_out)) if offset else None

    def forward(self, x: Tensor) -> Tensor:
        z = self.gain * x @ self.kernel
        return z if self.offset is None else z + self.offset


def by_example(x: Tensor, examples: int) -> Tensor:
    if x.shape[0] % examples:
        raise ValueError("its rows belong to no example")
    return x.reshape(examples, -1, x.shape[-1])


class GainAdapter(secondorder.Adapter):
    """Rows are the scaled inputs; the kernel lies transposed."""

    weight_name, bias_name = "kernel", "offset"

    def __init__(self, module: Gain, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.d_in, self.d_out = module.kernel.shape
        self.gain = module.gain

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        for part in x.reshape(-1, self.d_in).split(4):  # in chunks, as large layers do
            yield self.gain * part

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return g.reshape(-1, self.d_out)

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        return self.gain * by_example(x, examples)

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return by_example(g, examples)

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None, workspace=None) -> Tensor:
        return super().to_matrix(None if weight is None else weight.mT.contiguous(), bias, workspace)

    def from_matrix(self, matrix: Tensor, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = super().from_matrix(matrix, None if like is None else like.mT)
        return None if weight is None else weight.mT.contiguous(), bias


class UnscaledAdapter(GainAdapter):
    """Forgets the gain."""

    def __init__(self, module: Gain, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.gain = 1.0


class Model(nn.Module):
    def __init__(self, kind: type[Gain], offset: bool = True) -> None:
        super().__init__()
        self.own, self.head = kind(D, 3, offset), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.own(x)).mean(1))

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        z = tape.product("own", self.own.gain * x, self.own.kernel.mT, self.own.offset)
        return tape.linear("head", self.head, torch.tanh(z).mean(1))


def fresh() -> type[Gain]:
    """A type that no other test has registered."""

    class Mine(Gain):
        pass

    return Mine


def problem(kind: type[Gain], **options) -> tuple[Model, Tensor, Tensor]:
    return seeded_build(lambda: Model(kind, **options)), noise(N, S, D), labels(N, 3)


def pairs_of(model: Model, x: Tensor, y: Tensor, approx: str = "expand") -> dict:
    return expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy, approx)


@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no offset"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_a_registered_layer_has_a_block(approx, offset):
    kind = fresh()
    secondorder.register_layer(kind, GainAdapter)
    model, x, y = problem(kind, offset=offset)
    A, B = pairs_of(model, x, y, approx)["own"]
    opt = plain_kfac(model, approx=approx, damping=0.02)
    assert "fallback" not in opt.describe()
    F.cross_entropy(model(x), y).backward()
    found = step_of(opt, [p for p in (model.own.kernel, model.own.offset) if p is not None])
    check_block(opt, "own", (A, B))
    gradient, moved = (torch.cat([p[i].mT if p[i].ndim == 2 else p[i][:, None] for p in found], 1) for i in (0, 1))
    assert_close(moved, solve_exact(B, A, gradient, 0.02), 1e-8)


@pytest.mark.parametrize("frozen", ["kernel", "offset"])
def test_a_frozen_part(frozen):
    kind = fresh()
    secondorder.register_layer(kind, GainAdapter)
    model, x, y = problem(kind)
    getattr(model.own, frozen).requires_grad_(False)
    A, B = pairs_of(model, x, y)["own"]
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    assert_close(opt.dense_curvature("own"), torch.kron(B, A))


def test_before_it_is_registered_the_reason_names_the_way():
    model, *_ = problem(fresh())
    opt = plain_kfac(model)
    assert follows_fallback(opt, "own.kernel", "register_layer")
    assert follows_fallback(opt, "own.offset", "register_layer")


def test_an_optimizer_that_is_there_already_keeps_its_blocks():
    kind = fresh()
    model, x, y = problem(kind)
    opt = plain_kfac(model, lr=0.1)
    secondorder.register_layer(kind, GainAdapter)
    train(opt, model, (x,), y, F.cross_entropy)
    assert set(opt.blocks) == {"head"}


def test_a_second_registration_replaces_the_first():
    kind = fresh()
    secondorder.register_layer(kind, UnscaledAdapter)
    secondorder.register_layer(kind, GainAdapter)
    model, x, y = problem(kind)
    expected = pairs_of(model, x, y)["own"]
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    check_block(opt, "own", expected)


def test_subclasses_follow_their_nearest_registered_base():
    base = fresh()

    class Derived(base):
        pass

    class Further(Derived):
        pass

    secondorder.register_layer(base, UnscaledAdapter)
    secondorder.register_layer(Derived, GainAdapter)
    model, x, y = problem(Further)
    expected = pairs_of(model, x, y)["own"]
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    check_block(opt, "own", expected)


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

    class Shared(Model):
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


@pytest.mark.parametrize(
    "kind", [nn.Linear(2, 2), "Linear", int, None, F.linear], ids=["module", "name", "type", "None", "function"]
)
def test_a_module_type_of_a_wrong_kind_is_refused(kind):
    with pytest.raises(TypeError, match="module_type"):
        secondorder.register_layer(kind, GainAdapter)


@pytest.mark.parametrize(
    "adapter",
    [object, int, "GainAdapter", None, Gain, lambda module: None],
    ids=["object", "int", "name", "None", "module", "function"],
)
def test_an_adapter_of_a_wrong_kind_is_refused(adapter):
    with pytest.raises(TypeError, match="adapter"):
        secondorder.register_layer(fresh(), adapter)


def test_an_adapter_object_instead_of_its_class_is_refused():
    with pytest.raises(TypeError, match="adapter"):
        secondorder.register_layer(fresh(), GainAdapter(Gain(2, 3), True, True))
