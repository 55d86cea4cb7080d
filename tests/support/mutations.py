"""Put the faults of `tests.support.mutants` into copies of the package, one at a time, and see which test catches each.

    python -m tests.support.mutations                     all of them, by the tests that are likely to catch each
    python -m tests.support.mutations --only 'kl-clip*'   some of them
    python -m tests.support.mutations --whole             also run the default tests on faults that survive

A copy contains only the tracked files. A test counts as a catch only if it passes without the fault.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.support.mutants import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LIMIT, WHOLE_LIMIT = 900, 3600  # seconds for one run of likely tests, and for the whole default run
#: The last line of the short summary that names a test: `FAILED tests/test_x.py::test_y[case] - message`.
_NAMED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)
_QUIETLY = ("-q", "-p", "no:cacheprovider", "--tb=no")
_FAILED, _NONE_SELECTED, _TIMED_OUT = 1, 5, -1


class Result(NamedTuple):
    """The outcome of a mutation: the test that caught it ("" if none did), or the error that prevented a verdict."""

    mutation: Mutation
    caught_by: str
    seconds: float
    error: str = ""

    def __str__(self) -> str:
        verdict = "ERROR" if self.error else "caught" if self.caught_by else "SURVIVED"
        return f"{verdict:8} {self.seconds:6.1f} s  {self.mutation.name:50} {self.error or self.caught_by}".rstrip()


def mutated(text: str, mutation: Mutation) -> str:
    """Return the text of a file with a fault in it.

    Raises:
        ValueError: If the line is not there exactly once, or would not change.
    """
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} has {mutation.old!r} {count} times, not once")
    if mutation.old == mutation.new or "\n" in mutation.old + mutation.new:
        raise ValueError(f"{mutation.name}: a mutation changes one line")
    return text.replace(mutation.old, mutation.new)


def paths_of(arguments: str) -> list[str]:
    """Return the files and folders among arguments of pytest."""
    return [word for word in shlex.split(arguments) if word.startswith("tests")]


class Copy:
    """A copy of the tracked files, in which one mutation at a time is tested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
        for name in filter(None, tracked.decode().split("\0")):
            if (ROOT / name).is_file():  # one that was removed is still in the index
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes((ROOT / name).read_bytes())
        self.environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "2000"}
        status, found = self._python("-c", "import secondorder; print(secondorder.__file__)", limit=LIMIT)
        if status or not Path(found.strip()).is_relative_to(folder):
            raise RuntimeError(f"tests would import {found}, not the copy in {folder}")

    def _python(self, *arguments: str, limit: float) -> tuple[int, str]:
        """Run a program; return its status and its output."""
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=self.folder, env=self.environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
        except BaseException:  # kill the whole session: ranks that the tests have started keep the pipe open
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        return process.returncode, output

    def pytest(self, *arguments: str, limit: float = LIMIT) -> tuple[int, list[str]]:
        """Run tests; return the status, and the names of the tests that failed or, if there are none, the last line."""
        try:
            status, output = self._python("-m", "pytest", *_QUIETLY, *arguments, limit=limit)
        except subprocess.TimeoutExpired:
            return _TIMED_OUT, [f"no end within {limit} seconds"]
        return status, (_NAMED.findall(output) if status == _FAILED else []) or [output.strip().rpartition("\n")[2]]

    @contextmanager
    def with_fault(self, mutation: Mutation) -> Iterator[None]:
        """Put a fault into the package inside the ``with`` block."""
        file = self.folder / "secondorder" / mutation.file
        text = file.read_text()
        try:
            self._write(file, mutated(text, mutation))
            yield
        finally:
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # Python compares a compiled file by size and whole seconds, and a mutation may change neither.
        Path(cache_from_source(str(file))).unlink(missing_ok=True)

    def judge(self, mutation: Mutation, whole: bool) -> Result:
        """Run the likely tests of a mutation, and then all default tests if ``whole`` is true."""
        started, ran = time.monotonic(), False
        tries = [(shlex.split(arguments), LIMIT) for arguments in mutation.tests] + [([], WHOLE_LIMIT)] * whole
        for arguments, limit in tries:
            with self.with_fault(mutation):
                status, (named, *_) = self.pytest("-x", *arguments, limit=limit)
            seconds = time.monotonic() - started
            if status in (_FAILED, _TIMED_OUT):
                return Result(mutation, named, seconds)
            if status not in (0, _NONE_SELECTED):
                return Result(mutation, "", seconds, f"pytest {shlex.join(arguments)}: {named}")
            ran |= status == 0
        error = "" if ran else f"no test is selected by {' and '.join(mutation.tests)}"
        return Result(mutation, "", time.monotonic() - started, error)


def judge_all(chosen: Sequence[Mutation], jobs: int, whole: bool) -> Iterator[Result]:
    """Yield the results of mutations in their order, judged by ``jobs`` processes at a time.

    A mutation whose test also fails without the fault is yielded again at the end, as an error.
    """
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for i in range(jobs):
            copies.put(Copy(Path(folder).resolve() / str(i)))

        def judge(mutation: Mutation) -> Result:
            copy = copies.get()
            try:
                return copy.judge(mutation, whole)
            finally:
                copies.put(copy)

        catches: dict[str, list[Result]] = {}
        for result in pool.map(judge, chosen):
            yield result
            if "::" in result.caught_by:
                catches.setdefault(result.caught_by, []).append(result)
        if catches:
            status, failed = copies.get().pytest("-m", "", *catches, limit=WHOLE_LIMIT)
            for name in failed if status else ():
                for result in catches.get(name, [r for found in catches.values() for r in found]):
                    yield result._replace(caught_by="", error=f"{name} does not pass without the fault either")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each mutation, and return 1 if any of them survived."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutations", description=summary)
    parser.add_argument("--only", metavar="PATTERN", default="*", help="names of mutations, or a part of them")
    parser.add_argument("--whole", action="store_true", help="run all default tests on mutations that survive")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of mutations to test at a time")
    given = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if fnmatch(m.name, f"*{given.only}*")]
    for m in chosen:  # fail early if a row is out of date
        mutated((ROOT / "secondorder" / m.file).read_text(), m)
    results = dict[str, Result]()
    for result in judge_all(chosen, given.jobs, given.whole):
        print(result, flush=True)
        results[result.mutation.name] = result
    caught = sum(bool(result.caught_by) for result in results.values())
    print(f"{caught} / {len(chosen)} caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
