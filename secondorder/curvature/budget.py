"""Intervals that keep the mean cost of a step within a budget, from counted FLOPs, bytes and operators alone.

::

    mean cost   1 + e + d/k + (c + r/m)/T  ≤  budget       in units of a step without curvature

e is the cost of a step that uses no curvature, d that of the directions of a step, c that of an update of the factors,
and r that of a refresh; the intervals k, T and m are what :func:`choose` returns. No clock is read, so runs are
reproducible and ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Intervals to choose from. Updates of the factors in fewer than ten steps rarely lower the loss at equal cost.
_UPDATES = (10, 20, 50, 100, 200, 500, 1000)
_PRECONDITIONED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: Number of updates of the factors between two refreshes.
_REFRESHES = (1, 2, 5)
#: The part of the budget beyond a step without curvature that directions may take.
_DIRECTIONS = 0.85
#: Operators of a layer: of its passes and AdamW's update, added by K-FAC in every step, and added by each stage.
_MODEL, _COVERED, _DIRECTION, _UPDATE, _REFRESH = 30.0, 3.0, 55.0, 80.0, 180.0
#: Operators of a step, whatever the number of layers: of training with AdamW, added by K-FAC, and added by directions.
_STEP, _IDLE, _CURVATURE = 20.0, 35.0, 80.0
#: Time of a FLOP of a factorization, divided by that of a matrix product.
_SLOWER = 5.0
#: Passes over the parameters, each of 4 bytes: of Adam, and of a direction with its length.
_ADAM_PASSES, _DIRECTION_PASSES = 14.0, 15.0
#: Passes over inputs and outputs of a layer in a forward and backward pass.
_ROW_PASSES = 4.0


class Calibration(NamedTuple):
    """Speed of a machine, relative to that of matrix products.

    Attributes:
        flops_per_byte: FLOPs of a matrix product in the time in which one byte is read or written.
        flops_per_operator: FLOPs of a matrix product in the time in which one operator is called.
    """

    flops_per_byte: float
    flops_per_operator: float


#: By type of device, for machines that were not measured.
NOMINAL = {"cpu": Calibration(12.0, 5e5), "cuda": Calibration(15.0, 1.5e8)}


class LayerWork(NamedTuple):
    """The work of a layer in a step.

    Attributes:
        rows: Rows of a batch on one rank, which are examples times positions.
        sizes: ``(n_a, n_g)``.
        blocks: Γ, the number of such matrices.
        direction: FLOPs of a direction.
        refresh: FLOPs of a refresh.
        one_hot: Whether each row of inputs has one nonzero entry, as in a lookup table.
    """

    rows: float
    sizes: tuple[int, int]
    blocks: int
    direction: float
    refresh: float
    one_hot: bool = False


class Others(NamedTuple):
    """Numbers of the parameters without curvature.

    Attributes:
        trained: Parameters that another rule updates.
        frozen: Parameters that are not trained, such as those of a model with adapters. Gradients pass through them.
    """

    trained: int = 0
    frozen: int = 0


class Costs(NamedTuple):
    """Costs in units of a step without curvature.

    Attributes:
        idle: A step that uses no curvature, beyond one with another optimizer.
        direction: Directions of all layers.
        update: An update of the factors of all layers.
        refresh: A refresh of all layers.
    """

    idle: float
    direction: float
    update: float
    refresh: float


class Intervals(NamedTuple):
    """The choice that a budget allows.

    Attributes:
        update: Number of steps between updates of the factors.
        refresh: Number of steps between refreshes.
        precondition: Number of steps between preconditioned ones.
        cost: Mean cost of a step, in units of a step without curvature.
    """

    update: int
    refresh: int
    precondition: int
    cost: float


def costs(layers: Sequence[LayerWork], others: Others, speed: Calibration) -> Costs:
    """Return the costs of the stages of a step, for layers with curvature and numbers of the other parameters."""
    byte, operator = speed.flops_per_byte, speed.flops_per_operator
    step = 4.0 * _ADAM_PASSES * others.trained * byte + _STEP * operator
    step += 4.0 * max((layer.rows for layer in layers), default=0.0) * others.frozen
    direction, update, refresh = _CURVATURE * operator, 0.0, 0.0
    for layer in layers:
        n_a, n_g = layer.sizes
        n = 1 if layer.one_hot else n_a  # numbers in a row of inputs
        rows, entries, factors = (layer.blocks * count for count in (layer.rows, n_a * n_g, n_a * n + n_g**2))
        step += 6.0 * rows * n * n_g + _MODEL * operator
        step += 4.0 * byte * (_ADAM_PASSES * entries + _ROW_PASSES * rows * (n + n_g))
        direction += layer.direction + 4.0 * byte * _DIRECTION_PASSES * entries + _DIRECTION * operator
        update += 2.0 * rows * (n**2 + n_g**2) + _UPDATE * operator
        update += 4.0 * byte * (2.0 * rows * (n + n_g) + 3.0 * factors)
        refresh += _SLOWER * layer.refresh + _REFRESH * operator
    idle = (_IDLE + _COVERED * len(layers)) * operator
    return Costs(idle / step, direction / step, update / step, refresh / step)


def choose(
    limit: float, layers: Sequence[LayerWork], others: Others, speed: Calibration, alternates: bool = True
) -> Intervals:
    """Return the shortest intervals within a budget, or the longest ones if it is too small for all.

    Args:
        limit: The budget, in units of a step without curvature.
        layers: The layers with curvature.
        others: Numbers of the parameters without curvature.
        speed: Speed of the machine.
        alternates: Whether steps may be left without preconditioning.
    """
    found = costs(layers, others, speed)
    room = limit - 1.0 - found.idle
    turns = _PRECONDITIONED if alternates else (1,)
    every = next((k for k in turns if found.direction / k <= _DIRECTIONS * room), turns[-1])
    pairs = [(t, t * m) for t in _UPDATES for m in _REFRESHES]
    means = [(found.direction / every + found.update / t + found.refresh / r, t, r) for t, r in pairs]
    cost, update, refresh = next((mean for mean in means if mean[0] <= room), means[-1])
    return Intervals(update, refresh, every, 1.0 + found.idle + cost)
