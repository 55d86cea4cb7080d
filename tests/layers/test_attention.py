"""`nn.MultiheadAttention`, whose weights are used without calling a module, and torch's transformers.

Factors of attention are tested in `test_layer_types.py`, too.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, HyLo
from secondorder.capture.layers.adapter import LinearAdapter
from secondorder.capture.statistics.call import Call
from tests.support.kfac import assert_close, hook_counts, labels, noise, plain_kfac, train_step, twin
from tests.support.layer_cases import CASES, Attends, attends, causal, spread
from tests.support.models import seeded_build
from tests.support.oracles import layers as oracle
from tests.support.oracles.layers import Tape, check_block, embedding, expected_pairs, follows_fallback, singles
from tests.support.tasks import assert_identical

N, T, S, E, H = 4, 3, 5, 4, 2
ATTENTION = CASES["attention"]


def problem(network=Attends) -> tuple[nn.Module, Tensor, Tensor, dict]:
    """A model with attention, data, and the factors of its blocks."""
    model = seeded_build(network)
    ((x,), y) = ATTENTION.data()
    return model, x, y, ATTENTION.factors(twin(model))


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "positions first"])
def test_added_rows_of_keys_and_values_have_no_block(batch_first):
    """They are added after the projection."""
    case = attends(add_bias_kv=True, batch_first=batch_first)
    model, (inputs, y) = case.model(), case.data()
    expected = case.factors(twin(model))
    opt = plain_kfac(model, **case.keywords)
    train_step(opt, model, inputs, y, F.cross_entropy)
    for name, pair in expected.items():
        check_block(opt, name, pair)
    assert follows_fallback(opt, "attn.bias_k", "no linear map")
    assert follows_fallback(opt, "attn.bias_v", "no linear map")
    assert "fallback" not in oracle.row_of(opt, "attn.in_proj_weight")


@pytest.mark.parametrize("frozen", ["in_proj", "out_proj"])
def test_a_frozen_projection_has_no_block(frozen):
    model, x, y, expected = problem()
    for name, p in model.attn.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    opt = plain_kfac(model)
    train_step(opt, model, (x,), y, F.cross_entropy)
    ATTENTION.check(opt, {name: pair for name, pair in expected.items() if name != f"attn.{frozen}"})


@pytest.mark.parametrize(("kdim", "vdim", "bias"), [(3, 2, True), (E, 2, False), (3, 3, True)])
def test_separate_projections(kdim, vdim, bias):
    """Keys and values of other widths have separate weights; every factor is that of its own product."""
    model, y = seeded_build(lambda: Attends(cross=True, kdim=kdim, vdim=vdim, bias=bias)), labels(N, 3)
    inputs = noise(N, T, E), noise(N, S, kdim, seed=1), noise(N, S, vdim, seed=2)
    expected = expected_pairs(twin(model).by_hand, singles(*inputs), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    train_step(opt, model, inputs, y, F.cross_entropy)
    for part, width in (("q", E), ("k", kdim), ("v", vdim)):
        A, B = oracle.held(opt, f"attn.{part}_proj")
        with_one = A.shape[-1] - width
        assert_close(A, expected[f"attn.{part}"][0][: width + with_one, : width + with_one])
        assert_close(B, expected[f"attn.{part}"][1])
    check_block(opt, "attn.out_proj", expected["attn.out"])
    unseen = [name for name, p in model.named_parameters() if follows_fallback(opt, name)]
    assert all(name == "attn.in_proj_bias" and follows_fallback(opt, name, "bias") for name in unseen)


@pytest.mark.parametrize(
    ("method", "keywords", "trained"),
    [
        (KFAC, {"approx": "reduce"}, ""),
        (KFAC, {"approx": "reduce", "inverse_method": "cholesky"}, ""),
        (EKFAC, {}, "bias"),
        (EKFAC, {"approx": "reduce"}, "bias"),
        (HyLo, {}, ""),
        (HyLo, {"approx": "expand"}, "bias"),
    ],
)
def test_keys_whose_gradients_sum_to_nothing_do_not_outweigh_queries_and_values(method, keywords, trained):
    """A softmax ignores what all scores have in common, so the sum of the gradients at the keys is a rounding error."""
    model, x, y, _ = problem()
    for name, p in model.attn.named_parameters():
        p.requires_grad_(trained in name)
    stacked = model.attn.in_proj_bias if trained else model.attn.in_proj_weight
    before = stacked.detach().clone()
    opt = method(model, lr=0.1, graft="sgd", momentum=0.0, damping=1.0, damping_mode="relative", **keywords)
    train_step(opt, model, (x,), y, F.cross_entropy)
    queries, keys, values = (part.norm() for part in (stacked.detach() - before).chunk(3))
    assert keys < 10 * min(queries, values)


def test_projections_with_summed_gradients_solve_with_the_damping_of_their_own_or_of_the_steepest_block():
    """λ of queries and values is relative to their own curvature, and λ of the keys, which have none, to the larger."""
    model, x, y, _ = problem()
    pairs = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy, "reduce")
    curvature = [torch.kron(B, A) for A, B in (pairs[f"attn.{part}"] for part in "qkv")]
    assert curvature[1].abs().max() < 1e-15
    means = [float(F.diagonal().mean()) for F in curvature]
    opt = plain_kfac(model, lr=1.0, approx="reduce", damping=0.1, damping_mode="relative")
    weight, bias = model.attn.in_proj_weight, model.attn.in_proj_bias
    before = torch.cat([weight.detach(), bias.detach()[:, None]], 1)
    train_step(opt, model, (x,), y, F.cross_entropy)
    moved = (torch.cat([weight.detach(), bias.detach()[:, None]], 1) - before).chunk(3)
    gradients = torch.cat([weight.grad, bias.grad[:, None]], 1).chunk(3)
    for i, mean in enumerate((means[0], max(means), means[2])):
        damped = curvature[i] + 0.1 * mean * torch.eye(len(curvature[i]), dtype=x.dtype)
        assert_close(moved[i].flatten(), -torch.linalg.solve(damped, gradients[i].flatten()), 1e-9, "qkv"[i])


class Projections(nn.Module):
    """Attention with a layer for each projection, as in many implementations."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.head = nn.Linear(E, E), nn.Linear(E, E), nn.Linear(E, E), nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = [f(x).unflatten(-1, (H, E // H)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        return self.head(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2).mean(1))


