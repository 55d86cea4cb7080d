"""`with opt.mask(keep)`: padded tokens make no rows, so the statistics are those of the sequences without padding.

The definition never sees a padded token: each example is computed by hand at its own length.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.kfac import assert_close, labels, noise, plain_kfac, train_step, twin
from tests.support.models import Net, seeded_build
from tests.support.oracles import layers as oracle
from tests.support.oracles.layers import Tape, check_block

N, S, D = 4, 5, 3
Y = labels(N, 3)


def padding_after(*lengths: int) -> Tensor:
    return torch.arange(S)[None] < torch.tensor(lengths)[:, None]


AFTER, ALL = padding_after(5, 2, 4, 1), torch.ones(N, S, dtype=torch.bool)
ANYWHERE = torch.rand(N, S, generator=torch.Generator().manual_seed(3)) > 0.4
ANYWHERE[:, 1] = True


class Tokens(nn.Module):
    """Two layers per token, a mean over the real ones, a head per example."""

    def __init__(self, words: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(7, D) if words else None
        self.first, self.second, self.head = nn.Linear(D, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 3)

    def tokens(self, x: Tensor) -> Tensor:
        x = x if self.table is None else torch.tanh(self.table(x))
        return self.second(torch.tanh(self.first(x)))

    def pooled(self, z: Tensor, keep: Tensor) -> Tensor:
        """The mean over real tokens of ``[N, S, d]``, zero where an example has none."""
        return (z * keep[..., None]).sum(1) / keep.sum(1).clamp(min=1)[:, None]

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.head(torch.tanh(self.pooled(self.tokens(x), keep)))

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        x = x if self.table is None else torch.tanh(oracle.embedding(tape, "table", x, self.table.weight))
        z = tape.linear("second", self.second, torch.tanh(tape.linear("first", self.first, x)))
        return tape.linear("head", self.head, torch.tanh(z.sum(1) / max(z.shape[1], 1)))


def expected(model: Tokens, x: Tensor, keep: Tensor, y: Tensor = Y, approx: str = "expand") -> dict:
    """(A, B) of every product, from each example at its own length."""
    unpadded = [(x[n : n + 1][:, keep[n]],) for n in range(len(x))]
    return oracle.expected_pairs(twin(model).by_hand, unpadded, y.split(1), F.cross_entropy, approx)


def garbage(x: Tensor, keep: Tensor) -> Tensor:
    """Large values at padding, which would be noticed."""
    return torch.where(keep[..., None], x, torch.full_like(x, 50.0))


def check(model: Tokens, keep: Tensor, given: Tensor | None, x: Tensor | None = None, **keywords) -> None:
    """A step under a mask has the factors of the rows without padding."""
    x = garbage(noise(N, S, D), keep) if x is None else x
    pairs = expected(model, x, keep)
    opt = plain_kfac(model, **keywords)
    x = x.transpose(0, 1).contiguous() if keywords else x.clone()
    with opt.mask(given):
        output = model(x.requires_grad_() if x.is_floating_point() and not keywords else x, keep)
    F.cross_entropy(output, Y).backward()
    opt.step()
    check_factors(opt, pairs)


def check_factors(opt, pairs: dict) -> None:
    for name, (A, B) in pairs.items():
        if name == "table":
            A = oracle.diagonal_of(A)
        check_block(opt, name, (A, B), torch.kron(A, B) if name == "table" else None)


# the real tokens, and the mask that is given: ones and zeros, as tokenizers return them, or None if all are real
MASKS = {
    "after": (AFTER, AFTER), "anywhere": (ANYWHERE, ANYWHERE), "no padding": (ALL, ALL), "no mask": (ALL, None),
    "integers": (ANYWHERE, ANYWHERE.to(torch.int64)), "bytes": (ANYWHERE, ANYWHERE.to(torch.uint8)),
    "an example without a token": (padding_after(5, 0, 4, 1),) * 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", MASKS)
def test_statistics_are_those_of_the_unpadded_rows(kind):
    check(seeded_build(Tokens), *MASKS[kind])


def test_a_table_of_words():
    words = torch.randint(7, (N, S), generator=torch.Generator().manual_seed(0))
    for keep in (AFTER, ANYWHERE):
        check(seeded_build(lambda: Tokens(words=True)), keep, keep, words)


def test_gradients_are_as_without_the_mask_and_zero_at_padding():
    model, x = seeded_build(Tokens), noise(N, S, D).requires_grad_()
    plain, opt = twin(model), plain_kfac(model)
    with opt.mask(AFTER):
        output = model(x, AFTER)
    assert torch.equal(output, plain(x, AFTER))
    F.cross_entropy(output, Y).backward()
    assert x.grad[AFTER].any()
    assert not x.grad[~AFTER].any()
    F.cross_entropy(plain(x, AFTER), Y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_gradients_at_padding_do_not_count():
    """If the loss reads padded positions, their rows do not count either."""

    class Reading(Tokens):
        def pooled(self, z: Tensor, keep: Tensor) -> Tensor:
            return z.mean(1)

    model, keep, x, outputs = seeded_build(Reading), ANYWHERE, noise(N, S, D), []
    plain = twin(model)
    plain.second.register_forward_hook(lambda module, args, z: z.retain_grad() or outputs.append((args[0], z)))
    F.cross_entropy(plain(x, keep), Y).backward()
    ((a, z),) = outputs
    a, g = a.detach()[keep], N * z.grad[keep]
    opt = plain_kfac(model)
    with opt.mask(keep):
        train_step(opt, model, (x, keep), Y, F.cross_entropy)
    check_block(opt, "second", (a.mT @ a / len(a), g.mT @ g / N))


def test_a_batch_of_padding_only_is_finite():
    model = seeded_build(Tokens)
    opt = plain_kfac(model, lr=0.1)
    for keep in (torch.zeros_like(ALL), AFTER):
        with opt.mask(keep):
            train_step(opt, model, (noise(N, S, D), keep), Y, F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_each_micro_batch_has_its_own_mask():
    model, y, masks = seeded_build(Tokens), labels(2 * N, 3), [AFTER, ANYWHERE]
    x = garbage(noise(2 * N, S, D), torch.cat(masks))
    pairs = expected(model, x, torch.cat(masks), y)
    opt = plain_kfac(model)
    for part, mask, target in zip(x.split(N), masks, y.split(N), strict=True):
        with opt.mask(mask):
            (F.cross_entropy(model(part, mask), target) / 2).backward()
    opt.step()
    check_factors(opt, pairs)


@pytest.mark.parametrize("before", ["a paused forward", "an exception"])
def test_forwards_outside_are_not_masked(before):
    model, x = seeded_build(Tokens), noise(N, S, D)
    pairs = expected(model, x, ALL)
    opt = plain_kfac(model)
    if before == "an exception":
        with pytest.raises(KeyError), opt.mask(AFTER):
            raise KeyError("user's own")
    else:
        with opt.mask(AFTER), opt.pause_capture():
            model(x, AFTER)
    train_step(opt, model, (x, ALL), Y, F.cross_entropy)
    check_factors(opt, pairs)


@pytest.mark.parametrize(
    "layout", ["flattened", "positions first", "batch second", "heads", "checkpointed", "checkpointed reentrant"]
)
def test_other_layouts_of_the_tokens(layout):
    class Laid(Tokens):
        def tokens(self, x):
            if layout.startswith("checkpointed"):
                return checkpoint(super().tokens, x, use_reentrant=layout.endswith("reentrant"))
            if layout == "flattened":
                return super().tokens(x.flatten(0, 1)).unflatten(0, (N, S))
            if layout == "positions first":
                return super().tokens(x.transpose(0, 1)).transpose(0, 1)
            if layout == "batch second":
                return super().tokens(x).transpose(0, 1)
            return super().tokens(self.two_heads(x)).mean(2)

        def two_heads(self, x):
            return x[:, :, None].expand(-1, -1, 2, -1)  # [N, S, 2, D]: two rows per token

        def by_hand(self, tape, x):
            if layout != "heads":
                return super().by_hand(tape, x)
            z = torch.tanh(tape.linear("first", self.first, self.two_heads(x)))
            z = tape.linear("second", self.second, z).mean(2)
            return tape.linear("head", self.head, torch.tanh(z.mean(1)))

    check(seeded_build(Laid), ANYWHERE, ANYWHERE, **({"batch_dim": 1} if layout == "batch second" else {}))


class Mixed(Tokens):
    """A norm, a frozen weight, attention among the tokens, and layers whose rows are not those of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv, self.pairs = nn.Conv2d(1, 2, 2), nn.Linear(2 * D, 2)
        self.first.weight.requires_grad_(False)

    def forward(self, x, image, keep):
        h = torch.tanh(self.first(self.norm(x)))
        z, _ = self.attn(h, h, h, key_padding_mask=~keep, need_weights=False)
        z = self.pooled(self.second(z), keep) + torch.tanh(self.conv(image)).mean((2, 3))
        return self.head(z + torch.tanh(self.pairs(torch.cat([x[:, :-1], x[:, 1:]], -1))).mean(1))

    def by_hand(self, tape, x, image, keep):
        real, patches = x[:, keep[0]], image.unfold(2, 2, 1).unfold(3, 2, 1).reshape(1, -1, 4)
        h = torch.tanh(tape.linear("first", self.first, self.norm(real)))
        z = tape.linear("second", self.second, oracle.multihead(tape, "attn", self.attn, h, h, h)).mean(1)
        z = z + torch.tanh(tape.product("conv", patches, self.conv.weight.flatten(1), self.conv.bias)).mean(1)
        pairs = tape.linear("pairs", self.pairs, torch.cat([x[:, :-1], x[:, 1:]], -1))
        return tape.linear("head", self.head, z + torch.tanh(pairs).mean(1))


