"""`nn.MultiheadAttention`, alone and inside torch's transformers, against models of four plain products per attention.

Its weights are used without calling a module, so this is also about being seen at all, and about leaving no trace.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.kfac import assert_close, hook_counts, labels, noise, plain_kfac, twin
from tests.support.models import seeded_build
from tests.support.oracles.kfac import solve_exact, solve_pi
from tests.support.oracles.layers import (
    Tape,
    attention_pairs,
    check_block,
    decoder_layer,
    embedding,
    encoder_layer,
    expected_pairs,
    follows_fallback,
    held,
    multihead,
    rows_by_example,
    singles,
    step_of,
    train,
)

N, T, S, E, H = 4, 3, 5, 4, 2


def causal(size: int) -> Tensor:
    return torch.full((size, size), -math.inf, dtype=torch.float64).triu(1)


def spread(layer: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """Torch starts the biases at zero, where mistakes with them cannot be seen."""
    for p in (layer.in_proj_bias, layer.out_proj.bias):
        if p is not None:
            nn.init.normal_(p)
    return layer


class Attends(nn.Module):
    """Attention of a tanh of the inputs, a mean over positions, a head."""

    def __init__(self, cross: bool = False, call: dict | None = None, **options) -> None:
        super().__init__()
        self.attn = spread(nn.MultiheadAttention(E, H, **{"batch_first": True, **options}))
        self.head, self.cross, self.call = nn.Linear(E, 3), cross, call or {}

    def forward(self, x: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = (k, v) if self.cross else (x, x)
        z, _ = self.attn(x, k, v, **self.call)
        return self.head(torch.tanh(z).mean(1 if self.attn.batch_first else 0))

    def by_hand(self, tape: Tape, x: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = (k, v) if self.cross else (x, x)
        z = multihead(tape, "attn", self.attn, x, k, v, self.call.get("attn_mask"))
        return tape.linear("head", self.head, torch.tanh(z).mean(1))


def self_inputs() -> tuple[Tensor]:
    return (noise(N, T, E),)


def cross_inputs(kdim: int = E, vdim: int = E) -> tuple[Tensor, Tensor, Tensor]:
    return noise(N, T, E), noise(N, S, kdim, seed=1), noise(N, S, vdim, seed=2)


def as_called(model: Attends, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs if model.attn.batch_first else tuple(x.transpose(0, 1).contiguous() for x in inputs)


def check(model: Attends, inputs: tuple[Tensor, ...], approx: str = "expand", **keywords) -> None:
    plain, y = twin(model), labels(N, 3)
    expected = expected_pairs(plain.by_hand, singles(*inputs), y.split(1), F.cross_entropy, approx)
    batch = as_called(model, inputs)
    assert_close(plain(*batch).detach(), plain.by_hand(Tape(), *inputs).detach(), 1e-12, "the definition")
    if not model.attn.batch_first:
        keywords["batch_dim"] = 1
    opt = plain_kfac(model, approx=approx, **keywords)
    F.cross_entropy(plain(*batch), y).backward()
    output = model(*batch)
    assert torch.equal(output, plain(*batch))
    F.cross_entropy(output, y).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    opt.step()
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(opt, name, pair)
    check_block(opt, "head", expected["head"])


# ---------------------------------------------------------------------------------------------------------------------
# Factors
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "positions first"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_factors(approx, batch_first, bias, cross):
    model = seeded_build(lambda: Attends(cross, batch_first=batch_first, bias=bias))
    check(model, cross_inputs() if cross else self_inputs(), approx)


@pytest.mark.parametrize(
    "call",
    [
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": causal(T)},
        {"attn_mask": causal(T), "need_weights": False},
        {"attn_mask": causal(T), "need_weights": False, "is_causal": True},
    ],
    ids=["no weights", "weights per head", "causal", "causal without weights", "said to be causal"],
)
def test_ways_to_call_it(call):
    check(seeded_build(lambda: Attends(call=call)), self_inputs())


def test_key_and_value_of_one_tensor():
    model = seeded_build(lambda: Attends(cross=True))
    x, memory, _ = cross_inputs()
    check(model, (x, memory, memory))


def test_padded_keys():
    """A padded key is projected all the same, and its value gets no gradient."""
    padding = torch.zeros(N, T, dtype=torch.bool)
    padding[1, 2] = padding[3, 1:] = True

    class Padded(Attends):
        def forward(self, x):
            z, _ = self.attn(x, x, x, key_padding_mask=padding)
            return self.head(torch.tanh(z).mean(1))

        def by_hand(self, tape, x, n):
            mask = torch.zeros(T, T, dtype=torch.float64).masked_fill(padding[n], -math.inf)
            z = multihead(tape, "attn", self.attn, x, x, x, mask)
            return tape.linear("head", self.head, torch.tanh(z).mean(1))

    model, (x,), y = seeded_build(Padded), self_inputs(), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x, torch.arange(N)), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(opt, name, pair)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "positions first"])
def test_added_rows_of_keys_and_values(options, batch_first):
    """They are put behind the projection, so they are rows of no block; where they are parameters, they say so."""
    model = seeded_build(lambda: Attends(batch_first=batch_first, **options))
    check(model, self_inputs())
    if "add_bias_kv" in options:
        opt = plain_kfac(seeded_build(lambda: Attends(batch_first=batch_first, **options)))
        assert follows_fallback(opt, "attn.bias_k", "no linear map")
        assert follows_fallback(opt, "attn.bias_v", "no linear map")
        assert "fallback" not in [line for line in opt.describe().splitlines() if "in_proj_weight" in line][0]


def test_one_example_without_a_batch_axis():
    class Bare(Attends):
        def forward(self, x):
            z, _ = self.attn(x, x, x)
            return self.head(torch.tanh(z).mean(0))

    model, x, y = seeded_build(Bare), noise(T, E), labels(1, 3)[0]
    plain = twin(model)
    run = lambda tape, x: Attends.by_hand(plain, tape, x)[0]  # noqa: E731
    expected = expected_pairs(run, [(x[None],)], [y], F.cross_entropy)
    opt = plain_kfac(model)
    F.cross_entropy(model(x), y).backward()
    opt.step()
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(opt, name, pair)


@pytest.mark.parametrize(
    "frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", "in_proj", "out_proj"]
)
def test_frozen_parts(frozen):
    model = seeded_build(Attends)
    for name, p in model.attn.named_parameters():
        if name.startswith(frozen):
            p.requires_grad_(False)
    (x,), y = self_inputs(), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    train(opt, model, (x,), y, F.cross_entropy)
    if frozen != "in_proj":
        A, B = (torch.stack([expected[f"attn.{part}"][i] for part in "qkv"]) for i in (0, 1))
        check_block(opt, "attn.in_proj", (A, B))
    if frozen != "out_proj":
        check_block(opt, "attn.out_proj", expected["attn.out"])
    assert "fallback" not in opt.describe()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("kdim", "vdim"), [(3, 2), (E, 2), (3, 3)])
def test_separate_projections(kdim, vdim, bias):
    """Keys and values of other widths have a weight each; every factor is that of its own product."""
    model, y = seeded_build(lambda: Attends(cross=True, kdim=kdim, vdim=vdim, bias=bias)), labels(N, 3)
    inputs = cross_inputs(kdim, vdim)
    expected = expected_pairs(twin(model).by_hand, singles(*inputs), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    train(opt, model, inputs, y, F.cross_entropy)
    for part, width in (("q", E), ("k", kdim), ("v", vdim)):
        A, B = held(opt, f"attn.{part}_proj")
        with_one = A.shape[-1] - width
        assert_close(A, expected[f"attn.{part}"][0][: width + with_one, : width + with_one])
        assert_close(B, expected[f"attn.{part}"][1])
    check_block(opt, "attn.out_proj", expected["attn.out"])
    unseen = [name for name, p in model.named_parameters() if follows_fallback(opt, name)]
    assert all(name == "attn.in_proj_bias" and follows_fallback(opt, name, "bias") for name in unseen)


# ---------------------------------------------------------------------------------------------------------------------
# Directions
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "solve"), [("eigen", solve_exact), ("cholesky", solve_pi)])
def test_direction_is_the_dense_solve(method, solve):
    model, (x,), y = seeded_build(Attends), self_inputs(), labels(N, 3)
    expected = attention_pairs(expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy), "attn")
    opt = plain_kfac(model, damping=0.02, inverse_method=method)
    F.cross_entropy(model(x), y).backward()
    layer = model.attn
    params = [layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias]
    (dw, vw), (db, vb), (dow, vow), (dob, vob) = step_of(opt, params)
    cases = {"attn.in_proj": ((dw, db), (vw, vb)), "attn.out_proj": ((dow, dob), (vow, vob))}
    for name, ((gw, gb), (mw, mb)) in cases.items():
        A, B = expected[name]
        gradient, moved = torch.cat([gw, gb[:, None]], 1), torch.cat([mw, mb[:, None]], 1)
        assert_close(moved, solve(B, A, gradient, 0.02), 1e-8, name)


def test_it_trains_as_separate_linear_layers_do():
    """Three steps with momentum and weight decay, against a model of nn.Linear layers under the same optimizer."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))
            self.head = nn.Linear(E, 3)

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            z = ((q @ k.mT / (E // H) ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(-2)
            return self.head(torch.tanh(self.out(z)).mean(1))

    model, plain = seeded_build(Attends), seeded_build(Plain)
    with torch.no_grad():
        for part, w, b in zip("qkv", model.attn.in_proj_weight.chunk(3), model.attn.in_proj_bias.chunk(3), strict=True):
            getattr(plain, part).weight.copy_(w)
            getattr(plain, part).bias.copy_(b)
        plain.out.load_state_dict(model.attn.out_proj.state_dict())
        plain.head.load_state_dict(model.head.state_dict())
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "damping": 0.03}
    ours, theirs = plain_kfac(model, **options), plain_kfac(plain, **options)
    for seed in range(3):
        x, y = noise(N, T, E, seed=seed), labels(N, 3, seed)
        train(ours, model, (x,), y, F.cross_entropy)
        train(theirs, plain, (x,), y, F.cross_entropy)
    stacked = torch.cat([plain.q.weight, plain.k.weight, plain.v.weight]).detach()
    assert_close(model.attn.in_proj_weight.detach(), stacked, 1e-8)
    assert_close(model.attn.out_proj.weight.detach(), plain.out.weight.detach(), 1e-8)
    assert_close(model.head.weight.detach(), plain.head.weight.detach(), 1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# Training loops
# ---------------------------------------------------------------------------------------------------------------------


def test_micro_batches_do_not_matter():
    model, (x,), y = seeded_build(Attends), self_inputs(), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    for part, target in zip(x.split(2), y.split(2), strict=True):
        (F.cross_entropy(model(part), target) / 2).backward()
    opt.step()
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(opt, name, pair)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer(reentrant):
    class Checkpointed(Attends):
        def forward(self, x):
            z = checkpoint(lambda x: self.attn(x, x, x)[0], x, use_reentrant=reentrant)
            return self.head(torch.tanh(z).mean(1))

    model, (x,), y = seeded_build(Checkpointed), self_inputs(), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    train(opt, model, (x.clone().requires_grad_(),), y, F.cross_entropy)
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(opt, name, pair)


def test_a_layer_called_twice():
    class Twice(Attends):
        def forward(self, x):
            z, _ = self.attn(x, x, x)
            z, _ = self.attn(torch.tanh(z), x, x)
            return self.head(torch.tanh(z).mean(1))

        def by_hand(self, tape, x):
            z = multihead(tape, "attn", self.attn, x, x, x)
            z = multihead(tape, "attn", self.attn, torch.tanh(z), x, x)
            return tape.linear("head", self.head, torch.tanh(z).mean(1))

    model, (x,), y = seeded_build(Twice), self_inputs(), labels(N, 3)
    for approx in ("expand", "reduce"):
        model = seeded_build(Twice)
        expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy, approx)
        opt = plain_kfac(model, approx=approx)
        train(opt, model, (x,), y, F.cross_entropy)
        for name, pair in attention_pairs(expected, "attn").items():
            check_block(opt, name, pair)


def test_an_unused_layer_is_no_trouble():
    class Unused(Attends):
        def forward(self, x, use: bool):
            z = self.attn(x, x, x)[0] if use else x
            return self.head(torch.tanh(z).mean(1))

    model, (x,), y = seeded_build(Unused), self_inputs(), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_kfac(model, lr=0.0)
    train(opt, model, (x, False), y, F.cross_entropy)
    train(opt, model, (x, True), y, F.cross_entropy)
    train(opt, model, (x, False), y, F.cross_entropy)
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(opt, name, pair)


def test_forwards_that_do_not_train_are_not_seen():
    model, (x,), y = seeded_build(Attends), self_inputs(), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    opt = plain_kfac(model)
    with torch.no_grad():
        model(2 * x)
    model.eval()
    with torch.no_grad():
        fast = model(x)
    model.train()
    with opt.pause_capture():
        model(3 * x)
    train(opt, model, (x,), y, F.cross_entropy)
    assert fast.shape == (N, 3)
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(opt, name, pair)


def test_random_numbers_of_dropout_are_as_without_the_optimizer():
    build = lambda: seeded_build(lambda: Attends(dropout=0.5))  # noqa: E731
    model, plain, (x,), y = build(), build(), self_inputs(), labels(N, 3)
    opt = plain_kfac(model)
    torch.manual_seed(3)
    expected = plain(x)
    after = torch.rand(3)
    torch.manual_seed(3)
    output = model(x)
    assert torch.equal(output, expected)
    F.cross_entropy(output, y).backward()
    opt.step()
    assert torch.equal(torch.rand(3), after)


# ---------------------------------------------------------------------------------------------------------------------
# Leaving no trace
# ---------------------------------------------------------------------------------------------------------------------


def anatomy(model: nn.Module) -> dict:
    """Types and attributes of all modules of a model."""
    return {
        name: (
            type(m),
            type(m).forward,
            {k: id(v) for k, v in vars(m).items() if not k.startswith("_")},
            sorted(vars(m)),
        )
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize("trained_before", [False, True])
def test_detach_leaves_the_module_as_it_was(trained_before):
    model, (x,), y = seeded_build(Attends), self_inputs(), labels(N, 3)
    forward, linear = nn.MultiheadAttention.forward, F.multi_head_attention_forward
    before, hooks, keys = anatomy(model), hook_counts(model), list(model.state_dict())
    opt = plain_kfac(model)
    assert list(model.state_dict()) == keys
    if trained_before:
        train(opt, model, (x,), y, F.cross_entropy)
    opt.detach()
    assert anatomy(model) == before
    assert hook_counts(model) == hooks
    assert nn.MultiheadAttention.forward is forward
    assert F.multi_head_attention_forward is linear
    assert torch.equal(model(x), twin(model)(x))


def test_a_copy_of_the_model_belongs_to_no_optimizer():
    model, (x,), y = seeded_build(Attends), self_inputs(), labels(N, 3)
    opt = plain_kfac(model, lr=0.1)
    other = copy.deepcopy(model)
    F.cross_entropy(other(x), y).backward()
    assert opt.memory_usage()["pending"] == 0
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    train(opt, model, (x,), y, F.cross_entropy)
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(opt, name, pair)


def test_two_optimizers_on_one_module_and_one_leaves():
    model, (x,), y = seeded_build(Attends), self_inputs(), labels(N, 3)
    expected = expected_pairs(twin(model).by_hand, singles(x), y.split(1), F.cross_entropy)
    left, stays = plain_kfac(model, lr=0.0), plain_kfac(model, lr=0.0)
    F.cross_entropy(model(x), y).backward()
    left.step()
    stays.step()
    for opt in (left, stays):
        for name, pair in attention_pairs(expected, "attn").items():
            check_block(opt, name, pair)
    left.detach()
    for _ in range(2):
        train(stays, model, (x,), y, F.cross_entropy)
    for name, pair in attention_pairs(expected, "attn").items():
        check_block(stays, name, pair)


def test_a_subclass_with_a_forward_of_its_own_takes_the_fallback_and_says_why():
    class Mine(nn.MultiheadAttention):
        def forward(self, x):
            return self.out_proj(F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, -1)).sum(-2))

    model = seeded_build(lambda: nn.Sequential(Mine(E, H, batch_first=True), nn.Flatten(), nn.Linear(T * E, 3)))
    opt = plain_kfac(model, lr=0.1)
    assert follows_fallback(opt, "0.in_proj_weight", "Mine")
    train(opt, model, self_inputs(), labels(N, 3), F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_skip_layers_leaves_it_out():
    model, (x,), y = seeded_build(Attends), self_inputs(), labels(N, 3)
    opt = plain_kfac(model, lr=0.1, skip_layers="attn")
    assert set(opt.blocks) == {"head"}
    train(opt, model, (x,), y, F.cross_entropy)
    other = plain_kfac(seeded_build(Attends), skip_layers="attn.out_proj")
    assert "attn.out_proj" not in other.blocks


# ---------------------------------------------------------------------------------------------------------------------
# Torch's transformers
# ---------------------------------------------------------------------------------------------------------------------


def check_all(opt, model: nn.Module, plain: nn.Module, run, examples, targets, loss) -> None:
    """Every product and every norm of a transformer, and not one parameter that follows the fallback."""
    expected = expected_pairs(run, examples, targets, loss)
    for name in {name.rpartition(".")[0] for name in expected if name.endswith((".q", ".out"))}:
        expected |= attention_pairs(expected, name)
    products = {name: pair for name, pair in expected.items() if not name.endswith((".q", ".k", ".v", ".out"))}
    for name, pair in products.items():
        dense = (
            torch.kron(*pair) if isinstance(plain.get_submodule(name.removesuffix(".in_proj")), nn.Embedding) else None
        )
        check_block(opt, name, pair, dense, 1e-8)
    norms = {name: m for name, m in plain.named_modules() if isinstance(m, nn.LayerNorm)}
    moments = dict.fromkeys(norms, 0)
    for example, target in zip(examples, targets, strict=True):
        value = loss(run(Tape(), *example), target)
        for name, norm in norms.items():
            u = torch.stack(torch.autograd.grad(value, list(norm.parameters()), retain_graph=True), -1)
            moments[name] = moments[name] + u[:, :, None] * u[:, None, :] / len(targets)
    for name, blocks in moments.items():
        assert_close(opt.dense_curvature(name), torch.block_diag(*blocks), 1e-8, name)
    assert set(opt.blocks) == products.keys() | norms.keys()
    assert "fallback" not in opt.describe()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "positions first"])
