# %% [markdown]
# # A character GPT
#
# This tutorial trains a small GPT to predict the next character of a text. It compares AdamW with the preset
# `from_muon`, which is made for transformers.
#
# You need `torch` and `matplotlib`. [Download the script](character-gpt.py). It takes about half a minute on one core.
#
# ## Data
#
# Python comes with the text of its manual, which `help()` shows. The first 300,000 characters are the data, and the
# last tenth of them is held out.

# %%
import textwrap
import time
from pydoc_data.topics import topics

import torch
from matplotlib import pyplot as plt
from torch import nn
from torch.nn.functional import cross_entropy

import secondorder

text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()[:300_000]
characters = sorted(set(text))
codes = {character: code for code, character in enumerate(characters)}
data = torch.tensor([codes[character] for character in text])
train_data, test_data = data[:270_000], data[270_000:]
print(text[1000:1300])

# %% [markdown]
# ## Model
#
# The model is a decoder of two layers, made of PyTorch's own modules. It reads 64 characters at a time.

# %%
LENGTH, WIDTH = 64, 64


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(len(characters), WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(characters))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x):
        x = self.characters(x) + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


# %% [markdown]
# ## Optimizer
#
# `from_muon` is EK-FAC with steps of a uniform spectrum. It makes the parameter groups itself: the hidden matrices are
# in one group, and the embeddings, the norms and the head are in another one with half the learning rate. `lr` means
# the same as in `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, which is the size of AdamW's steps.


# %%
def make_optimizer(name, model, lr):
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return secondorder.create("from_muon", model, lr=lr)


print(textwrap.fill(secondorder.presets()["from_muon"].call(lr=0.03), 100))

# %% [markdown]
# ## Train
#
# The loop is the usual one. The learning rate rises during the first tenth of the steps and then falls to zero.

# %%
STEPS, BATCH = 100, 24


def loss_of(model, rows):
    logits = model(rows[:, :-1])
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(name, lr, steps=STEPS):
    torch.manual_seed(0)  # every run starts from the same weights and sees the same batches
    model = GPT()
    opt = make_optimizer(name, model, lr)
    rates = [group["lr"] for group in opt.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, rates, steps, pct_start=0.1, cycle_momentum=False)
    losses, seconds = [], [0.0]
    for _ in range(steps):
        starts = torch.randint(len(train_data) - LENGTH, (BATCH, 1))
        rows = train_data[starts + torch.arange(LENGTH + 1)]
        start = time.perf_counter()
        opt.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        opt.step()
        schedule.step()
        seconds.append(seconds[-1] + time.perf_counter() - start)
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        held_out = loss_of(model, test_data[: len(test_data) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1))
    losses = torch.tensor(losses)
    return {"losses": losses, "seconds": seconds[1:], "loss": losses[-20:].mean(), "held-out loss": held_out}


# %% [markdown]
# Both optimizers get the same three learning rates.

# %%
RATES = (1e-2, 3e-2, 1e-1)
runs = {(name, lr): train(name, lr) for name in ("AdamW", "EK-FAC") for lr in RATES}
print("optimizer     lr  training loss  held-out loss")
for (name, lr), run in runs.items():
    print(f"{name:9} {lr:6g} {run['loss']:14.2f} {run['held-out loss']:14.2f}")

# %% [markdown]
# ## Compare
#
# The run with the lowest training loss represents each optimizer. A third run gives AdamW three times as many steps,
# because each of them takes less time.

# %%
best = {name: min(RATES, key=lambda lr: runs[name, lr]["loss"]) for name in ("AdamW", "EK-FAC")}
shown = {name: runs[name, lr] for name, lr in best.items()}
shown["AdamW, 3 times the steps"] = train("AdamW", best["AdamW"], 3 * STEPS)
LOOK = {
    "AdamW": {"color": "#E69F00", "linestyle": "--"},
    "EK-FAC": {"color": "#00A077", "linestyle": "-."},
    "AdamW, 3 times the steps": {"color": "#E69F00", "linestyle": ":"},
}

figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for name, run in shown.items():
    smooth = run["losses"].unfold(0, 10, 1).mean(1)  # means of ten steps
    by_step.plot(range(10, len(run["losses"]) + 1), smooth, label=name, **LOOK[name])
    by_time.plot(run["seconds"][9:], smooth, **LOOK[name])
by_step.set(xlabel="steps", ylabel="training loss (mean of 10 steps)")
by_time.set(xlabel="seconds")
by_step.legend()
figure.suptitle("Character GPT: AdamW and the preset from_muon")
plt.show()

for name, run in shown.items():
    time_of_step = 1000 * run["seconds"][-1] / len(run["losses"])
    print(f"{name:24} {time_of_step:5.1f} ms a step, held-out loss {run['held-out loss']:.2f}")

# %% [markdown]
# After the same number of steps, EK-FAC has a lower loss than AdamW, on the text that it was trained on and on the
# held-out text. A step takes about 1.6 times as long. In equal time the two curves are close at first, and EK-FAC
# ends with the lower loss. Its best learning rate is the largest one of the three, so an even larger one might do
# better.
#
# [Evidence](../evidence.md) has longer runs of a larger character GPT, with more optimizers.
