"""Small networks with every type of layer, each written twice: with torch's modules, and by hand on a tape.

Tests of every method use ``CASES``: build a network with :meth:`LayerCase.model`, train it on :meth:`LayerCase.data`,
and compare with :meth:`LayerCase.rows` or :meth:`LayerCase.factors`, which only use the network's
:class:`~tests.support.oracles.layers.Tape`. Blocks have the same names as in the optimizers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import secondorder
from tests.support.kfac import labels, noise
from tests.support.models import seeded_build
from tests.support.oracles import kfac, layers
from tests.support.oracles.kfac import Rows
from tests.support.oracles.layers import Tape, singles, transposed_weight

N = 4
Matrix = Callable[[nn.Parameter], Tensor]


@dataclass(frozen=True)
class LayerCase:
    """A network with one type of layer, and its special properties."""

    network: Callable[[], nn.Module]
    inputs: Callable[[], tuple]  # the batch in the form of the definition, with examples along the first axis
    examples: Callable[[], list[tuple]] | None = None  # arguments of `by_hand`, if they are not the rows of the batch
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)  # products of blocks that consist of several
    tables: frozenset[str] = frozenset()  # lookup tables, whose A is diagonal and whose weight `[V, D]` is transposed
    positions_first: bool = False  # whether time comes before the examples in the batch of the model
    exposed: bool = False  # whether the model needs `secondorder.nn.expose`
    positions: bool = True  # whether a layer has several rows per example, so that "expand" and "reduce" differ
    expand_only: bool = False  # whether the example of a row is unknown, so that "reduce" is not available
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords that an optimizer needs for this network."""
        return {"batch_dim": 1} if self.positions_first else {}

    def model(self) -> nn.Module:
        """A network in float64, the same at every call; the definition is its ``by_hand``."""
        return seeded_build(self.network)

    def ready(self, model: nn.Module) -> nn.Module:
        """The network in the form that an optimizer needs."""
        return secondorder.nn.expose(model) if self.exposed else model

    def data(self) -> tuple[tuple, Tensor]:
        """Arguments of the model, and targets."""
        batch = self.inputs()
        if self.positions_first:
            batch = tuple(x.transpose(0, 1).contiguous() for x in batch)
        return batch, labels(self.number, 3)

    @property
    def number(self) -> int:
        return N if self.examples is None else len(self.examples())

    def by_hand(self) -> list[tuple]:
        """Arguments of ``by_hand``, example by example."""
        return singles(*self.inputs()) if self.examples is None else self.examples()

    def rows(self, model: nn.Module, number: int | None = None) -> dict[str, list[Rows]]:
        """Rows of each group of every block by the definition, in the order ``[W | b]``.

        With ``number``, these are the rows of the first examples only.
        """
        targets = labels(self.number, 3).split(1)
        found = layers.rows_by_example(model.by_hand, self.by_hand()[:number], targets[:number], self.loss)
        own = {block: [found.pop(product) for product in products] for block, products in self.groups.items()}
        return {**own, **{name: [rows] for name, rows in found.items()}}

    def factors(
        self, model: nn.Module, approx: str = "expand", number: int | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """(A, B) of every block; the axis of groups is dropped if there is only one group."""
        pairs = {}
        for name, groups in self.rows(model, number).items():
            A, B = (torch.cat(parts) for parts in zip(*(kfac.factors(rows, approx) for rows in groups), strict=True))
            A, B = (A[0], B[0]) if len(A) == 1 else (A, B)
            pairs[name] = (layers.diagonal_of(A), B) if name in self.tables else (A, B)
        return pairs

    def check(self, opt: Any, expected: dict[str, tuple[Tensor, Tensor]]) -> None:
        """K-FAC has exactly these factors, and each block is their product."""
        assert set(opt.blocks) == set(expected)
        assert "fallback" not in opt.describe()
        for block, (A, B) in expected.items():
            layers.check_block(opt, block, (A, B), torch.kron(A, B) if block in self.tables else None)

    def matrix(self, model: nn.Module, block: str, read: Matrix = lambda p: p.detach().clone()) -> Tensor:
        """The values that ``read`` returns for a block's trained parameters, as ``[Γ, n_g, n_a]``."""
        layer, weight, bias = parameters_of(model, block)
        groups = len(self.groups.get(block, ("",)))
        weight, bias = (None if p is None or not p.requires_grad else read(p) for p in (weight, bias))
        parts = []
        if weight is not None and isinstance(layer, nn.modules.conv._ConvTransposeNd):
            parts.append(transposed_weight(layer, weight))
        elif weight is not None:
            transposed = block in self.tables or isinstance(layer, (Gain, Conv1D))
            weight = weight.mT if transposed else weight.flatten(0, 1) if isinstance(layer, Stacked) else weight
            parts.append(weight.reshape(groups, len(weight) // groups, -1))
        if bias is not None:
            parts.append(bias.reshape(groups, -1, 1))
        return torch.cat(parts, -1)


def parameters_of(model: nn.Module, block: str) -> tuple[nn.Module, nn.Parameter | None, nn.Parameter | None]:
    """The layer of a block, its weight and its bias."""
    if block in dict(model.named_modules()):
        layer = model.get_submodule(block)
        names = ("kernel", "offset") if isinstance(layer, Gain) else ("weight", "bias")
    else:
        owner, _, part = block.rpartition(".")
        layer = model.get_submodule(owner)
        names = (f"{part}_weight", f"{part}_bias") if part == "in_proj" else (f"weight_{part}", f"bias_{part}")
    return (layer, *(getattr(layer, name, None) for name in names))


# --------------------------------------------------------------------------------------- Linear layers and convolutions


def linear(tape: Tape | None, name: str, layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer, or its product on a tape; the weight of a Conv1D is transposed."""
    if tape is None:
        return layer(x)
    return tape.product(name, x, layer.weight.mT if isinstance(layer, Conv1D) else layer.weight, layer.bias)


class Network(nn.Module):
    """A network that is defined by ``by_hand``, which calls torch's modules if there is no tape."""

    def forward(self, *inputs: Any) -> Tensor:
        return self.by_hand(None, *inputs)


class Linear(Network):
    """Two linear layers on any leading dimensions, with a mean over positions."""

    def __init__(self, bias: bool = True, times: int = 1) -> None:
        super().__init__()
        self.inner, self.head, self.times = nn.Linear(3, 3, bias=bias), nn.Linear(3, 3, bias=bias), times

    def by_hand(self, tape: Tape | None, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(linear(tape, "inner", self.inner, x))
        return linear(tape, "head", self.head, pooled(x))


class Tied(Linear):
    """The same network with a second name for the weight and the bias."""

    def __init__(self) -> None:
        super().__init__(times=2)
        self.other = nn.Linear(3, 3)
        self.other.weight, self.other.bias = self.inner.weight, self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(pooled(torch.tanh(self.other(torch.tanh(self.inner(x))))))


def pooled(z: Tensor) -> Tensor:
    """The mean over all but the first and the last axis."""
    return z if z.ndim == 2 else z.flatten(1, -2).mean(1)


class Conv(Network):
    """A convolution or transposed convolution with a pooled head; by hand over patches.

    If ``other`` is given, a second layer with these options shares the weight and bias.
    """

    def __init__(self, kind: type[nn.Module], *sizes: Any, other: dict | None, **options: Any) -> None:
        super().__init__()
        self.conv, self.second = kind(*sizes, **options), None
        if other is not None:
            self.second = kind(*sizes, **{**options, **other})
            self.second.weight, self.second.bias = self.conv.weight, self.conv.bias
        self.head = nn.Linear(sizes[1], 3)

    def by_hand(self, tape: Tape | None, x: Tensor, *output_size: Any) -> Tensor:
        used = [layer for layer in (self.conv, self.second) if layer is not None]
        outputs = [torch.tanh(convolved(tape, layer, x, *output_size)) for layer in used]
        z, *second = (output.flatten(-len(self.conv.kernel_size)).mean(-1) for output in outputs)
        return linear(tape, "head", self.head, z - second[0] / 2 if second else z)


def convolved(tape: Tape | None, layer: nn.Module, x: Tensor, *output_size: Any) -> Tensor:
    """The output of a (transposed) convolution; with a tape, of one example, by one product per group."""
    outputs = layer(x, *output_size)
    if tape is None:
        return outputs
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        rows = layers.transposed_rows(layer, x[0], outputs.shape[2:])
        weights = transposed_weight(layer, layer.weight)
    else:
        rows, weights = kfac.conv_rows(layer, x[0]), layer.weight.unflatten(0, (layer.groups, -1)).flatten(2)
    biases = [None] * layer.groups if layer.bias is None else layer.bias.chunk(layer.groups)
    parts = enumerate(zip(rows, weights, biases, strict=True))
    products = [tape.product(f"conv.{i}", a, weight, bias) for i, (a, weight, bias) in parts]
    return torch.cat(products, -1).mT.unflatten(-1, outputs.shape[2:])[None]


def conv(
    kind: type[nn.Module], sizes: tuple, options: dict, spatial: tuple, *output_size: Any, other: dict | None = None
) -> LayerCase:
    images = noise(N, sizes[0], *spatial)
    return LayerCase(
        lambda: Conv(kind, *sizes, other=other, **options),
        lambda: (images, *output_size),
        (lambda: [(x, *output_size) for x in images.split(1)]) if output_size else None,
        {"conv": tuple(f"conv.{i}" for i in range(options.get("groups", 1)))},
    )


class Conv1D(nn.Module):
    """``x @ weight + bias`` on any leading dimensions, as in the transformers library."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 2), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class GPT2Attention(Network):
    """The attention of GPT-2: one product for q, k and v, and another after the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.head = Conv1D(12, 4), Conv1D(4, 4), nn.Linear(4, 3)

    def by_hand(self, tape: Tape | None, x: Tensor) -> Tensor:
        q, k, v = linear(tape, "c_attn", self.c_attn, x).chunk(3, -1)
        z = linear(tape, "c_proj", self.c_proj, layers.attention(q, k, v, 2))
        return linear(tape, "head", self.head, z.mean(1))


class Pair(Network):
    """A bilinear layer of two inputs on any leading dimensions, with a mean over positions and a head."""

    def __init__(self, bias: bool = True, keywords: bool = False, second_only: bool = False) -> None:
        super().__init__()
        # With `second_only`, the first input of the bilinear layer needs no gradient, but the rows need both inputs.
        self.left = nn.Linear(2, 2) if second_only else nn.Linear(3, 3)
        self.both, self.head = nn.Bilinear(3, 2, 4, bias=bias), nn.Linear(4, 3)
        self.keywords, self.second_only = keywords, second_only

    def by_hand(self, tape: Tape | None, x: Tensor, y: Tensor) -> Tensor:
        left = torch.tanh(linear(tape, "left", self.left, y if self.second_only else x))
        x, y = (x, left) if self.second_only else (left, y)
        if tape is None:
            z = self.both(input1=x, input2=y) if self.keywords else self.both(x, y)
        else:
            products = (x[..., :, None] * y[..., None, :]).flatten(-2)
            z = tape.product("both", products, self.both.weight.flatten(1), self.both.bias)
        return linear(tape, "head", self.head, pooled(torch.tanh(z)))


def bilinear(*lead: int, **options: bool) -> LayerCase:
    return LayerCase(
        lambda: Pair(**options), lambda: (noise(N, *lead, 3), noise(N, *lead, 2, seed=1)), positions=bool(lead)
    )


# -------------------------------------------------------------------------------------------------------- Lookup tables


class Words(Network):
    """A lookup table with a mean over positions and a head; the table is used once or twice."""

    def __init__(self, times: int = 1, **options: Any) -> None:
        super().__init__()
        self.embedding, self.head, self.times = nn.Embedding(7, 3, **options), nn.Linear(3, 3), times

    def by_hand(self, tape: Tape | None, x: Tensor) -> Tensor:
        if self.times == 1:
            z = pooled(torch.tanh(looked_up(tape, self.embedding, x)))
        else:
            one, other = (looked_up(tape, self.embedding, part).mean(1) for part in (x[:, :2], x[:, 2:]))
            z = one * other
        return linear(tape, "head", self.head, z)


def looked_up(tape: Tape | None, layer: nn.Module, x: Tensor) -> Tensor:
    if tape is None:
        return layer(x)
    if isinstance(layer, nn.EmbeddingBag):
        return bag_by_hand(tape, "embedding", layer, x[0].tolist(), [1.0] * x.shape[1])
    return layers.embedding(tape, "embedding", x, layer.weight, layer.padding_idx)


def words(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(0))


def table(*lead: int, network: Callable[..., nn.Module] = Words, positions: bool = True, **options: Any) -> LayerCase:
    return LayerCase(
        lambda: network(**options), lambda: (words(N, *lead),), tables=frozenset({"embedding"}),
        positions=positions and bool(lead),
    )  # fmt: skip


class Bags(nn.Module):
    """A bag per example, times a dense feature, with a head."""

    def __init__(self, by_name: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag, self.head, self.by_name = nn.EmbeddingBag(7, 3, **options), nn.Linear(3, 3), by_name

    def forward(self, feature: Tensor, indices: Tensor, *rest: Tensor | None) -> Tensor:
        z = self.bag(input=indices, offsets=rest[0]) if self.by_name else self.bag(indices, *rest)
        return self.head(torch.tanh(z * feature))

    def by_hand(self, tape: Tape, feature: Tensor, indices: list[int], weights: list[float]) -> Tensor:
        z = bag_by_hand(tape, "bag", self.bag, indices, weights)
        return tape.linear("head", self.head, torch.tanh(z * feature))


def bag_by_hand(tape: Tape, name: str, bag: nn.EmbeddingBag, indices: list[int], weights: list[float]) -> Tensor:
    kept = [(i, w) for i, w in zip(indices, weights, strict=True) if i != bag.padding_idx]
    row = torch.zeros(min(len(kept), 1), 7, dtype=torch.float64)  # a bag that is empty or all padding has no row
    for i, w in kept:
        row[0, i] += w / (len(kept) if bag.mode == "mean" else 1)
    return tape.product(name, row, bag.weight.mT).sum(0, keepdim=True)


class SharedTables(Network):
    """Two tables that share one weight, with different padding or modes."""

    def __init__(self, kind: type[nn.Module], one: dict, other: dict) -> None:
        super().__init__()
        self.embedding, self.second, self.head = kind(7, 3, **one), kind(7, 3, **other), nn.Linear(3, 3)
        nn.init.normal_(self.embedding.weight)
        self.second.weight = self.embedding.weight

    def by_hand(self, tape: Tape | None, x: Tensor) -> Tensor:
        first, second = (pooled(torch.tanh(looked_up(tape, z, x))) for z in (self.embedding, self.second))
        return linear(tape, "head", self.head, first - second / 2)


def shared_tables(kind: type[nn.Module], one: dict, other: dict) -> LayerCase:
    return table(4, network=SharedTables, positions=kind is nn.Embedding, kind=kind, one=one, other=other)


RAGGED = [[0, 3, 3], [5], [1, 2, 6, 1], [4, 2], [6, 6, 6]]
EVEN = [[0, 3, 3], [5, 3, 1], [1, 2, 6], [6, 6, 6]]
WITH_AN_EMPTY_ONE = [*RAGGED[:2], [], *RAGGED[2:]]


def bags(indices: list[list[int]], *, weighted: bool = False, in_rows: bool = False, **options: Any) -> LayerCase:
    flat = torch.tensor([i for bag in indices for i in bag])
    offsets = torch.tensor([0, *map(len, indices)]).cumsum(0)
    given = noise(len(flat), seed=7) if weighted else torch.ones(len(flat), dtype=torch.float64)
    weights = [part.tolist() for part in given.split([len(bag) for bag in indices])]
    feature = noise(len(indices), 1)
    if in_rows:
        flat, given, starts = flat.view(len(indices), -1), given.view(len(indices), -1), None
    else:
        starts = offsets if options.get("include_last_offset") else offsets[:-1]
    return LayerCase(
        lambda: Bags(**options),
        lambda: (feature, flat, starts, given) if weighted else (feature, flat, starts),
        lambda: list(zip(feature.split(1), indices, weights, strict=True)),
        tables=frozenset({"bag"}),
        positions=False,
    )


# ------------------------------------------------------------------------------------------------------------ Attention

IN_PROJ = {"attn.in_proj": ("attn.q", "attn.k", "attn.v"), "attn.out_proj": ("attn.out",)}


def spread(layer: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """Initialize the biases at random, because their default of zero would hide errors."""
    for p in (layer.in_proj_bias, layer.out_proj.bias):
        if p is not None:
            nn.init.normal_(p)
    return layer


def causal(size: int) -> Tensor:
    return torch.full((size, size), -torch.inf, dtype=torch.float64).triu(1)


PADDED = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)


class Attends(nn.Module):
    """One or several calls of attention, with a mean over positions and a head."""

    def __init__(
        self, cross: bool = False, call: dict | None = None, times: int = 1, padded: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.attn = spread(nn.MultiheadAttention(4, 2, **{"batch_first": True, **options}))
        self.head, self.cross, self.call, self.times, self.padded = nn.Linear(4, 3), cross, call or {}, times, padded

    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attn(x, k, v, **({"key_padding_mask": PADDED} if self.padded else {}), **self.call)[0]

    def forward(self, x: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = (k, v) if self.cross else (x, x)
        for _ in range(self.times):
            x = torch.tanh(self.attend(x, k, v))
        return self.head(x.mean(-2 if self.attn.batch_first else 0))  # works without a batch axis, too

    def by_hand(self, tape: Tape, x: Tensor, k: Any = None, v: Tensor | None = None) -> Tensor:
        mask = self.call.get("attn_mask")
        if self.padded:
            mask = torch.zeros(3, 3, dtype=torch.float64).masked_fill(PADDED[k], -torch.inf)
        k, v = (k, v) if self.cross else (x, x)
        for _ in range(self.times):
            x = torch.tanh(layers.multihead(tape, "attn", self.attn, x, k, v, mask))
        return tape.linear("head", self.head, x.mean(1))


class CheckpointedAttention(Attends):
    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(super().attend, x.clone().requires_grad_(), k, v, use_reentrant=True)


def attends(**options: Any) -> LayerCase:
    inputs = [noise(N, 3, 4), noise(N, 5, 4, seed=1), noise(N, 5, 4, seed=2)][: 3 if options.get("cross") else 1]
    return LayerCase(
        lambda: Attends(**options),
        lambda: tuple(inputs),
        (lambda: singles(*inputs, torch.arange(N))) if options.get("padded") else None,
        IN_PROJ,
        positions_first=not options.get("batch_first", True),
    )


# ----------------------------------------------------------------------------------------------------------- Recurrence


class Sequences(nn.Module):
    """A recurrent layer with optional initial states, a mean over time, and a head."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, options = kind, {"batch_first": True, **options}
        self.rnn = getattr(nn, kind)(3, 2, **options)
        self.head = nn.Linear((self.rnn.proj_size or self.rnn.hidden_size) * (1 + self.rnn.bidirectional), 3)

    def forward(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        if start is not None:
            start = start.transpose(0, 1).contiguous()
            start = (start, start.square()) if self.kind == "LSTM" else start
        z, _ = self.rnn(x, start)
        return self.head(torch.tanh(z).mean(-2 if self.rnn.batch_first else 0))  # works without a batch axis, too

    def by_hand(self, tape: Tape, x: Tensor, start: Tensor | None = None) -> Tensor:
        states = None if start is None else [(h, h.square()) for h in start.unbind(1)]
        z = layers.unroll(tape, "rnn", self.kind, self.rnn, x, states)
        return tape.linear("head", self.head, torch.tanh(z).mean(1))


def recurrent(kind: str, *, start: bool = False, **options: Any) -> LayerCase:
    states = [noise(N, options.get("num_layers", 1), 2, seed=5)] if start else []
    first = not options.get("batch_first", True)
    network = partial(Sequences, kind, **options)
    return LayerCase(network, lambda: (noise(N, 3, 3), *states), exposed=True, positions_first=first)


LENGTHS = [3, 1, 4, 2]


class Packed(Sequences):
    """Sequences of different lengths, which are packed in the model or before."""

    def forward(self, x: Any, lengths: Tensor | None = None) -> Tensor:
        if lengths is not None:
            is_sorted = bool((lengths.diff() <= 0).all())
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=is_sorted)
        z, lengths = pad_packed_sequence(self.rnn(x)[0], batch_first=True)
        return self.head(torch.tanh(z).sum(1) / lengths[:, None])


def packed(kind: str, lengths: Sequence[int] = LENGTHS, before: bool = False, **options: Any) -> LayerCase:
    x, sizes = noise(N, 4, 3), torch.tensor(lengths)
    done = pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
    return LayerCase(
        partial(Packed, kind, **options),
        lambda: (done,) if before else (x, sizes),
        lambda: [(x[n : n + 1, :length],) for n, length in enumerate(lengths)],
        exposed=True,
        expand_only=True,
    )


class Stepped(nn.Module):
    """A cell that is called once per time step."""

    def __init__(self, kind: str, bias: bool = True) -> None:
        super().__init__()
        self.kind, self.cell, self.head = kind, getattr(nn, f"{kind}Cell")(3, 2, bias=bias), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0] if self.kind == "LSTM" else state)

    def by_hand(self, tape: Tape, x: Tensor) -> Tensor:
        cell, state = self.cell, (x.new_zeros(1, 2),) * 2
        for t in range(x.shape[1]):
            i = tape.product("cell.ih", x[:, t], cell.weight_ih, cell.bias_ih)
            h = tape.product("cell.hh", state[0], cell.weight_hh, cell.bias_hh)
            state = layers.cell_step(self.kind, i, h, state)
        return tape.linear("head", self.head, state[0])


def cell(kind: str, bias: bool = True) -> LayerCase:
    return LayerCase(lambda: Stepped(kind, bias), lambda: (noise(N, 3, 3),), exposed=True)


# ------------------------------------------------------------------------------ Experts, and layers that are registered


class Experts(Network):
    """Tokens go to the expert in ``route [N, S]``; an expert without tokens is skipped or called on an empty batch."""

    def __init__(self, calls_the_idle: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head, self.calls_the_idle = nn.Linear(4, 3), calls_the_idle

    def by_hand(self, tape: Tape | None, x: Tensor, route: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = route == i
            if mine.any() or (tape is None and self.calls_the_idle):
                z = z.masked_scatter(mine[..., None], torch.tanh(linear(tape, f"experts.{i}", expert, x[mine])))
        return linear(tape, "head", self.head, z.mean(1))


class Stacked(nn.Module):
    """Three experts in one weight, ``[N, S, 4]`` to ``[N, S, 3, 2]``."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 4) / 2)
        self.bias = nn.Parameter(torch.randn(3, 2)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        z = torch.einsum("nsi,eoi->nseo", x, self.weight)
        return z if self.bias is None else z + self.bias


class StackedAdapter(secondorder.Adapter):
    """A block per expert, each of which sees every token."""

    def __init__(self, module: Stacked, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.groups, self.d_out, self.d_in = module.weight.shape

    def is_unbatched(self, x: Tensor) -> bool:
        return False

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        yield x.reshape(1, -1, self.d_in).expand(self.groups, -1, -1)

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return g.reshape(-1, self.groups, self.d_out).transpose(0, 1)

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        return x.reshape(1, examples, -1, self.d_in).expand(self.groups, -1, -1, -1)

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return g.reshape(examples, -1, self.groups, self.d_out).movedim(2, 0)

    def from_matrix(self, matrix: Tensor, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        weight, _ = super().from_matrix(matrix, like)
        return weight, matrix[..., -1].contiguous() if self.has_bias else None


class Mixture(Network):
    """Stacked experts, weighted by gates that are part of the data."""

    def __init__(self, layer: type[Stacked], bias: bool = True) -> None:
        super().__init__()
        self.experts, self.head = layer(bias=bias), nn.Linear(2, 3)

    def by_hand(self, tape: Tape | None, x: Tensor, gates: Tensor) -> Tensor:
        if tape is None:
            z = self.experts(x)
        else:
            biases = [None] * 3 if self.experts.bias is None else self.experts.bias
            experts = enumerate(zip(self.experts.weight, biases, strict=True))
            z = torch.stack([tape.product(f"expert.{i}", x, weight, bias) for i, (weight, bias) in experts], 2)
        return linear(tape, "head", self.head, (torch.tanh(z) * gates[..., None]).sum(2).mean(1))


def gates() -> Tensor:
    """Random gates, many of which are zero; those of one expert are zero for all tokens."""
    on = torch.rand(N, 3, 3, generator=torch.Generator().manual_seed(1)) > 0.5
    on[..., 1] = False
    return on * noise(N, 3, 3, seed=4)


class Gain(nn.Module):
    """``gain · (kernelᵀ x) + offset``, with unusual names of the parameters."""

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
    """Rows are the scaled inputs; the kernel is transposed."""

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


class Own(Network):
    """A layer with a registered adapter, a mean over positions, and a head."""

    def __init__(self, kind: type[Gain], offset: bool = True) -> None:
        super().__init__()
        self.own, self.head = kind(4, 3, offset), nn.Linear(3, 3)

    def by_hand(self, tape: Tape | None, x: Tensor) -> Tensor:
        if tape is None:
            z = self.own(x)
        else:
            z = tape.product("own", self.own.gain * x, self.own.kernel.mT, self.own.offset)
        return linear(tape, "head", self.head, pooled(torch.tanh(z)))


def registered(base: type[nn.Module], adapter: type[secondorder.Adapter]) -> type[nn.Module]:
    """Register an adapter for a new subclass, and return the subclass."""
    kind = type("Registered" + base.__name__, (base,), {})
    secondorder.register_layer(kind, adapter)
    return kind


def stacked(bias: bool) -> LayerCase:
    kind, products = registered(Stacked, StackedAdapter), ("expert.0", "expert.1", "expert.2")
    return LayerCase(lambda: Mixture(kind, bias), lambda: (noise(N, 3, 4), gates()), groups={"experts": products})


def own(offset: bool) -> LayerCase:
    kind = registered(Gain, GainAdapter)
    return LayerCase(lambda: Own(kind, offset), lambda: (noise(N, 3, 4),))


# ---------------------------------------------------------------------------------------------------------- All of them

TRANSPOSED_1D, TRANSPOSED_2D = nn.ConvTranspose1d, nn.ConvTranspose2d

LINEAR = {
    "linear": LayerCase(Linear, lambda: (noise(N, 3),), positions=False),
    "linear-tokens": LayerCase(Linear, lambda: (noise(N, 5, 3),)),
    "linear-no-bias": LayerCase(lambda: Linear(bias=False), lambda: (noise(N, 2, 3, 3),)),
    "linear-called-twice": LayerCase(lambda: Linear(times=2), lambda: (noise(N, 4, 3),)),
    "linear-tied": LayerCase(Tied, lambda: (noise(N, 4, 3),)),
    "bilinear": bilinear(),
    "bilinear-tokens": bilinear(4),
    "bilinear-no-bias": bilinear(2, 3, bias=False),
    "bilinear-keywords": bilinear(4, keywords=True),
    "bilinear-second-input": bilinear(second_only=True),
}

CONVOLUTIONS = {
    "conv1d": conv(nn.Conv1d, (2, 3, 3), {"stride": 2, "padding": 1}, (7,)),
    "conv1d-circular": conv(nn.Conv1d, (2, 3, 2), {"padding": 1, "padding_mode": "circular"}, (5,)),
    "conv2d": conv(nn.Conv2d, (2, 3, 2), {"dilation": (1, 2)}, (4, 5)),
    "conv2d-groups": conv(nn.Conv2d, (4, 6, 2), {"groups": 2, "padding": 1}, (3, 2)),
    "conv2d-no-bias": conv(nn.Conv2d, (2, 3, (1, 3)), {"bias": False, "padding": "same"}, (3, 4)),
    "conv2d-depthwise": conv(nn.Conv2d, (3, 6, 2), {"groups": 3}, (3, 3)),
    "conv3d": conv(nn.Conv3d, (2, 3, 2), {"stride": (1, 2, 1)}, (3, 4, 2)),
}

SHARED = {  # two layers with one weight
    "shared-stride": conv(nn.Conv1d, (2, 3, 3), {}, (7,), other={"stride": 2}),
    "shared-padding": conv(nn.Conv1d, (2, 3, 3), {"padding": "same"}, (5,), other={"padding": "valid"}),
    "shared-circular": conv(
        nn.Conv1d, (2, 3, 3), {"padding": 1, "padding_mode": "reflect"}, (5,),
        other={"padding": 2, "padding_mode": "circular"},
    ),
    "shared-groups": conv(
        nn.Conv1d, (4, 6, 2), {"dilation": 2, "groups": 2, "bias": False}, (6,), other={"dilation": 1, "stride": 2}
    ),
    "shared-2d": conv(
        nn.Conv2d, (2, 3, 2), {"padding": 1}, (3, 4), other={"padding": 0, "dilation": (2, 1), "stride": (1, 2)}
    ),
    "shared-3d": conv(
        nn.Conv3d, (2, 3, (2, 1, 2)), {"padding": 1}, (3, 2, 3),
        other={"padding": 0, "stride": (2, 1, 1), "dilation": (1, 1, 2)},
    ),
    "shared-transposed": conv(TRANSPOSED_1D, (2, 3, 3), {"stride": 2}, (3,), other={"output_padding": 1}),
    "shared-transposed-groups": conv(
        TRANSPOSED_1D, (4, 4, 2), {"dilation": 3, "groups": 2}, (3,), other={"dilation": 1}
    ),
    "shared-transposed-2d": conv(
        TRANSPOSED_2D, (2, 3, 2), {"stride": (1, 2)}, (2, 3), other={"stride": 1, "dilation": (2, 1), "padding": 1}
    ),
    "shared-table-padding": shared_tables(nn.Embedding, {"padding_idx": 3}, {}),
    "shared-table-other-padding": shared_tables(nn.Embedding, {"padding_idx": 0}, {"padding_idx": -1}),
    "shared-bag-mode": shared_tables(nn.EmbeddingBag, {"mode": "sum"}, {"mode": "mean"}),
    "shared-bag-padding": shared_tables(
        nn.EmbeddingBag, {"padding_idx": 2, "mode": "mean"}, {"padding_idx": 0, "mode": "mean"}
    ),
}  # fmt: skip

TRANSPOSED = {  # `test_layer_types.py` tests every option
    "transposed-1d-stride": conv(TRANSPOSED_1D, (2, 3, 3), {"stride": 2}, (4,)),
    "transposed-1d-groups": conv(TRANSPOSED_1D, (4, 6, 3), {"groups": 2, "stride": 2}, (3,)),
    "transposed-1d-no-bias": conv(TRANSPOSED_1D, (2, 3, 3), {"bias": False, "padding": 2}, (4,)),
    "transposed-2d": conv(TRANSPOSED_2D, (2, 3, (2, 3)), {"stride": (2, 1), "padding": (0, 1)}, (2, 3)),
    "transposed-2d-stride": conv(TRANSPOSED_2D, (2, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}, (2, 3)),
    "transposed-2d-groups": conv(TRANSPOSED_2D, (4, 4, 2), {"groups": 2, "stride": 2, "bias": False}, (2, 2)),
    "transposed-2d-depthwise": conv(TRANSPOSED_2D, (3, 3, 2), {"groups": 3}, (2, 2)),
    # an output size given in the call decides the output padding
    "transposed-2d-size-6-5": conv(TRANSPOSED_2D, (2, 3, 3), {"stride": 2, "padding": 1}, (3, 3), (6, 5)),
    "transposed-3d": conv(nn.ConvTranspose3d, (2, 2, 2), {"stride": (1, 2, 1), "output_padding": (0, 1, 0)}, (2, 1, 2)),
}

TABLES = {
    "embedding": table(4), "embedding-one-index": table(), "embedding-two-axes": table(2, 3),
    "embedding-padding": table(4, padding_idx=2), "embedding-padding-last": table(4, padding_idx=-1),
    "embedding-called-twice": table(5, times=2),
}  # fmt: skip

BAGS = {
    "bag-sum": bags(EVEN, in_rows=True, mode="sum"),
    "bag-mean-padding": bags(EVEN, in_rows=True, mode="mean", padding_idx=3),
    "bag-offsets": bags(RAGGED, mode="mean"),
    "bag-offsets-padding": bags(RAGGED, mode="sum", padding_idx=3),
    "bag-last-offset-padding": bags(RAGGED, mode="mean", include_last_offset=True, padding_idx=3),
    "bag-empty-mean": bags(WITH_AN_EMPTY_ONE, mode="mean"),
    "bag-weights-padding": bags(RAGGED, weighted=True, mode="sum", padding_idx=3),
    "bag-weights-in-rows": bags(EVEN, weighted=True, in_rows=True, mode="sum"),
    "bag-keywords": bags(RAGGED, by_name=True, mode="mean"),
}

ATTENTION = {
    "attention": attends(),
    "attention-no-bias": attends(bias=False, call={"need_weights": False}),
    "attention-positions-first": attends(batch_first=False),
    "attention-cross": attends(cross=True),
    "attention-cross-positions-first": attends(cross=True, batch_first=False, bias=False),
    "attention-weights-per-head": attends(call={"average_attn_weights": False}),
    "attention-causal": attends(call={"attn_mask": causal(3)}),
    "attention-said-to-be-causal": attends(call={"attn_mask": causal(3), "need_weights": False, "is_causal": True}),
    "attention-padded-keys": attends(padded=True),
    "attention-zero-key": attends(add_zero_attn=True),
    "attention-called-twice": attends(times=2),
    "attention-one-memory": LayerCase(
        lambda: Attends(cross=True), lambda: (noise(N, 3, 4), *[noise(N, 5, 4, seed=1)] * 2), groups=IN_PROJ
    ),
    "attention-checkpointed": LayerCase(CheckpointedAttention, lambda: (noise(N, 3, 4),), groups=IN_PROJ),
}

RECURRENCE = {
    "lstm": recurrent("LSTM"),
    "gru": recurrent("GRU"),
    "rnn": recurrent("RNN"),
    "rnn-relu": recurrent("RNN", nonlinearity="relu"),
    "lstm-no-bias": recurrent("LSTM", bias=False),
    "gru-positions-first": recurrent("GRU", batch_first=False),
    "lstm-two-layers": recurrent("LSTM", num_layers=2),
    "gru-two-layers-bidirectional": recurrent("GRU", num_layers=2, bidirectional=True),
    "lstm-two-layers-bidirectional": recurrent("LSTM", num_layers=2, bidirectional=True),
    "lstm-projected": recurrent("LSTM", proj_size=1, num_layers=2, bidirectional=True),
    "lstm-states": recurrent("LSTM", start=True, num_layers=2),
    "rnn-states": recurrent("RNN", start=True, num_layers=2),
    "lstm-packed": packed("LSTM"),
    "gru-packed-sorted": packed("GRU", sorted(LENGTHS, reverse=True)),
    "rnn-packed": packed("RNN", num_layers=2, bidirectional=True),
    "gru-packed-bidirectional": packed("GRU", num_layers=2, bidirectional=True),
    "lstm-packed-before": packed("LSTM", before=True),
    "lstm-cell": cell("LSTM"),
    "gru-cell": cell("GRU", bias=False),
    "rnn-cell": cell("RNN"),
}

EXPERTS = {
    "experts": LayerCase(Experts, lambda: (noise(N, 3, 4), words(N, 3) % 3), expand_only=True),
    "experts-stacked": stacked(True),
    "experts-stacked-no-bias": stacked(False),
    "registered": own(True),
    "registered-no-offset": own(False),
}

#: Every type of layer whose rows are products.
CASES = {**LINEAR, **CONVOLUTIONS, **SHARED, **TRANSPOSED, **TABLES, **BAGS, **ATTENTION, **RECURRENCE, **EXPERTS}
#: One difficult case of each type.
ONE_OF_EACH = (
    "linear-tied", "bilinear-tokens", "conv2d-groups", "conv1d-circular", "transposed-1d-groups",
    "transposed-2d-stride", "transposed-3d", "shared-2d", "shared-transposed",
    "shared-table-padding", "embedding-padding", "bag-offsets", "bag-weights-padding", "attention",
    "attention-cross-positions-first", "lstm-two-layers", "gru", "rnn-packed", "gru-cell",
    "experts-stacked", "registered",
)  # fmt: skip
