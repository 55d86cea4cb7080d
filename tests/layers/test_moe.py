"""Mixtures of experts, adapters of frozen weights, and parametrized weights: covered, or with a reason why not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from secondorder import KFAC
from secondorder.nn import expose
from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise, plain_kfac, train_step, twin
from tests.support.layer_cases import Experts
from tests.support.models import Net, seeded_build
from tests.support.oracles import layers as oracle
from tests.support.oracles.layers import block_state, check_block, expected_pairs, row_of, singles, step_of

N, S, D, E = 4, 3, 4, 3


def routes(seed: int, experts: int = E) -> Tensor:
    return torch.randint(experts, (N, S), generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("error:.*nothing was captured")
@pytest.mark.parametrize("calls_the_idle", [False, True], ids=["not called", "called with no token"])
def test_experts_without_tokens_in_a_step(calls_the_idle):
    """Statistics of busy experts are over all examples of the batch; an idle one stays and keeps its estimate."""
    model, y = seeded_build(lambda: Experts(calls_the_idle)), labels(N, 3)
    opt = plain_kfac(model, lr=0.1, factor_decay=0.0)
    kept: dict[str, Tensor] = {}
    for step, route in enumerate((routes(0, 2), routes(1, 2), routes(1), torch.full((N, S), 1))):
        x, before = noise(N, S, D, seed=step), twin(model)
        expected = expected_pairs(before.by_hand, singles(x, route), y.split(1), F.cross_entropy)
        train_step(opt, model, (x, route), y, F.cross_entropy)
        for name, pair in expected.items():
            check_block(opt, name, pair)
        for name in {f"experts.{i}" for i in range(E)} - expected.keys():
            if name in kept:
                assert torch.equal(opt.dense_curvature(name), kept[name])
            else:
                assert torch.equal(model.get_submodule(name).weight, before.get_submodule(name).weight)
        kept = {name: opt.dense_curvature(name) for name in opt.blocks if block_state(opt, name)["factor_updates"]}
    assert "fallback" not in opt.describe()


class Quantized(nn.Module):
    """A base in int8 with a scale; some libraries keep the weight as a Parameter without a gradient."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (d_out, d_in)).to(torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.tensor(0.01))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).mT


class Tuned(nn.Module):
    """A frozen base with a low-rank adapter, a mean over positions, a head."""

    def __init__(self, base: type[nn.Module]) -> None:
        super().__init__()
        self.base = base(D, D).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + 0.5 * self.up(self.down(x))).mean(1))

    def by_hand(self, tape: oracle.Tape, x: Tensor) -> Tensor:
        z = self.base(x) + 0.5 * tape.linear("up", self.up, tape.linear("down", self.down, x))
        return tape.linear("head", self.head, torch.tanh(z).mean(1))


BASES = [
    (nn.Linear, "cholesky", "model"),
    (nn.Linear, "eigen", "trained"),  # as trainers of adapters do: the optimizer is not given the base
    (Quantized, "eigen", "model"),
]


@pytest.mark.parametrize(("base", "method", "given"), BASES)
def test_frozen_and_quantized_bases_do_not_matter(base, method, given):
    model, x, y = seeded_build(lambda: Tuned(base)), noise(N, S, D), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    before = {k: v.clone() for k, v in model.base.state_dict().items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = plain_kfac(trained if given == "trained" else model, module=model, inverse_method=method)
    train_step(opt, model, (x,), y, F.cross_entropy)
    assert set(opt.blocks) == {"down", "up", "head"}
    for name, pair in expected.items():
        check_block(opt, name, pair)
    opt.load_state_dict(opt.state_dict())
    train_step(opt, model, (x,), y, F.cross_entropy)
    for key, value in model.base.state_dict().items():
        assert torch.equal(value, before[key])
        assert value.dtype == before[key].dtype
    assert "fallback" not in opt.describe()
    if base is nn.Linear and given == "model":
        assert "frozen" in row_of(opt, "base.weight")


LAYERS = {
    "Linear": lambda: (nn.Linear(4, 4), noise(N, 4)),
    "Conv1d": lambda: (nn.Conv1d(4, 4, 1), noise(N, 4, 2)),
    "ConvTranspose1d": lambda: (nn.ConvTranspose1d(4, 4, 2), noise(N, 4, 2)),
    "Embedding": lambda: (nn.Embedding(5, 4), torch.arange(N) % 5),
    "Bilinear": lambda: (nn.Bilinear(4, 4, 4), noise(N, 4)),
    "LayerNorm": lambda: (nn.LayerNorm((1, 4)), noise(N, 1, 4)),
}
WRAPPERS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "weight_norm of old": nn.utils.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "spectral_norm of old": nn.utils.spectral_norm,
    "pruning": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
}


