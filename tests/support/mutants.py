"""Faults of one line, which `tests.support.mutations` puts into copies of the package: some test must catch each.

The faults are typical mistakes: a sign, a factor, a dropped term, a wrong transpose, an interval that is off by one, a
copy that is skipped. When a line of the package changes, update its row here. A row that no test catches any longer
shows what the tests have lost.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A fault."""

    name: str
    file: str  # below `secondorder/`
    old: str  # a part of a line that occurs once in the file
    new: str  # its replacement
    tests: tuple[str, ...]  # arguments of pytest that select the tests that are likely to catch it, in order of trial


HYLO = ("tests/hylo",)
EKFAC = ("tests/ekfac",)
BLOCKS = ("tests/curvature", *EKFAC)
WINDOW = ("tests/window",)
ORACLE = ("tests/oracle",)
STACKS = "tests/curvature/test_block_stacks.py"
RULES = ("tests/test_update.py", "tests/contract -k 'graft or inner or momentum or weight_decay or fallback'")

MUTATIONS: tuple[Mutation, ...] = (
    # ---------------------------------------------------------------- linalg: the mathematics
    Mutation(
        "woodbury-adds-what-it-subtracts", "linalg/woodbury.py",
        "add_combination_(out, rows, z.neg_())", "add_combination_(out, rows, z)", HYLO,
    ),
    Mutation(
        "kernel-without-the-bias", "linalg/kernel.py",
        "found.addcmul_(inner, found) if x.homogeneous", "found.mul_(inner) if x.homogeneous", HYLO,
    ),
    Mutation(
        "interpolation-forgets-the-residual", "linalg/selection.py",
        'found.residual if residual != "none"', 'found.residual if residual == "full"', HYLO,
    ),
    Mutation(
        "direction-rotated-back-by-the-transpose", "linalg/eigenbasis.py",
        "product(x, basis_a.mT)", "product(x, basis_a)", ("tests/curvature", *ORACLE, *EKFAC),
    ),
    Mutation(
        "pairs-of-positions-count-once", "linalg/gradient_squares.py",
        "alpha=2 if distance else 1", "alpha=1", ("tests/ekfac -k scale_functions", *EKFAC),
    ),
    Mutation(
        "scale-carried-over-by-the-transpose", "linalg/eigenbasis.py",
        "product(scale, r_a.square().mT)", "product(scale, r_a.square())", BLOCKS,
    ),
    Mutation(
        "mean-of-ones-forgets-the-number-of-rows", "linalg/dense.py",
        "out[..., d, d] += rows.shape[-2]", "out[..., d, d] += 1", (*ORACLE, "tests/layers"),
    ),
    Mutation(
        "newest-row-is-a-step-old", "linalg/gram.py",
        "age = (newest(pos, m) - torch.arange", "age = (pos - torch.arange", WINDOW,
    ),
    Mutation(
        "static-inverse-adds-what-it-subtracts", "linalg/inverse_fisher.py",
        "vectors[:, columns].double() - inside", "vectors[:, columns].double() + inside",
        ("tests/static",),
    ),
    Mutation(
        "quadratic-model-without-one-half", "linalg/quadratic.py",
        "0.5 * torch.dot(x, matrix @ x)", "torch.dot(x, matrix @ x)", ("tests/adaptive",),
    ),
    # ---------------------------------------------------------------- methods and the update
    Mutation(
        "damping-alone-is-relative", "methods/defaults.py",
        '"absolute" if mode is None else mode}', '"relative" if mode is None else mode}',
        ("tests/oracle -k solves", "tests/contract -k damping", *ORACLE),
    ),
    Mutation(
        "momentum-takes-in-a-dropped-batch", "linalg/gates.py",
        "nesterov=nesterov, maximize=False, is_first_step=False, found_inf=(~gate)",
        "nesterov=nesterov, maximize=False, is_first_step=False, found_inf=(gate)",
        ("tests/unit/test_gates.py", "tests/contract/test_devices.py"),
    ),
    Mutation(
        "squares-of-adam-lack-the-root-of-their-bias", "linalg/first_order.py",
        "[(1 - beta2**t) ** 0.5 for t in steps]", "[(1 - beta2**t) for t in steps]", RULES,
    ),
    Mutation(
        "kl-clip-by-the-rate-itself", "linalg/first_order.py",
        "torch.stack(some).sum() * (lr * lr)", "torch.stack(some).sum() * lr", ("tests/contract -k kl_clip",),
    ),
    Mutation(
        "graft-without-coupled-decay", "update.py",
        'return gradient.add(local(p), alpha=group["weight_decay"])', "return gradient",
        ("tests/contract -k 'graft or weight_decay'",),
    ),
    Mutation(
        "rate-of-the-fallback-ignores-the-schedule", "update.py",
        'return own * (rate(group["lr"]) / base if', "return own * (1.0 if",
        ("tests/contract -k 'fallback or schedulers'",),
    ),
    Mutation(
        "modelled-step-goes-uphill", "update.py",
        "[d * -alpha for d in directions]", "[d * alpha for d in directions]", ("tests/adaptive",),
    ),
    # ---------------------------------------------------------------- curvature: blocks
    Mutation(
        "damping-split-the-other-way", "capture/statistics/averages.py",
        "return pi * root, root / pi", "return root / pi, pi * root", ("tests/oracle -k 'split or solves'", *ORACLE),
    ),
    Mutation(
        "weight-of-old-batches-does-not-decay", "capture/statistics/averages.py",
        "grown = weight * decay + batch_weight", "grown = weight + batch_weight", ("tests/oracle -k running", *ORACLE),
    ),
    Mutation(
        "decay-is-no-curvature", "curvature/factors.py",
        'return damping + group["weight_decay"] if', "return damping if",
        ("tests/fisher -k decay", *ORACLE, "tests/contract -k weight_decay"),
    ),
    Mutation(
        "refreshes-a-step-late", "curvature/refresh_schedule.py",
        "return (t - phase) % interval == 0", "return (t - phase) % interval == 1 % interval",
        ("tests/schedule", *ORACLE),
    ),
    Mutation(
        "refresh-works-on-factors-that-change", "curvature/refresh.py",
        'block.state[f"begun_{side}"].copy_(task.matrix)', "task.matrix", ("tests/schedule",),
    ),
    Mutation(
        "failed-inverse-is-adopted", "curvature/inverse.py",
        'adopt_tensor(state, f"inverse_{side}", tensors[0], good)',
        'adopt_tensor(state, f"inverse_{side}", tensors[0], good | True)', ("tests/oracle -k fail", *ORACLE),
    ),
    Mutation(
        "null-space-is-not-averaged", "curvature/eigenbasis.py",
        'state["scale"].copy_(_pooled(self, state, state["scale"]))', 'state["scale"].copy_(state["scale"])', BLOCKS,
    ),
    Mutation(
        "leaving-row-takes-its-dots-along", "curvature/window/window.py",
        "gram.packed_row(slot, self.m)) * leaving)", "gram.packed_row(slot, self.m)) * 0)", WINDOW,
    ),
    Mutation(
        "shorter-window-keeps-the-oldest-rows", "curvature/window/window.py",
        'old.counters["pos"] - kept + torch.arange', 'old.counters["pos"] + torch.arange',
        ("tests/window -k checkpoint", *WINDOW),
    ),
    Mutation(
        "rounding-of-entries-is-lost", "curvature/window/topk.py",
        "rest = found - kept.to(found.dtype)", "rest = torch.zeros_like(found)", ("tests/window -k topk", *WINDOW),
    ),
    # ---------------------------------------------------------------- what ranks exchange
    Mutation(
        "statistics-that-no-rank-captured-are-sent", "parallel/exchange.py",
        "sends = self.comm.captures(block.index) or self.comm.sources(block.index) > 1", "sends = True",
        ("tests/unit", "tests/curvature"),
    ),
    Mutation(
        "curvature-goes-to-ranks-that-do-not-precondition", "parallel/exchange.py",
        "mine = {b: schema for b, schema in schemas.items() if self.comm.preconditions(b.index)}",
        "mine = dict(schemas)", ("tests/unit", "tests/curvature"),
    ),
    Mutation(
        "batch-of-one-rank-that-is-not-finite-is-added", "parallel/exchange.py",
        "words = torch.where(finite, words, lost)", "words = torch.where(finite, words, words)",
        ("tests/unit", "tests/distributed"),
    ),
    Mutation(
        "gradients-are-added-and-not-averaged", "comm/rank_grid.py",
        'stage="gradients", count=self._grid.world)', 'stage="gradients", count=1)',
        ("tests/distributed -k 'average or equivalence'", "tests/distributed"),
    ),
    Mutation(
        "directions-come-from-the-rank-of-another-row", "comm/rank_grid.py",
        "return self._rank - self._rank % width + self._owners[index] % width", "return self._owners[index] % width",
        ("tests/comm", "tests/distributed -k 'equivalence or grid'", "tests/distributed"),
    ),
    Mutation(
        "loads-count-for-the-first-rank", "comm/placement.py",
        "so_far.add(rank, loads[i])", "so_far.add(0, loads[i])", ("tests/comm -k placement", "tests/comm"),
    ),
    Mutation(
        "rows-of-unequal-batches-count-alike", "preconditioners/row_exchange.py",
        "(block.gradient_scale(n) * share) ** 0.5", "block.gradient_scale(n) ** 0.5",
        ("tests/distributed -k hylo", "tests/distributed"),
    ),
    Mutation(
        "decay-sees-a-part-of-the-window", "parallel/windows.py",
        "unit.decay_dots = words[-m:][:t]", "pass", ("tests/window -k ranks", "tests/distributed -k windows"),
    ),
    Mutation(
        "norms-are-those-of-a-piece", "parallel/shards.py",
        "return self.comm.sum_pieces(own)", "return own", ("tests/fsdp",),
    ),
    # ---------------------------------------------------------------- checkpoints
    Mutation(
        "state-of-another-rank-is-taken", "checkpoint/checkpoint.py",
        "if saved_by and saved_by != self._comm.identity:", "if saved_by and not self._comm.combines:",
        ("tests/checkpoint", "tests/distributed -k checkpoint"),
    ),
    Mutation(
        "loaded-rate-is-that-of-the-checkpoint-itself", "checkpoint/checkpoint.py",
        "{k: comparison.copied(v) for k, v in given.items()", "{k: v for k, v in given.items()",
        ("tests/contract -k tensor_lr", "tests/checkpoint"),
    ),
    Mutation(
        "weight-of-momentum-is-not-in-the-state", "curvature/window/window.py",
        'found["momentum_weight"] = self.outside.weight', "pass", ("tests/window -k checkpoint", *WINDOW),
    ),
    Mutation(
        "refreshes-restart-after-loading", "preconditioners/layer_checkpoint.py",
        'block.state["refreshes"] = refreshes[block] if good else 0', 'block.state["refreshes"] = 0',
        ("tests/checkpoint -k resume", "tests/checkpoint"),
    ),
    # ---------------------------------------------------------------- devices other than the CPU
    Mutation(
        "states-are-not-views-of-their-stack", "linalg/stacks.py", "state[key] = part", "pass", (STACKS,),
    ),
    Mutation(
        "stacks-mix-blocks-with-other-options", "preconditioners/block_stacks.py",
        "return *kind, block.sets_length, values, kept", "return *kind, block.sets_length, kept", (STACKS,),
    ),
    Mutation(
        "directions-of-a-stack-are-not-checked", "preconditioners/block_stacks.py",
        "torch.where(good[:, None], flat, own)", "flat", (STACKS,),
    ),
    Mutation(
        "factors-of-a-stack-take-in-a-bad-batch", "preconditioners/estimate_stacks.py",
        "Estimate(total, found[0].scale), fine & torch.isfinite(total.flatten(1).sum(1))",
        "Estimate(total, found[0].scale), fine", (STACKS,),
    ),
    Mutation(
        "moving-mean-ignores-the-gate", "linalg/gates.py",
        "maximize=True, is_first_step=False, found_inf=(~gate)",
        "maximize=True, is_first_step=False, found_inf=(~gate & gate)",
        ("tests/unit/test_gates.py", "tests/contract/test_devices.py"),
    ),
)  # fmt: skip
