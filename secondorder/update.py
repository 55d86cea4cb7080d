"""The first-order part of a step: the sources to precondition, the length of directions, and the update rules.

::

    ∇ ─► sources ─► Preconditioner.propose ─► bound ─► apply
         ∇, or Adam's mean                    guard, kl-clip, graft, clip
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.capture.statistics.averages import all_finite
from secondorder.comm.layout import local
from secondorder.linalg import first_order, stacks
from secondorder.linalg.dense import all_true_on_cpu
from secondorder.linalg.first_order import as_real, rate
from secondorder.parameters import Directions, Group, ParameterTable
from secondorder.preconditioners.base import Covering, Preconditioner, Proposal, Rule


class Update:
    """Sizes directions and applies them by the first-order rules of the groups, whose state it allocates.

    Args:
        table: The parameters.
        preconditioner: The preconditioner, which may change the rules of the parameters that it preconditions.
    """

    def __init__(self, table: ParameterTable, preconditioner: Preconditioner) -> None:
        self._table, self._preconditioner = table, preconditioner
        #: Lengths of Adam's steps at rate 1 in this step, where Adam determines the size of the directions.
        self._lengths: Directions = {}
        #: Factors by which grafting scaled directions in the last step, by the first parameter of each set.
        self.graft_factors: dict[nn.Parameter, Tensor] = {}
        #: Factor by which kl-clip scaled directions in the last step, or None.
        self.kl_factor: Tensor | None = None

    def diagnostics(self) -> dict[str, Any]:
        """Return the factors by which grafting and kl-clip scaled directions in the last step."""
        firsts = {
            name: next((p for p in params if p in self.graft_factors), None)
            for name, params in self._preconditioner.plan.reported()
        }
        found: dict[str, Any] = {
            "graft_factor": {n: float(self.graft_factors[p]) for n, p in firsts.items() if p is not None}
        }
        if self._preconditioner.takes_sources:
            found["kl_clip_factor"] = None if self.kl_factor is None else float(self.kl_factor)
        return found

    # ------------------------------------------------------------------ state
    def keys(self, p: nn.Parameter, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of the state of the first-order rule that a parameter usually follows."""
        covered = p in self._preconditioner.covered
        if options.is_adam((group["graft"] or group["inner"]) if covered else group["fallback"]):
            return "exp_avg", "exp_avg_sq"
        rule = _plain_rule("sgd", group)
        momentum = (self._preconditioner.rule(p, group, rule) if covered else rule).momentum
        return ("momentum_buffer",) if momentum else ()

    def allocate(self, p: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Allocate the state of the usual rule, so that state never depends on which gradients came first."""
        for key in self.keys(p, group):
            self.state_of(p, key)

    def state_of(self, p: nn.Parameter, key: str) -> Tensor:
        """Return a state tensor of a rule, which has the shape of the parameter."""
        state = self._table.state[p]
        if key not in state:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return cast(Tensor, state[key])

    def counts(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the number of updates of each parameter, as 0-dim tensors on the CPU."""
        return [self._table.state[p]["step"] for p in params]

    def count(self, gradients: Directions) -> None:
        """Count an update of every parameter that has a gradient."""
        torch._foreach_add_(self.counts(gradients), 1.0)

    def _moments(self, params: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        """Adam's moments; for sharded parameters, the shards of this rank."""
        first, second = ([local(self.state_of(p, key)) for p in params] for key in ("exp_avg", "exp_avg_sq"))
        return first, second

    # ------------------------------------------------------------------ what is preconditioned
    def sources(self, gradients: Directions, gate: Tensor | None) -> Directions:
        """Return the tensors to precondition by parameter; none for windows, which contain them.

        This is the gradient, or Adam's bias-corrected first moment if Adam determines the size of the step. Nothing
        changes where ``gate``, a 0-dim bool tensor, is False.
        """
        curvature = self._preconditioner
        params = curvature.preconditioned(gradients)
        grafted = {p for p in params if options.is_adam(curvature.covered[p].group["graft"])}
        means = self._count_moments(grafted, gradients, gate)
        if not curvature.takes_sources:
            return {}
        found = {p: means.get(p, gradients[p]) for p in params}
        curvature.change_sources(found, gradients, gate)
        return found

    def _count_moments(self, chosen: set[nn.Parameter], gradients: Directions, gate: Tensor | None) -> Directions:
        """Update Adam's moments and the lengths of its steps for the parameters whose step has that length.

        Returns:
            The bias-corrected first moments, if they are preconditioned.
        """
        corrected: Directions = {}
        self._lengths.clear()
        for group in self._table.groups if chosen else ():
            own = [p for p in group["params"] if p in chosen]
            if own:
                moments, counts = self._moments(own), self.counts(own)
                betas, eps = self._preconditioner.adam_options(group)
                grads = [self._with_decay(p, gradients[p]) for p in own]
                grads, means, squares = map(as_real, (grads, *moments))
                lengths = first_order.adam_lengths_(grads, means, squares, counts, betas, eps, gate)
                self._lengths.update(zip(own, lengths.unbind(), strict=True))
                if self._preconditioner.takes_sources:
                    steps: list[float] = torch.stack(counts).tolist()
                    corrected.update(zip(own, first_order.corrected(moments[0], steps, betas[0]), strict=True))
        return corrected

    def _with_decay(self, p: nn.Parameter, gradient: Tensor) -> Tensor:
        """Return the gradient that Adam uses for a covered parameter, with weight decay added if it is coupled."""
        group = self._table.group_of[p]
        if not group["weight_decay"] or options.is_decoupled(self._preconditioner.covered[p].group["graft"], group):
            return gradient
        return gradient.add(local(p), alpha=group["weight_decay"])

    # ------------------------------------------------------------------ the size of directions
    def bound(self, proposal: Proposal, sources: Directions) -> Directions:
        """Return finite directions by parameter, with the length that grafting and clipping give them.

        Args:
            proposal: Preconditioned directions, which are changed in place.
            sources: The preconditioned tensors. The dict is emptied, since it may be as large as the model.
        """
        self.graft_factors.clear()
        self.kl_factor = None
        if sources:
            products = self._guard(proposal, sources)
            sources.clear()
            self._kl_clip(proposal.directions, products)
        self._graft(proposal)
        directions = {p: _like(d, p) for p, d in proposal.directions.items()}
        self._clip(directions)
        return {p: d.to(p.dtype) for p, d in directions.items()}

    def _guard(self, proposal: Proposal, source: Directions) -> Directions:
        """Replace the directions of a block by its gradients for this step if they are not finite.

        Returns:
            ``⟨direction, source⟩`` by parameter, or by the first parameter of a block. kl-clip needs it, and it is not
            finite where a direction is not.
        """
        unknown, directions = [params for _, params in proposal.sets], proposal.directions
        if proposal.products:
            unknown = [params for params in unknown if params[0] not in proposal.products]
            directions = {p: directions[p] for params in unknown for p in params}
        is_needed = self._table.shards.is_sharded or _clipped(
            directions, self._table.group_of, self._preconditioner.covered
        )
        on_cpu = all(d.device.type == "cpu" for d in directions.values())
        if not directions or (not is_needed and on_cpu and all_true_on_cpu(all_finite(list(directions.values())))):
            return proposal.products
        products = {p: first_order.inner_product(d, source[p].to(d.dtype)) for p, d in directions.items()}
        squares: Directions = {}
        if self._table.shards.is_sharded:  # one message: on a device, both are needed
            cast_ = ((p, source[p].to(d.dtype)) for p, d in directions.items())
            squares = {p: first_order.inner_product(x, x) for p, x in cast_}
            found = torch.stack([x.to(torch.float64) for x in (*products.values(), *squares.values())])
            sums = self._table.shards.sum(found, [*products, *products]).chunk(2)
            products, squares = (dict(zip(products, own.unbind(), strict=True)) for own in sums)
        finite = torch.isfinite(torch.stack([x.to(torch.float32) for x in products.values()]))
        if finite.device.type == "cpu" and all_true_on_cpu(finite):
            return {**proposal.products, **products}
        plain = {p: source[p].to(d.dtype) for p, d in directions.items()}
        own = squares or dict(zip(plain, first_order.norms(plain.values()).square().unbind(), strict=True))
        for params, good in _judged(unknown, products):
            for p in params:
                proposal.directions[p] = torch.where(good, directions[p], plain[p])
                products[p] = torch.where(good, products[p], own[p])
        return {**proposal.products, **products}

    def _kl_clip(self, directions: Directions, products: Directions) -> None:
        """Bound the KL divergence that the step of all clipped groups may cause. Each group has a limit of its own."""
        group_of = self._table.group_of
        clipped = _clipped(directions, group_of, self._preconditioner.covered)
        if not clipped:
            return
        known = [p for p in clipped if p in products]
        rates = {id(group): rate(group["lr"]) for group in self._table.groups}  # one object for each group
        terms, lrs = [products[p] for p in known], [rates[id(group_of[p])] for p in known]
        for limit in {group_of[p]["kl_clip"] for p in clipped}:
            self.kl_factor = factor = first_order.kl_clip_factor(terms, lrs, limit)
            torch._foreach_mul_([directions[p] for p in clipped if group_of[p]["kl_clip"] == limit], factor)

    def _graft(self, proposal: Proposal) -> None:
        """Give each set of directions the size of the step of the rule named by ``graft``."""
        directions, raw = proposal.directions, proposal.raw
        chosen = [(rule, params) for rule, params in proposal.sets if rule is not None and params]
        if not chosen:
            return
        members = [p for _, params in chosen for p in params]
        found = [[directions[p] for p in params] for _, params in chosen]
        # A tensor with the norm of the step of the rule: Adam's steps would be as large as the model.
        wanted = [self._lengths[p] if options.is_adam(rule) else raw[p] for rule, params in chosen for p in params]
        lengths = self._table.shards.norms([*members, *members], chain(wanted, *found)).chunk(2)
        factors = first_order.match_lengths_(found, *lengths)
        self.graft_factors.update(zip((params[0] for _, params in chosen), factors.unbind(), strict=True))

    def _clip(self, directions: Directions) -> None:
        """Bound the norm of all directions, and then their entries."""
        group_of = self._table.group_of
        limited = [p for p in directions if group_of[p]["clip_norm"] is not None]
        if limited:
            total = torch.linalg.vector_norm(self._table.shards.norms(limited, [directions[p] for p in limited]))
            for p in limited:
                factor = (group_of[p]["clip_norm"] / (total + 1e-12)).clamp(max=1)
                directions[p].mul_(factor.to(directions[p].device, torch.float64))
        for p, direction in directions.items():
            if (bound := group_of[p]["clip_value"]) is not None:
                (torch.view_as_real(direction) if direction.is_complex() else direction).clamp_(-bound, bound)

    # ------------------------------------------------------------------ rules
    def rule(self, p: nn.Parameter, group: Group, preconditioned: bool) -> Rule:
        """Return the first-order rule of a parameter in this step, which depends on whether it has a direction."""
        curvature = self._preconditioner
        if p not in curvature.covered:
            return _rule_named(group["fallback"], group, is_fallback=True)
        graft = curvature.covered[p].group["graft"]
        if preconditioned:
            if options.is_adam(graft):  # coupled decay is already in Adam's moments
                is_decoupled = options.is_decoupled(graft, group)
                rule = Rule("plain", 0.0, group["weight_decay"] if is_decoupled else 0.0, is_decoupled)
            else:
                rule = _rule_named(group["inner"], group)
            return curvature.rule(p, group, rule)
        is_on = not curvature.refresh_interval or group[curvature.refresh_interval]
        if not is_on or graft is not None or options.is_adam(group["inner"]):
            return _rule_named(graft or group["inner"], group, may_fuse=bool(is_on and graft))
        return _rule_named(group["fallback"], group, is_fallback=True)

    def apply(
        self, gradients: Directions, directions: Directions, gate: Tensor | None, size: Tensor | None = None
    ) -> None:
        """Update all parameters that have gradients.

        Args:
            gradients: Gradients of this step by parameter.
            directions: Preconditioned directions by parameter.
            gate: None, or a 0-dim bool tensor. If it is False, nothing changes.
            size: Learning rate and momentum of the quadratic model ``[2]``, which replace those of the groups for
                parameters with directions.
        """
        for group in self._table.groups:
            by_rule: dict[Rule, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p in gradients:
                    preconditioned = p in directions
                    is_sized = preconditioned and size is not None
                    rule = _modelled_rule(group) if is_sized else self.rule(p, group, preconditioned)
                    by_rule.setdefault(rule, []).append(p)
            for rule, members in by_rule.items():
                for part in stacks.foreach_parts(members, group["foreach"]):
                    own = [directions.get(p, gradients[p]) for p in part]
                    if rule.kind == "adam":
                        self._apply_adam(rule, part, group, own, gate)
                    elif rule.kind == "model":
                        self._apply_model(rule, part, group, own, gate, cast(Tensor, size))
                    else:
                        self._apply_sgd(rule, part, group, own, gate)

    def _apply_adam(
        self, rule: Rule, params: list[nn.Parameter], group: Group, directions: list[Tensor], gate: Tensor | None
    ) -> None:
        betas, eps = self._preconditioner.adam_options(group)
        tensors, directions, means, squares = map(as_real, (self._locals(params), directions, *self._moments(params)))
        may_fuse = rule.may_fuse and gate is None and group["foreach"] is None
        fused = may_fuse and first_order.fits_fused((*map(torch.Tensor.detach, tensors), *directions, *means))
        first_order.adam_(
            tensors, directions, means, squares, self.counts(params),
            lr=_fallback_lr(group) if rule.is_fallback else rate(group["lr"]), betas=betas, eps=eps,
            weight_decay=rule.weight_decay, decoupled=rule.decoupled, gate=gate, fused=fused,
        )  # fmt: skip

    def _apply_sgd(
        self, rule: Rule, params: list[nn.Parameter], group: Group, directions: list[Tensor], gate: Tensor | None
    ) -> None:
        tensors = self._locals(params)
        if rule.shrink:
            first_order.shrink_(tensors, rule.shrink, gate)
        if rule.factor != 1:
            directions = list(torch._foreach_mul(directions, rule.factor))
        first_order.sgd_(
            tensors, directions, self._buffers(rule, params), lr=rate(group["lr"]), momentum=rule.momentum,
            weight_decay=rule.weight_decay, nesterov=group["nesterov"] and rule.momentum > 0, decoupled=rule.decoupled,
            gate=gate,
        )  # fmt: skip

    def _apply_model(
        self, rule: Rule, params: list[nn.Parameter], group: Group, directions: list[Tensor], gate: Tensor | None,
        size: Tensor,
    ) -> None:  # fmt: skip
        alpha, mu = size.to(params[0].device).unbind()
        # δ = lr (α d₁ + μ d₂) as heavy-ball momentum μ on −α d₁: the buffer is −δ / lr, like SGD's.
        first_order.sgd_(
            self._locals(params), [d * -alpha for d in directions], self._buffers(rule, params),
            lr=rate(group["lr"]), momentum=cast("float", mu), weight_decay=rule.weight_decay, nesterov=False,
            decoupled=True, gate=gate,
        )  # fmt: skip

    def _buffers(self, rule: Rule, params: Sequence[nn.Parameter]) -> list[Tensor] | None:
        return [local(self.state_of(p, "momentum_buffer")) for p in params] if rule.momentum else None

    def _locals(self, params: list[nn.Parameter]) -> list[Tensor]:
        """The parameters; for sharded parameters, the shards of this rank."""
        return [local(p) for p in params] if self._table.shards.is_sharded else cast("list[Tensor]", params)


def _judged(
    sets: Sequence[Sequence[nn.Parameter]], products: Directions
) -> Iterator[tuple[Sequence[nn.Parameter], Tensor]]:
    """Yield the parameters of each set and whether all of their products are finite, as a 0-dim bool tensor."""
    by_size: dict[int, list[Sequence[nn.Parameter]]] = {}
    for params in sets:
        by_size.setdefault(len(params), []).append(params)
    for size, alike in by_size.items():
        found = torch.stack([products[p] for params in alike for p in params])
        yield from zip(alike, torch.isfinite(found).view(-1, size).all(1).unbind(), strict=True)


def _plain_rule(kind: str, group: Mapping[str, Any]) -> Rule:
    return Rule(kind, group["momentum"], group["weight_decay"], group["decoupled_weight_decay"])


def _modelled_rule(group: Group) -> Rule:
    """The rule for directions whose size the quadratic model determines. They already contain coupled decay."""
    is_decoupled = group["decoupled_weight_decay"]
    return Rule("model", group["momentum"], group["weight_decay"] if is_decoupled else 0.0, True)


def _rule_named(name: str, group: Group, *, is_fallback: bool = False, may_fuse: bool = False) -> Rule:
    """The rule that an option of a group names."""
    if not options.is_adam(name):
        return _plain_rule("sgd", group)
    decoupled = options.is_decoupled(name, group)
    return Rule("adam", 0.0, group["weight_decay"], decoupled, is_fallback=is_fallback, may_fuse=may_fuse)


def _fallback_lr(group: Group) -> Any:
    """The fallback's learning rate, scaled in proportion to the schedule of ``lr``, whose peak OneCycleLR stores."""
    own, base = group["fallback_lr"], group.get("max_lr", group["fallback_base_lr"])
    if own is None:
        if group["graft"] is not None:
            return rate(group["lr"])
        own = 1e-3
    return own * (rate(group["lr"]) / base if base else rate(group["lr"]) > 0)


def _clipped(
    directions: Directions, group_of: Mapping[nn.Parameter, Group], covered: Mapping[nn.Parameter, Covering]
) -> list[nn.Parameter]:
    """Return the parameters whose directions kl-clip bounds."""
    return [
        p
        for p in directions
        if group_of[p].get("kl_clip") and covered[p].group["graft"] is None and not covered[p].sets_length
    ]


def _like(direction: Tensor, p: nn.Parameter) -> Tensor:
    if not p.is_complex():
        return direction
    # Make a copy, because a complex view must start at an even offset.
    return torch.view_as_complex(direction.to(torch.promote_types(direction.dtype, torch.float32)).clone())
