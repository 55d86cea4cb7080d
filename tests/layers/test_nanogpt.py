"""A GPT as nanoGPT writes it is covered without a keyword: tied weights, a LayerNorm of its own, learned positions."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, HyLo
from tests.layers.test_handwritten_norms import NanoGPTNorm

VOCABULARY, CONTEXT, WIDTH = 31, 12, 16


class Layer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = NanoGPTNorm(WIDTH, bias), NanoGPTNorm(WIDTH, bias)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h, self.ln_f = nn.Sequential(Layer(bias), Layer(bias)), NanoGPTNorm(WIDTH, bias)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(self.h(self.wte(idx) + self.wpe(torch.arange(idx.shape[1])))))


@pytest.mark.parametrize(
    ("method", "bias", "keywords"),
    [
        (KFAC, True, {}),
        (KFAC, False, {"lr": 1e-2, "graft": "adam"}),
        (EKFAC, True, {"lr": 1e-2, "graft": "adam"}),
        (HyLo, True, {"lr": 1e-2, "graft": "adam"}),
    ],
)
def test_it_is_covered_but_for_positions_that_have_no_gradients_of_examples(method, bias, keywords):
    """They are looked up once for the whole batch, which is nothing to K-FAC and one warning of the other methods."""
    torch.manual_seed(0)
    model, losses = GPT(bias), []
    words = torch.randint(VOCABULARY, (5, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt = method(model, **keywords)
        for _ in range(8):
            opt.zero_grad()
            loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    rows = opt.describe().splitlines()
    left_out = [row.split()[0] for row in rows if "fallback" in row]
    if method is KFAC:
        assert not found
        assert left_out == []
        assert len([row for row in rows if "block '" in row]) == len(list(model.parameters()))
    else:
        (warning,) = found
        assert "(wpe: its 12 rows may be shared by the whole batch" in str(warning.message)
        assert left_out == ["wpe.weight"]
