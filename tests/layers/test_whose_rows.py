"""Which rows belong to which example: ambiguous layouts, tokens as data, shared positions, parts of a batch.

A layer whose examples are unknown is left out with a reason; it never gets statistics of the wrong rows.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.ekfac import assert_scales, held_bases, held_scales, plain_ekfac, state_of
from tests.support.grid import each, pairs
from tests.support.kfac import assert_close, labels, noise, plain_kfac, train_step
from tests.support.models import Net, seeded_build
from tests.support.oracles.ekfac import scales
from tests.support.oracles.layers import Tape, multihead, row_of
from tests.support.warned import warned

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing was captured")


def train(opt, model: nn.Module, x: Tensor, loss, keep: Tensor | None = None, steps: int = 2) -> None:
    """Steps on one batch without moving the parameters: a basis, then a scale in it."""
    for group in opt.param_groups:
        group["lr"] = 0.0
    for _ in range(steps):
        opt.zero_grad()
        with opt.mask(keep):
            outputs = model(x)
        loss(outputs).backward()
        opt.step()


def is_left_out(opt, layer: nn.Module) -> bool:
    """Whether a layer has no statistics; then the table has the reason."""
    state = state_of(opt, layer)
    if state["factor_updates"] or state["refreshes"]:
        return False
    assert state.get("scale_updates", 0) == 0
    (group,) = opt.param_groups
    (name,) = [n for n, p in zip(group["param_names"], group["params"], strict=True) if p is layer.weight]
    assert len(row_of(opt, name).partition(" fallback: ")[2]) > 20
    return True


def gradients(layer: nn.Module, examples: list[Tensor], loss) -> Tensor:
    """``[N, 1, d_out, d_in]``: the gradient of each example's own loss, by hand."""
    weight = layer.weight.detach().clone().requires_grad_()
    return torch.stack([torch.autograd.grad(loss(x @ weight.mT, n), weight)[0][None] for n, x in enumerate(examples)])


def positions_first(flat: bool) -> Net:
    """``[S, N, 3]`` to ``[S, N, 2]``, on sequences or on their flattened rows."""

    def forward(net, x):
        return net.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if flat else net.layer(x)

    return Net(forward, layer=nn.Linear(3, 2, bias=False))


@pairs(size={"5x4": (5, 4), "4x4": (4, 4), "8x4": (8, 4), "2x4": (2, 4), "4x1": (4, 1)}, flat=[False, True])
def test_the_scale_of_sequence_first_batches(size, flat):
    S, N = size
    for transport in ("project", "recompute"):
        model, x, y = seeded_build(lambda: positions_first(flat)), noise(S, N, 3), noise(S, N, 2, seed=1)
        opt = plain_ekfac(model, batch_dim=1, transport=transport)
        train(opt, model, x, lambda f, y=y: (f - y).square().sum((0, 2)).mean())
        if flat and is_left_out(opt, model.layer):
            continue
        G = gradients(model.layer, list(x.unbind(1)), lambda f, n, y=y: (f - y[:, n]).square().sum())
        assert_close(held_scales(opt, model.layer), scales(G, *held_bases(opt, model.layer)), 1e-9)


@pytest.mark.parametrize(("batch_dim", "S", "N"), [(0, 4, 4), (1, 5, 4), (1, 4, 4)])
def test_a_layer_that_is_the_whole_model(batch_dim, S, N):
    layer = seeded_build(lambda: nn.Linear(3, 2, bias=False))
    x = noise(*((N, S) if batch_dim == 0 else (S, N)), 3)
    keep = torch.arange(S)[None] < torch.tensor([1, 2, 3, 4])[:, None]
    along = keep if batch_dim == 0 else keep.mT
    opt = plain_kfac(layer, batch_dim=batch_dim)
    train(opt, layer, x, lambda f: (f * along[..., None]).square().sum() / N, keep, steps=1)
    rows, state = x[along], state_of(opt, layer)
    g = 2 * rows @ layer.weight.detach().mT
    assert_close(state["factor_a"], rows.mT @ rows / len(rows), 1e-9)
    assert_close(state["factor_g"], g.mT @ g / N, 1e-9)
    assert float(state["factor_weight"]) == N


