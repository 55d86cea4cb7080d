# %% [markdown]
# # A complete training loop
#
# Real loops accumulate gradients, clip them, warm the learning rate up and save checkpoints. This tutorial has all of
# it in one loop, which works for AdamW and for K-FAC without a change. It then interrupts a run, resumes it from its
# checkpoint, and compares the weights with those of a run that was not interrupted.
#
# You need `torch`, `scikit-learn` and `matplotlib`. [Download the script](training-loop.py). It takes about 10 seconds
# on one core.
#
# ## Data and model

# %%
import tempfile
import time
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import secondorder

digits = load_digits()
inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def make_model():
    torch.manual_seed(0)  # every run starts from the same weights
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 10))


def make_optimizer(name, model, lr):
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    return secondorder.create("from_adamw", model, lr=lr, weight_decay=1e-2)


# %% [markdown]
# ## The loop
#
# * **Accumulation.** A step takes 4 micro-batches of 32 examples. Each loss is divided by 4, so the gradient is the
#   mean over all 128 examples. K-FAC adds the statistics of the micro-batches up by itself.
# * **Clipping.** `clip_grad_norm_` acts on the gradients between `backward` and `step`, as with any optimizer. K-FAC
#   preconditions the clipped gradient. Its curvature comes from the micro-batches before clipping.
# * **Schedule.** The learning rate rises for 15 steps and then falls to zero along a cosine.
# * **Checkpoint.** The state dict of the optimizer contains the curvature. The file also has the model, the schedule
#   and the state of the random number generator, because the generator decides about the next batch.

# %%
STEPS, WARMUP, PARTS, SIZE = 150, 15, 4, 32


def train(name, lr, *, file=None, stop_at=STEPS):
    """Train to step `stop_at`. Resume from `file` if it exists, and save there at the end."""
    model = make_model()
    opt = make_optimizer(name, model, lr)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        opt,
        [
            torch.optim.lr_scheduler.LinearLR(opt, 1 / WARMUP, total_iters=WARMUP),
            torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS - WARMUP),
        ],
        milestones=[WARMUP],
    )
    first = 0
    if file is not None and file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["generator"])
        first = state["step"]

    losses, seconds = [], [0.0]
    for _ in range(first, stop_at):
        examples = torch.randint(len(inputs), (PARTS, SIZE))
        start = time.perf_counter()
        opt.zero_grad()
        total = 0.0
        for part in examples:
            loss = cross_entropy(model(inputs[part]), labels[part]) / PARTS
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        seconds.append(seconds[-1] + time.perf_counter() - start)
        losses.append(total)

    if file is not None:
        state = {
            "model": model.state_dict(),
            "optimizer": opt.state_dict(),
            "schedule": schedule.state_dict(),
            "generator": torch.get_rng_state(),
            "step": stop_at,
        }
        torch.save(state, file)
    return {"losses": torch.tensor(losses), "seconds": seconds[1:], "loss": sum(losses[-15:]) / 15, "model": model}


# %% [markdown]
# ## Train
#
# Both optimizers get the same three learning rates.

# %%
RATES = (3e-3, 1e-2, 3e-2)
runs = {(name, lr): train(name, lr) for name in ("AdamW", "K-FAC") for lr in RATES}
print("optimizer     lr  training loss")
for (name, lr), run in runs.items():
    print(f"{name:9} {lr:6g} {run['loss']:14.5f}")
best = {name: min(RATES, key=lambda lr: runs[name, lr]["loss"]) for name in ("AdamW", "K-FAC")}

# %% [markdown]
# ## Interrupt and resume
#
# The first call stops at step 60 and saves. The second call builds everything anew, loads the file and goes on.

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "checkpoint.pt"
    before = train("K-FAC", best["K-FAC"], file=file, stop_at=60)
    after = train("K-FAC", best["K-FAC"], file=file)
    print(f"The checkpoint has {file.stat().st_size / 1e6:.1f} MB.")

whole = runs["K-FAC", best["K-FAC"]]
pairs = zip(after["model"].parameters(), whole["model"].parameters())
print("The weights are equal to the bit:", all(torch.equal(a, b) for a, b in pairs))
print("The losses are equal:", torch.equal(torch.cat((before["losses"], after["losses"])), whole["losses"]))

# %% [markdown]
# ## Compare
#
# The figure shows AdamW, the uninterrupted run of K-FAC, and on top of it the resumed one.

# %%
LOOK = {"AdamW": {"color": "#E69F00", "linestyle": "--"}, "K-FAC": {"color": "#3B82D0", "linestyle": "-"}}

figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for name, lr in best.items():
    run = runs[name, lr]
    smooth = run["losses"].unfold(0, 10, 1).mean(1)  # means of ten steps
    by_step.plot(range(10, STEPS + 1), smooth, label=name, **LOOK[name])
    by_time.plot(run["seconds"][9:], smooth, **LOOK[name])
resumed = after["losses"].unfold(0, 10, 1).mean(1)
by_step.plot(range(70, STEPS + 1)[::8], resumed[::8], "o", color="0.2", markersize=4, label="K-FAC, resumed at step 60")
by_step.set(yscale="log", xlabel="steps", ylabel="training loss (mean of 10 steps)")
by_time.set(xlabel="seconds")
by_step.legend()
figure.suptitle("Accumulation, clipping, warm-up and a checkpoint")
plt.show()

for name, lr in best.items():
    print(f"{name:5} {1000 * runs[name, lr]['seconds'][-1] / STEPS:5.1f} ms a step")

# %% [markdown]
# The points lie on the curve of K-FAC, because the resumed run repeats the uninterrupted one. After the same number of
# steps, K-FAC has a lower training loss than AdamW. A step takes about twice as long, which is the budget of the
# preset, so AdamW can take twice as many steps in the same time. [Reliability](../reliability.md) lists the tests of
# checkpoints.
