# %% [markdown]
# # Two ranks with `torchrun`
#
# This tutorial trains on two processes with `DistributedDataParallel`, and lets `MemOpt` divide the curvature between
# them. Then it asks `plan()` what a much larger model would need on 8 nodes with 8 GPUs each.
#
# You need `torch`, `scikit-learn` and `matplotlib`. [Download the script](two-ranks.py) and start it with
#
# ```bash
# torchrun --standalone --nproc-per-node=2 two-ranks.py
# ```
#
# It takes about 20 seconds on two cores. The output below is that of rank 0.
#
# ## Processes and data
#
# `torchrun` starts the script twice, and each process joins the group. On GPUs the backend is `"nccl"`. Rank r takes
# every second example, from r on.

# %%
import time

import torch
import torch.distributed as dist
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import secondorder
from secondorder import KFAC, HybridOpt, MemOpt

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

digits = load_digits()
inputs = torch.tensor(digits.data, dtype=torch.float32)[rank::world] / 16
labels = torch.tensor(digits.target)[rank::world]


def make_model():
    torch.manual_seed(0)  # every run starts from the same weights, on every rank
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10))


# %% [markdown]
# ## Optimizer
#
# The optimizer gets the bare model and the strategy. Without `comm=`, every rank would keep the curvature of all
# layers. With `MemOpt`, each layer has one owner, which keeps its curvature, preconditions its gradient and sends the
# result to the other rank.


# %%
def make_optimizer(name, model, lr):
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    return secondorder.create("from_adamw", model, lr=lr, weight_decay=1e-2, comm=MemOpt())


opt = make_optimizer("K-FAC", make_model(), 1e-3)
print(opt.describe())
print(opt.plan(batch_size=48))
opt.close()

# %% [markdown]
# ## Train
#
# Each rank draws 48 of its own examples in a step, so a step has 96 examples. `DistributedDataParallel` averages the
# gradients, and the optimizer adds up the statistics. At the end every rank calls `consolidate_state_dict`, which
# brings all curvature to rank 0, and rank 0 saves a complete checkpoint.

# %%
STEPS = 150


def train(name, lr):
    model = make_model()
    wrapped = DistributedDataParallel(model)
    opt = make_optimizer(name, model, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    draw = torch.Generator().manual_seed(rank)
    losses, seconds = [], [0.0]
    for _ in range(STEPS):
        batch = torch.randint(len(inputs), (48,), generator=draw)
        start = time.perf_counter()
        opt.zero_grad()
        loss = cross_entropy(wrapped(inputs[batch]), labels[batch])
        loss.backward()
        opt.step()
        schedule.step()
        seconds.append(seconds[-1] + time.perf_counter() - start)
        dist.all_reduce(loss.detach())  # the sum over the ranks, for the figure
        losses.append(loss.item() / world)
    if name == "K-FAC":
        opt.consolidate_state_dict(to=0)  # every rank calls it
        if rank == 0:
            torch.save(opt.state_dict(), "checkpoint.pt")
        opt.close()
    losses = torch.tensor(losses)
    return {"losses": losses, "seconds": seconds[1:], "loss": losses[-15:].mean().item()}


RATES = (3e-3, 1e-2, 3e-2)
runs = {(name, lr): train(name, lr) for name in ("AdamW", "K-FAC") for lr in RATES}
print("optimizer     lr  training loss")
for (name, lr), run in runs.items():
    print(f"{name:9} {lr:6g} {run['loss']:14.5f}")

# %% [markdown]
# ## Compare

# %%
shown = {name: min((runs[name, lr] for lr in RATES), key=lambda run: run["loss"]) for name in ("AdamW", "K-FAC")}
LOOK = {"AdamW": {"color": "#E69F00", "linestyle": "--"}, "K-FAC": {"color": "#3B82D0", "linestyle": "-"}}

if rank == 0:
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for name, run in shown.items():
        smooth = run["losses"].unfold(0, 10, 1).mean(1)  # means of ten steps
        by_step.plot(range(10, STEPS + 1), smooth, label=name, **LOOK[name])
        by_time.plot(run["seconds"][9:], smooth, **LOOK[name])
    by_step.set(yscale="log", xlabel="steps", ylabel="training loss (mean of 10 steps)")
    by_time.set(xlabel="seconds")
    by_step.legend()
    figure.suptitle("Two ranks: AdamW, and K-FAC with MemOpt")
    plt.show()

for name, run in shown.items():
    print(f"{name:5} {1000 * run['seconds'][-1] / STEPS:5.1f} ms a step")
dist.destroy_process_group()

# %% [markdown]
# After the same number of steps, K-FAC has a lower loss than AdamW. A step takes two to three times as long: the budget
# of the preset, 2, does not count the messages between processes. Dividing the curvature is worth it for models whose
# curvature does not fit on one rank.
#
# ## A plan for 8 × 8 GPUs
#
# `plan()` does the placement for any number of ranks, without processes. A model on the `meta` device has shapes and no
# numbers, so the model may be larger than the memory of this computer. This one is an encoder with 24 layers of width
# 1,024, as in BERT-large, with 8 examples per rank. `plan()` counts one position per example, as its last line says.
# Only the FLOPs of the statistics depend on that.

# %%
with torch.device("meta"):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True), 24)
opt = KFAC(encoder, lr=1e-3, graft="adamw", comm=MemOpt())
print(opt.plan(world_size=64, batch_size=8))

# %% [markdown]
# Compare the strategies by the bytes that the fullest rank stores, and by the bytes that a rank sends per step on
# average. `HybridOpt(1 / 8)` has eight gradient workers for each layer. The rows of its grid are then the eight GPUs of
# a node, so the directions, which are sent on every step, stay inside the node.

# %%
print("strategy        curvature stored     statistics, curvature and directions sent")
for comm in (secondorder.CommOpt(), HybridOpt(1 / 8), MemOpt()):
    ranks = opt.plan(world_size=64, comm=comm, batch_size=8).ranks
    stored = max(r.stored["factors"] + r.stored["second_order"] for r in ranks) / 2**30
    sent = [max(r.sent.get(kind, 0) for r in ranks) / 2**20 for kind in ("statistics", "curvature", "directions")]
    print(f"{type(comm).__name__:10} {stored:17.2f} GiB {sent[0]:10.0f} MiB {sent[1]:10.0f} MiB {sent[2]:10.0f} MiB")

# %% [markdown]
# `CommOpt` stores all curvature on every rank and sends no directions. `MemOpt` stores a sixtieth of that, and sends a
# direction as large as the gradient on every step. `HybridOpt(1 / 8)` is between the two in memory, and its directions
# stay inside a node. [Strategies](../strategies.md) explains all of them, and [Nodes](../nodes.md) has scripts for a
# cluster.
