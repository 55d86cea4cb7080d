"""The transformer layers that the workloads on text share, and the decoder built from them.

Queries, keys and values are separate ``nn.Linear`` layers, so each one is a Kronecker block of its own.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def dropping(share: float) -> nn.Module:
    return nn.Dropout(share) if share else nn.Identity()


class Attention(nn.Module):
    """Self-attention with separate projections."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Layer(nn.Module):
    """One transformer layer, with its norms in front of its two halves or behind them."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = True,
        norm_first: bool = True,
        eps: float = 1e-5,
        activation: Callable[[], nn.Module] = nn.GELU,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attention = Attention(width, heads, causal, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width))
        self.dropout = dropping(dropout)
        self.norm_first = norm_first

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return the next hidden states; arguments as of :meth:`Attention.forward`."""
        if self.norm_first:
            x = x + self.dropout(self.attention(self.norm1(x), allowed))
            first: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
            return first
        x = self.norm1(x + self.dropout(self.attention(x, allowed)))
        last: Tensor = self.norm2(x + self.dropout(self.mlp(x)))
        return last


class GPT(nn.Module):
    """Token and position embeddings, causal layers with their norms in front, a norm and a head.

    The weights are initialised as torch does by default; :func:`benchmarks.workloads.gpt2.initialise` does it as GPT-2.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        layers: int,
        heads: int,
        *,
        tied: bool = False,
        activation: Callable[[], nn.Module] = nn.GELU,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = dropping(dropout)
        self.layers = nn.Sequential(
            *(Layer(width, heads, activation=activation, dropout=dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        # Looked up for every example, so that each has gradients of its own there.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits
