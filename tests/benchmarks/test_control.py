"""The control of orthogonal EKFAC has the same steps as that method with an identity in place of the curvature."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.peers import PEERS
from benchmarks.peers.orthogonal import orthogonal_momentum
from benchmarks.recipes.tuned import OURS
from secondorder import EKFAC, FallbackOptions


class Network(nn.Module):
    """Every layer type that the control supports, and some that it leaves to AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3), nn.LayerNorm(6)
        self.up = nn.ConvTranspose2d(6, 3, 2, 2)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.tokens, self.head = nn.Embedding(5, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = torch.tanh(self.up(self.conv(x))).reshape(len(x), -1, 6) + self.tokens(tokens)[:, None]
        rows = self.norm(rows)
        return self.head(torch.tanh(self.attention(rows, rows, rows, need_weights=False)[0]).mean(1))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_control_is_orthogonal_ekfac_with_little_curvature(decay):
    torch.manual_seed(0)
    model = Network().double()
    twin = copy.deepcopy(model)
    control = orthogonal_momentum(
        model, lr=0.02, plain_lr=0.01, plain_layers="Embedding,LayerNorm,head", weight_decay=decay
    )
    hidden = [*twin.conv.parameters(), *twin.up.parameters(), *twin.attention.parameters()]
    plain = [*twin.norm.parameters(), *twin.tokens.parameters(), *twin.head.parameters()]
    ekfac = EKFAC(
        [{"params": hidden, "orthogonalize": True}, {"params": plain, "lr": 0.01}], module=twin, lr=0.02,
        momentum=0.8, nesterov=True, momentum_mode="pre", kl_clip=None, betas=(0.9, 0.95),
        power=1e-13, factor_update_steps=1, inv_update_steps=1,
        skip_layers=["tokens", "norm", "head"], fallback=FallbackOptions("adamw", lr=0.01),
        weight_decay=decay, decoupled_weight_decay=True,
    )  # fmt: skip
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(16, 2, 4, 4, generator=generator, dtype=torch.float64)
        tokens, y = (torch.randint(n, (16,), generator=generator) for n in (5, 4))
        for network, optimizer in ((model, control), (twin, ekfac)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x, tokens), y).backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_adamw_trains_a_layer_of_one_output():
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Conv2d(6, 1, 1))
    twin = copy.deepcopy(model[1])
    control = orthogonal_momentum(model, lr=0.02, plain_lr=0.01, plain_layers=None)
    adamw = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    model(torch.randn(3, 2, 4, 4)).square().mean().backward()
    for ours, theirs in zip(model[1].parameters(), twin.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    control.step()
    adamw.step()
    torch.testing.assert_close(model[1].state_dict(), twin.state_dict())


@pytest.mark.parametrize("workload", PEERS["orthogonal"].recipes)
def test_the_recipe_of_the_control_is_that_of_the_method(workload):
    own, method = PEERS["orthogonal"].recipes[workload].settings, OURS["ekfac_orthogonal"].recipes[workload].settings
    assert {"lr", "plain_lr", "plain_layers"} <= own.keys()
    assert own.items() <= method.items()
