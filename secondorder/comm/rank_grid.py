"""The base of the strategies on a grid of ranks, in which a unit is preconditioned by one rank, several or all ranks.

A grid has ``m`` rows and ``W / m`` columns (see :class:`~secondorder.comm.placement.Grid`). The m ranks in the column
of a unit's owner precondition it, each for the ranks of its row. :class:`~secondorder.comm.CommOpt` has ``m = W``,
:class:`~secondorder.comm.MemOpt` has ``m = 1``, and :class:`~secondorder.comm.HybridOpt` lies between them.

Pauloski et al., KAISA, SC21 (arXiv 2107.01739), section 3, where every rank stores all factors instead of the owner.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secondorder import options
from secondorder.comm.agreement import fingerprint, require_equal
from secondorder.comm.collectives import Collectives
from secondorder.comm.layout import Route, is_cut
from secondorder.comm.placement import Grid, Load, assign
from secondorder.comm.rendezvous import first_meeting, meet
from secondorder.comm.strategy import CommStrategy, Parcel, Pending, Shard, Unit, default_timeout, world_size

#: Length of the longest error message that is sent to the other ranks, in bytes.
_MESSAGE = 2048
#: Arguments that do not affect which rank holds what.
_DOES_NOT_PLACE = ("average_gradients", "wire_dtype", "timeout", "verify_every")


def _nobody() -> None:
    """Return None, as a weak reference to a deleted optimizer does."""


class RankGrid(CommStrategy):
    """Base of the strategies on a grid of ranks.

    Args:
        replicate_factors: Whether to store the running factors of all units on every rank. If None, the strategy
            decides.
        average_gradients: Whether ``step`` replaces ``.grad`` by its mean over the ranks, for models without DDP.
        wire_dtype: ``torch.bfloat16`` rounds statistics and directions before they are sent, which halves the bytes;
            sums are still computed in float32. If None, nothing is rounded.
        timeout: Number of seconds after which a missing rank is an error. If None, it is the timeout of the default
            process group.
        verify_every: For debugging, the number of steps between comparisons of the parameters and of the sent messages
            over the ranks. The first difference raises ``RuntimeError``. If None, nothing is compared.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    def __init__(
        self,
        *,
        replicate_factors: bool | None = None,
        average_gradients: bool = False,
        wire_dtype: torch.dtype | None = None,
        timeout: float | None = None,
        verify_every: int | None = None,
    ) -> None:
        options.optional_flag("replicate_factors", replicate_factors)
        options.flag("average_gradients", average_gradients)
        if wire_dtype not in (None, torch.bfloat16):
            raise ValueError(f"wire_dtype must be torch.bfloat16 or None, got {wire_dtype!r}")
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")
        self._replicate, self._average = replicate_factors, average_gradients
        options.optional_whole(1)("verify_every", verify_every)
        self._wire_dtype, self._timeout, self._verify_every = wire_dtype, timeout, verify_every
        self._steps = 0
        self._optimizer: Callable[[], Any] = _nobody
        self._units: list[Unit] = []
        self._owners: list[int] = []
        #: Owners by name. Units that are placed again stay on the rank that has their state.
        self._homes: dict[str, int] = {}
        self._grid = Grid(1, 1)
        self._rank = 0
        self._connected = False
        self._world: Any = None
        self._row: Any = None
        self._column: Any = None
        self.collectives = Collectives(wire_dtype=wire_dtype)

    # ------------------------------------------------------------------ what a strategy says
    @abstractmethod
    def workers(self, world: int) -> int:
        """Return m, the number of ranks that precondition a unit."""

    takes_pieces = True
    #: Whether every rank keeps all running estimates unless ``replicate_factors`` says otherwise.
    replicates_by_default = False
    #: Whether only the owner of a unit captures its statistics, unless every rank needs the estimate at every step.
    only_owners_capture: bool = False

    def owners_among(self, world: int) -> Sequence[int] | None:
        """Return the ranks that may own units; None for all ranks."""
        return None

    # ------------------------------------------------------------------ life
    def place(self, units: Sequence[Unit]) -> None:
        """Spread the units over the ranks, longest processing time first. Units that were placed before do not move."""
        world = world_size()
        if world != self._grid.world:
            self._homes = {}
        self._rank = dist.get_rank() if world > 1 else 0
        self._units = list(units)
        self._owners = self.owners_of(units, world, self._homes)
        self._grid = Grid(world, self.workers(world))
        self._homes |= {unit.name: owner for unit, owner in zip(units, self._owners, strict=True)}

    def owners_of(self, units: Sequence[Unit], world: int, homes: Mapping[str, int] | None = None) -> list[int]:
        """Return the owners of units in a world of this size, whether it exists or not."""
        grid = Grid(world, self.workers(world))
        loads = [Load(self.cost(unit, grid), unit.nbytes) for unit in units]
        return assign(loads, grid, [(homes or {}).get(unit.name) for unit in units], self.owners_among(world))

    @property
    def homes(self) -> Mapping[str, int]:
        """Owners of all placed units by name. A unit that is placed again keeps its owner."""
        return self._homes

    def imagine(
        self, rank: int, grid: Grid, units: Sequence[Unit], owners: Sequence[int], groups: Sequence[Any]
    ) -> None:
        """Act as a rank of a world that need not exist, for a dry run with a copy of a strategy.

        Args:
            rank: The rank to simulate.
            grid: Grid of the ranks of that world.
            units: The units that are placed there.
            owners: Owner of each unit.
            groups: Stand-ins for the groups of the world, of the rank's row and of its column; None for a single rank.
        """
        self._rank, self._grid, self._units, self._owners = rank, grid, list(units), list(owners)
        self._world, self._row, self._column = groups

    def cost(self, unit: Unit, grid: Grid) -> float:
        """Return the FLOPs per step of a unit that its owner computes and other ranks do not."""
        own = unit.refresh_flops / unit.interval
        return own + unit.step_flops if grid.workers < grid.world else own

    def connect(self, facts: Mapping[str, Sequence[str]], device: torch.device) -> None:
        """Create the groups and compare the ranks' plans. This is a collective; see the base class."""
        if not self.combines:
            return
        if not self._connected:
            with first_meeting(self._rank, self._grid.world):
                self.meet("the constructor of the optimizer")
                self._make_groups(device)
        blocks = [f"{u.name}: {u.signature}" for u in self._units]
        placement = [f"{u.name} on rank {owner}" for u, owner in zip(self._units, self._owners, strict=True)]
        mine = {"strategy": [repr(self)], **facts, "blocks": blocks, "placement": placement}
        require_equal(self.collectives, mine, self._world)

    def _make_groups(self, device: torch.device) -> None:
        """Create groups, in one order on all ranks: the world, then rows, then columns that differ from both."""
        wait = default_timeout(device) if self._timeout is None else datetime.timedelta(seconds=self._timeout)
        self.collectives = Collectives(wire_dtype=self._wire_dtype, device=device)
        self._world = dist.new_group(list(range(self._grid.world)), timeout=wait)
        # Which groups come next depends on the strategy, and ranks with different strategies would wait for each other.
        require_equal(self.collectives, {"strategy": [repr(self)]}, self._world)
        self._row, self._column = self._axes(wait)
        self._connected = True

    def _axes(self, wait: datetime.timedelta | None) -> tuple[Any, Any]:
        """Return the groups of this rank's row and column; None for a row or column of one rank."""

        def group_of(sets: Iterable[Sequence[int]]) -> Any:
            own = None
            for ranks in sets:
                if len(ranks) == self._grid.world:
                    return self._world
                if len(ranks) > 1:
                    made = dist.new_group(list(ranks), timeout=wait)
                    own = made if self._rank in ranks else own
            return own

        return group_of(self._grid.rows), group_of(self._grid.columns)

    def claim(self, optimizer: Any) -> None:
        """Serve one optimizer.

        Raises:
            ValueError: If the strategy already serves another optimizer.
        """
        other = self._optimizer()
        if other is not None and other is not optimizer:
            raise ValueError(f"{self!r} serves another optimizer already: pass a separate strategy to each optimizer")
        self._optimizer = weakref.ref(optimizer)

    def compare(self, facts: Mapping[str, Sequence[str]]) -> None:
        """Compare facts over the ranks."""
        if self.combines:
            require_equal(self.collectives, facts, self._world)

    def end_step(self) -> None:
        """Compare the ranks if that was requested.

        Raises:
            RuntimeError: On every rank, if the ranks differ.
        """
        self._steps += 1
        if self._verify_every is None or not self.combines or self._steps % self._verify_every:
            return
        sent = [record for record in self.collectives.counter.records if record.size == self._grid.world]
        groups = self._optimizer().param_groups
        params = [p for group in groups for p in group["params"] if not is_cut(p)]
        facts = {
            "messages sent": [str(record) for record in sent],
            "parameters": [f"number {i}: {fingerprint(p)}" for i, p in enumerate(params)],
        }
        try:
            require_equal(self.collectives, facts, self._world)
        except ValueError as error:
            raise RuntimeError(f"step {self._steps}: {error}") from None

    def close(self) -> None:
        """Destroy the groups. Idempotent."""
        connected, self._connected = self._connected, False
        self._optimizer = _nobody
        if connected and dist.is_initialized():
            for group in {id(g): g for g in self._own_groups() if g is not None}.values():
                with contextlib.suppress(ValueError):  # it was destroyed with the default group
                    dist.destroy_process_group(group)
        # The threads of a group end with its last reference, which must not happen when the interpreter exits.
        self._world = self._row = self._column = None

    def _own_groups(self) -> list[Any]:
        """Return the groups that this strategy has created."""
        return [self._row, self._column, self._world]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, which excludes the groups."""
        kept = {k: v for k, v in self.__dict__.items() if k not in ("_world", "_row", "_column")}
        return {
            **kept,
            "_optimizer": _nobody,
            "_connected": False,
            "collectives": Collectives(wire_dtype=self._wire_dtype),
        }

    def __repr__(self) -> str:
        """Return the constructor call that creates an equal strategy."""
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.arguments().items())})"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for ``repr()`` that differ from their defaults. They must be equal on all ranks."""
        changed = {
            "replicate_factors": self._replicate,
            "average_gradients": self._average or None,
            "wire_dtype": self._wire_dtype,
            "timeout": self._timeout,
            "verify_every": self._verify_every,
        }
        return {k: v for k, v in changed.items() if v is not None}

    # ------------------------------------------------------------------ who
    @property
    def combines(self) -> bool:
        """Whether several ranks work together."""
        return self._grid.world > 1

    @property
    def replicates(self) -> bool:
        """Whether every rank holds the running estimates of all units."""
        return self.replicates_by_default if self._replicate is None else self._replicate

    @property
    def averages(self) -> bool:
        """Whether the strategy averages gradients itself."""
        return self._average and self.combines

    @property
    def grid(self) -> Grid:
        """The grid of ranks."""
        return self._grid

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._rank

    @property
    def identity(self) -> str:
        """This rank, its world and the arguments that place the curvature, as text."""
        changed = {k: v for k, v in self.arguments().items() if k not in _DOES_NOT_PLACE}
        strategy = f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"
        return f"rank {self._rank} of {self._grid.world} under {strategy}"

    @property
    def data_world(self) -> int:
        """Number of processes that read data, which is all of them."""
        return self._grid.world

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of messages."""
        return self.collectives.nbytes

    def owner(self, index: int) -> int:
        """Return the rank that refreshes the curvature of a unit."""
        return self._owners[index]

    def captures(self, index: int) -> bool:
        """Whether this rank captures statistics of a unit: all ranks do, or only its owner."""
        return not self.only_owners_capture or self._units[index].everywhere or self.refreshes(index)

    def sources(self, index: int) -> int:
        """Return the number of ranks that capture statistics of a unit that not every rank estimates."""
        return 1 if self.only_owners_capture else self.data_world

    def estimates(self, index: int) -> bool:
        """Whether this rank holds the running estimate of a unit."""
        return self.is_everywhere(index) or self.refreshes(index)

    def is_everywhere(self, index: int) -> bool:
        """Whether every rank holds the running estimate of a unit."""
        return self.replicates or self._units[index].everywhere

    def preconditions(self, index: int) -> bool:
        """Whether this rank is in the column of the owner."""
        return self._owners[index] % self._grid.width == self._rank % self._grid.width

    def preconditioners(self, index: int) -> Sequence[int]:
        """Return the ranks in the column of the owner."""
        return range(self._owners[index] % self._grid.width, self._grid.world, self._grid.width)

    def captures_elsewhere(self, index: int) -> bool:
        """Whether any rank captures statistics of a unit without preconditioning it."""
        return self._grid.width > 1 and (self._units[index].everywhere or self.sources(index) > 1)

    def shard(self, index: int) -> Shard:
        """Return this rank's part of a divisible unit, which is cut over the row."""
        return Shard(self._rank % self._grid.width, self._grid.width)

    def shards(self, index: int) -> Sequence[int]:
        """Return, by rank, which part of a divisible unit it has."""
        return [rank % self._grid.width for rank in range(self._grid.world)]

    def sender(self, index: int) -> int:
        """Return the rank of this row that preconditions a unit."""
        width = self._grid.width
        return self._rank - self._rank % width + self._owners[index] % width

    # ------------------------------------------------------------------ verbs of a step
    def average_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Replace ``.grad`` by its mean over the ranks; one that is missing on some ranks counts as zeros."""
        if not self._average or not self.combines:
            return
        trained = [p for p in params if p.requires_grad]
        present = torch.tensor([float(p.grad is not None) for p in trained], dtype=torch.float64)
        anywhere = self.agree(present).tolist()
        found = [p for p, there in zip(trained, anywhere, strict=True) if there]
        for p in found:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.layout != torch.strided:
                p.grad = p.grad.to_dense()
        grads = [torch.view_as_real(g) if g.is_complex() else g for g in (p.grad for p in found) if g is not None]
        self.collectives.average(grads, group=self._world, stage="gradients", count=self._grid.world).wait()

    def agree(self, words: Tensor) -> Tensor:
        """Sum a small float64 vector over the ranks, and return it on the CPU."""
        if not self.combines:
            return words.cpu()
        return self.collectives.words(words, group=self._world, stage="words")

    def fail_together(self, error: str | None, failed: bool) -> None:
        """Raise the error of the first rank that has one, on every rank."""
        if not failed:
            return
        world = self._grid.world
        has_one = torch.zeros(world, dtype=torch.float64)
        has_one[self._rank] = float(error is not None)
        first = int(self.agree(has_one).argmax())
        text = (error or "").encode()[:_MESSAGE].ljust(_MESSAGE)
        letters = torch.tensor(list(text), dtype=torch.float64) * (self._rank == first)
        message = bytes(int(c) for c in self.agree(letters).tolist()).decode(errors="replace").strip()
        raise RuntimeError(message)

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        """Sum parcels over all ranks, on every rank or on the owners. What only the owner captures is not sent."""
        if not self.combines:
            return Pending()
        if self.only_owners_capture:
            parcels = [p for p in parcels if self._units[p.index].everywhere]
        spread, rest = self._split(parcels)
        flags = [flag for p in spread for flag in p.symmetric]
        tensors = [t for p in spread for t in p.tensors]
        first = self.collectives.all_reduce(tensors, group=self._world, stage="statistics", symmetric=flags)
        by_root, symmetric = self._by_root(rest, self._owners.__getitem__)
        second = self.collectives.reduce(by_root, group=self._world, stage="statistics", symmetric=symmetric)
        return Pending(first, second)

    def _split(self, parcels: Sequence[Parcel]) -> tuple[list[Parcel], list[Parcel]]:
        """Return the parcels of units that every rank estimates, and those of the others."""
        spread = [p for p in parcels if self.is_everywhere(p.index)]
        return spread, [p for p in parcels if not self.is_everywhere(p.index)]

    def gather_statistics(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Stack tensors of the ranks that capture them in rank order, on every rank or only on the owners."""
        if not self.combines:
            return super().gather_statistics(parcels)
        if self.only_owners_capture:
            own = super().gather_statistics(parcels)
            return [p if self.refreshes(p.index) else Parcel(p.index, []) for p in own]
        spread, rest = self._split(parcels)
        flat = [t for p in spread for t in p.tensors]
        first = self.collectives.all_gather(flat, group=self._world, stage="rows")
        by_root, _ = self._by_root(rest, self._owners.__getitem__)
        second = self.collectives.gather(by_root, group=self._world, stage="rows")
        stacked = iter(first.wait())
        found = {p.index: Parcel(p.index, [next(stacked) for _ in p.tensors]) for p in spread}
        own = iter(second.wait().get(self._rank, []))
        for p in rest:
            if self._owners[p.index] == self._rank:
                found[p.index] = Parcel(p.index, [next(own) for _ in p.tensors])
        return [found.get(p.index, Parcel(p.index, [])) for p in parcels]

    def share_curvature(self, parcels: Sequence[Parcel]) -> None:
        """Copy parcels from the owners of their units to the other ranks of their columns."""
        if not self.combines or self._grid.workers == 1:
            return
        by_root, symmetric = self._by_root(parcels, self._owners.__getitem__)
        self.collectives.broadcast(
            by_root, group=self._column, stage="curvature", symmetric=symmetric, exact=True
        ).wait()

    def spread(self, parcels: Sequence[Parcel]) -> None:
        """Copy parcels from the owners of their units to all ranks."""
        if not self.combines:
            return
        by_root, symmetric = self._by_root(parcels, self._owners.__getitem__)
        self.collectives.broadcast(by_root, group=self._world, stage="spread", symmetric=symmetric, exact=True).wait()

    def post_directions(self, parcels: Sequence[Parcel]) -> Pending:
        """Start to copy directions from the ranks that preconditioned to the other ranks of their rows."""
        if not self.combines or self._grid.width == 1:
            return Pending()
        by_root, symmetric = self._by_root(parcels, self.sender)
        return Pending(self.collectives.broadcast(by_root, group=self._row, stage="directions", symmetric=symmetric))

    @staticmethod
    def _by_root(parcels: Sequence[Parcel], root: Any) -> tuple[dict[int, list[Tensor]], dict[int, list[bool]]]:
        tensors: dict[int, list[Tensor]] = {}
        flags: dict[int, list[bool]] = {}
        for p in parcels:
            tensors.setdefault(root(p.index), []).extend(p.tensors)
            flags.setdefault(root(p.index), []).extend(p.symmetric)
        return dict(sorted(tensors.items())), flags

    # ------------------------------------------------------------------ verbs that are called rarely
    def meet(self, what: str) -> None:
        """Wait until every rank has come here."""
        if self.combines:
            meet(what, None if self._timeout is None else datetime.timedelta(seconds=self._timeout))

    def copy_from(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Copy tensors of one rank to all others."""
        if self.combines and tensors:
            self.collectives.broadcast({source: list(tensors)}, group=self._world, stage="copies", exact=True).wait()

    # ------------------------------------------------------------------ verbs of parameters that are sharded over ranks
    def reshard(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], stage: str, exact: bool = False
    ) -> list[Tensor]:
        """Bring tensors of one dtype from one sharding to another, in one exchange between all ranks."""
        if not self.combines:
            return super().reshard(tensors, routes, stage, exact)
        work = self.collectives.reshard(tensors, routes, group=self._world, stage=stage, exact=exact)
        found: list[Tensor] = work.wait()
        return found

    def sum_pieces(self, values: Tensor) -> Tensor:
        """Sum a vector over all ranks."""
        if self.combines:
            self.collectives.all_reduce([values], group=self._world, stage="norms", exact=True).wait()
        return values

    # ------------------------------------------------------------------ verbs of divisible units
    def sum_shards(self, values: Tensor) -> Tensor:
        """Sum a vector over the ranks of this row."""
        if self._grid.width == 1:
            return values
        self.collectives.all_reduce([values], group=self._row, stage="dots").wait()
        return values

    def gather_shards(self, shards: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Assemble flat tensors from the parts of the ranks of this row."""
        if self._grid.width == 1:
            return list(shards)
        found: list[Tensor] = self.collectives.gather_uneven(shards, sizes, group=self._row, stage="directions").wait()
        return found
