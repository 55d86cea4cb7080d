# %% [markdown]
# # A physics-informed network
#
# This tutorial solves the Poisson equation $-\Delta u = f$ on the unit square with a small network. It compares AdamW
# with the preset `physics_informed`, which is HyLo on the gradients of the outputs.
#
# You need `torch` and `matplotlib`. [Download the script](physics-informed.py). It takes about half a minute on one
# core.
#
# ## The equation
#
# The right side is $f(x, y) = 2 \pi^2 \sin(\pi x) \sin(\pi y)$, and $u$ is zero on the boundary. The exact solution is
# $u(x, y) = \sin(\pi x) \sin(\pi y)$, so the error of the network can be measured. The network sees 900 points inside
# the square and 120 points on its boundary, all of them at every step.

# %%
import textwrap
import time
from math import pi

import torch
from matplotlib import pyplot as plt
from torch import nn

import secondorder

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
inside = torch.rand(900, 2)
boundary = torch.rand(120, 2)
for start, axis, value in ((0, 0, 0.0), (30, 0, 1.0), (60, 1, 0.0), (90, 1, 1.0)):
    boundary[start : start + 30, axis] = value


def exact(points):
    return torch.sin(pi * points).prod(1, keepdim=True)


grid = torch.cartesian_prod(torch.linspace(0, 1, 21), torch.linspace(0, 1, 21))

# %% [markdown]
# ## The network
#
# The loss needs second derivatives of the network with respect to its inputs. The network carries them forward through
# its layers: row 0 is the value, rows 1 and 2 are the first derivatives with respect to $x$ and $y$, and rows 3 and 4
# are the second derivatives. Every weight is then used in one call of its layer, which is what the curvature of a layer
# needs. A bias belongs to the value only, so it is the weight of an additional input that is 1 in row 0 and 0 in the
# others.

# %%
CONSTANT = torch.tensor([1.0, 0, 0, 0, 0])[:, None]
INPUTS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])  # the derivatives of x and y


class Solution(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        sizes = (2, width), (width, width), (width, 1)
        self.layers = nn.ModuleList(nn.Linear(before + 1, after, bias=False) for before, after in sizes)

    def forward(self, points, of_value, of_laplacian):
        rows = torch.cat((points[:, None], INPUTS[1:].expand(len(points), 4, 2)), 1)
        for number, layer in enumerate(self.layers):
            if number:
                value, first, second = rows.split((1, 2, 2), 1)
                value = torch.tanh(value)
                slope = 1 - value**2
                rows = torch.cat((value, slope * first, slope * second - 2 * value * slope * first**2), 1)
            rows = layer(torch.cat((rows, CONSTANT.expand(len(points), 5, 1)), 2))
        return of_value * rows[:, 0] + of_laplacian * (rows[:, 3] + rows[:, 4])


# %% [markdown]
# The residual is $-\Delta u - f$ at a point inside and $10 u$ at a point on the boundary. The factor 10 makes the
# boundary count.

# %%
points = torch.cat((inside, boundary))
is_inside = torch.arange(1020)[:, None] < 900
of_value = torch.where(is_inside, 0.0, 10.0)
of_laplacian = torch.where(is_inside, -1.0, 0.0)
right = torch.where(is_inside, 2 * pi**2 * exact(points), 0.0)

# %% [markdown]
# ## Train
#
# K-FAC and HyLo normally estimate the curvature from the gradients of the loss. Those vanish here as the residuals do.
# The preset therefore asks for the curvature of the outputs, and the loop has one more line: `opt.observe(outputs,
# "gaussian")` between the forward and the backward pass. The learning rate falls to zero along a cosine for both
# optimizers.


# %%
def make_optimizer(name, model, lr):
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    return secondorder.create("physics_informed", model, lr=lr)


print(textwrap.fill(secondorder.presets()["physics_informed"].call(), 100))

STEPS = 150


def train(name, lr, steps=STEPS):
    torch.manual_seed(0)  # every run starts from the same weights
    model = Solution()
    opt = make_optimizer(name, model, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    losses, seconds = [], [0.0]
    for _ in range(steps):
        start = time.perf_counter()
        opt.zero_grad()
        outputs = model(points, of_value, of_laplacian)
        loss = (outputs - right).square().sum(1).mean()
        if name == "HyLo":
            opt.observe(outputs, "gaussian")
        loss.backward()
        opt.step()
        schedule.step()
        seconds.append(seconds[-1] + time.perf_counter() - start)
        losses.append(loss.item())
    with torch.no_grad():
        error = model(grid, 1.0, 0.0) - exact(grid)
    relative = error.norm() / exact(grid).norm()
    return {"losses": losses, "seconds": seconds[1:], "loss": losses[-1], "error": relative.item()}


# %% [markdown]
# The two optimizers have different units for the learning rate: AdamW's is roughly the change of a weight in a step,
# and for HyLo 1 is a full Newton step. Both get the same wide range of rates.

# %%
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
runs = {(name, lr): train(name, lr) for name in ("AdamW", "HyLo") for lr in RATES}
print("optimizer     lr       loss  relative error of u")
for (name, lr), run in runs.items():
    print(f"{name:9} {lr:6g} {run['loss']:10.2g} {run['error']:20.2g}")

# %% [markdown]
# ## Compare
#
# The run with the lowest loss represents each optimizer. A third run gives AdamW four times as many steps, because each
# of them takes less time.

# %%
best = {name: min(RATES, key=lambda lr: runs[name, lr]["loss"]) for name in ("AdamW", "HyLo")}
shown = {name: runs[name, lr] for name, lr in best.items()}
shown["AdamW, 4 times the steps"] = train("AdamW", best["AdamW"], 4 * STEPS)
LOOK = {
    "AdamW": {"color": "#E69F00", "linestyle": "--"},
    "HyLo": {"color": "#CC79A7", "linestyle": ":"},
    "AdamW, 4 times the steps": {"color": "#E69F00", "linestyle": ":"},
}

figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for name, run in shown.items():
    by_step.plot(range(1, len(run["losses"]) + 1), run["losses"], label=name, **LOOK[name])
    by_time.plot(run["seconds"], run["losses"], **LOOK[name])
by_step.set(yscale="log", xlabel="steps", ylabel="loss")
by_time.set(xlabel="seconds")
by_step.legend()
figure.suptitle("Poisson equation: AdamW and the preset physics_informed")
plt.show()

for name, run in shown.items():
    time_of_step = 1000 * run["seconds"][-1] / len(run["losses"])
    print(f"{name:24} {time_of_step:5.1f} ms a step, relative error {run['error']:.2g}")

# %% [markdown]
# HyLo needs about twenty steps for the loss at which AdamW ends, and then goes on to one that is more than a thousand
# times lower. A step takes several times as long. In equal time HyLo is still far lower, because AdamW hardly improves
# after its first hundred steps. The solutions differ as much: AdamW's is off by about ten percent, and HyLo's by less
# than one.
#
# This is the kind of problem that second-order methods are best at: the points are the same at every step, so nothing
# is noise, and the loss is badly conditioned. [Recipes](../recipes.md) has the same settings for other equations.
