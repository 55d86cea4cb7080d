"""`with opt.mask(keep)`: padded tokens are no rows, so the statistics are those of the sequences without padding.

The definition never sees a padded token: each example is run by hand at its own length.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.kfac import assert_close, labels, noise, plain_kfac, twin
from tests.support.models import seeded_build
from tests.support.oracles.kfac import expected_factors
from tests.support.oracles.layers import (
    Tape,
    attention_pairs,
    block_state,
    check_block,
    embedding,
    expected_pairs,
    multihead,
    step_of,
    train,
)

N, S, D = 4, 5, 3
LENGTHS = (5, 2, 4, 1)


def padding_behind(lengths=LENGTHS) -> Tensor:
    return torch.arange(S)[None] < torch.tensor(lengths)[:, None]


def padding_anywhere() -> Tensor:
    keep = torch.rand(N, S, generator=torch.Generator().manual_seed(3)) > 0.4
    keep[:, 1] = True
    return keep


KEEPS = {"behind": padding_behind(), "anywhere": padding_anywhere(), "none": torch.ones(N, S, dtype=torch.bool)}


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
        x = x if self.table is None else torch.tanh(embedding(tape, "table", x, self.table.weight))
        z = tape.linear("second", self.second, torch.tanh(tape.linear("first", self.first, x)))
        return tape.linear("head", self.head, torch.tanh(z.sum(1) / max(z.shape[1], 1)))


def unpadded(x: Tensor, keep: Tensor) -> list[tuple[Tensor]]:
    return [(x[n : n + 1][:, keep[n]],) for n in range(len(x))]


def expected(model: Tokens, x: Tensor, keep: Tensor, y: Tensor) -> dict:
    return expected_pairs(twin(model).by_hand, unpadded(x, keep), y.split(1), F.cross_entropy)


def check(model: Tokens, keep: Tensor, given: Tensor | None, **keywords) -> None:
    """A step under a mask has the factors of the rows without padding."""
    x, y = garbage(noise(N, S, D), keep), labels(N, 3)
    pairs = expected(model, x, keep, y)
    opt = plain_kfac(model, **keywords)
    with opt.mask(given):
        output = model(x.transpose(0, 1).contiguous() if keywords else x.clone().requires_grad_(), keep)
    F.cross_entropy(output, y).backward()
    opt.step()
    check_factors(opt, pairs)


def check_factors(opt, pairs: dict) -> None:
    for name, pair in pairs.items():
        check_block(opt, name, pair)


def garbage(x: Tensor, keep: Tensor) -> Tensor:
    """Large values where there is padding: they would show."""
    return torch.where(keep[..., None], x, torch.full_like(x, 50.0))


SOME = padding_anywhere()
# what is real, and what is given for it: masks of ones and zeros as tokenizers give them, or None where all is
MASKS = {
    "behind": (padding_behind(), padding_behind()),
    "anywhere": (SOME, SOME),
    "no padding": (KEEPS["none"], KEEPS["none"]),
    "no mask": (KEEPS["none"], None),
    "integers": (SOME, SOME.to(torch.int64)),
    "bytes": (SOME, SOME.to(torch.uint8)),
    "an example without a token": (padding_behind((5, 0, 4, 1)),) * 2,
}


@pytest.mark.parametrize("kind", MASKS)
def test_statistics_are_those_of_the_unpadded_rows(kind):
    keep, given = MASKS[kind]
    check(seeded_build(Tokens), keep, given)


@pytest.mark.parametrize("where", ["behind", "anywhere"])
def test_a_table_of_words(where):
    model, keep, y = seeded_build(lambda: Tokens(words=True)), KEEPS[where], labels(N, 3)
    x = torch.randint(7, (N, S), generator=torch.Generator().manual_seed(0))
    pairs = expected(model, x, keep, y)
    opt = plain_kfac(model)
    with opt.mask(keep):
        train(opt, model, (x, keep), y, F.cross_entropy)
    A, B = pairs.pop("table")
    A = torch.diag(A.diagonal())
    check_block(opt, "table", (A, B), torch.kron(A, B))
    check_factors(opt, pairs)


def test_gradients_are_as_without_the_mask_and_zero_at_padding():
    model, keep, y = seeded_build(Tokens), KEEPS["behind"], labels(N, 3)
    plain, x = twin(model), noise(N, S, D).requires_grad_()
    opt = plain_kfac(model)
    with opt.mask(keep):
        output = model(x, keep)
    assert torch.equal(output, plain(x, keep))
    F.cross_entropy(output, y).backward()
    assert x.grad[keep].any()
    assert not x.grad[~keep].any()
    F.cross_entropy(plain(x, keep), y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_gradients_at_padding_do_not_count():
    """Where the loss reads padded positions too, their rows are no rows all the same."""

    class Reading(Tokens):
        def pooled(self, z: Tensor, keep: Tensor) -> Tensor:
            return z.mean(1)

    model, keep, y = seeded_build(Reading), KEEPS["anywhere"], labels(N, 3)
    plain, x, outputs = twin(model), noise(N, S, D), []
    plain.second.register_forward_hook(lambda module, args, z: z.retain_grad() or outputs.append((args[0], z)))
    F.cross_entropy(plain(x, keep), y).backward()
    ((a, z),) = outputs
    a, g = a.detach()[keep], N * z.grad[keep]
    opt = plain_kfac(model)
    with opt.mask(keep):
        train(opt, model, (x, keep), y, F.cross_entropy)
    check_block(opt, "second", (a.mT @ a / len(a), g.mT @ g / N))


def test_reduce_does_not_average_over_padding_unsaid():
    """It follows the mask, or leaves the padded layers to the fallback with a warning by name; never the plain mean."""
    model, keep, y = seeded_build(Tokens), KEEPS["behind"], labels(N, 3)
    x = garbage(noise(N, S, D), keep)
    rows = expected_pairs(twin(model).by_hand, unpadded(x, keep), y.split(1), F.cross_entropy, "reduce")
    opt = plain_kfac(model, approx="reduce", lr=0.1)
    with opt.mask(keep):
        F.cross_entropy(model(x, keep), y).backward()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = dict(zip(("first", "second"), step_of(opt, [model.first.weight, model.second.weight]), strict=True))
    for name, (gradient, moved) in found.items():
        if block_state(opt, name)["factor_updates"]:
            check_block(opt, name, rows[name])
        else:
            assert any(name in str(w.message) and "padded" in str(w.message) for w in told)
            assert_close(moved, 0.1 * gradient)
    check_block(opt, "head", rows["head"])


def test_a_batch_of_nothing_but_padding_is_finite():
    model, keep, y = seeded_build(Tokens), torch.zeros(N, S, dtype=torch.bool), labels(N, 3)
    opt = plain_kfac(model, lr=0.1)
    with opt.mask(keep):
        train(opt, model, (noise(N, S, D), keep), y, F.cross_entropy)
    with opt.mask(KEEPS["behind"]):
        train(opt, model, (noise(N, S, D), KEEPS["behind"]), y, F.cross_entropy)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_each_micro_batch_has_its_own_mask():
    model, y = seeded_build(Tokens), labels(2 * N, 3)
    masks = [KEEPS["behind"], KEEPS["anywhere"]]
    keep = torch.cat(masks)
    x = garbage(noise(2 * N, S, D), keep)
    pairs = expected(model, x, keep, y)
    opt = plain_kfac(model)
    for part, mask, target in zip(x.split(N), masks, y.split(N), strict=True):
        with opt.mask(mask):
            (F.cross_entropy(model(part, mask), target) / 2).backward()
    opt.step()
    check_factors(opt, pairs)


@pytest.mark.parametrize("before", ["a paused forward", "an exception"])
def test_forwards_outside_are_not_masked(before):
    model, keep, y = seeded_build(Tokens), KEEPS["behind"], labels(N, 3)
    x, everything = noise(N, S, D), KEEPS["none"]
    pairs = expected(model, x, everything, y)
    opt = plain_kfac(model)
    if before == "an exception":
        with pytest.raises(KeyError), opt.mask(keep):
            raise KeyError("user's own")
    else:
        with opt.mask(keep), opt.pause_capture():
            model(x, keep)
    train(opt, model, (x, everything), y, F.cross_entropy)
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
            x = x[:, :, None].expand(-1, -1, 2, -1)  # [N, S, 2, D]: two rows per token
            return super().tokens(x).mean(2)

        def by_hand(self, tape, x):
            if layout != "heads":
                return super().by_hand(tape, x)
            x = x[:, :, None].expand(-1, -1, 2, -1)
            z = tape.linear("second", self.second, torch.tanh(tape.linear("first", self.first, x))).mean(2)
            return tape.linear("head", self.head, torch.tanh(z.mean(1)))

    keywords = {"batch_dim": 1} if layout == "batch second" else {}
    check(seeded_build(Laid), SOME, SOME, **keywords)


def test_layers_of_another_shape_are_left_alone():
    """An image beside the text, and a layer over tokens that are paired: no mask fits them, so every row counts."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pairs, self.tokens = nn.Conv2d(1, 2, 2), nn.Linear(2 * D, 2), nn.Linear(D, 2)
            self.head = nn.Linear(2, 3)

        def forward(self, x, image, keep):
            image = torch.tanh(self.conv(image)).mean((2, 3))
            pairs = torch.tanh(self.pairs(torch.cat([x[:, :-1], x[:, 1:]], -1))).mean(1)
            tokens = (torch.tanh(self.tokens(x)) * keep[..., None]).sum(1)
            return self.head(image + pairs + tokens)

    model, keep, y = seeded_build(Beside), KEEPS["behind"], labels(N, 3)
    plain, x, image = twin(model), noise(N, S, D), noise(N, 1, 3, 4, seed=2)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain

        def forward(self, packed):
            parts = packed.split([S * D, 12, S], 1)
            return self.inner(parts[0].unflatten(1, (S, D)), parts[1].reshape(-1, 1, 3, 4), parts[2])

    packed = torch.cat([x.flatten(1), image.flatten(1), keep.double()], 1)
    names = ["inner.conv", "inner.pairs", "inner.head"]
    pairs = expected_factors(Whole(), packed, y, F.cross_entropy, names)
    opt = plain_kfac(model)
    with opt.mask(keep):
        train(opt, model, (x, image, keep), y, F.cross_entropy)
    for name in names:
        check_block(opt, name.removeprefix("inner."), pairs[name])