def test_encoder_layer(norm_first, batch_first):
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(E, H, 5, 0.0, norm_first=norm_first, batch_first=batch_first)
            self.head = nn.Linear(E, 3)
            spread(self.layer.self_attn)

        def forward(self, x):
            return self.head(self.layer(x).mean(1 if batch_first else 0))

        def by_hand(self, tape, x):
            return tape.linear("head", self.head, encoder_layer(tape, "layer", self.layer, x).mean(1))

    model, (x,), y = seeded_build(Encoder), self_inputs(), labels(N, 3)
    plain = twin(model)
    batch = x if batch_first else x.transpose(0, 1)
    assert_close(model(batch).detach(), plain.by_hand(Tape(), x).detach(), 1e-12)
    opt = plain_kfac(model, batch_dim=0 if batch_first else 1)
    assert torch.equal(model(batch), plain(batch))
    train(opt, model, (batch,), y, F.cross_entropy)
    check_all(opt, model, plain, plain.by_hand, singles(x), y.split(1), F.cross_entropy)


WORDS = 7


class Translator(nn.Module):
    """Embeddings, torch's encoder-decoder, a word per position."""

    def __init__(self, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, E), nn.Embedding(WORDS, E)
        self.body = nn.Transformer(
            E, H, 1, 2, 5, 0.0, activation="gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.head = nn.Linear(E, WORDS)
        for m in self.modules():
            if isinstance(m, nn.MultiheadAttention):
                spread(m)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.head(self.body(self.source(src), self.target(tgt), tgt_mask=causal(T), tgt_is_causal=True))

    def by_hand(self, tape: Tape, src: Tensor, tgt: Tensor) -> Tensor:
        memory = embedding(tape, "source", src, self.source.weight)
        for i, layer in enumerate(self.body.encoder.layers):
            memory = encoder_layer(tape, f"body.encoder.layers.{i}", layer, memory)
        memory = self.body.encoder.norm(memory)
        z = embedding(tape, "target", tgt, self.target.weight)
        for i, layer in enumerate(self.body.decoder.layers):
            z = decoder_layer(tape, f"body.decoder.layers.{i}", layer, z, memory, causal(T))
        return tape.linear("head", self.head, self.body.decoder.norm(z))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "positions first"])
