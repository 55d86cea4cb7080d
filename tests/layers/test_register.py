"""`register_layer`: a user's own layer with an adapter of a few lines; and Hugging Face's `Conv1D`."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secondorder
from secondorder.capture.layers.others import hugging_face_conv1d
from tests.support.kfac import assert_close, labels, noise, plain_kfac, train_step, twin
from tests.support.layer_cases import CASES, Conv1D, Gain, GainAdapter, GPT2Attention, LayerCase, Own
from tests.support.models import Net, seeded_build
from tests.support.oracles.kfac import solve_exact
from tests.support.oracles.layers import block_state, check_block, follows_fallback, step_of

N, S, D = 4, 3, 4
REGISTERED = CASES["registered"]


class UnscaledAdapter(GainAdapter):
    """Omits the gain."""

    def __init__(self, module: Gain, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.gain = 1.0


def fresh() -> type[Gain]:
    """A type that no other test has registered."""
    return type("Mine", (Gain,), {})


def problem(kind: type[Gain]) -> tuple[Own, Tensor, Tensor]:
    return seeded_build(lambda: Own(kind)), noise(N, S, D), labels(N, 3)


def test_the_reason_for_an_unregistered_layer_names_register_layer():
    """An optimizer that exists already keeps its blocks; a registered layer may be skipped by its type."""
    kind = fresh()
    model, x, y = problem(kind)
    opt = plain_kfac(model, lr=0.1)
    assert all(follows_fallback(opt, f"own.{name}", "register_layer") for name in ("kernel", "offset"))
    secondorder.register_layer(kind, GainAdapter)
    train_step(opt, model, (x,), y, F.cross_entropy)
    assert set(opt.blocks) == set(plain_kfac(twin(model), skip_layers=(kind,)).blocks) == {"head"}


def test_a_second_registration_replaces_the_first_and_subclasses_follow_their_nearest_base():
    """The factors are those of the registered layer in the table of cases, which is this network."""
    twice, base = fresh(), fresh()
    derived = type("Derived", (base,), {})
    further = type("Further", (derived,), {})
    for kind, adapter in ((twice, UnscaledAdapter), (twice, GainAdapter), (base, UnscaledAdapter)):
        secondorder.register_layer(kind, adapter)
    secondorder.register_layer(derived, GainAdapter)
    for kind in (twice, further):
        model, x, y = problem(kind)
        opt = plain_kfac(model)
        train_step(opt, model, (x,), y, F.cross_entropy)
        check_block(opt, "own", REGISTERED.factors(REGISTERED.model())["own"])


def test_what_an_adapter_does_not_cover_follows_the_fallback_with_a_reason():
    """A forward or a parameter that a subclass adds, and what the adapter itself refuses."""
    base, picky = fresh(), fresh()

    class Changed(base):
        def forward(self, x):
            return super().forward(x).square()

    class Extra(base):
        def __init__(self, *sizes) -> None:
            super().__init__(*sizes)
            self.scale = nn.Parameter(torch.ones(()))

    class Picky(GainAdapter):
        @staticmethod
        def refusal(module: nn.Module) -> str:
            return "its gain is too large" if module.gain > 2 else ""

    secondorder.register_layer(base, GainAdapter)
    secondorder.register_layer(picky, Picky)
    for kind, name, reasons in (
        (Changed, "own.kernel", ("Changed", "overrides")),
        (Extra, "own.scale", ("besides",)),
        (picky, "own.kernel", ("its gain is too large",)),
    ):
        model, x, y = problem(kind)
        opt = plain_kfac(model, lr=0.1)
        assert follows_fallback(opt, name, *reasons)
        F.cross_entropy(model(x), y).backward()
        gradient = torch.zeros(()) if kind is Extra else model.own.kernel.grad
        before = model.get_parameter(name).detach().clone()
        opt.step()
        assert_close(before - model.get_parameter(name).detach(), 0.1 * gradient)
    picky.gain = 1.0
    assert "own" in plain_kfac(problem(picky)[0]).blocks


def test_a_layer_whose_rows_belong_to_no_example_follows_the_fallback():
    """The error of the adapter becomes the reason; expand does not need examples."""
    kind, x, y = fresh(), noise(N, S, D), labels(N, 3)
    secondorder.register_layer(kind, GainAdapter)

    def forward(net, x):
        return net.head(torch.tanh(x[..., :3] + net.own(net.table)).mean(1))

    def shared() -> Net:
        return Net(forward, own=kind(D, 3), head=nn.Linear(3, 3), table=nn.Buffer(torch.randn(S, D)))

    model = seeded_build(shared)
    opt = plain_kfac(model, lr=0.1, approx="reduce")
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match="its rows belong to no example"):
        ((gradient, moved),) = step_of(opt, [model.own.kernel])
    assert_close(moved, 0.1 * gradient)
    model = seeded_build(shared)
    opt = plain_kfac(model)
    train_step(opt, model, (x,), y, F.cross_entropy)
    assert block_state(opt, "own")["factor_updates"] == 1


def test_invalid_arguments_are_refused():
    for kind in (nn.Linear(2, 2), "Linear", int, None, F.linear):
        with pytest.raises(TypeError, match="module_type"):
            secondorder.register_layer(kind, GainAdapter)
    for adapter in (int, "GainAdapter", None, Gain, lambda module: None, GainAdapter(Gain(2, 3), True, True)):
        with pytest.raises(TypeError, match="adapter"):
            secondorder.register_layer(fresh(), adapter)


# ------------------------ Conv1D, a linear layer with a transposed weight; a stand-in takes the place of the package

CASE = LayerCase(GPT2Attention, lambda: (noise(4, 3, 4),))
MODULE = "transformers.pytorch_utils"


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("part", ["", "weight", "bias"], ids=["whole", "weight frozen", "bias frozen"])
def test_factors_and_direction_of_conv1d_are_those_of_the_product(part, approx, monkeypatch):
    package, utils = types.ModuleType("transformers"), types.ModuleType(MODULE)
    package.pytorch_utils, utils.Conv1D = utils, Conv1D
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, MODULE, utils)
    monkeypatch.setattr(Conv1D, "__module__", MODULE)
    model, (inputs, y) = CASE.model(), CASE.data()
    for name, p in model.c_attn.named_parameters():
        p.requires_grad_(name != part)
    expected = CASE.factors(twin(model), approx)
    opt = plain_kfac(model, approx=approx)
    F.cross_entropy(model(*inputs), y).backward()
    before = {name: CASE.matrix(model, name) for name in expected}
    gradients = {name: CASE.matrix(model, name, lambda p: p.grad.clone()) for name in expected}
    opt.step()
    CASE.check(opt, expected)
    for name, (A, B) in expected.items():
        moved = before[name] - CASE.matrix(model, name)
        assert_close(moved, solve_exact(B, A, gradients[name], 1e-2), 1e-8, name)


def test_conv1d_is_found_once_it_is_imported_and_not_by_its_name(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    assert hugging_face_conv1d() is None
    library = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, library)
    assert hugging_face_conv1d() is None
    model = seeded_build(lambda: nn.Sequential(Conv1D(3, 4)))  # of the same name
    assert follows_fallback(plain_kfac(model), "0.weight", "Conv1D")
    library.Conv1D = Conv1D
    assert hugging_face_conv1d() is Conv1D


class ChannelsFirst(nn.Linear):
    """A linear layer with a forward of its own, which returns its outputs ``[N, d, S]`` as a view."""

    def __init__(self) -> None:
        super().__init__(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).transpose(1, 2)


class SecondOutput(torch.autograd.Function):
    """Returns a sum, and the outputs ``[N, d, S]`` of a linear layer."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.square().sum(), (x @ weight.T).mT.contiguous()

    @staticmethod
    def backward(ctx, _, g):
        x, weight = ctx.saved_tensors
        return g.mT @ weight, g.mT.flatten(0, 1).T @ x.flatten(0, 1)