def test_norms_attention_frozen_weights_and_layers_of_another_shape():
    """The mask fits neither an image in addition to the text nor a layer over pairs of tokens, so all rows count."""
    model, keep = seeded_build(Mixed), ANYWHERE
    plain, data = twin(model), (noise(N, S, D), noise(N, 1, 3, 4, seed=2), keep)
    pairs = oracle.expected_pairs(plain.by_hand, oracle.singles(*data), Y.split(1), F.cross_entropy)
    us = []
    for example, y in zip(oracle.singles(*data), Y.split(1), strict=True):
        value = F.cross_entropy(plain.by_hand(Tape(), *example), y)
        us.append(torch.stack(torch.autograd.grad(value, [plain.norm.weight, plain.norm.bias]), -1))
    u = torch.stack(us)
    opt = plain_kfac(model)
    with opt.mask(keep):
        train_step(opt, model, data, Y, F.cross_entropy)
    products = {name: pair for name, pair in pairs.items() if not name.startswith("attn.")}
    check_factors(opt, products | oracle.attention_pairs(pairs, "attn"))
    assert_close(opt.dense_curvature("norm"), torch.block_diag(*(torch.einsum("nci,ncj->cij", u, u) / N)), 1e-8)


def test_reduce_leaves_padded_layers_out_with_a_warning():
    model, x = seeded_build(Tokens), garbage(noise(N, S, D), AFTER)
    rows = expected(model, x, AFTER, approx="reduce")
    opt = plain_kfac(model, approx="reduce", lr=0.1)
    with opt.mask(AFTER):
        F.cross_entropy(model(x, AFTER), Y).backward()
    with pytest.warns(UserWarning, match="first, second: .*cannot leave out padded rows"):
        moves = oracle.step_of(opt, [model.first.weight, model.second.weight])
    for gradient, moved in moves:
        assert_close(moved, 0.1 * gradient)
    check_block(opt, "head", rows["head"])