def test_attention_s_projections_are_masked_too():
    class Attends(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
            self.second = nn.Linear(4, 2)

        def forward(self, x, keep):
            x = torch.tanh(self.first(x))
            z, _ = self.attn(x, x, x, key_padding_mask=~keep, need_weights=False)
            return self.head(torch.tanh(self.pooled(self.second(z), keep)))

        def by_hand(self, tape, x):
            x = torch.tanh(tape.linear("first", self.first, x))
            z = tape.linear("second", self.second, multihead(tape, "attn", self.attn, x, x, x))
            return tape.linear("head", self.head, torch.tanh(z.mean(1)))

    model, keep, y = seeded_build(Attends), KEEPS["anywhere"], labels(N, 3)
    x = garbage(noise(N, S, D), keep)
    pairs = expected(model, x, keep, y)
    opt = plain_kfac(model)
    with opt.mask(keep):
        train(opt, model, (x, keep), y, F.cross_entropy)
    pairs |= attention_pairs(pairs, "attn")
    check_factors(opt, {name: pair for name, pair in pairs.items() if name[-2:] not in (".q", ".k", ".v", "ut")})


def test_norms_and_frozen_weights_are_untouched_by_padding_without_a_gradient():
    class Normed(Tokens):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.first.weight.requires_grad_(False)

        def tokens(self, x):
            return super().tokens(self.norm(x))

    model, keep, y = seeded_build(Normed), KEEPS["anywhere"], labels(N, 3)
    x = garbage(noise(N, S, D), keep) + noise(N, S, D, seed=4)
    plain, us = twin(model), []
    for n in range(N):
        value = F.cross_entropy(plain(x[n : n + 1], keep[n : n + 1]), y[n : n + 1])
        us.append(torch.stack(torch.autograd.grad(value, [plain.norm.weight, plain.norm.bias]), -1))
    u = torch.stack(us)
    opt = plain_kfac(model)
    with opt.mask(keep):
        train(opt, model, (x, keep), y, F.cross_entropy)
    assert_close(opt.dense_curvature("norm"), torch.block_diag(*(torch.einsum("nci,ncj->cij", u, u) / N)), 1e-8)
    assert_close(opt.state[model.first.bias]["factor_a"].flatten(), torch.ones(1, dtype=torch.float64))


def test_a_mask_of_a_wrong_kind_or_shape_is_refused():
    """A mask of floats is one to be added to scores: its zeros mean the opposite."""
    opt = plain_kfac(seeded_build(Tokens))
    for keep in ([[True]], "keep", torch.ones(N, S), torch.ones(N, S, dtype=torch.bfloat16)):
        with pytest.raises(TypeError, match="mask"), opt.mask(keep):
            pass
    for shape in ((N,), (N, S, 1), ()):
        with pytest.raises(ValueError, match="keep|mask"), opt.mask(torch.ones(shape, dtype=torch.bool)):
            pass