class Fused(ChannelsFirst):
    """A layer that computes its outputs together with others."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = SecondOutput.apply(x, self.weight)[1]
        return outputs.view(outputs.shape)


class ChannelsFirstAdapter(secondorder.Adapter):
    def __init__(self, module: nn.Module, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.d_out, self.d_in = module.weight.shape

    def is_unbatched(self, x):
        return False

    def input_rows(self, x):
        yield x.flatten(0, -2)

    def output_rows(self, g, x, examples):
        return g.transpose(1, 2).flatten(0, 1)

    def example_inputs(self, x, examples):
        return x

    def example_outputs(self, g, x, examples):
        return g.transpose(1, 2)


@pytest.mark.parametrize("kind", [ChannelsFirst, Fused])
def test_a_subclass_of_linear_may_be_registered_whose_outputs_are_views_in_another_order(kind):
    assert follows_fallback(plain_kfac(seeded_build(kind)), "weight", kind.__name__, "overrides")
    secondorder.register_layer(kind, ChannelsFirstAdapter)
    model = seeded_build(kind)
    opt, x, c = plain_kfac(model), noise(5, 6, 4), noise(5, 3, 6, seed=1)
    (model(x) * c).sum((1, 2)).mean().backward()
    opt.step()
    B = torch.einsum("nos,nps->op", c, c) / 5
    A = torch.einsum("nsi,nsj->ij", x, x) / 30
    assert_close(opt.dense_curvature(""), torch.kron(B, A))
