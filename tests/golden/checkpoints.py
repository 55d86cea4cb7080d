"""Files that older versions saved: what is in the state after loading, and the bits of the steps that follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.contract.saved_runs import RUNS, continued, continued_in_parts
from tests.golden.ranks import processes
from tests.golden.traces import plain, watched


@dataclass(frozen=True)
class Kept:
    """A file, or the files of all ranks."""

    name: str

    def trace(self) -> dict[str, Any]:
        run = RUNS[self.name]
        if run.world == 1:
            return loaded(0, 1, self.name, f"{self.name}.pt")
        file = f"{self.name}.pt" if run.together else None
        found = processes().run(loaded, self.name, file, world=run.world)
        alone = {"alone": loaded(0, 1, self.name, file)} if file else {}
        return {f"rank {rank}": trace for rank, trace in enumerate(found)} | alone


def loaded(rank: int, world: int, name: str, file: str | None) -> dict[str, Any]:
    """The trace of a rank."""

    def fill(trace: dict[str, Any]) -> None:
        answer = continued_in_parts(rank, world, name) if file is None else continued(rank, world, name, file)
        trace.update(plain(answer))

    return watched(fill)


def files() -> Iterator[tuple[str, Kept]]:
    for name in RUNS:
        yield name, Kept(name)


SETS = {"files": files}
