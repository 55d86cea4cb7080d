"""Steps sized by the quadratic model of the loss: its products with curvature, and the rate and momentum it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from secondorder.adaptation.replay import exact_products
from secondorder.adaptation.trial import Adaptation, Evaluation
from secondorder.curvature.block import Block
from secondorder.linalg.dense import precision_of
from secondorder.linalg.quadratic import QuadraticModel
from secondorder.methods.layer_optimizer import LayerOptimizer
from secondorder.parameters import Directions


class ModelledOptimizer(LayerOptimizer):
    """The quadratic model along directions of the parameters, exact or by the curvature of the blocks."""

    def _begin_adaptation(self, adaptation: Adaptation) -> None:
        self._adaptation = adaptation
        self._evaluation: Evaluation | None = None
        self._coefficients: Tensor | None = None

    # ------------------------------------------------------------------ the quadratic model
    def _model(self, directions: Sequence[Directions], gradients: Directions, at: Directions) -> QuadraticModel:
        """The model of the objective along some directions.

        Args:
            directions: ``d_i`` by parameter.
            gradients: ∇.
            at: Values of parameters that have moved since the gradient was taken.

        Returns:
            Its pieces, in float64.
        """
        device = next(iter(gradients.values())).device
        wide = [{p: d.to(torch.promote_types(d.dtype, torch.float32)) for p, d in one.items()} for one in directions]
        decayed = [{p: w * d for p, d in one.items() if (w := self._coupled_decay(p))} for one in wide]
        values = {p: at.get(p, p.detach()) for p in decayed[0]}
        products = {
            "gradient": [_inner(gradients, d, device) for d in wide],
            "decay_gradient": [_inner(values, w, device) for w in decayed],
            "decay": [torch.stack([_inner(d, w, device) for d in wide]) for w in decayed],
        }
        return QuadraticModel(
            curvature=self._curvature_products(wide, at).to(device),
            damping=self._block_products(wide, self._damping_product).to(device),
            **{name: torch.stack(found) for name, found in products.items()},
        )

    def _curvature_products(self, directions: Sequence[Directions], at: Directions) -> Tensor:
        """``⟨d_i, C d_j⟩ [k, k]``: of the loss where the closure returned its outputs, else of the method's blocks."""
        evaluation, likelihood = self._evaluation, self._adaptation.loss_model
        if evaluation is None or likelihood is None or not evaluation.exact:
            return self._block_products(directions, self._curvature.curvature_product)
        assert self._table.root is not None
        with self._unseen():
            own = exact_products(self._table.root, evaluation.exact, likelihood, directions, at, mean=self._is_mean())
        return self._of_all_ranks(own)

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        """The mean over the ranks, as of their gradients; the same bits on each, so that all decide alike."""
        if not self.comm.combines:
            return values
        total = self.comm.agree(values.detach().to(torch.float64).flatten()) / self.comm.data_world
        return total.reshape(values.shape).to(values.device)

    def _block_products(self, directions: Sequence[Directions], product: Callable[[Block, Tensor], Tensor]) -> Tensor:
        """``Σ ⟨D_i, product(D_j)⟩ [k, k]`` over the blocks that precondition, ``D [(Γ,) n_g, n_a]``."""
        k, first = len(directions), next(iter(directions[0].values()))
        total = torch.zeros(k, k, dtype=torch.float64, device=first.device)
        for block in self._curvature.active(directions[0]):
            matrices = [block.layer.matrix([d[p].to(precision_of(p)) for p in block.params]) for d in directions]
            images = [product(block, m) for m in matrices]
            rows = [torch.stack([(m * image).sum() for image in images]) for m in matrices]
            total += torch.stack(rows).to(total)
        # Blocks and their damping are per example; a sum over examples has those of all of them.
        return (total + total.mT) * (0.5 if self._is_mean() else 0.5 * self._examples())

    def _is_mean(self) -> bool:
        return all(group.get("loss_reduction", "mean") == "mean" for group in self.param_groups)

    def _examples(self) -> float:
        """Examples in the gradient of this step, which a summed loss has the curvature of."""
        own = 0.0 if self._evaluation is None else float(self._evaluation.examples)
        found = float(self._of_all_ranks(torch.tensor(own, dtype=torch.float64)))
        if not found:
            raise RuntimeError(
                "with loss_reduction='sum' the quadratic model needs the number of examples, which it counts in the "
                "forwards of a closure, at the first tensor argument of the model: call step(closure), or average the "
                "loss and use loss_reduction='mean'"
            )
        return found

    def _join_ranks(self) -> None:
        chosen = self._adaptation
        if self._is_cut and (chosen.quadratic_model or chosen.needing_loss):
            names = ", ".join([*(["quadratic_model"] if chosen.quadratic_model else []), *chosen.needing_loss])
            raise NotImplementedError(
                f"{names}: steps are not judged where parameters are cut over the ranks (fully_shard); leave that out, "
                "or use DistributedDataParallel"
            )
        if chosen.quadratic_model or chosen.adaptive_damping:
            away = [
                b
                for b in self.blocks.values()
                if not (self.comm.estimates(b.index) and self.comm.preconditions(b.index))
            ]
            if away:
                raise NotImplementedError(
                    f"the quadratic model multiplies with the curvature of all layers, and under {self.comm!r} that of "
                    f"'{away[0].label}' is on other ranks alone: use comm=CommOpt()"
                )
        super()._join_ranks()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Pause capture, without the next step taking this for the user's own pause."""
        capture = self.capture
        before = capture.was_paused
        with self.pause_capture():
            yield
        capture.was_paused = before

    def _damping_product(self, block: Block, matrix: Tensor) -> Tensor:
        damping = self._curvature.block_damping(block)
        return matrix * (damping[..., None, None] if isinstance(damping, Tensor) else damping)

    def _coupled_decay(self, p: nn.Parameter) -> float:
        group = self._table.group_of[p]
        return 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"])

    # ------------------------------------------------------------------ stage 7 with the model

    def _apply(self, gradients: Directions, directions: Directions, gate: Tensor | None) -> None:
        size = None
        if self._adaptation.quadratic_model and directions:
            directions = {p: d + w * p if (w := self._coupled_decay(p)) else d for p, d in directions.items()}
            along = [directions]
            if any(self._table.group_of[p]["momentum"] and self._update.steps_of(p) > 1 for p in directions):
                along.append({p: self._previous(p) for p in directions})
            tolerance = torch.finfo(precision_of(next(iter(directions)))).eps ** 0.5
            found = self._model(along, {p: gradients[p] for p in directions}, {}).minimum(tolerance)
            self._coefficients = size = torch.nn.functional.pad(found, (0, 2 - len(found)))
        self._update.apply(gradients, directions, gate, size)

    def _previous(self, p: nn.Parameter) -> Tensor:
        """The previous step before ``lr``, or zeros where momentum is off."""
        buffer = self._update.state_of(p, "momentum_buffer") if self._table.group_of[p]["momentum"] else None
        return torch.zeros_like(p) if buffer is None else -buffer


def _inner(x: Directions, y: Directions, device: torch.device) -> Tensor:
    """``Σ ⟨x, y⟩`` over the parameters of y, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for p, b in y.items():
        a = x[p].to(b.dtype)
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        total = total + (a * b).sum().to(total)
    return total
