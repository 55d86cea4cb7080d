"""Models written by hand for one example at a time, whose products ``z = W a + b`` are recorded.

A test builds the same network twice: once from torch's modules, which the optimizer sees, and once as a function of a
:class:`Tape` and the same parameters. The factors of the first must be those that the rows of the second define. No
code of the package is used for the latter.

    symbol      shape           meaning
    a           [S_n, n_a]      input rows of one product of example n, the 1 last iff its bias is trained
    g           [S_n, n_g]      gradient of that example's loss at the output rows
    A, B                        as in ``tests.support.oracles.kfac``
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.kfac import assert_close
from tests.support.oracles.kfac import Loss, Rows, factors, kron


def trained(parameter: Tensor | None) -> bool:
    return parameter is not None and parameter.requires_grad


class Tape:
    """Records (name, a, z) of every product of one example."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor, Tensor]] = []

    def product(self, name: str, a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[..., d_in]`` to ``[..., d_out]`` by ``weight`` of ``[d_out, d_in]``."""
        z = a @ weight.mT
        z = z if bias is None else z + bias
        parts = [a.detach().reshape(-1, a.shape[-1])] if trained(weight) else []
        if trained(bias):
            parts.append(a.new_ones(a.shape[:-1].numel(), 1))
        if parts:
            self.calls.append((name, torch.cat(parts, -1), z))
        return z

    def linear(self, name: str, layer: nn.Module, a: Tensor) -> Tensor:
        return self.product(name, a, layer.weight, layer.bias)


Run = Callable[..., Tensor]


def rows_by_example(run: Run, examples: Sequence[tuple], targets: Sequence[Tensor], loss: Loss) -> dict[str, Rows]:
    """Rows of all products of ``run(tape, *example)``; an example adds no rows to products that it does not reach."""
    notes = []
    for example, target in zip(examples, targets, strict=True):
        tape = Tape()
        value = loss(run(tape, *example), target)
        outputs = [z for *_, z in tape.calls]
        gradients = torch.autograd.grad(value, outputs, allow_unused=True, materialize_grads=True)
        mine: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for (name, a, _), g in zip(tape.calls, gradients, strict=True):
            mine.setdefault(name, []).append((a, g.reshape(-1, g.shape[-1])))
        notes.append(mine)
    found = {}
    for name in dict.fromkeys(name for mine in notes for name in mine):
        a, g = next(mine[name][0] for mine in notes if name in mine)
        empty = [(a[:0], g[:0])]
        calls = [mine.get(name, empty) for mine in notes]
        found[name] = Rows(
            [torch.cat([a for a, _ in pairs])[None] for pairs in calls],
            [torch.cat([g for _, g in pairs])[None] for pairs in calls],
        )
    return found


def singles(*batches: Tensor) -> list[tuple[Tensor, ...]]:
    """Examples of batches ``[N, ...]``, each with a batch axis of 1."""
    return list(zip(*(x.split(1) for x in batches), strict=True))


def expected_pairs(
    run: Run, examples: Sequence[tuple], targets: Sequence[Tensor], loss: Loss, approx: str = "expand"
) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) by product name."""
    found = rows_by_example(run, examples, targets, loss)
    return {name: tuple(x[0] for x in factors(rows, approx)) for name, rows in found.items()}


def diagonal_of(A: Tensor) -> Tensor:
    return A * torch.eye(A.shape[-1], dtype=A.dtype)


# ----------------------------------------------------------------------------------------------- State of the optimizer


def block_state(opt, name: str) -> dict:
    return opt.state[opt.blocks[name].owner]


def held(opt, name: str) -> tuple[Tensor, Tensor]:
    """(A, B) of a block; a factor that is stored as a vector is returned as a diagonal matrix."""
    state, groups = block_state(opt, name), opt.blocks[name].adapter.groups
    matrices = []
    for side in ("factor_a", "factor_g"):
        x = state[side].detach().clone()
        matrices.append(x.diag_embed() if x.ndim == 1 + (groups > 1) else x)
    return matrices[0], matrices[1]


def check_block(opt, name: str, pair: tuple[Tensor, Tensor], dense: Tensor | None = None, tolerance=1e-9) -> None:
    """State and ``dense_curvature`` of a block against (A, B); ``dense`` where it is not ``kron(B, A)``."""
    A, B = held(opt, name)
    assert_close(A, pair[0], tolerance, f"A of {name!r}")
    assert_close(B, pair[1], tolerance, f"B of {name!r}")
    assert_close(opt.dense_curvature(name), kron(pair[1], pair[0]) if dense is None else dense, tolerance, name)


def step_of(opt, params: Sequence[nn.Parameter]) -> list[tuple[Tensor, Tensor]]:
    """Take a step with the current gradients; (∇, V) of some parameters, where V is their change (lr = 1)."""
    before = [p.detach().clone() for p in params]
    gradients = [p.grad.clone() for p in params]
    opt.step()
    return [(g, old - p.detach()) for p, old, g in zip(params, before, gradients, strict=True)]


def row_of(opt, name: str) -> str:
    """The line of a parameter in ``describe()``."""
    (line,) = [line for line in opt.describe().splitlines() if line.split()[:1] == [name]]
    return line


def follows_fallback(opt, name: str, *reason: str) -> bool:
    """Whether a parameter uses the fallback, and its row gives the reason in these words."""
    row = row_of(opt, name).lower()
    return "fallback" in row and all(word.lower() in row for word in reason)


# ----------------------------------------------------------------------------------------------- Layers of transformers


def embedding(tape: Tape, name: str, tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """A table look-up as the product of one-hot rows; padding is looked up, but is no row."""
    flat = tokens.reshape(-1)
    real = (flat != padding_idx).nonzero()[:, 0] if padding_idx is not None else torch.arange(len(flat))
    one_hot = F.one_hot(flat[real], len(weight)).to(weight.dtype)
    z = tape.product(name, one_hot, weight.mT)
    return weight.detach()[flat].index_put((real,), z).reshape(*tokens.shape, weight.shape[1])


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of projected ``[N, T, E]`` and ``[N, S, E]``; ``mask`` is added to the scores."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def multihead(
    tape: Tape, name: str, layer: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention of ``[N, T, E]`` from four products: ``name.q``, ``name.k``, ``name.v`` and ``name.out``."""
    if layer.in_proj_weight is not None:
        weights = layer.in_proj_weight.chunk(3)
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = (
        tape.product(f"{name}.{part}", x, weight, bias)
        for part, x, weight, bias in zip("qkv", (q, k, v), weights, biases, strict=True)
    )
    if layer.bias_k is not None:
        k, v = (torch.cat([x, row.expand(len(x), -1, -1)], 1) for x, row in ((k, layer.bias_k), (v, layer.bias_v)))
    if layer.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return tape.linear(f"{name}.out", layer.out_proj, attention(q, k, v, layer.num_heads, mask))


def feedforward(tape: Tape, name: str, layer: nn.Module, x: Tensor) -> Tensor:
    hidden = layer.activation(tape.linear(f"{name}.linear1", layer.linear1, x))
    return tape.linear(f"{name}.linear2", layer.linear2, hidden)


def residual(layer: nn.Module, norm: nn.Module, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
    return x + inner(norm(x)) if layer.norm_first else norm(x + inner(x))


def encoder_layer(tape: Tape, name: str, layer: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    x = residual(layer, layer.norm1, x, lambda x: multihead(tape, f"{name}.self_attn", layer.self_attn, x, x, x))
    return residual(layer, layer.norm2, x, lambda x: feedforward(tape, name, layer, x))


def decoder_layer(
    tape: Tape, name: str, layer: nn.TransformerDecoderLayer, x: Tensor, memory: Tensor, mask: Tensor | None = None
) -> Tensor:
    def look(x: Tensor) -> Tensor:
        return multihead(tape, f"{name}.multihead_attn", layer.multihead_attn, x, memory, memory)

    x = residual(layer, layer.norm1, x, lambda x: multihead(tape, f"{name}.self_attn", layer.self_attn, x, x, x, mask))
    x = residual(layer, layer.norm2, x, look)
    return residual(layer, layer.norm3, x, lambda x: feedforward(tape, name, layer, x))


def attention_pairs(expected: dict, name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of the two blocks of an attention layer: q, k, v are the groups of the first."""
    A, B = (torch.stack([expected[f"{name}.{part}"][i] for part in "qkv"]) for i in (0, 1))
    return {f"{name}.in_proj": (A, B), f"{name}.out_proj": expected[f"{name}.out"]}


# ------------------------------------------------------------------------- Recurrent layers and transposed convolutions

State = tuple[Tensor, ...]


def cell_step(kind: str, i: Tensor, h: Tensor, state: State, nonlinearity: str = "tanh") -> State:
    """One step from the two products ``i = W_ih x + b_ih`` and ``h = W_hh h + b_hh``; the state starts with h."""
    if kind == "RNN":
        return (torch.relu(i + h) if nonlinearity == "relu" else torch.tanh(i + h),)
    if kind == "GRU":
        ir, iz, i_n = i.chunk(3, -1)
        hr, hz, hn = h.chunk(3, -1)
        reset, update = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
        new = torch.tanh(i_n + reset * hn)
        return ((1 - update) * new + update * state[0],)
    into, forget, candidate, out = (i + h).chunk(4, -1)
    c = torch.sigmoid(forget) * state[1] + torch.sigmoid(into) * torch.tanh(candidate)
    return torch.sigmoid(out) * torch.tanh(c), c


def unroll(tape: Tape, name: str, kind: str, layer: nn.RNNBase, x: Tensor, start: list[State] | None = None) -> Tensor:
    """Outputs ``[1, T, H · directions]`` of a stack of layers over one sequence ``[1, T, D]``."""
    for i in range(layer.num_layers):
        outputs = []
        for suffix in ("", "_reverse")[: 1 + layer.bidirectional]:
            widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)[: 1 + (kind == "LSTM")]
            state = tuple(x.new_zeros(1, width) for width in widths)
            if start is not None:
                state = start[len(outputs) + i * (1 + layer.bidirectional)]

            def product(part: str, a: Tensor, at: str = f"l{i}{suffix}") -> Tensor:
                weight, bias = (getattr(layer, f"{what}_{part}_{at}", None) for what in ("weight", "bias"))
                return tape.product(f"{name}.{part}_{at}", a, weight, bias)

            steps = range(x.shape[1])
            found = {}
            for t in reversed(steps) if suffix else steps:
                inputs = product("ih", x[:, t]), product("hh", state[0])
                state = cell_step(kind, *inputs, state, getattr(layer, "nonlinearity", "tanh"))
                if layer.proj_size:
                    state = (product("hr", state[0]), *state[1:])
                found[t] = state[0]
            outputs.append(torch.stack([found[t] for t in steps], 1))
        x = torch.cat(outputs, -1)
    return x


def transposed_rows(layer: nn.Module, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Rows ``[Γ, S, C/Γ · k]`` of one example ``[C, *spatial]`` for outputs of ``sizes``, a row ordered (c, k...).

    Element ``l`` of the input reaches, through kernel offset ``j``, the pixel ``l·stride + j·dilation − padding``.
    """
    axes = list(zip(layer.stride, layer.dilation, layer.padding, x.shape[1:], strict=True))
    rows = []
    for pixel in itertools.product(*map(range, sizes)):
        columns = []
        for offset in itertools.product(*map(range, layer.kernel_size)):
            places = zip(pixel, offset, axes, strict=True)
            sources = [divmod(o + padding - j * d, stride) for o, j, (stride, d, padding, _) in places]
            reached = all(not rest and 0 <= at < axis[-1] for (at, rest), axis in zip(sources, axes, strict=True))
            index = (slice(None), *(source for source, _ in sources))
            columns.append(x[index] if reached else x.new_zeros(len(x)))
        rows.append(torch.stack(columns, -1))  # [C, k]
    return torch.stack(rows).reshape(len(rows), layer.groups, -1).transpose(0, 1)


def transposed_weight(layer: nn.Module, weight: Tensor) -> Tensor:
    """``[Γ, d_o/Γ, d_i/Γ · k]`` of a tensor shaped like the weight."""
    grouped = weight.reshape(layer.groups, layer.in_channels // layer.groups, -1, math.prod(layer.kernel_size))
    return grouped.transpose(1, 2).flatten(2)
