"""The table of runs on several gloo ranks, plain, under DDP and under `fully_shard`: one trace per rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import DedicatedWorkers
from tests.distributed.oracle import METHODS, STRATEGIES, TASKS, build, shard
from tests.distributed.pool import Pool
from tests.fsdp.wrapping import Wrap, fully_sharded
from tests.golden import runs
from tests.golden.traces import (
    Events,
    Training,
    digest,
    messages_of,
    path,
    state_of,
    tables,
    text_of,
    trace_of,
    watched,
)

LATE_EVENTS: dict[str, Events] = {
    "interval": {3: runs.setting(factor_update_steps=1, inv_update_steps=1)},
    "damping": {3: runs.setting(damping=0.2, lr=0.01), 6: runs.setting(kl_clip=None)},
    "failures": {4: runs.breaking("eigh", "cholesky_ex", "cholesky", "qr"), 7: runs.breaking()},
    "frozen": {3: runs.freezing("mix"), 6: runs.freezing("mix", frozen=False)},
    "looks": {2: runs.looking, 5: runs.looking},
}


@dataclass(frozen=True)
class Ranks:
    """A run on several ranks.

    Attributes:
        method: Name of the method.
        strategy: Name of the strategy; None: what the optimizer takes by itself.
        world: Number of ranks.
        task: Name of the task.
        keywords: Settings beyond the method's own.
        comm: Keywords of the strategy.
        way: How a step is taken, see `Training`.
        steps: Number of steps.
        sizes: Of the ranks' shards; equal ones by default.
        poison: Step in which the last rank's batch has a NaN.
        early: Rank whose data end early, under `Join`.
        saves: Whether what ranks save alone and together is loaded in the middle.
        dedicated: Keywords of `DedicatedWorkers`.
        wrap: How `fully_shard` cuts the parameters; None: DDP, or the strategy averages gradients.
        ddp: Whether the model is wrapped by DDP.
        micro: Micro-batches of a step.
        events: Name of what is done before steps.
    """

    method: str
    strategy: str | None
    world: int = 2
    task: str = "words"
    keywords: Mapping[str, Any] = field(default_factory=dict)
    comm: Mapping[str, Any] = field(default_factory=dict)
    way: str = "plain"
    steps: int = 8
    sizes: tuple[int, ...] | None = None
    poison: int | None = None
    early: int | None = None
    saves: bool = False
    dedicated: Mapping[str, Any] | None = None
    wrap: Wrap | None = None
    ddp: bool = False
    micro: int = 1
    events: str | None = None

    def trace(self) -> dict[str, Any]:
        found = processes().run(on_a_rank, self, world=self.world, timeout=300)
        return {f"rank {rank}": trace for rank, trace in enumerate(found)}

    def training(self, rank: int, world: int) -> Training:
        """The model and optimizer of a rank."""
        model = TASKS[self.task].model()
        if self.wrap is not None:
            model = fully_sharded(model, rank, world, self.wrap)
        elif self.ddp:
            model = DDP(model)
        comm: Any = None
        if self.dedicated is not None:
            comm = DedicatedWorkers(**self.dedicated)
        elif self.strategy is not None:
            own = {} if self.ddp or self.wrap is not None else {"average_gradients": True}
            comm = STRATEGIES[self.strategy](**own, **self.comm)
        optimizer = build(self.method, model, comm, **self.keywords)
        events = LATE_EVENTS[self.events] if self.events else {}
        return Training(model, optimizer, lambda step: self.batch(step, rank, world), self.way, self.micro, events)

    def batch(self, step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        inputs, targets = TASKS[self.task].batch(step)
        if step == self.poison:
            inputs[-1] = torch.nan
        return shard((inputs, targets), rank, world, self.sizes)


@cache
def processes() -> Pool:
    return Pool()


# ---------------------------------------------------------------------------------------------------------------------
# On a rank
# ---------------------------------------------------------------------------------------------------------------------


def on_a_rank(rank: int, world: int, run: Ranks) -> dict[str, Any]:
    """The trace of this rank."""
    with runs.mended():
        if run.dedicated is not None or run.early is not None:
            special = joined if run.dedicated is None else of_a_role
            return watched(lambda trace: special(run.training(rank, world), rank, run, trace))

        def middle(training: Training, step: int, trace: dict[str, Any]) -> None:
            saved_and_loaded(run, rank, world, training, step, trace)

        plans = {"this world": (), "of 4": (4,)} if run.wrap is None else {"this world": ()}
        return trace_of(lambda: run.training(rank, world), run.steps, plans, middle if run.saves else None)


def saved_and_loaded(run: Ranks, rank: int, world: int, training: Training, step: int, trace: dict[str, Any]) -> None:
    """Go on with what this rank saved alone, and with what all saved together."""
    saved = {"alone": copy.deepcopy(training.optimizer.state_dict())}
    training.optimizer.consolidate_state_dict()
    trace["consolidated"] = state_of(training.optimizer.state_dict())
    training.optimizer.consolidate_state_dict(None)
    saved["together"] = training.optimizer.state_dict()
    trace["messages of saving"] = messages_of(training.optimizer)
    saved = {name: runs.through_a_file(found) for name, found in saved.items()}
    weights = copy.deepcopy(training.model.state_dict())
    for name, held in saved.items():
        fresh = run.training(rank, world)
        fresh.model.load_state_dict(weights)
        found: dict[str, Any] = {}
        try:
            fresh.optimizer.load_state_dict(held)
        except Exception as error:  # any error belongs to the trace
            found["error"] = text_of(error)
        else:
            path(fresh, step, run.steps, found)
            found["state"] = state_of(fresh.optimizer.state_dict())
        fresh.optimizer.close()
        trace[f"loaded {name}"] = found


def joined(training: Training, rank: int, run: Ranks, trace: dict[str, Any]) -> None:
    """Ranks with a different number of batches, and two steps of all after that."""
    inside = [training.model, training.optimizer] if run.ddp else [training.optimizer]
    with Join(inside):
        path(training, 0, 3 if rank == run.early else run.steps, trace)
    trace["at the end"] = {name: digest(p) for name, p in training.model.named_parameters()}
    path(training, run.steps, run.steps + 2, trace)
    trace |= {"state": state_of(training.optimizer.state_dict()), "all": messages_of(training.optimizer)}


def of_a_role(training: Training, rank: int, run: Ranks, trace: dict[str, Any]) -> None:
    """The loop of a rank that dedicated workers give a role."""
    comm = training.optimizer.comm
    if comm.role == "inverse":
        comm.serve(training.optimizer)
    else:
        first = 100 * (comm.data_rank + 1) + 50 * (comm.role == "factor")
        training.batch = lambda step: TASKS[run.task].batch(first + step)
        path(training, 0, run.steps, trace)
    trace |= {"role": comm.role, **tables(training.optimizer), "all": messages_of(training.optimizer)}
    training.optimizer.close()
    trace["state"] = state_of(training.optimizer.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------

EAGER = {"factor_update_steps": 1, "inv_update_steps": 2}
MODEL = {"likelihood": "categorical", **EAGER}
PRE = {"estimator": "running", "momentum_mode": "pre", "power": 0.5, "fallback_eps": 1e-3}


def ranks() -> Iterator[tuple[str, Ranks]]:
    for method in METHODS:
        for strategy in ("comm", "mem"):
            yield f"{method}-{strategy}-2", Ranks(method, strategy, saves=strategy == "mem")
    for method in ("kfac_eigen", "kfac_cholesky", "ekfac_intra", "ekfac_running", "hylo_kid", "mfac_sparse"):
        yield f"{method}-hybrid-4", Ranks(method, "hybrid_half", 4, saves=True)
    for method in ("kfac_eigen", "ekfac_intra", "hylo_kis", "mfac"):
        yield f"{method}-hybrid-3", Ranks(method, "hybrid_third", 3)
    for strategy in ("comm_owner", "mem_replicated", "local_factors", "chief", "chief_inverses", "chief_own"):
        for method, world in (("kfac_cholesky", 3), ("ekfac_intra", 2)):
            yield f"{method}-{strategy}-{world}", Ranks(method, strategy, world, saves=method == "kfac_cholesky")
    special: dict[str, Ranks] = {
        "uneven kfac": Ranks("kfac_eigen", "mem", 2, sizes=(7, 5), ddp=True),
        "uneven ekfac": Ranks("ekfac_intra", "comm", 3, sizes=(6, 4, 2), ddp=True),
        "uneven energy": Ranks("hylo_kid", "mem", 3, "mlp", {"rank_energy": 0.7}, sizes=(6, 4, 2)),
        "uneven energy kis": Ranks("hylo_kis", "comm", 2, "mlp", {"rank_energy": 0.8}, sizes=(7, 5), saves=True),
        "cheaper": Ranks("hylo_kid", "mem", 2, keywords={"kfac_when_cheaper": True, "rank_fraction": 0.8}, saves=True),
        "switch": Ranks("hylo_kid", "mem", 2, keywords={"mode": "auto", "switch": runs.SWITCHES["norm"]}),
        "probe": Ranks("hylo_kid", "comm", 2, "mlp", {"mode": "auto", "switch": runs.SWITCHES["error"]}),
        "poison": Ranks("kfac_eigen", "mem", 2, "mlp", poison=3, ddp=True),
        "poison ekfac": Ranks("ekfac_intra", "comm", 2, "cnn", poison=4),
        "poison mfac": Ranks("mfac", "mem", 2, "mlp", poison=3),
        "poison hylo": Ranks("hylo_kid", "mem", 2, "mlp", poison=3),
        "join": Ranks("kfac_eigen", "mem", 2, "mlp", EAGER, early=0, ddp=True),
        "join ekfac": Ranks("ekfac_intra", "comm", 2, "mlp", EAGER, early=1),
        "join mfac": Ranks("mfac", "mem", 3, "mlp", early=1, ddp=True),
        "verified": Ranks("kfac_eigen", "mem", 2, comm={"verify_every": 1}),
        "verified mfac": Ranks("mfac", "comm", 2, comm={"verify_every": 1}),
        "rounded": Ranks("ekfac_intra", "mem", 2, comm={"wire_dtype": torch.bfloat16, "verify_every": 1}),
        "overlap": Ranks("kfac_cholesky", "mem", 2, keywords={"overlap": True, "stagger": True}, steps=12),
        "overlap ekfac": Ranks("ekfac_intra", "mem", 2, keywords={"overlap": True}, steps=12, saves=True),
        "packed": Ranks("kfac_eigen", "hybrid_half", 4, keywords={"factor_storage": "packed", "stagger": True}),
        "recompute": Ranks("ekfac_intra", "mem", 2, keywords={"transport": "recompute", **EAGER}, events="failures"),
        "qr": Ranks("ekfac_intra", "mem", 2, keywords={"basis_update": "qr", **EAGER}, steps=12),
        "pre": Ranks("ekfac_running", "mem", 2, keywords=PRE, saves=True),
        "calibrate": Ranks("ekfac_running", "mem", 2, "mlp", {"calibrate_damping": True, **MODEL}, way="loss"),
        "adaptive": Ranks("kfac_eigen", "comm", 2, "mlp", {"adaptive_damping": True, "damping_interval": 2, **MODEL},
                          way="loss"),
        "quadratic": Ranks("kfac_eigen", "comm", 2, "mlp", {"quadratic_model": True, "reject_steps": True, **MODEL},
                           way="outputs"),
        "observed": Ranks("kfac_eigen", "mem", 2, keywords={"fisher": "mc"}, way="observe"),
        "orthogonal": Ranks("kfac_eigen", "mem", 2, keywords={"orthogonalize": True, "graft": "adam"}),
        "micro": Ranks("kfac_eigen", "mem", 2, micro=2),
        "interval": Ranks("kfac_eigen", "mem", 2, events="interval"),
        "damping": Ranks("kfac_cholesky", "comm", 2, events="damping"),
        "failures": Ranks("kfac_eigen", "mem", 3, keywords=EAGER, events="failures"),
        "frozen": Ranks("kfac_eigen", "mem", 2, events="frozen"),
        "looks": Ranks("kfac_eigen", "mem", 2, "mlp", events="looks"),
        "layer windows": Ranks("mfac", "mem", 2, keywords={"partition": "layer"}, saves=True),
        "ggt momentum": Ranks("ggt", "hybrid_half", 4, keywords={"betas": (0.9, 0.95)}),
    }  # fmt: skip
    # blocks with diagonal factors, which all ranks need, beside others that their owner alone has
    mixed = {"max_factor_dim": 5, **EAGER}
    for strategy in ("mem", "hybrid_half", "local_factors", "chief_own", "comm_owner"):
        world = 4 if strategy == "hybrid_half" else 2
        special[f"mixed {strategy}"] = Ranks("kfac_cholesky", strategy, world, "mlp", mixed, saves=strategy == "mem")
    yield from special.items()
    roles: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
        "one data rank": (3, {}, {"warmup": "identity"}),
        "one data rank warm": (3, {"inverse_method": "cholesky"}, {}),
        "two data ranks": (4, {}, {}),
        "colocated": (2, {}, {"allow_colocated": True}),
        "two inverse ranks": (4, {}, {"gradient": [0], "factor": [1]}),
    }
    for name, (world, keywords, comm) in roles.items():
        own = {**EAGER, **keywords}
        yield f"roles {name}", Ranks("kfac_eigen", None, world, "mlp", own, dedicated=comm, steps=9)


def fsdp() -> Iterator[tuple[str, Ranks]]:
    for method in (
        "kfac_eigen",
        "kfac_cholesky",
        "ekfac_intra",
        "ekfac_running",
        "hylo_kid",
        "mfac",
        "mfac_sparse",
        "ggt",
    ):
        for world in (2, 4):
            wrap = Wrap(each=world == 2)
            yield f"{method}-{world}", Ranks(method, None, world, "odd", wrap=wrap, saves=world == 2)
    special: dict[str, Ranks] = {
        "interval": Ranks("kfac_eigen", None, 2, "odd", wrap=Wrap(), events="interval"),
        "frozen": Ranks("kfac_eigen", None, 2, "odd", wrap=Wrap(), events="frozen"),
        "looks": Ranks("ekfac_intra", None, 2, "even", wrap=Wrap(), events="looks"),
        "replicas": Ranks("kfac_eigen", None, 4, "even", wrap=Wrap(replicas=2)),
        "columns": Ranks("ekfac_running", None, 2, "even", wrap=Wrap(columns=True)),
        "pre": Ranks("ekfac_running", None, 2, "odd", PRE, wrap=Wrap()),
        "kept whole": Ranks("kfac_eigen", "comm", 2, "odd", wrap=Wrap(reshard=False)),
        "hybrid": Ranks("kfac_eigen", "hybrid_half", 4, "odd", wrap=Wrap()),
        "recompute": Ranks("ekfac_intra", None, 2, "odd", {"transport": "recompute", **EAGER}, wrap=Wrap(),
                           events="failures"),
        "poison": Ranks("kfac_eigen", None, 2, "even", wrap=Wrap(), poison=3),
        "orthogonal": Ranks("kfac_eigen", None, 2, "odd", {"orthogonalize": True, "graft": "adam"}, wrap=Wrap()),
        "quadratic": Ranks("kfac_eigen", None, 2, "even", {"quadratic_model": True, **MODEL}, wrap=Wrap(),
                           way="outputs"),
        "layer windows": Ranks("mfac", None, 2, "odd", {"partition": "layer"}, wrap=Wrap(), saves=True),
    }  # fmt: skip
    yield from special.items()


SETS = {"ranks": ranks, "fsdp": fsdp}
