"""A GPT as nanoGPT writes it is covered without a keyword: tied weights, a LayerNorm of its own, learned positions."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, HyLo
from tests.layers.test_handwritten_norms import NanoGPTNorm

VOCABULARY, CONTEXT, WIDTH = 31, 12, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = NanoGPTNorm(WIDTH, bias), Attention(), NanoGPTNorm(WIDTH, bias)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList([Layer(bias), Layer(bias)]),
                "ln_f": NanoGPTNorm(WIDTH, bias),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for layer in self.transformer.h:
            x = layer(x)
        return self.lm_head(self.transformer.ln_f(x))


def trained(opt: torch.optim.Optimizer, model: GPT) -> list[float]:
    losses = []
    words = torch.randint(VOCABULARY, (5, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(8):
        opt.zero_grad()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("bias", "keywords"), [(True, {}), (False, {"lr": 1e-2, "graft": "adam"})], ids=["defaults", "grafted, no bias"]
)
def test_kfac_covers_all_of_it_and_says_nothing(bias, keywords):
    torch.manual_seed(0)
    model = GPT(bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = KFAC(model, **keywords)
        losses = trained(opt, model)
    assert "fallback" not in opt.describe()
    assert len([line for line in opt.describe().splitlines() if "block '" in line]) == len(list(model.parameters()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", [EKFAC, HyLo])
def test_the_other_methods_leave_out_the_positions_alone(method):
    """They are looked up once for the whole batch, so they have no gradients of single examples."""
    torch.manual_seed(0)
    model = GPT(True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt = method(model, lr=1e-2, graft="adam")
        losses = trained(opt, model)
    (told,) = found
    assert "(transformer.wpe: its 12 rows may be shared by the whole batch" in str(told.message)
    rows = [line for line in opt.describe().splitlines() if "fallback" in line]
    assert [row.split()[0] for row in rows] == ["transformer.wpe.weight"]
    assert losses[-1] < losses[0]
