"""Damping and step size that follow the loss: Levenberg-Marquardt, the quadratic model, rejected steps, calibration.

::

    evaluate     call the closure; record its forward passes if the model will differentiate them
    statistics, refresh, share
    take         once: calibrate damping       for each candidate: move, the loss at θ+δ, undo
                 move                          learning rate and momentum from the quadratic model
                 every T steps: judge          the loss at θ+δ on the same batch, ρ, λ; an increase may be undone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from secondorder.adaptation.model import LocalModel
from secondorder.adaptation.no_trust import Move, Sized, called
from secondorder.adaptation.replay import Moment, eager, kept_gradients, recorded
from secondorder.adaptation.trial import Evaluation, Snapshot, loss_model, match_outputs, parts_of
from secondorder.capture.batch import rules
from secondorder.config import AdaptationOptions
from secondorder.curvature.schema import of_kinds
from secondorder.curvature.wrappers import Parts, forwarded
from secondorder.linalg import quadratic
from secondorder.linalg.dense import precision_of
from secondorder.parameters import RULE_KEYS, Directions
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.update import Update

ReturnedT = TypeVar("ReturnedT")

#: Multiples of the damping that calibration tries.
GRID = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)


class TrustRegion:
    """Judges the steps of a layer method that has a damping λ.

    Args:
        adaptation: The options that are on.
        curvature: The blocks.
        update: The first-order rules.
    """

    def __init__(self, adaptation: AdaptationOptions, curvature: LayerPreconditioner[Any], update: Update) -> None:
        self.adaptation, self._curvature, self._update = adaptation, curvature, update
        self._setting, self._table, self._comm = curvature.setting, curvature.table, curvature.comm
        self._likelihood = loss_model(adaptation)
        self._model = LocalModel(curvature, self._likelihood)
        self._evaluation: Evaluation | None = None
        self._coefficients: Tensor | None = None
        self._reduction_ratio: float | None = None
        self._rejected_steps = 0

    # ------------------------------------------------------------------ what cannot be judged
    @property
    def adapts_damping(self) -> bool:
        """Whether λ changes with the loss, in which case it may start far too large."""
        return self.adaptation.adaptive_damping

    def check_module(self, root: nn.Module | None) -> None:
        """Reject a module that cannot run again.

        Raises:
            NotImplementedError: If the model has several parts and no forward.
        """
        if isinstance(root, Parts) and self._likelihood is not None:
            raise NotImplementedError(
                "likelihood= runs the model again along the step, which needs one module with a forward: leave it "
                "out to use the curvature of the blocks, or pass one module that contains all parts"
            )

    def refuse(self) -> None:
        """Reject parameters or blocks if this rank has only a part of them.

        Raises:
            NotImplementedError: If there are any.
        """
        chosen = self.adaptation
        if self._table.shards.is_sharded and chosen.judging:
            raise NotImplementedError(
                f"{', '.join(chosen.judging)}: steps are not judged if parameters are sharded over the ranks "
                "(fully_shard); leave it out, or use DistributedDataParallel"
            )
        if chosen.quadratic_model or chosen.adaptive_damping:
            comm, blocks = self._comm, self._curvature.plan.blocks
            away = [b for b in blocks if not (comm.estimates(b.index) and comm.preconditions(b.index))]
            if away:
                raise NotImplementedError(
                    f"the quadratic model multiplies with the curvature of all layers, but under {comm!r} that of "
                    f"'{away[0].label}' is only on other ranks: use comm=CommOpt()"
                )

    def why_not_joinable(self) -> str | None:
        """Return why a rank without data cannot take part in the steps of the others, or None if it can."""
        wanted = self.adaptation.needing_loss + ["quadratic_model"] * self.adaptation.quadratic_model
        return f"{wanted[0]}=True needs the loss of every rank, but a rank without data has none" if wanted else None

    # ------------------------------------------------------------------ the closure
    def evaluate(self, closure: Callable[[], ReturnedT] | None) -> ReturnedT | None:
        """Return what the closure returns with gradients enabled, and record it for the judgment of the step.

        Raises:
            RuntimeError: If there is no closure and an option needs one.
            TypeError: If the closure returned anything other than a loss and outputs, or no outputs for a likelihood.
        """
        self._evaluation = None
        if closure is None:
            self._require_no_loss()
            return None
        recording = self._needs_forwards()
        looks_again = self._adapts() or self.adaptation.reject_steps or self._calibrates()
        if not (recording or looks_again):
            return called(closure)
        assert self._table.root is not None
        devices, layers = {p.device for p in self._table.group_of}, self._setting.layers
        start, root = Moment(self._table.root, devices), forwarded(self._table.root)[0]
        (rule,) = rules(layers.batch.input, [root], layers.batch.dim)
        with recorded(root, devices, on=recording) as forwards:
            returned = called(closure)
        loss, outputs, targets = parts_of(returned)
        exact = recording and self._likelihood is not None
        matched = match_outputs(forwards, outputs, targets) if exact else []
        examples = sum(forward.examples(layers.batch.dim, rule) for forward in forwards)
        self._evaluation = Evaluation(
            cast("Callable[[], Any]", closure), self._objective(loss), start, recording, examples, matched
        )
        return returned

    def _require_no_loss(self) -> None:
        wanted = self.adaptation.needing_loss
        if not wanted and self.adaptation.quadratic_model and self._likelihood is not None:
            raise RuntimeError("likelihood= needs step(closure) with a closure that returns (loss, outputs)")
        if not wanted:
            return
        scaled = self._setting.loss_scale.multiplies
        hint = " GradScaler.step() does not pass a closure: train in bfloat16, which needs no scaler." if scaled else ""
        raise RuntimeError(
            f"{wanted[0]}=True judges steps by their loss: call step(closure) with a closure that zeroes the "
            f"gradients, computes the loss, calls backward and returns the loss, or (loss, outputs).{hint}"
        )

    def _adapts(self) -> bool:
        """Whether λ is judged at the end of this step; the next one may start with a refresh."""
        chosen = self.adaptation
        return chosen.adaptive_damping and (self._setting.runtime.step + 1) % chosen.damping_interval == 0

    def _calibrates(self) -> bool:
        return any(group.get("damping_calibrated") is False for group in self._table.groups)

    def _needs_forwards(self) -> bool:
        """Whether the model needs the forward passes of this step, to differentiate them or to count their examples."""
        modelled = self._adapts() or self.adaptation.quadratic_model
        return modelled and (self._likelihood is not None or not self._model.is_mean)

    def _objective(self, loss: Tensor) -> Tensor:
        """Return the loss, or its negative if it is maximized."""
        signs = {bool(group["maximize"]) for group in self._table.groups}
        if len(signs) > 1:
            raise RuntimeError(
                "some groups maximize the loss and others minimize it, so no single change of the loss can judge a "
                "step: use two optimizers, or switch off the options that judge steps by the loss"
            )
        return -loss if signs == {True} else loss

    # ------------------------------------------------------------------ the trial
    def dropped(self) -> None:
        """Increase λ after a batch that is left out, for which there is no finite ratio."""
        if self._adapts():
            self._scale_damping(self._rise())

    def take(self, move: Move, gradients: Directions, gate: Tensor | None) -> None:
        """Take the step and judge it: calibrate λ before the first step, and undo or keep the step.

        Args:
            move: The function that moves the parameters.
            gradients: Gradients of this step by parameter.
            gate: None, or a 0-dim bool tensor that is False if the step is not to be taken.
        """
        evaluation = self._evaluation
        try:
            if evaluation is None or not self._curvature.directions.active(gradients):
                move()
                return
            if self._calibrates():
                self._calibrate(evaluation, move, gradients)
            if not (self._adapts() or self.adaptation.reject_steps):
                move()
                return
            before = self._snapshot(gradients)
            try:
                move()
                self._judge_step(evaluation, before, gradients, gate)
            except BaseException:
                before.undo()
                raise
        finally:
            self._evaluation = None  # it holds the closure and a batch

    def size(self, gradients: Directions, directions: Directions) -> Sized:
        """Return the directions with coupled weight decay, and the rate and momentum that minimize the model."""
        if not (self.adaptation.quadratic_model and directions):
            return directions, None
        model, update, group_of = self._model, self._update, self._table.group_of
        directions = {p: d + w * p if (w := model.coupled_decay(p)) else d for p, d in directions.items()}
        along = [directions]
        if any(group_of[p]["momentum"] and float(update.counts([p])[0]) > 1 for p in directions):
            along.append({  # the previous step before `lr`, or zeros if momentum is off
                p: -update.state_of(p, "momentum_buffer") if group_of[p]["momentum"] else torch.zeros_like(p)
                for p in directions
            })  # fmt: skip
        tolerance = torch.finfo(precision_of(next(iter(directions)))).eps ** 0.5
        own = {p: gradients[p] for p in directions}
        found = model.along(along, own, {}, self._evaluation).minimum(tolerance)
        self._coefficients = torch.nn.functional.pad(found, (0, 2 - len(found)))
        return directions, self._coefficients

    def _judge_step(self, evaluation: Evaluation, before: Snapshot, gradients: Directions, gate: Tensor | None) -> None:
        """Compare the loss after the step with the loss before and with the model, and act on it."""
        losses = torch.stack([evaluation.loss.double(), self._loss_now(evaluation).double()])
        numbers = [*self._model.of_all_ranks(losses)]
        if gate is not None:
            numbers.append(gate)
        if self._adapts():
            numbers.append(self._predicted(before, gradients))
        # This is the only wait for the device in a judged step.
        old, new, *others = torch.stack([n.to(numbers[-1].device, torch.float64) for n in numbers]).tolist()
        taken = gate is None or bool(others[0])
        rejected = self.adaptation.reject_steps and taken and not new <= old
        factor = (
            self._verdict(old, new - old, others[-1], torch.finfo(evaluation.loss.dtype).eps) if self._adapts() else 1.0
        )
        if self.adaptation.reject_steps:
            self._rejected_steps += rejected
            for group in self._table.groups:
                group["rejected_in_a_row"] = group.get("rejected_in_a_row", 0) + 1 if rejected else 0
        if rejected:
            before.undo()
            self._forget_momentum(before)
            # In changes of a few percent it would take dozens of steps, none of which moves, to correct a wrong λ.
            factor = max(self._rise(), 2.0 ** (self._table.groups[0]["rejected_in_a_row"] - 1))
        self._scale_damping(factor)

    def _forget_momentum(self, before: Snapshot) -> None:
        """Reset momentum after a second rejection in a row, because no damping improves a step that momentum causes."""
        if self._table.groups[0]["rejected_in_a_row"] > 1:
            momentum = {"momentum_buffer"} | of_kinds(self._table.entries, "momentum")
            for p in before.values:
                state = self._table.state[p]
                for key in [k for k in state if k in momentum]:
                    if isinstance(state[key], Tensor):
                        state[key].zero_()
                    else:
                        state[key] = 0  # the age of the state

    def _predicted(self, before: Snapshot, gradients: Directions) -> Tensor:
        """Return ``q(δ) − q(0)`` of the step that was taken."""
        model = self._model.along([before.moved()], gradients, before.values, self._evaluation)
        return model.change(torch.ones_like(model.gradient), damped=self.adaptation.include_damping_in_model)

    def _verdict(self, loss: float, actual: float, predicted: float, epsilon: float) -> float:
        """Return the factor by which λ changes."""
        if quadratic.is_rounding(loss, actual, predicted, epsilon):
            return 1.0
        self._reduction_ratio = quadratic.reduction_ratio(actual, predicted)
        return quadratic.damping_factor(actual, predicted, self.adaptation.damping_interval)

    def _loss_now(self, evaluation: Evaluation) -> Tensor:
        """Return the objective on the same batch at the current parameters, without side effects."""
        assert self._table.root is not None
        holders = [*self._table.root.parameters(), *self._table.group_of]
        # Use the same mode as before, because other rounding would look like a change of the loss.
        mode = eager() if evaluation.eager else nullcontext()
        pause = self._curvature.hooks.pause(by_user=False)
        with pause, kept_gradients(holders), evaluation.start.replayed(), mode, torch.enable_grad():
            returned = evaluation.closure()
        return self._objective(parts_of(returned)[0])

    def _snapshot(self, gradients: Directions, *, estimates: bool = False) -> Snapshot:
        """Copy what a step changes: parameters, the state of their rules, and optionally running estimates."""
        for p in gradients:  # what a step allocates would not be undone
            self._update.allocate(p, self._table.group_of[p])
        kinds = ("momentum", "scale", "buffers") if estimates else ("momentum",)
        keys = {*RULE_KEYS, "step"} | of_kinds(self._table.entries, *kinds)
        return Snapshot.of({p: self._table.state[p] for p in gradients}, keys.__contains__)

    # ------------------------------------------------------------------ λ
    def _rise(self) -> float:
        return 1 / quadratic.DECAY**self.adaptation.damping_interval

    def _scale_damping(self, factor: float) -> None:
        """Change λ of every group by one factor, within the bounds."""
        low, high = self.adaptation.min_damping, self.adaptation.max_damping
        self.set_damping([quadratic.bounded(g["damping"], factor, low, high) for g in self._table.groups])

    def set_damping(self, values: Sequence[float]) -> None:
        """Change λ of every group, and invalidate factorizations with another value."""
        changed = []
        for group, value in zip(self._table.groups, values, strict=True):
            if group["damping"] != value:
                group["damping"] = value
                changed.append(group)
        # Factored inverses contain the damping of their refresh, so a change would act many steps too late.
        affected = (b for b in self._curvature.plan.blocks if any(b.group is g for g in changed))
        factored = (b for b in affected if b.inverse.holds_damping)
        if late := [b for b in factored if self._table.state[b.owner]["refreshes"] > 0]:
            self._curvature.renew(late)

    def _calibrate(self, evaluation: Evaluation, move: Move, gradients: Directions) -> None:
        """Choose the damping from a geometric grid whose step decreases the loss of this batch most."""
        given = [group["damping"] for group in self._table.groups]
        low, high = self.adaptation.min_damping, self.adaptation.max_damping
        candidates = [[quadratic.bounded(value, multiple, low, high) for value in given] for multiple in GRID]
        before, losses = self._snapshot(gradients, estimates=True), []
        try:
            for candidate in candidates:
                self.set_damping(candidate)
                move(quiet=True)
                losses.append(self._model.of_all_ranks(self._loss_now(evaluation)))
                before.undo()
        except BaseException:
            before.undo()
            self.set_damping(given)
            raise
        found = torch.stack(losses).to(torch.float64).tolist()
        # Choose the largest damping if losses are equal or none is finite.
        best = min(range(len(GRID)), key=lambda i: (found[i] if math.isfinite(found[i]) else math.inf, -i))
        self.set_damping(candidates[best])
        for group in self._table.groups:
            group["damping_calibrated"] = True

    def diagnostics(self) -> dict[str, Any]:
        """Return the damping, and counters and factors of judged steps; reading them may wait for the device."""
        alpha, mu = (None, None) if self._coefficients is None else self._coefficients.tolist()
        return {
            "damping": [group["damping"] for group in self._table.groups],
            "reduction_ratio": self._reduction_ratio,
            "rejected_steps": self._rejected_steps,
            "model_rate": None if alpha is None else -alpha,
            "model_momentum": mu,
        }