def wrapped(layer: nn.Module) -> Net:
    """A layer, a mean over positions, a head."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        z = net.layer(x, x) if isinstance(net.layer, nn.Bilinear) else net.layer(x)
        return net.head(torch.tanh(z).reshape(len(z), 4, -1).mean(2))

    return Net(forward, layer=layer, head=nn.Linear(4, 3))


def check_reasons(model: nn.Module, x: Tensor) -> KFAC:
    """A row of the table names a block with statistics, or gives the reason why there is none."""
    y = labels(N, 3)
    opt = plain_kfac(model, lr=0.1)
    rows = {name: row_of(opt, name) for name, _ in model.named_parameters()}
    left_out = [name for name, row in rows.items() if "fallback" in row]
    assert any("orig" in name or name[-2:] in ("_g", "_v") for name in left_out)
    F.cross_entropy(model(x), y).backward()
    for gradient, moved in step_of(opt, [model.get_parameter(name) for name in left_out]):
        assert_close(moved, 0.1 * gradient)
    for name in rows.keys() - {"head.weight", "head.bias"}:
        if name in left_out:
            assert oracle.follows_fallback(opt, name, "parametri"), row_of(opt, name)
        else:
            block = next(b for b in opt.blocks.values() if any(p is model.get_parameter(name) for p in b.params))
            assert block_state(opt, block.name)["factor_updates"] == 1, name
    train_step(opt, model, (x,), y, F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return opt


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:.*weight_norm.*deprecated")
@each(  # torch itself has no spectral norm of a vector
    lambda kind, wrapper: kind != "LayerNorm" or "spectral" not in wrapper, kind=LAYERS.keys(), wrapper=WRAPPERS.keys(),
)  # fmt: skip
def test_parametrized_layers_follow_the_fallback_with_a_reason(wrapper, kind):
    layer, x = LAYERS[kind]()
    opt = check_reasons(seeded_build(lambda: wrapped(WRAPPERS[wrapper](layer))), x)
    assert set(opt.blocks) == {"head"}


def projected(kind: str, wrapper: str, part: str) -> Net:
    """Attention or recurrence with a weight that is parametrized, a mean over positions, a head."""
    layer = nn.LSTM(4, 4, batch_first=True) if kind == "LSTM" else nn.MultiheadAttention(4, 2, batch_first=True)
    owner, names = (layer.out_proj, ()) if part == "out_proj" else (layer, (part,))
    WRAPPERS[wrapper](owner, *names)
    inputs, head = 1 if kind == "LSTM" else 3, nn.Linear(4, 3)
    return Net(lambda net, x: net.head(torch.tanh(net.layer(*[x] * inputs)[0]).mean(1)), layer=layer, head=head)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def doubled_bias() -> nn.Module:
    return wrapped(nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "bias", Double()))


PARAMETRIZED = {
    "bias alone": (doubled_bias, noise(N, 4)),
    "exposed LSTM": (lambda: expose(projected("LSTM", "weight_norm of old", "weight_hh_l0")), noise(N, S, 4)),
    "exposed attention": (lambda: expose(projected("attention", "weight_norm", "in_proj_weight")), noise(N, S, 4)),
    "attention": (lambda: projected("attention", "weight_norm", "in_proj_weight"), noise(N, S, 4)),
    "attention, old": (lambda: projected("attention", "weight_norm of old", "in_proj_weight"), noise(N, S, 4)),
    # torch itself never updates an out_proj under its old weight_norm
    "outputs of attention": (lambda: projected("attention", "weight_norm", "out_proj"), noise(N, S, 4)),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_blocks_of_partly_parametrized_layers_have_statistics(kind):
    build, x = PARAMETRIZED[kind]
    check_reasons(seeded_build(build), x)
