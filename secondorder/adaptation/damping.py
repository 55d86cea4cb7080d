"""Damping and step size that watch the loss: Levenberg-Marquardt, the quadratic model, rejected steps, calibration.

::

    stage 0      the closure; its forwards are recorded where the model will differentiate them
    stages 1-4   as ever
    trial        once: calibrate damping       for each candidate: stages 5 to 7, the loss at θ+δ, undo
                 stages 5 to 7                 rate and momentum from the quadratic model
                 every T steps: judge          the loss at θ+δ on the same batch, ρ, λ; a rise may be undone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from secondorder.adaptation.model import ModelledOptimizer
from secondorder.adaptation.replay import Moment, eager, kept_gradients, recorded
from secondorder.adaptation.trial import Adaptation, Evaluation, Snapshot, match_outputs, parts_of
from secondorder.capture.batch import rules
from secondorder.curvature.block import Block
from secondorder.curvature.layer import Parts, forwarded
from secondorder.curvature.schema import of_kinds
from secondorder.linalg import quadratic
from secondorder.parameters import RULE_KEYS, Directions

ReturnedT = TypeVar("ReturnedT")

#: Multiples of the given damping that calibration tries.
GRID = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3)


class AdaptiveOptimizer(ModelledOptimizer):
    """Base of the layer methods that have a damping λ.

    A method calls :meth:`_begin_adaptation` before the constructor of its base.
    """

    def _begin_adaptation(self, adaptation: Adaptation) -> None:
        super()._begin_adaptation(adaptation)
        self._reduction_ratio: float | None = None
        self._rejected_steps = 0

    def _connect(self, root: nn.Module | None) -> None:
        if isinstance(root, Parts) and self._adaptation.loss_model is not None:
            raise NotImplementedError(
                "likelihood= has the model run again along the step, which takes one module with a forward: leave it "
                "out to use the curvature of the blocks, or pass one module that holds all parts"
            )
        super()._connect(root)

    # ------------------------------------------------------------------ stage 0: the closure
    def _evaluate(self, closure: Callable[[], ReturnedT] | None) -> ReturnedT | None:
        self._evaluation = None
        if closure is None:
            self._require_no_loss()
            return None
        recording = self._needs_forwards()
        if not (recording or self._looks_again()):
            return super()._evaluate(closure)
        assert self._table.root is not None
        devices = {p.device for p in self._table.group_of}
        start = Moment(self._table.root, devices)
        root, chosen = forwarded(self._table.root)[0], self._layer_options
        (rule,) = rules(chosen.batch_input, [root], chosen.batch_dim)
        with recorded(root, devices, on=recording) as forwards:
            returned = super()._evaluate(closure)
        loss, outputs, targets = parts_of(returned)
        exact = self._adaptation.loss_model is not None and outputs is not None
        matched = match_outputs(forwards, outputs, targets) if recording and exact else []
        examples = sum(forward.examples(chosen.batch_dim, rule) for forward in forwards)
        self._evaluation = Evaluation(
            cast("Callable[[], Any]", closure), self._objective(loss), start, recording, examples, matched
        )
        return returned

    def _require_no_loss(self) -> None:
        wanted = self._adaptation.needing_loss
        if not wanted:
            return
        scaled = self.loss_scale.multiplies
        hint = " GradScaler.step() passes no closure on: train in bfloat16, which needs no scaler." if scaled else ""
        raise RuntimeError(
            f"{wanted[0]}=True judges steps by their loss: call step(closure) with a closure that zeroes the "
            f"gradients, computes the loss, calls backward and returns the loss, or (loss, outputs).{hint}"
        )

    def _watch_damping(self) -> None:
        if not self._adaptation.adaptive_damping:  # λ may begin far too large
            super()._watch_damping()

    def _adapts(self) -> bool:
        """Whether λ is judged at the end of this step: the next one may begin with a refresh."""
        chosen = self._adaptation
        return chosen.adaptive_damping and (self._t + 1) % chosen.damping_interval == 0

    def _why_not_joinable(self) -> str | None:
        wanted = self._adaptation.needing_loss + ["quadratic_model"] * self._adaptation.quadratic_model
        if wanted:
            return f"{wanted[0]}=True looks at the loss of every rank, and one without data has none"
        return super()._why_not_joinable()

    def _calibrates(self) -> bool:
        return any(group.get("damping_calibrated") is False for group in self.param_groups)

    def _looks_again(self) -> bool:
        """Whether this step evaluates the loss at other parameters too."""
        return self._adapts() or self._adaptation.reject_steps or self._calibrates()

    def _needs_forwards(self) -> bool:
        """Whether the model needs the forwards of this step: to differentiate them, or to count their examples."""
        modelled = self._adapts() or self._adaptation.quadratic_model
        return modelled and (self._adaptation.loss_model is not None or not self._is_mean())

    def _objective(self, loss: Tensor) -> Tensor:
        """The loss, or its negative where it is maximized."""
        signs = {bool(group["maximize"]) for group in self.param_groups}
        if len(signs) > 1:
            raise RuntimeError(
                "some groups maximize the loss and others minimize it, so no single change of the loss can judge a "
                "step: use two optimizers, or switch off what judges steps by their loss"
            )
        return -loss if signs == {True} else loss

    def _inspect(self, gradients: Directions) -> tuple[bool, Tensor | None]:
        ok, gate = super()._inspect(gradients)
        if not ok and self._adapts():
            self._scale_damping(self._rise())  # nothing to judge, and no finite ratio
        return ok, gate

    # ------------------------------------------------------------------ the trial
    @contextmanager
    def _trial(self, gradients: Directions, gate: Tensor | None) -> Iterator[None]:
        evaluation = self._evaluation
        try:
            if evaluation is None or not self._curvature.active(gradients):
                yield
                return
            if self._calibrates():
                self._calibrate(evaluation, gradients, gate)
            if not (self._adapts() or self._adaptation.reject_steps):
                yield
                return
            before = self._snapshot(gradients)
            try:
                yield
                self._judge_step(evaluation, before, gradients, gate)
            except BaseException:
                before.undo()
                raise
        finally:
            self._evaluation = None  # it holds the closure and a batch

    def _judge_step(self, evaluation: Evaluation, before: Snapshot, gradients: Directions, gate: Tensor | None) -> None:
        """Compare the loss after the step with the one before and with the model, and act on it."""
        numbers = [*self._of_all_ranks(torch.stack([evaluation.loss.double(), self._loss_now(evaluation).double()]))]
        if gate is not None:
            numbers.append(gate)
        if self._adapts():
            numbers.append(self._predicted(before, gradients))
        # The one wait for the device of a judged step.
        old, new, *others = torch.stack([n.to(numbers[-1].device, torch.float64) for n in numbers]).tolist()
        taken = gate is None or bool(others[0])
        rejected = self._adaptation.reject_steps and taken and not new <= old
        factor = self._verdict(old, new - old, others[-1], _epsilon(evaluation.loss)) if self._adapts() else 1.0
        if self._adaptation.reject_steps:
            self._count_rejections(rejected)
        if rejected:
            before.undo()
            self._forget_momentum(before)
            # By a few percent each it would take dozens of steps, none of which moves, to mend a λ that is far off.
            factor = max(self._rise(), 2.0 ** (self.param_groups[0]["rejected_in_a_row"] - 1))
        self._scale_damping(factor)

    def _count_rejections(self, rejected: bool) -> None:
        self._rejected_steps += rejected
        for group in self.param_groups:
            group["rejected_in_a_row"] = group.get("rejected_in_a_row", 0) + 1 if rejected else 0

    def _forget_momentum(self, before: Snapshot) -> None:
        """After a second rejection in a row, start momentum anew: more damping cannot mend a step that it causes."""
        if self.param_groups[0]["rejected_in_a_row"] > 1:
            momentum = {"momentum_buffer"} | of_kinds(self.entries, "momentum")
            for p in before.values:
                state = self.state[p]
                for key in [k for k in state if k in momentum]:
                    if isinstance(state[key], Tensor):
                        state[key].zero_()
                    else:
                        state[key] = 0  # its age

    def _predicted(self, before: Snapshot, gradients: Directions) -> Tensor:
        """``q(δ) − q(0)`` of the step that was taken."""
        model = self._model([before.moved()], gradients, before.values)
        return model.change(torch.ones_like(model.gradient), damped=self._adaptation.include_damping_in_model)

    def _verdict(self, loss: float, actual: float, predicted: float, epsilon: float) -> float:
        """Factor of λ."""
        if quadratic.is_rounding(loss, actual, predicted, epsilon):
            return 1.0
        self._reduction_ratio = quadratic.reduction_ratio(actual, predicted)
        return quadratic.damping_factor(actual, predicted, self._adaptation.damping_interval)

    def _loss_now(self, evaluation: Evaluation) -> Tensor:
        """The objective on the same batch at the parameters as they are; leaves no trace."""
        assert self._table.root is not None
        holders = [*self._table.root.parameters(), *self._table.group_of]
        # As before, eagerly or not: the rounding of two ways to compute would be taken for a change of the loss.
        mode = eager() if evaluation.eager else nullcontext()
        with self._unseen(), kept_gradients(holders), evaluation.start.replayed(), mode, torch.enable_grad():
            returned = evaluation.closure()
        return self._objective(parts_of(returned)[0])

    def _snapshot(self, gradients: Directions, *, estimates: bool = False) -> Snapshot:
        """What a step changes: parameters and the state of their rules, and if asked for running estimates."""
        kinds = ("momentum", "scale", "buffers") if estimates else ("momentum",)
        states, keys = {p: self.state[p] for p in gradients}, {*RULE_KEYS, "step"} | of_kinds(self.entries, *kinds)
        return Snapshot.of(states, keys.__contains__)

    # ------------------------------------------------------------------ λ
    def _rise(self) -> float:
        return 1 / quadratic.DECAY**self._adaptation.damping_interval

    def _scale_damping(self, factor: float) -> None:
        """Change λ of every group by one factor, within the bounds."""
        low, high = self._adaptation.min_damping, self._adaptation.max_damping
        self._set_damping([quadratic.bounded(g["damping"], factor, low, high) for g in self.param_groups])

    def _set_damping(self, values: Sequence[float]) -> None:
        changed = []
        for group, value in zip(self.param_groups, values, strict=True):
            if group["damping"] != value:
                group["damping"] = value
                changed.append(group)
        # Factored inverses hold the damping of their refresh, and would answer to a change many steps too late.
        late = [
            b
            for b in self._curvature.all_blocks
            if any(b.group is g for g in changed) and self._is_damped_at_refresh(b)
        ]
        if late:
            self._curvature.renew(late)

    def _is_damped_at_refresh(self, block: Block) -> bool:
        return block.group.get("inverse_method") == "cholesky" and self.state[block.owner]["refreshes"] > 0

    def _calibrate(self, evaluation: Evaluation, gradients: Directions, gate: Tensor | None) -> None:
        """Take the damping of a geometric grid whose step lowers the loss of this batch most."""
        given = [group["damping"] for group in self.param_groups]
        low, high = self._adaptation.min_damping, self._adaptation.max_damping
        candidates = [[quadratic.bounded(value, multiple, low, high) for value in given] for multiple in GRID]
        before, losses = self._snapshot(gradients, estimates=True), []
        for candidate in candidates:
            self._set_damping(candidate)
            self._update.count(gradients)
            self._apply(gradients, self._directions(gradients, gate), gate)
            losses.append(self._of_all_ranks(self._loss_now(evaluation)))
            before.undo()
        found = torch.stack(losses).to(torch.float64).tolist()
        # Of equal losses, and where none is finite, the greatest damping.
        best = min(range(len(GRID)), key=lambda i: (found[i] if math.isfinite(found[i]) else math.inf, -i))
        self._set_damping(candidates[best])
        for group in self.param_groups:
            group["damping_calibrated"] = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the base class."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if self._adaptation.calibrate_damping:
            # A group that joins in the middle of training keeps the damping that it was given.
            group.setdefault("damping_calibrated", self._t > 0)
        if self._adaptation.reject_steps:
            group.setdefault("rejected_in_a_row", self.param_groups[0].get("rejected_in_a_row", 0))

    # ------------------------------------------------------------------ copies, and what it tells
    def _kept_by_copies(self) -> dict[str, Any]:
        return {**super()._kept_by_copies(), "adaptation": self._adaptation}

    def _restore(self, kept: dict[str, Any]) -> None:
        self._begin_adaptation(kept["adaptation"])
        super()._restore(kept)

    def diagnostics(self) -> dict[str, Any]:
        """Counters and factors as plain numbers; reading them may wait for the device."""
        alpha, mu = (None, None) if self._coefficients is None else self._coefficients.tolist()
        return super().diagnostics() | {
            "damping": [group["damping"] for group in self.param_groups],
            "reduction_ratio": self._reduction_ratio,
            "rejected_steps": self._rejected_steps,
            "model_rate": None if alpha is None else -alpha,
            "model_momentum": mu,
        }


def _epsilon(loss: Tensor) -> float:
    return float(torch.finfo(loss.dtype).eps)
