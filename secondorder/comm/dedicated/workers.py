"""Asynchronous curvature: some ranks train, some estimate factors, and some invert them.

It follows the second distributed strategy of tensorflow/kfac, but is reproducible: see :class:`DedicatedWorkers`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from secondorder.comm.agreement import require_equal
from secondorder.comm.collectives import Collectives
from secondorder.comm.dedicated.arguments import Arguments, Entry
from secondorder.comm.dedicated.board import ABORTED, Board
from secondorder.comm.dedicated.links import Links, Worker, contents, finish, new_group
from secondorder.comm.dedicated.ranks import Agenda, GradientRank, Rank
from secondorder.comm.dedicated.roles import Roles, resolve
from secondorder.comm.dedicated.service import FactorRank, InverseRank
from secondorder.comm.placement import Grid, Load, assign
from secondorder.comm.rendezvous import first_meeting
from secondorder.comm.strategy import CommStrategy, Parcel, Pending, Unit, world_size

#: Time that the first gradient rank waits for an inverse rank, as a fraction of the timeout, while others wait for it.
_PATIENCE = {"abort": 0.8, "degrade": 0.3}


class DedicatedWorkers(CommStrategy):
    """Computes curvature in the background on dedicated ranks, two to three periods behind the training.

    Gradient ranks average their gradients, precondition and step. Factor ranks run the same loop on separate data but
    never step. Inverse ranks factorize. Do not wrap the model with DDP. Each process runs the part of its role::

        comm = secondorder.DedicatedWorkers()
        with secondorder.KFAC(model, lr=0.1, comm=comm) as optimizer:
            if comm.role == "inverse":
                comm.serve(optimizer)  # returns when the gradient ranks are done
            else:
                for x, y in part_of_the_data(comm.data_rank, comm.data_world):
                    optimizer.zero_grad()
                    loss(model(x), y).backward()
                    optimizer.step()

    In lockstep mode, with epochs of T steps, the factor ranks estimate factors in epoch k from the parameters at its
    start, in T steps. The factors are inverted in epoch k + 1 and used from step ``(k + 2) T`` on. The curvature in use
    thus belongs to parameters that are 2T to 3T − 1 steps old, and every run is bit-for-bit the same. In opportunistic
    mode, a version is used from the first end of an epoch at which it is ready, and no gradient rank waits for it.
    :attr:`log` records the versions that were used, and ``replay`` repeats them.

    A factor rank that runs out of data continues without data in ``close()``. If it has data left when training ends,
    :attr:`stopped` becomes True, and its steps do nothing.

    Args:
        gradient: Ranks that train. If no role is set, a fifth of all ranks (rounded, at least one) estimates factors,
            a fifth inverts them, and the others train. If one role is missing, it consists of the remaining ranks.
        factor: Ranks that estimate factors.
        inverse: Ranks that factorize them.
        mode: ``"lockstep"`` or ``"opportunistic"``.
        period: T, the number of steps of an epoch. If None, it is ``inv_update_steps``.
        seed: Seed of the order in which an inverse rank works on its layers.
        allow_colocated: Whether the same ranks may estimate and factorize.
        warmup: Behavior while a layer has no version: with ``"sync"``, the gradient ranks estimate and factorize once
            themselves, at the first step; with ``"identity"``, the gradient is used without preconditioning.
        max_staleness: Largest age, in steps, of the parameters behind a version. An older version is dropped, and the
            layer is treated as in the warm-up. If None, there is no limit.
        on_loss: Behavior when an inverse rank is lost: ``"abort"`` raises an error on all ranks; ``"degrade"`` (with
            gloo) continues, and the layers of that rank keep their last version, up to ``max_staleness``. The loss of
            any other rank always ends the run.
        timeout: Number of seconds after which a silent rank counts as lost; it must be longer than an epoch takes. If
            None, it is the timeout of the default process group.
        replay: The :attr:`log` of an opportunistic run to repeat.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or roles are empty or overlap.
    """

    def __init__(
        self,
        gradient: Sequence[int] | None = None,
        factor: Sequence[int] | None = None,
        inverse: Sequence[int] | None = None,
        mode: str = "lockstep",
        period: int | None = None,
        seed: int = 0,
        allow_colocated: bool = False,
        warmup: str = "sync",
        max_staleness: int | None = None,
        on_loss: str = "abort",
        timeout: float | None = None,
        replay: Sequence[Sequence[Any]] | None = None,
    ) -> None:
        #: The checked arguments of the strategy.
        self.arguments = Arguments(
            gradient, factor, inverse, mode, period, seed, allow_colocated, warmup, max_staleness, on_loss, timeout,
            replay,
        )  # fmt: skip
        self._begin()

    #: Whether the strategy supports ``Join``, which it does not, since ranks of other roles cannot take part in it.
    takes_joiners = False

    def _begin(self) -> None:
        self._roles: Roles | None = None
        self._rank = 0
        self._units: list[Unit] = []
        self._owners: list[int] = []
        self._served: Any = lambda: None
        self._links: Links | None = None
        self._part: Rank | None = None
        self.collectives = Collectives()

    # ------------------------------------------------------------------ life
    def place(self, units: Sequence[Unit]) -> None:
        """Spread the units over the inverse ranks, longest processing time first."""
        if self._links is not None:
            raise NotImplementedError(
                "DedicatedWorkers: the layers with curvature changed during training (a layer was frozen, added or "
                "cast), and ranks of other roles cannot detect this. Make a new optimizer on all ranks."
            )
        world = world_size()
        self._roles = resolve(world, self.arguments.roles, self.arguments.allow_colocated)
        self._rank = dist.get_rank() if world > 1 else 0
        if any(unit.divisible for unit in units):
            raise NotImplementedError(
                "DedicatedWorkers estimates factors of layers and does not support windows: use CommOpt or MemOpt"
            )
        self._units, self._owners = list(units), owners_of(units, world, self._roles)

    def admit(self, optimizer: Any) -> None:
        """Check the optimizer before the ranks communicate.

        Raises:
            NotImplementedError: If ranks of other roles cannot compute the curvature of the optimizer.
            ValueError: If this strategy serves another optimizer.
        """
        if self._served() is not None and self._served() is not optimizer:
            raise ValueError(f"{self!r} serves another optimizer already: pass a separate strategy to each optimizer")
        if reason := optimizer.reason_against_roles():
            raise NotImplementedError(f"{type(optimizer).__name__} under DedicatedWorkers: {reason}")
        self._served = weakref.ref(optimizer)

    def connect(self, facts: Mapping[str, Sequence[str]], device: torch.device) -> None:
        """Create the groups, compare the ranks' plans, and start from the parameters of the first gradient rank."""
        if self._links is not None:
            return
        given, roles = self.arguments, self.roles
        period = given.period_of([unit.interval for unit in self._units])
        default: Any = distributed_c10d._get_default_store()
        timeout = given.timeout or default.timeout.total_seconds()
        with first_meeting(self._rank, world_size()):
            control = new_group(range(world_size()), timeout, backend="gloo")
            self.collectives, small = Collectives(device=device), Collectives()
            mine = {"strategy": [repr(self)], **facts, "blocks": [f"{u.name}: {u.signature}" for u in self._units]}
            require_equal(small, mine, control)
            mark = small.words(torch.tensor([_mark(self._rank)]), group=control, stage="agreement", op="max")
        board = Board(f"dedicated/{int(mark)}", timeout)
        patience = _PATIENCE[given.on_loss] * timeout
        self._links = Links(roles, self._rank, self.collectives, board, timeout, patience, device, control)
        agenda = Agenda(
            period,
            tuple(self._owners),
            lockstep=given.mode == "lockstep",
            seed=given.seed,
            max_staleness=given.max_staleness,
            degrade=given.on_loss == "degrade",
            replay=None if given.replay is None else tuple(map(list, given.replay)),
        )
        kinds = {"gradient": GradientRank, "factor": FactorRank, "inverse": InverseRank}
        self._part = kinds[self.role](agenda, self._links, self._optimizer)
        start = self._optimizer().parameters_now()
        finish(self._links.copy("gradients", roles.chief, start, stage="parameters"))
        finish(self._links.copy("parameters", roles.chief, start))

    def _optimizer(self) -> Worker:
        found = self._served()
        if found is None:
            raise RuntimeError("the optimizer of this DedicatedWorkers() is gone")
        return cast(Worker, found.role_worker)

    def serve(self, optimizer: Any) -> None:
        """Factorize for the gradient ranks until they stop. Call this on inverse ranks.

        Args:
            optimizer: The optimizer of this strategy.

        Raises:
            RuntimeError: If this rank has another role, the optimizer is another one, or a rank fails or is lost.
        """
        if self.role != "inverse":
            raise RuntimeError(f"this is a {self.role} rank, which runs the training loop; only inverse ranks serve")
        if self._served() is not optimizer or not isinstance(self._part, InverseRank):
            raise RuntimeError("serve() takes the optimizer that was made with this strategy, before it is closed")
        with torch.no_grad():
            self._part.serve()

    def close(self) -> None:
        """Stop all ranks. The first gradient rank announces the end, and the others finish their work. Idempotent.

        Raises:
            RuntimeError: If a rank fails, or does not finish within the timeout.
        """
        links, part = self._links, self._part
        if links is None or part is None:
            return
        together = False
        try:
            if not part.failed:
                with torch.no_grad():
                    part.close()
                together = not part.failed and self._leave_together(links)
        finally:
            self._links = None
            links.leave(together)

    def _leave_together(self, links: Links) -> bool:
        """Whether all ranks are still alive, so that they can leave together."""
        lost = links.board.wait("end")["lost"]
        if not lost:
            return True
        links.board.write(f"bye/{self._rank}")
        # The store may be in this process, which must live until the other ranks no longer need the store.
        if self._rank == self.roles.chief:
            for rank in sorted(set(range(self.world)) - set(lost)):
                links.board.wait(f"bye/{rank}")
        return False

    def abandon(self, error: BaseException) -> None:
        """Make all other ranks raise an error, because this rank has left its loop with an error."""
        if self._part is not None and self._links is not None and not self._part.failed:
            self._part.give_up(f"rank {self._rank}, {self.role} worker: {type(error).__name__}: {error}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, which consists of the arguments."""
        made = {"_roles", "_rank", "_units", "_owners", "_served", "_links", "_part", "collectives"}
        return {k: v for k, v in self.__dict__.items() if k not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which is not connected to any rank yet."""
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        """Return the constructor call that creates an equal strategy."""
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.arguments.changed.items())})"

    # ------------------------------------------------------------------ who
    @property
    def role(self) -> str:  # type: ignore[override]
        """``"gradient"``, ``"factor"`` or ``"inverse"``. A rank that estimates and factorizes has ``"factor"``."""
        return self.roles.of(self._rank)

    @property
    def roles(self) -> Roles:
        """Roles of all ranks."""
        if self._roles is None:
            raise RuntimeError("roles are known once an optimizer was made with this DedicatedWorkers()")
        return self._roles

    @property
    def combines(self) -> bool:
        """Whether several ranks work together, which is always True once the roles are known."""
        return self._roles is not None

    @property
    def replicates(self) -> bool:
        """Whether every rank holds all estimates. It is False, since a rank holds only what its role needs."""
        return False

    @property
    def updates(self) -> bool:
        """Whether this rank takes steps, as gradient ranks do."""
        return self._roles is None or self.role == "gradient"

    @property
    def stopped(self) -> bool:
        """Whether training has ended, so that a factor rank may leave its loop."""
        return self._part is not None and self._part.stopped

    @property
    def log(self) -> list[Entry]:
        """The events of training by step. It is available on gradient ranks.

        An entry ``["turn", step, k]`` means that parameters were sent to the factor ranks, and ``["take", step, rank,
        version]`` means that a version of an inverse rank was taken. Pass the log to ``replay`` on every rank.
        """
        return list(self._part.log) if isinstance(self._part, GradientRank) else []

    @property
    def lost(self) -> list[int]:
        """Inverse ranks that were lost. It is available on gradient ranks."""
        return sorted(self._part.lost) if isinstance(self._part, GradientRank) else []

    def age(self, index: int) -> int | None:
        """Return the age of the parameters behind the curvature in use. It is available on gradient ranks.

        Args:
            index: Index of the block.

        Returns:
            The age in steps; None while there is no such curvature.
        """
        return self._part.age(index) if isinstance(self._part, GradientRank) else None

    @property
    def rank(self) -> int:
        """Rank of this process among all processes."""
        return self._rank

    @property
    def data_rank(self) -> int:
        """Index of this process within its role."""
        return self.roles.peers(self._rank).index(self._rank)

    @property
    def data_world(self) -> int:
        """Number of processes of this role."""
        return len(self.roles.peers(self._rank))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of messages."""
        return self.collectives.nbytes

    def owner(self, index: int) -> int:
        """Return the inverse rank of a unit."""
        return self._owners[index]

    def _warms_up(self, index: int) -> bool:
        """Whether the gradient ranks compute the curvature of a unit themselves, because they have none."""
        if self.role != "gradient" or self.arguments.warmup != "sync":
            return False
        optimizer = self._served()
        return optimizer is None or not optimizer.role_worker.has_curvature(index)

    def learns(self, index: int) -> bool:
        """Whether this rank estimates a unit. Factor ranks always do, and gradient ranks do in the warm-up."""
        return (self.role == "factor" and not self.stopped) or self._warms_up(index)

    def renews(self, index: int) -> bool:
        """Whether a step refreshes a unit: on gradient ranks in the warm-up, and never on inverse ranks."""
        return self._warms_up(index)

    def captures(self, index: int) -> bool:
        """Whether this rank captures statistics of a unit; it is the same as :meth:`learns`."""
        return self.learns(index)

    def estimates(self, index: int) -> bool:
        """Whether this rank holds the running estimate of a unit."""
        if self.role == "gradient":
            return self.arguments.warmup == "sync" or self._units[index].everywhere
        return self.role == "factor" or self._owners[index] == self._rank

    def preconditions(self, index: int) -> bool:
        """Whether this rank holds the results of refreshes, as gradient ranks and the inverse rank of the unit do."""
        return self.role == "gradient" or self._owners[index] == self._rank

    def refreshes(self, index: int) -> bool:
        """Whether this rank refreshes a unit. Its inverse rank does, and the first gradient rank in the warm-up."""
        chosen = self.roles.chief if self.role == "gradient" else self._owners[index]
        return chosen == self._rank

    # ------------------------------------------------------------------ verbs of a step
    def begin_step(self) -> None:
        """Reject a step of an inverse rank.

        Raises:
            RuntimeError: On an inverse rank.
        """
        if self.role == "inverse":
            raise RuntimeError("this is an inverse rank: it calls comm.serve(optimizer) instead of a training loop")

    def end_step(self) -> None:
        """Exchange messages with the other roles if an epoch has ended."""
        if self._part is not None and self._links is not None:
            self._part.end_step()

    def average_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Replace ``.grad`` by its mean over gradient ranks; one that is missing on some of them counts as 0."""
        links = self._links
        if links is None or self.role != "gradient" or links.group_of_role is None:
            return
        trained = [p for p in params if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trained]
        present = torch.tensor([float(p.grad is not None) for p in trained], device=links.device)
        with self._watched("averaging gradients"):
            self.collectives.average(
                [*grads, present], group=links.group_of_role, stage="gradients", count=self.data_world
            ).wait()
        for p, grad, anywhere in zip(trained, grads, present.tolist(), strict=True):
            if anywhere:
                p.grad = grad

    def _watched(self, doing: str) -> Any:
        assert self._part is not None
        return self._part.watched(doing)

    def agree(self, words: Tensor) -> Tensor:
        """Sum a small float64 vector over the ranks of this role, and return it on the CPU."""
        if self._links is None:
            return words.cpu()
        with self._watched("agreeing with its peers"):
            return self._links.sum(words)

    def fail_together(self, error: str | None, failed: bool) -> None:
        """Raise the error of the first rank that has one, on every rank of this role."""
        if not failed or self._links is None or self._part is None:
            return
        if error is not None:
            self._part.give_up(error)
            raise RuntimeError(error)
        self._part.failed = True
        raise RuntimeError(self._links.board.wait(ABORTED)["message"])

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        """Sum parcels over the ranks of this role, on each of them."""
        links = self._links
        if links is None or links.group_of_role is None:
            return Pending()
        tensors, flags = contents(parcels)
        with self._watched("adding up statistics"):
            self.collectives.all_reduce(
                tensors, group=links.group_of_role, stage="statistics", symmetric=flags, exact=True
            ).wait()
        return Pending()

    def share_curvature(self, parcels: Sequence[Parcel]) -> None:
        """Copy the results of the first gradient rank to the others, which happens only in the warm-up."""
        if self._links is None or not isinstance(self._part, GradientRank):
            return
        tensors, flags = contents(parcels)
        with self._watched("sharing curvature"):
            finish(self._links.copy("gradients", self.roles.chief, tensors, flags, stage="curvature"))
        self._part.note([p.index for p in parcels])

    def gather_statistics(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Reject gathering of statistics, because rows cannot be passed to the inverse ranks.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("DedicatedWorkers supports sums of statistics, but not rows")

    def meet(self, what: str) -> None:
        """Reject a barrier, because not all ranks can reach it while inverse ranks are in ``serve()``.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{what} under DedicatedWorkers: inverse ranks are in serve() and cannot take part. Save the state_dict() "
            "of every rank, and load it on the same ranks."
        )


def owners_of(units: Sequence[Unit], world: int, roles: Roles) -> list[int]:
    """Return the inverse rank of each unit."""
    loads = [Load(unit.refresh_flops / unit.interval, unit.nbytes) for unit in units]
    return assign(loads, Grid(world, world), only=roles.inverse)


def _mark(rank: int) -> float:
    """Return a number that no other strategy of this process group has on its first rank, and 0 on the other ranks."""
    store = distributed_c10d._get_default_store()
    return float(store.add("secondorder/dedicated", 1)) if rank == 0 else 0.0
