"""Networks learn with a tenth of the rows."""

import torch
import torch.nn.functional as F
from torch import nn

from secondorder import HyLo
from tests.support.grid import pairs


class Small(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8 * 16, classes)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(x.flatten(1))


def patterns(n, seed, classes=4):
    """Noisy copies of one 8 × 8 pattern per class, shifted by up to one pixel."""
    generator = torch.Generator().manual_seed(1234)
    base = torch.randn(classes, 8, 8, generator=generator)
    generator.manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    shift = torch.randint(-1, 2, (n, 2), generator=generator).tolist()
    x = torch.stack([base[c].roll(s, (0, 1)) for c, s in zip(y.tolist(), shift, strict=True)])
    return (x + 0.5 * torch.randn(n, 8, 8, generator=generator))[:, None], y


# With a normalized damping, lr · λ is what the plain form has for lr.
SETTINGS = {
    "kid": {"lr": 0.003, "mode": "kid"},
    "kis": {"lr": 0.003, "mode": "kis"},
    "normalized": {"lr": 0.03, "mode": "auto", "normalize_damping": True},
}


@pairs(lambda settings, approx: (settings["mode"], approx) != ("auto", "expand"),
       settings=SETTINGS, approx=["reduce", "expand"])  # fmt: skip
def test_a_small_network_of_convolutions_learns(settings, approx):
    """ρ = .1: 7 of 64 rows."""
    torch.manual_seed(0)
    model, losses = Small(), []
    opt = HyLo(model, approx=approx, damping=0.1, rank_fraction=0.1, update_steps=5, **settings)
    for seed in range(80):
        x, y = patterns(64, seed)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 1.2
    assert sum(losses[-10:]) / 10 < 0.1
