# %% [markdown]
# # Hugging Face Trainer
#
# This tutorial trains a small BERT with the `Trainer` of Hugging Face, first with AdamW and then with K-FAC. The
# `Trainer` takes the optimizer as an argument, so nothing else changes.
#
# You need `torch`, `transformers`, `accelerate` and `matplotlib`. [Download the script](hugging-face-trainer.py). It
# takes about half a minute on one core. Nothing is downloaded: the model is made from a configuration, and the data is
# synthetic.
#
# ## Data and model
#
# Each example is a sentence of 16 random words out of 60. The label says whether words below 30 are in the majority.
# The first 1,024 examples are for training, and 256 are held out.

# %%
import tempfile
import time

import torch
import transformers
from matplotlib import pyplot as plt
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

import secondorder
from secondorder.integrations.transformers import SecondOrderCallback

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
words = torch.randint(60, (1280, 16))
labels = ((words < 30).sum(1) > 8).long()
data = [{"input_ids": row, "labels": label} for row, label in zip(words, labels)]
train_data, test_data = data[:1024], data[1024:]


def make_model():
    torch.manual_seed(0)  # every run starts from the same weights
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=60, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


# %% [markdown]
# ## Optimizer
#
# `optimizers=(optimizer, None)` passes the optimizer to the `Trainer`, which builds the schedule itself. Its default is
# a linear decay.


# %%
def make_optimizer(name, model, lr):
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    return secondorder.create("from_adamw", model, lr=lr, weight_decay=1e-2)


# %% [markdown]
# ## Train
#
# `SecondOrderCallback` writes the diagnostics of the optimizer into the log of the `Trainer`. On one process it is
# optional. The other callback measures the time of each step.


# %%
class Clock(TrainerCallback):
    def __init__(self):
        self.seconds = [0.0]

    def on_step_begin(self, *args, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(self.seconds[-1] + time.perf_counter() - self.start)


STEPS = 120


def train(name, lr, folder):
    model, clock = make_model(), Clock()
    opt = make_optimizer(name, model, lr)
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=32, logging_steps=1, max_grad_norm=1.0, seed=0,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callbacks = [clock] if name == "AdamW" else [clock, SecondOrderCallback()]
    trainer = Trainer(
        model, arguments, train_dataset=train_data, eval_dataset=test_data, optimizers=(opt, None), callbacks=callbacks
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    losses = torch.tensor([line["loss"] for line in log])
    return {
        "losses": losses,
        "seconds": clock.seconds[1:],
        "loss": losses[-15:].mean().item(),
        "held-out loss": trainer.evaluate()["eval_loss"],
        "diagnostics": {key: value for key, value in log[-1].items() if key.startswith("secondorder/")},
    }


RATES = (1e-3, 3e-3, 1e-2)
with tempfile.TemporaryDirectory() as folder:
    runs = {(name, lr): train(name, lr, folder) for name in ("AdamW", "K-FAC") for lr in RATES}
print("optimizer      lr  training loss  held-out loss")
for (name, lr), run in runs.items():
    print(f"{name:9} {lr:7g} {run['loss']:14.3f} {run['held-out loss']:14.3f}")

# %% [markdown]
# The last line of the log of a K-FAC run has these numbers next to the loss:

# %%
for key, value in runs["K-FAC", 1e-3]["diagnostics"].items():
    print(key, value)

# %% [markdown]
# ## Compare

# %%
shown = {name: min((runs[name, lr] for lr in RATES), key=lambda run: run["loss"]) for name in ("AdamW", "K-FAC")}
LOOK = {"AdamW": {"color": "#E69F00", "linestyle": "--"}, "K-FAC": {"color": "#3B82D0", "linestyle": "-"}}

figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for name, run in shown.items():
    smooth = run["losses"].unfold(0, 10, 1).mean(1)  # means of ten steps
    by_step.plot(range(10, STEPS + 1), smooth, label=name, **LOOK[name])
    by_time.plot(run["seconds"][9:], smooth, **LOOK[name])
by_step.set(yscale="log", xlabel="steps", ylabel="training loss (mean of 10 steps)")
by_time.set(xlabel="seconds")
by_step.legend()
figure.suptitle("Hugging Face Trainer: a small BERT")
plt.show()

for name, run in shown.items():
    print(f"{name:5} {1000 * run['seconds'][-1] / STEPS:5.1f} ms a step")

# %% [markdown]
# After the same number of steps, K-FAC has lower losses than AdamW at the smallest rate. At the best one, the training
# loss is about the same and the held-out loss is higher. A step takes more than half as long again, so nothing is
# gained on this task. The tutorial shows how the parts fit together. [Trainers](../trainers.md) has more about the
# `Trainer`: parameter groups, checkpoints, several processes and padding.