def batches(*lengths: int | list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Micro-batches of three sequences of the given lengths; a list has the numbers of real tokens out of 8."""
    found = []
    for i, n in enumerate(lengths):
        size, real = (n, [n] * 3) if isinstance(n, int) else (8, n)
        keep = torch.arange(size)[None] < torch.tensor(real)[:, None]
        found.append((noise(3, size, 3, seed=i), noise(3, size, 2, seed=i + 9), keep))
    return found


BATCHES = {
    "equal": batches(4, 4), "short first": batches(4, 12), "long first": batches(12, 4),
    "mask": batches([2, 2, 4]), "masks": batches([2, 2, 4], [8, 1, 5]),
}  # fmt: skip


@each(case=BATCHES.keys(), reduction=["mean", "sum"])
def test_the_scale_of_tokens_as_data(case, reduction):
    """It is the mean over the real tokens of the step of a token's own squared gradient."""
    total = 1 if reduction == "sum" else sum(int(keep.sum()) for *_, keep in BATCHES[case])
    model = seeded_build(lambda: nn.Sequential(nn.Linear(3, 2, bias=False)))
    opt = plain_ekfac(model, lr=0.0, token_is_example=True, loss_reduction=reduction)
    for _ in range(2):
        opt.zero_grad()
        for x, y, keep in BATCHES[case]:
            with opt.mask(None if bool(keep.all()) else keep):
                found = (model(x) - y).square().sum(-1)[keep]
            (found.sum() / total).backward()
        opt.step()
    tokens = [(x[keep], y[keep]) for x, y, keep in BATCHES[case]]
    rows, targets = (torch.cat(parts) for parts in zip(*tokens, strict=True))
    G = gradients(model[0], list(rows), lambda f, n: (f - targets[n]).square().sum())
    assert_close(held_scales(opt, model[0]), scales(G, *held_bases(opt, model[0])), 1e-9)


def attention(E: int = 4) -> Net:
    layer = nn.MultiheadAttention(E, 2, batch_first=True, bias=False)
    return Net(lambda net, q, *kv: net.attention(q, *(kv or (q,)) * 2, need_weights=False)[0], attention=layer)


def test_tokens_as_data_in_cross_attention():
    """Queries and outputs have 2 positions in an example whose keys have 10."""
    N, L, S, E = 3, 2, 10, 4
    model = seeded_build(attention)
    q, kv, y = noise(N, L, E), noise(N, S, E, seed=1), noise(N, L, E, seed=2)
    opt = plain_ekfac(model, lr=0.0, token_is_example=True)
    for _ in range(2):
        opt.zero_grad()
        (model(q, kv) - y).square().sum(-1).mean().backward()
        opt.step()
    tape = Tape()
    outputs = multihead(tape, "attention", model.attention, q, kv, kv)
    blocks = {"attention.q": "in_proj", "attention.out": "out_proj"}
    calls = [(blocks[name], a, z) for name, a, z in tape.calls if name in blocks]
    gradients = torch.autograd.grad((outputs - y).square().sum(-1).mean(), [z for *_, z in calls])
    for (key, a, _), g in zip(calls, gradients, strict=True):
        G = N * L * g.reshape(-1, E, 1) * a.reshape(-1, 1, E)
        state = opt.state[opt.blocks[f"attention.{key}"].owner]
        s, Q_A, Q_B = (state[k] if state[k].ndim == 2 else state[k][0] for k in ("scale", "basis_a", "basis_g"))
        assert_close(s, scales(G[:, None], Q_B[None], Q_A[None])[0], 1e-9, key)


T = 8


def positioned() -> Net:
    """Positions are looked up once for the whole batch."""

    def forward(net, x):
        words = x if x.is_floating_point() else net.words(x)
        return net.head(torch.tanh(words + net.place(torch.arange(x.shape[1]))))

    return Net(forward, words=nn.Embedding(5, 3), place=nn.Embedding(T + 1, 3), head=nn.Linear(3, 2))


def read(f: Tensor) -> Tensor:
    return f.square().flatten(1).sum(1).mean()


@pairs(N=[2, 8, 16], kind=["indices", "features"], method=["scale", "reduce"])
def test_shared_positions_are_never_split_among_the_examples(N, kind, method):
    model = seeded_build(positioned)
    x = torch.arange(N * T).view(N, T) % 5 if kind == "indices" else noise(N, T, 3)
    opt = plain_ekfac(model) if method == "scale" else plain_kfac(model, approx="reduce")
    with warned() as caught:
        train(opt, model, x, read, steps=3)
    assert is_left_out(opt, model.place)
    assert any("place" in w and "shared by the whole batch" in w for w in caught)
    assert state_of(opt, model.head)["refreshes"] > 0
    if method == "scale":
        assert_scales(opt, model, seeded_build(positioned), x, torch.zeros(N), lambda f, _: read(f), ["head"])
    opt.param_groups[0]["lr"], before = 0.1, model.place.weight.detach().clone()
    opt.step()
    assert_close(before - model.place.weight.detach(), 0.1 * model.place.weight.grad)


def columns() -> Net:
    """A table for each column of the input."""

    def forward(net, x):
        return net.head(torch.tanh(sum(table(x[:, i]) for i, table in enumerate(net.tables))))

    return Net(forward, tables=nn.ModuleList(nn.Embedding(5, 3) for _ in range(3)), head=nn.Linear(3, 2))


@pytest.mark.parametrize("N", [2, 6])
def test_one_row_per_example_is_not_mistaken_for_a_shared_position(N):
    model, x = seeded_build(columns), torch.arange(N * 3).view(N, 3) % 5
    opt = plain_ekfac(model)
    train(opt, model, x, read)
    for i, table in enumerate(model.tables):
        seen = held_scales(opt, table)[0].sum(0) > 0
        assert seen.nonzero().flatten().tolist() == sorted(set(x[:, i].tolist()))


@pytest.mark.parametrize("length", [5, 12, 24])
def test_whole_examples_are_drawn_in_attention(length):
    """Every example has an axis of its own, so A shows which ones are in it."""
    N, kept = 12, 2
    model = seeded_build(lambda: attention(N))
    x = torch.eye(N, dtype=torch.float64)[:, None].expand(N, length, N).contiguous()
    opt = plain_kfac(model, factor_batch_size=kept)
    train(opt, model, x, read, steps=1)
    for A in opt.state[model.attention.in_proj_weight]["factor_a"]:
        diagonal = A.diagonal()
        assert int((diagonal > 0).sum()) == kept
        assert_close(diagonal[diagonal > 0], torch.full((kept,), 1 / kept, dtype=torch.float64), 1e-12)


def test_examples_are_drawn_for_the_scale_of_a_table():
    N = 12
    table = seeded_build(lambda: nn.Embedding(N, 3))
    model, y = nn.Sequential(table), noise(N, 6, 3, seed=4)
    opt = plain_ekfac(model, scale_batch_size=1)
    train(opt, model, torch.arange(N)[:, None].expand(N, 6), lambda f: read(f - y))
    s = held_scales(opt, table)[0]
    (chosen,) = (s.sum(0) > 0).nonzero().flatten().tolist()
    gradient = 2 * (table.weight.detach()[chosen] - y[chosen]).sum(0)
    Q_B = held_bases(opt, table)[0][0]
    assert_close(s[:, chosen], (Q_B.mT @ gradient).square(), 1e-9)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_warning_about_compiled_attention_names_expose():
    model = seeded_build(attention)
    opt = plain_kfac(model, lr=0.01)
    fast, x, y = torch.compile(model, backend="eager"), noise(3, 4, 4), labels(3, 4)
    with warned() as caught:
        for _ in range(2):
            train_step(opt, fast, x, y, lambda output, target: F.cross_entropy(output.mean(1), target))
    assert any("secondorder.nn.expose" in w for w in caught)
    assert math.isfinite(float(model.attention.in_proj_weight.detach().sum()))