def test_a_whole_transformer(batch_first, norm_first):
    def words(length: int, seed: int) -> Tensor:
        return torch.randint(WORDS, (N, length), generator=torch.Generator().manual_seed(seed))

    src, tgt, y = words(S, 0), words(T, 1), words(T, 2)
    model = seeded_build(lambda: Translator(batch_first, norm_first))
    plain = twin(model)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def lay(x: Tensor) -> Tensor:
        return x if batch_first else x.transpose(0, 1).contiguous()

    assert_close(lay(model(lay(src), lay(tgt))).detach(), plain.by_hand(Tape(), src, tgt).detach(), 1e-12)
    opt = plain_kfac(model, batch_dim=0 if batch_first else 1)
    assert torch.equal(model(lay(src), lay(tgt)), plain(lay(src), lay(tgt)))
    train(opt, model, (lay(src), lay(tgt)), lay(y), loss)
    check_all(opt, model, plain, plain.by_hand, singles(src, tgt), y.split(1), loss)


def test_a_stack_of_encoder_layers_with_a_padding_mask_trains():
    """The layer stack may nest its tensors in evaluation; in training everything stays covered."""
    stack = seeded_build(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 5, 0.1, batch_first=True), 2))
    opt = plain_kfac(stack, lr=0.01)
    padding = torch.zeros(N, T, dtype=torch.bool)
    padding[0, 2] = True
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    for seed in range(3):
        opt.zero_grad()
        stack(noise(N, T, E, seed=seed), src_key_padding_mask=padding).square().mean().backward()
        opt.step()
        stack.eval()
        with torch.no_grad():
            stack(noise(N, T, E), src_key_padding_mask=padding)
        stack.train()
    assert "fallback" not in opt.describe()
    for name, p in stack.named_parameters():
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before[name]), name


def test_the_definitions_of_all_products_give_the_gradients():
    """Checks the hand-written transformer itself."""
    model, src, tgt = (
        seeded_build(lambda: Translator(True)),
        torch.tensor([[1, 2, 3], [4, 0, 1]]),
        torch.tensor([[1, 2, 3]] * 2),
    )
    loss = lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())  # noqa: E731
    rows = rows_by_example(model.by_hand, singles(src, tgt), tgt.split(1), loss)
    loss(model(src, tgt), tgt).backward()
    for name in ("body.decoder.layers.1.linear2", "body.encoder.layers.0.linear1", "head"):
        layer = model.get_submodule(name)
        assert_close(rows[name].mean_gradient()[0], torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1), 1e-10)
    for name in ("body.decoder.layers.0.multihead_attn", "body.encoder.layers.0.self_attn"):
        layer = model.get_submodule(name)
        stacked = torch.cat([rows[f"{name}.{part}"].mean_gradient()[0] for part in "qkv"])
        assert_close(stacked, torch.cat([layer.in_proj_weight.grad, layer.in_proj_bias.grad[:, None]], 1), 1e-10)