def test_a_mask_of_a_wrong_kind_or_shape_is_refused():
    """A mask of floats is meant to be added to scores: its zeros mean the opposite."""
    opt = plain_kfac(seeded_build(Tokens))
    for keep in ([[True]], "keep", torch.ones(N, S), torch.ones(N, S, dtype=torch.bfloat16)):
        with pytest.raises(TypeError, match="mask"), opt.mask(keep):
            pass
    for shape in ((N,), (N, S, 1), ()):
        with pytest.raises(ValueError, match="keep|mask"), opt.mask(torch.ones(shape, dtype=torch.bool)):
            pass


def test_a_buffer_of_the_mask_may_be_used_again():
    """A layer whose second result is unused keeps its statistics waiting until the step."""

    def forward(net: Net, x: Tensor) -> Tensor:
        net.logged = net.norm(2 * x)
        return net.norm(x)

    found = []
    for reuses in (True, False):
        model = Net(forward, norm=nn.LayerNorm(4)).double()
        opt, buffer = plain_kfac(model), torch.empty(5, 6, dtype=torch.bool)
        for seed in range(2):
            keep = noise(5, 6, seed=seed) > 0
            with opt.mask(buffer.copy_(keep) if reuses else keep):
                y = model(noise(5, 6, 4, seed=seed))
            (y * noise(5, 6, 4, seed=seed + 2)).sum((1, 2)).mean().backward()
        opt.step()
        found.append(opt.dense_curvature("norm"))
    assert_close(*found)