@pytest.mark.parametrize("saturated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [KFAC, EKFAC, HyLo])
def test_sums_that_are_rounding_errors_count_as_zero(method, dtype, saturated):
    """Those at the keys are. Without this, a relative λ would be a multiple of them, and the next step enormous."""
    model, single = seeded_build(Projections), torch.float32 if dtype == torch.bfloat16 else dtype
    scale = (10.0 if dtype == torch.bfloat16 else 30.0) if saturated else 1.0
    model, x, y = model.to(single), scale * noise(N, T, E).to(single), labels(N, 3)
    plain = {"graft": None, "momentum": 0.0, "kl_clip": None}
    opt = method(model, lr=1.0, approx="reduce", damping=0.1, damping_mode="relative", **plain)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    if method is not HyLo:
        sizes = {name: oracle.held(opt, name)[1].norm() for name in ("query", "key", "value")}
        assert sizes["key"] == 0 < min(sizes["query"], sizes["value"])
    if method is not EKFAC:  # its scale is that of whole gradients, which do not vanish
        start = dict(zip(dict(model.named_parameters()), before, strict=True))["key.weight"]
        assert_close(start - model.key.weight.detach(), model.key.weight.grad / 0.1, 1e-3 if single != dtype else 1e-5)


@pytest.mark.parametrize(("dtype", "small", "tiny"), [(torch.float64, 1e-11, 1e-13), (torch.bfloat16, 0.1, 0.02)])
def test_small_sums_stay_as_they_are(dtype, small, tiny):
    adapter = LinearAdapter(nn.Linear(1, 1), has_weight=True, has_bias=False)
    for difference in (small, tiny):
        g = torch.tensor([[[1.0], [difference - 1]]], dtype=torch.float64).to(dtype)
        found = Call(None, g, adapter).output_sums(torch.float64, 1)
        assert_identical(found, g.double().sum(1) * (difference == small))


class TwoAttentions(nn.Module):
    """Two attentions that share weights, with different numbers of heads and different layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.second = nn.MultiheadAttention(E, H, batch_first=True), nn.MultiheadAttention(E, E)
        self.second.in_proj_weight, self.second.in_proj_bias = self.attn.in_proj_weight, self.attn.in_proj_bias
        self.second.out_proj = self.attn.out_proj
        self.head = nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x)[0]
        z = x.transpose(0, 1)
        return self.head((z + self.second(z, z, z, need_weights=False)[0]).mean(0))

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        for layer in (self.attn, self.second):
            x = x + oracle.multihead(tape, "attn", layer, x, x, x)
        return tape.linear("head", self.head, x.mean(1))


def test_attentions_that_share_weights_with_different_heads_and_layouts():
    model, x, y, expected = problem(TwoAttentions)
    opt = plain_kfac(model)
    train_step(opt, model, (x,), y, F.cross_entropy)
    ATTENTION.check(opt, expected)


def anatomy(model: nn.Module) -> list:
    """Types, attributes and hooks of all modules of a model, and the functions of torch that they call."""
    modules = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    functions = nn.MultiheadAttention.forward, F.multi_head_attention_forward
    return [modules, functions, list(model.state_dict()), hook_counts(model)]


def test_each_of_two_optimizers_on_a_module_may_be_detached():
    """The last one leaves the module as it was."""
    model, x, y, expected = problem()
    before = anatomy(model)
    left, stays = plain_kfac(model, lr=0.0), plain_kfac(model, lr=0.0)
    assert list(model.state_dict()) == before[2]
    F.cross_entropy(model(x), y).backward()
    for opt in (left, stays):
        opt.step()
        ATTENTION.check(opt, expected)
    left.detach()
    for _ in range(2):
        train_step(stays, model, (x,), y, F.cross_entropy)
    ATTENTION.check(stays, expected)
    stays.detach()
    assert anatomy(model) == before
    assert torch.equal(model(x), twin(model)(x))


def test_subclasses_with_a_forward_of_their_own_and_skipped_modules_follow_the_fallback():
    class Mine(nn.MultiheadAttention):
        def forward(self, x):
            return self.out_proj(F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, -1)).sum(-2))

    model = seeded_build(lambda: nn.Sequential(Mine(E, H, batch_first=True), nn.Flatten(), nn.Linear(T * E, 3)))
    opt = plain_kfac(model, lr=0.1)
    assert follows_fallback(opt, "0.in_proj_weight", "Mine")
    train_step(opt, model, (noise(N, T, E),), labels(N, 3), F.cross_entropy)
    assert set(plain_kfac(seeded_build(Attends), skip_layers="attn").blocks) == {"head"}
    assert "attn.out_proj" not in plain_kfac(seeded_build(Attends), skip_layers="attn.out_proj").blocks


WORDS = 7


class Translator(nn.Module):
    """Embeddings, torch's encoder-decoder, a word per position."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, E), nn.Embedding(WORDS, E)
        self.body = nn.Transformer(E, H, 1, 2, 5, 0.0, activation="gelu", norm_first=True)
        self.head = nn.Linear(E, WORDS)
        for m in self.modules():
            if isinstance(m, nn.MultiheadAttention):
                spread(m)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.head(self.body(self.source(src), self.target(tgt), tgt_mask=causal(T), tgt_is_causal=True))

    def by_hand(self, tape: Tape, src: Tensor, tgt: Tensor) -> Tensor:
        memory = embedding(tape, "source", src, self.source.weight)
        for i, layer in enumerate(self.body.encoder.layers):
            memory = oracle.encoder_layer(tape, f"body.encoder.layers.{i}", layer, memory)
        memory = self.body.encoder.norm(memory)
        z = embedding(tape, "target", tgt, self.target.weight)
        for i, layer in enumerate(self.body.decoder.layers):
            z = oracle.decoder_layer(tape, f"body.decoder.layers.{i}", layer, z, memory, causal(T))
        return tape.linear("head", self.head, self.body.decoder.norm(z))


def test_a_whole_transformer():
    """Every product and every norm has its block, and no parameter follows the fallback rule."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    src, tgt, y = (torch.randint(WORDS, (N, length)) for length in (S, T, T))
    model = seeded_build(Translator)
    plain = twin(model)
    expected = expected_pairs(plain.by_hand, singles(src, tgt), y.split(1), loss)
    for name in {name.rpartition(".")[0] for name in expected if name.endswith(".out")}:
        expected |= oracle.attention_pairs(expected, name)
    products = {name: pair for name, pair in expected.items() if not name.endswith((".q", ".k", ".v", ".out"))}
    given = src.mT.contiguous(), tgt.mT.contiguous()
    outputs = model(*given)
    assert_close(outputs.transpose(0, 1).detach(), plain.by_hand(Tape(), src, tgt).detach(), 1e-12)
    opt = plain_kfac(model, batch_dim=1)
    assert torch.equal(model(*given), outputs)
    train_step(opt, model, given, y.mT, loss)
    for name, pair in products.items():
        check_block(opt, name, pair, torch.kron(*pair) if name in ("source", "target") else None, 1e-8)
    assert set(opt.blocks) == products.keys() | {n for n, m in plain.named_modules() if isinstance(m, nn.LayerNorm)}
    assert "fallback" not in opt.describe()
