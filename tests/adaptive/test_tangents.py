"""Forward-mode products of recorded forwards, against explicit Jacobians and Hessians with the same dropout masks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from secondorder.adaptation.replay import Evaluated, Moment, exact_products, kept_gradients, output_change, recorded
from secondorder.capture.fisher.likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from tests.support.quadratic import flat, output_hessian

CPU = {torch.device("cpu")}


class Attention(nn.Module):
    """Embedding, attention modules and kernels, layer norm, a keyword, nested outputs, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor, *, scale: float) -> dict[str, Any]:
        x = self.table(tokens)
        y, _ = self.attention(x, x, x, need_weights=False)
        heads = self.norm(x + scale * y).unflatten(-1, (2, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return {"hidden": [x, y], "logits": F.linear(y, self.table.weight)}


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.flip(0, 1)


class Attributes(nn.Sequential):
    """Returns an object of a class that is no container."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> SimpleNamespace:
        hidden = self[1](self[0](x))
        return SimpleNamespace(hidden=hidden, logits=self[2](hidden), name="two")


@dataclass
class Case:
    """A model with one input; ``pick`` selects the outputs from what it returns."""

    model: nn.Module
    x: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    pick: Callable[[Any], Tensor] = lambda out: out

    def run(self) -> Tensor:
        return self.pick(self.model(self.x, **self.options))


def case(name: str) -> Case:
    if name == "mlp":
        return Case(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 4)), torch.randn(7, 3))
    if name == "cnn":
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.4),
            nn.Conv2d(4, 4, 3, groups=2), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3),
        )  # fmt: skip
        return Case(model, torch.randn(5, 2, 11, 11))
    if name == "view":  # as in language models: all positions except the first, classes before positions
        model = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 4))
        return Case(model, torch.randn(3, 5, 3), pick=lambda out: out[:, 1:, :3].transpose(1, 2))
    if name == "attributes":
        return Case(Attributes(), torch.randn(4, 3), pick=lambda out: out.logits)
    if name == "parametrized":
        layer = nn.Linear(3, 4)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return Case(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 3))
    assert name == "attention"
    return Case(Attention(), torch.randint(0, 6, (3, 5)), {"scale": 0.7}, lambda out: out["logits"])


NAMES = ["mlp", "cnn", "view", "attributes", "parametrized", "attention"]


@pytest.fixture(params=NAMES)
def it(request: pytest.FixtureRequest) -> Case:
    found = case(request.param)
    found.model.double()
    found.x = found.x.double() if found.x.is_floating_point() else found.x
    return found


def evaluate(it: Case) -> tuple[Evaluated, Tensor]:
    """A recorded forward, and its Jacobian ``[outputs, P]`` from one backward per output."""
    before = Moment(it.model, CPU)
    with recorded(it.model, CPU) as forwards:
        outputs = it.run()
    found = Evaluated(*forwards, outputs, None)
    parameters = list(it.model.parameters())
    with before.replayed():
        rows = [torch.autograd.grad(e, parameters, retain_graph=True, allow_unused=True) for e in it.run().reshape(-1)]
    full = [[torch.zeros_like(p) if g is None else g for p, g in zip(parameters, r, strict=True)] for r in rows]
    return found, torch.stack([flat(row) for row in full])


def random_direction(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    return {p: torch.randn_like(p) for p in model.parameters()}


def test_change_of_the_outputs_is_the_jacobian_times_the_direction(it: Case) -> None:
    """The direction may have some parameters only and be at those before a step; there are no side effects."""
    it.run().sum().backward()
    found, J = evaluate(it)
    parameters = list(it.model.parameters())
    direction, rng = {p: torch.randn_like(p) for p in parameters}, torch.get_rng_state()
    grads = {p: (p.grad, p.grad.clone()) for p in parameters if p.grad is not None}
    state = {name: (id(t), t.clone()) for name, t in it.model.state_dict(keep_vars=True).items()}

    def assert_change(direction: dict[nn.Parameter, Tensor], before: dict[nn.Parameter, Tensor]) -> None:
        change = output_change(it.model, found, direction, before)
        v = flat(direction.get(p, torch.zeros_like(p)) for p in parameters)
        torch.testing.assert_close(change.reshape(-1), J @ v, rtol=1e-9, atol=1e-10)
        assert change.shape == found.outputs.shape

    assert_change(direction, {})
    assert_change({parameters[0]: direction[parameters[0]], nn.Parameter(torch.ones(2)): torch.ones(2)}, {})
    assert torch.equal(torch.get_rng_state(), rng)
    for p, (grad, values) in grads.items():
        assert p.grad is grad
        assert torch.equal(grad, values)
    for name, t in it.model.state_dict(keep_vars=True).items():
        assert id(t) == state[name][0]
        assert torch.equal(t, state[name][1])
    before = {p: p.detach().clone() for p in parameters}
    with torch.no_grad():
        for p in parameters:
            p.add_(torch.randn_like(p))
    assert_change(direction, before)


LOSSES: list[tuple[Likelihood, Callable[..., Tensor], Callable[[Tensor], Tensor]]] = [
    (Categorical(), F.cross_entropy, lambda f: torch.randint(0, f.shape[-1], f.shape[:-1])),
    (Gaussian(mean=True), F.mse_loss, torch.randn_like),
    (Gaussian(variance=1.0), lambda f, y: 0.5 * (f - y).square().sum() / len(f), torch.randn_like),
    (Bernoulli(mean=True), F.binary_cross_entropy_with_logits, torch.rand_like),
]


@pytest.mark.parametrize(("likelihood", "loss", "targets"), LOSSES, ids=["ce", "mse", "squares", "bce"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_products_with_the_gauss_newton_matrix(
    name: str, likelihood: Likelihood, loss: Callable[..., Tensor], targets: Callable[[Tensor], Tensor]
) -> None:
    it = case(name)
    it.model, it.x = it.model.double(), it.x.double()
    found, J = evaluate(it)
    C = J.mT @ output_hessian(loss, found.outputs, targets(found.outputs)) @ J
    directions = [random_direction(it.model) for _ in range(2)]
    D = torch.stack([flat(d.values()) for d in directions])
    products = exact_products(it.model, [found], likelihood, directions, {}, mean=True)
    torch.testing.assert_close(products, D @ C @ D.mT, rtol=1e-9, atol=1e-12)
    total = exact_products(it.model, [found], likelihood, directions, {}, mean=False)
    torch.testing.assert_close(total, products * len(it.x), rtol=1e-9, atol=1e-12)


def test_micro_batches_make_one_batch_and_ignored_targets_have_no_curvature() -> None:
    it = case("mlp")
    it.model.double()[2].p = 0.0  # type: ignore[union-attr]
    x, y = torch.randn(7, 3).double(), torch.randint(0, 4, (7,))
    directions = [random_direction(it.model), random_direction(it.model)]

    def products(*slices: slice, targets: Tensor | None = None) -> Tensor:
        with recorded(it.model, CPU) as forwards:
            outputs = [it.model(x[s]) for s in slices]
        matched = [Evaluated(f, o, targets) for f, o in zip(forwards, outputs, strict=True)]
        return exact_products(it.model, matched, Categorical(), directions, {}, mean=True)

    torch.testing.assert_close(products(slice(0, 3), slice(3, 7)), products(slice(0, 7)))
    ignored = y.clone()
    ignored[4:] = -100
    torch.testing.assert_close(products(slice(0, 7), targets=ignored), products(slice(0, 4), targets=y[:4]))


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_an_operator_without_forward_mode_is_refused_with_the_remedy() -> None:
    it = Case(nn.Linear(3, 2), torch.randn(4, 3))
    it.model.register_forward_hook(lambda module, args, output: Opaque.apply(output))
    found, _ = evaluate(it)
    with pytest.raises(RuntimeError, match=r"cannot.*jvp.*return the loss alone"):
        output_change(it.model, found, random_direction(it.model), {})
    assert it.run().requires_grad  # the model still works


def test_outputs_that_the_model_did_not_return_are_refused() -> None:
    it = case("mlp")
    with recorded(it.model, CPU) as forwards:
        outputs = it.run()
    with pytest.raises(RuntimeError, match=r"not among what the model returned: return the model's own tensor"):
        Evaluated(*forwards, outputs * 2, None)
    with pytest.raises(RuntimeError, match="not among"):
        Evaluated(*forwards, outputs.double(), None)


def test_forwards_without_gradients_are_not_recorded() -> None:
    it = case("mlp")
    with recorded(it.model, CPU) as forwards:
        with torch.no_grad():
            it.run()
        it.run()
    assert len(forwards) == 1
    it.run()
    assert len(forwards) == 1
    assert not it.model._forward_hooks
    assert not it.model._forward_pre_hooks


def test_products_use_the_autocast_of_the_forward() -> None:
    it = case("mlp")
    with recorded(it.model, CPU) as forwards, torch.autocast("cpu", torch.bfloat16):
        outputs = it.run()
    change = output_change(it.model, Evaluated(*forwards, outputs, None), random_direction(it.model), {})
    assert change.dtype == outputs.dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)


def test_recomputed_activations_are_one_forward() -> None:
    it = case("mlp")
    it.model = Checkpointed(it.model)
    with recorded(it.model, CPU) as forwards:
        outputs = it.run()
        outputs.sum().backward()
    assert len(forwards) == 1
    output_change(it.model, Evaluated(*forwards, outputs, None), random_direction(it.model), {})


def test_parameters_whose_tangents_a_reentrant_checkpoint_drops_are_refused() -> None:
    """Torch itself refuses only the tangents of the checkpoint's inputs, of which these have none."""
    it = case("mlp")
    it.model = Checkpointed(it.model, reentrant=True)
    it.x.requires_grad_()
    with recorded(it.model, CPU) as forwards:
        outputs = it.run()
    one, moves = Evaluated(*forwards, outputs, None), random_direction(it.model)
    with pytest.raises(RuntimeError, match=r"parameters of Linear are lost.*use_reentrant=True.*or drop likelihood="):
        output_change(it.model, one, moves, {})
    assert not output_change(it.model, one, {}, {}).any()  # frozen layers are fine, and no hook is left


def test_a_moment_restores_generators_and_buffers() -> None:
    model = nn.BatchNorm1d(3)
    x = torch.randn(5, 3)
    before = Moment(model, CPU)
    model(x)
    noise = torch.randn(4)
    after = {name: b.clone() for name, b in model.named_buffers()}
    rng = torch.get_rng_state()
    buffers = dict(model.named_buffers())
    with before.replayed():
        assert torch.equal(torch.randn(4), noise)
        assert not torch.equal(model.running_mean, after["running_mean"])  # type: ignore[arg-type]
        model.running_mean = torch.ones(3)  # replaced, not changed
    assert torch.equal(torch.get_rng_state(), rng)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, after[name])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_kept(set_to_none: bool) -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3))[0, 0].backward()
    unused = nn.Parameter(torch.ones(2))
    before = {p: (p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None}
    with kept_gradients([*model.parameters(), unused, model.weight]):
        model.zero_grad(set_to_none=set_to_none)
        (model(torch.randn(4, 3)).sum() + unused.sum()).backward()
    assert unused.grad is None
    for p, (grad, values) in before.items():
        assert p.grad is grad
        assert torch.equal(grad, values)
