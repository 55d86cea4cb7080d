"""Draws the figures of ``docs/methods``: each method's curvature of one layer, next to the true one.

``python docs/draw_curvature.py`` writes them into ``docs/images`` and prints their numbers. The model is small enough
to compute the Fisher matrix itself: the expectation over inputs and over labels *as the model predicts them*. The
methods get labels that are drawn from those predictions, so that all of them estimate this matrix.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.functional import cross_entropy

from secondorder import EKFAC, GGT, KFAC, MFAC, HyLo, ScaleOptions

FOLDER = Path(__file__).parent / "images"
#: The layer that is drawn, the number of examples in each estimate, and the batch size of the window methods.
LAYER, EXAMPLES, BATCH = "2", 1792, 8
#: Gray is readable on light and dark pages. Each method has the color that it has in the plots of the benchmarks.
GRAY = "#7d8590"
COLORS = {"kfac": "#0072B2", "ekfac": "#009E73", "hylo": "#CC79A7", "mfac": "#D55E00", "ggt": "#999999"}


class Picture(NamedTuple):
    """A method's curvature and the one that it estimates, ``[n, n]`` each."""

    title: str
    truth: Tensor
    found: Tensor
    what: str = "True Fisher"

    @property
    def error(self) -> float:
        """Relative error in the Frobenius norm."""
        return float((self.found - self.truth).norm() / self.truth.norm())

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two matrices."""
        return float((self.found * self.truth).sum() / self.found.norm() / self.truth.norm())


class Task(NamedTuple):
    """A trained model, inputs ``[EXAMPLES, 64]``, and labels drawn from its predictions."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor


def task() -> Task:
    """Return a small network that has begun to recognize handwritten digits, with its data."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    inputs = torch.tensor(digits.data[:EXAMPLES] / 16.0)
    labels = torch.tensor(digits.target[:EXAMPLES])
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10)).double()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        opt.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        opt.step()
    with torch.no_grad():
        drawn = torch.distributions.Categorical(logits=model(inputs)).sample()
    return Task(model, inputs, drawn)


def true_fisher(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the mean over the inputs of ``Jᵀ (diag p − p pᵀ) J``, for row-major ``vec([W | b])`` of the layer."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    own = {name: p for name, p in weights.items() if name.startswith(f"{LAYER}.")}

    def outputs(mine: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, {**weights, **mine}, (x,))

    jacobian = vmap(jacrev(outputs), (None, 0))(own, inputs)
    parts = [jacobian[f"{LAYER}.weight"], jacobian[f"{LAYER}.bias"][..., None]]
    j = torch.cat(parts, -1).flatten(2)  # [N, classes, n]
    p = outputs(own, inputs).softmax(-1)
    s = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("kci,kcd,kdj->ij", j, s, j) / len(inputs)


def estimate(task: Task, make: Callable[[nn.Module], Any], batches: int, passes: int = 1) -> Tensor:
    """Return a method's curvature of the layer after one step per batch and pass, at a learning rate of 0."""
    model = copy.deepcopy(task.model)
    opt = make(model)
    for _ in range(passes):
        for x, y in zip(task.inputs.chunk(batches), task.labels.chunk(batches), strict=True):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()
    found: Tensor = opt.dense_curvature(LAYER).double()
    opt.close()
    return found


def pictures() -> dict[str, Picture]:
    """Return all pictures by method; ``"sngd"``, all rows of HyLo, shows the effect of drawing labels alone."""
    chosen = task()
    truth = true_fisher(chosen.model, chosen.inputs)
    every = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}
    rows = EXAMPLES // BATCH
    half = root(truth)
    # The window contains the layer alone, because the root of a block is not the block of the root.
    ggt = estimate(chosen, lambda m: GGT(m, lr=0.0, window_size=rows, partition="layer"), rows)
    return {
        "kfac": Picture("K-FAC", truth, estimate(chosen, lambda m: KFAC(m, **every), 1)),
        # The second pass measures the scale in the eigenbasis of the first.
        "ekfac": Picture(
            "EK-FAC", truth, estimate(chosen, lambda m: EKFAC(m, **every, scale=ScaleOptions(decay=0.0)), 1, passes=2)
        ),
        "sngd": Picture("all rows", truth, estimate(chosen, lambda m: HyLo(m, lr=0.0, mode="sngd"), 1)),
        "hylo": Picture(
            f"HyLo, 64 of {EXAMPLES} rows",
            truth,
            estimate(chosen, lambda m: HyLo(m, lr=0.0, mode="kid", rank_fraction=64 / EXAMPLES, damping=1e-4), 1),
        ),
        # A row is the mean of a batch, so its second moment is smaller by the batch size. GGT does not divide by the
        # number of rows either.
        "mfac": Picture(
            f"M-FAC, {rows} rows", truth, BATCH * estimate(chosen, lambda m: MFAC(m, lr=0.0, window_size=rows), rows)
        ),
        "ggt": Picture(f"GGT, {rows} rows", half, ggt * math.sqrt(BATCH / rows), "Root of the true Fisher"),
    }


def root(matrix: Tensor) -> Tensor:
    """Return the square root of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt() @ vectors.mT


def draw(name: str, picture: Picture) -> None:
    """Write a picture of both matrices, their difference and their eigenvalues."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "font.size": 12, "text.color": GRAY, "axes.labelcolor": GRAY, "axes.titlecolor": GRAY, "axes.edgecolor": GRAY,
        "xtick.color": GRAY, "ytick.color": GRAY, "svg.hashsalt": name, "svg.fonttype": "none",
        "font.family": "sans-serif",
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(5.8, 5.9), layout="constrained")
        limit = 0.7 * float(picture.truth.abs().max())
        panels = (
            (picture.what, picture.truth),
            (picture.title, picture.found),
            (f"Error: {picture.error:.2f} of the norm", picture.found - picture.truth),
        )
        for axis, (title, matrix) in zip(axes.flat, panels, strict=False):
            shades = axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
            axis.set_title(title, fontsize=13)
            axis.set_xticks([])
            axis.set_yticks([])
        bar = figure.colorbar(shades, ax=axes[1, 0], location="bottom", shrink=0.85, ticks=[-limit, 0, limit])
        bar.ax.set_xticklabels([f"{-limit:.2f}", "0", f"{limit:.2f}"])
        axis = axes[1, 1]
        for matrix, label, color, look in (
            (picture.truth, "true", GRAY, "-"),
            (picture.found, picture.title.split(",")[0], COLORS[name], "x"),
        ):
            values = torch.linalg.eigvalsh(matrix).flip(0)
            values[values < 1e-7 * values[0]] = torch.nan  # rounding errors of a matrix of lower rank
            axis.semilogy(range(1, len(values) + 1), values, look, color=color, ms=5, lw=2, mew=1.4, label=label)
        axis.yaxis.set_minor_formatter("")
        axis.set_title("Eigenvalues", fontsize=13)
        axis.patch.set_alpha(0)
        axis.legend(frameon=False, labelcolor=GRAY, handletextpad=0.4)
        figure.savefig(FOLDER / f"curvature-{name}.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    for name, picture in pictures().items():
        if name != "sngd":
            draw(name, picture)
        print(f"{picture.title:34} error {picture.error:.3f}  cosine {picture.cosine:.4f}")  # noqa: T201
