# %% [markdown]
# # Large batches
#
# A large batch has a gradient with little noise. The shape of the loss remains hard, and curvature helps with it. This
# tutorial trains a deep autoencoder on all images at once. It compares SGD and AdamW with the preset `large_batch`,
# which has no learning rate to tune.
#
# You need `torch`, `scikit-learn` and `matplotlib`. [Download the script](large-batches.py). It takes about 15 seconds
# on one core.
#
# ## Data and model
#
# The autoencoder compresses the 64 pixels of a handwritten digit into 8 numbers. The batch is all 1,797 images. The
# loss of an image is the cross-entropy of its pixels. It cannot fall below the entropy of the pixels, which is
# subtracted from all numbers below.

# %%
import time

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import secondorder
from secondorder import AdaptationOptions

images = torch.tensor(load_digits().data, dtype=torch.float32) / 16


def make_model():
    torch.manual_seed(0)  # every run starts from the same weights
    sizes = (64, 32, 8, 32, 64)
    layers = [layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def loss_of(outputs):
    return binary_cross_entropy_with_logits(outputs, images, reduction="none").sum(1).mean()


entropy = loss_of(images.logit(1e-6)).item()


# %% [markdown]
# ## A loss that the optimizer can ask for
#
# The preset chooses the learning rate and the momentum of every step from a quadratic model of the loss. The example
# also lets it adapt the damping, every five steps. For both it has to evaluate the model, so `step` takes a closure.
# The closure clears the gradients, computes the loss, calls `backward`, and returns the loss and the outputs.
# `likelihood` tells the optimizer how the loss depends on the outputs.


# %%
def make_optimizer(name, model, lr):
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    options = AdaptationOptions(quadratic_model=True, adaptive_damping=True, damping_interval=5, likelihood="bernoulli")
    return secondorder.create("large_batch", model, adaptation=options)


STEPS = 150


def train(name, lr=None, steps=STEPS):
    model = make_model()
    opt = make_optimizer(name, model, lr)

    def closure():
        opt.zero_grad()
        outputs = model(images)
        loss = loss_of(outputs)
        loss.backward()
        return (loss, outputs) if name == "K-FAC" else loss  # an optimizer of PyTorch wants the loss alone

    losses, seconds = [], [0.0]
    for _ in range(steps):
        start = time.perf_counter()
        opt.step(closure)
        seconds.append(seconds[-1] + time.perf_counter() - start)
        with torch.no_grad():
            losses.append(loss_of(model(images)).item() - entropy)
    return {"losses": losses, "seconds": seconds[1:], "loss": losses[-1]}


# %% [markdown]
# ## Train
#
# SGD and AdamW get the same four learning rates. K-FAC runs once.

# %%
RATES = (0.003, 0.01, 0.03, 0.1)
runs = {(name, lr): train(name, lr) for name in ("SGD", "AdamW") for lr in RATES}
print("optimizer     lr    loss")
for (name, lr), run in runs.items():
    print(f"{name:9} {lr:6g} {run['loss']:7.2f}")
shown = {name: min((runs[name, lr] for lr in RATES), key=lambda run: run["loss"]) for name in ("SGD", "AdamW")}
shown["K-FAC"] = train("K-FAC")
print(f"K-FAC       none {shown['K-FAC']['loss']:7.2f}")

# %% [markdown]
# ## Compare
#
# The run with the lowest loss represents SGD and AdamW. A fourth run gives AdamW eight times as many steps, because
# each of them takes less time.

# %%
adamw = min(RATES, key=lambda lr: runs["AdamW", lr]["loss"])
shown["AdamW, 8 times the steps"] = train("AdamW", adamw, 8 * STEPS)
LOOK = {
    "SGD": {"color": "#8C8C8C", "linestyle": "-."},
    "AdamW": {"color": "#E69F00", "linestyle": "--"},
    "K-FAC": {"color": "#3B82D0", "linestyle": "-"},
    "AdamW, 8 times the steps": {"color": "#E69F00", "linestyle": ":"},
}

figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for name, run in shown.items():
    by_step.plot(range(1, len(run["losses"]) + 1), run["losses"], label=name, **LOOK[name])
    by_time.plot(run["seconds"], run["losses"], **LOOK[name])
by_step.set(yscale="log", xlabel="steps", ylabel="loss beyond the entropy")
by_time.set(xlabel="seconds")
by_step.legend()
figure.suptitle("An autoencoder on all images at once")
plt.show()

for name, run in shown.items():
    print(f"{name:24} {1000 * run['seconds'][-1] / len(run['losses']):5.1f} ms a step, loss {run['loss']:.2f}")

# %% [markdown]
# After the same number of steps, K-FAC has a far lower loss than SGD and AdamW, and it needed no search for a learning
# rate. A step takes more than ten times as long, because each one also evaluates the quadratic model on a model that is
# tiny. In equal time AdamW has the lower loss at first. K-FAC overtakes it later and ends lower.
#
# [Damping](../damping.md) explains how the step size and the damping are chosen.
