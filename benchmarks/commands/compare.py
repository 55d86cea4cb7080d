"""``compare``: many optimizers on one workload, with the same number of trials each, and a report in Markdown.

It can be stopped at any time, and continues exactly from there: each run is checkpointed every minute, next to the
results. Later runs extend the results in the repository.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks import report, store
from benchmarks.commands.options import OnWorkload
from benchmarks.compare.plan import STEP, Budget, Job, current, end_loss, pending
from benchmarks.compare.runs import Setting, execute, find, key_of, measure_reference, pause_of, recipe_of
from benchmarks.compare.tables import printed, write_report
from benchmarks.peers import PEERS, available, set_paths, versions
from benchmarks.recipes import METHODS, VARIANTS
from benchmarks.recipes.building import parse_settings
from benchmarks.store import locked
from benchmarks.workloads import Size
from benchmarks.workloads.tiny import found_or_made_up

TARGETS: dict[str, float] = {"autoencoder": 0.2, "poisson": 0.2}
"""Share of the best first-order run's steps in which one of our methods should reach its loss."""
TARGET = 0.7
SMOKE_STEPS = 20  # maximum number of steps of a full run in the size `smoke`, which only checks that everything works


@dataclass
class Compare(OnWorkload):
    """Compare optimizers on one workload with equal budgets, and write a report."""

    size: Size = "cpu"
    """Size of the model and of the batch. smoke takes seconds, uses one rate and seed, and generates missing data."""
    optimizers: tuple[str, ...] = ()
    """Names of the optimizers. Default: every method of this package and every installed third-party optimizer."""
    steps: int | None = None
    """Steps of a full run. Default: those of the workload."""
    factors: tuple[float, ...] = (1 / STEP, 1.0, STEP)
    """Learning rates to try, as multiples of that of the recipe."""
    seeds: int = 3
    """Number of seeds of the full runs of the leaders."""
    leaders: int = 2
    """Number of our methods, and of first-order optimizers, that count as leaders. They and AdamW also complete a run
    at the next lower rate, and run with further seeds. With 0, all have further seeds, and none has a second rate."""
    short: tuple[str, ...] = ()
    """Optimizers that also run with a schedule that ends at the target's share of the steps. Default: the best two of
    our methods and the best first-order optimizer."""
    minutes: float = 90.0
    """Time limit in minutes. The next call continues with the remaining runs."""
    jobs: int = 1
    """Number of simultaneous runs, each with its own --threads."""
    threads: int = 1
    """Number of threads of a run. With one thread, seconds are processor time, which steps of SGD in between scale to
    the processor's speed at the start, because other work slows it down. With more, they are wall-clock time."""
    evaluate: bool = False
    """Evaluate on all held-out data at the end, and with further metrics of the workload, such as BLEU."""
    peer_path: tuple[str, ...] = ()
    """Checkout of a third-party optimizer that is not a package, such as kfac_pytorch=../kfac-pytorch."""
    results: Path | None = None
    """File of results to extend. Default: a file in --out-dir."""

    def run(self) -> int:
        """Run the command.

        Returns 1 if a full run or all trials of an optimizer raised an error, else 0. Divergence is no error.
        """
        set_paths(self.peer_path)
        path = self.results or self.out_dir / f"compare-{self.workload}-{self.size}.json"
        found = found_or_made_up(self.workload, self.data_dir, self.size, parse_settings(self.workload_set))
        with locked(path), found as (data_dir, made_up):
            setting = self._setting(data_dir, path.with_suffix(".runs"))
            results = store.load(path, self._head(setting, made_up))
            results["command"] = command_line(sys.argv[1:])
            names = list(self.optimizers) or self._everyone()
            for name in names:
                find(name).recipe(self.workload, self.size)  # reports a wrong name before the first run
                if name in PEERS and name not in available():
                    find(name).construct(nn.Linear(1, 1), **find(name).settings(self.workload))  # reports the problem
            if self.threads == 1 and self.size != "smoke":
                results.setdefault("reference_seconds", measure_reference(setting))
                setting = replace(setting, reference_seconds=results["reference_seconds"])
            self._fill(results, names, setting, path)
        self._report(results, path)
        return int(_failed([run for run in results["runs"] if run["optimizer"] in names]))

    def _fill(self, results: dict[str, Any], names: list[str], setting: Setting, path: Path) -> None:
        budget = self._budget(results["steps"], TARGETS.get(self.workload, TARGET))
        _drop_outdated(results, names, setting)
        results["machines"].append(store.limits(self.threads))
        with report.progress_bar() as progress, _workers(self.jobs) as submit:
            task = progress.add_task(f"{self.workload}, {self.size}", total=None)
            running: dict[Future[dict[str, Any]], Job] = {}
            while True:
                taken = set(running.values())
                short = self.short or _best(results["runs"], names, budget)
                free = (job for job in pending(results["runs"], names, short, budget) if job not in taken)
                while len(running) < self.jobs and time.time() < setting.deadline and (job := next(free, None)):
                    running[submit(job, setting)] = job
                if not running:
                    return
                progress.update(task, description=", ".join(f"{j.optimizer} ({j.phase})" for j in running.values()))
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    if isinstance(future.exception(), TimeoutError):
                        continue
                    results["runs"].append(future.result() | {"machine": len(results["machines"]) - 1})
                    results["runs"] = current(results["runs"], names, budget)
                    store.save(path, results)
                    if pause := pause_of(job, setting, future.result()["key"]):
                        pause.done()
                    progress.advance(task)

    def _budget(self, steps: int, share: float) -> Budget:
        if self.size == "smoke":
            return Budget(steps, (1.0,), 1, 1 / 6, 0.0, extend=False)
        return Budget(steps, tuple(self.factors), self.seeds, 1 / 6, share, leaders=self.leaders)

    def _everyone(self) -> list[str]:
        names = [name for name in (*METHODS, *available()) if self.workload in find(name).recipes]
        plain = {name: dict(find(name).settings(self.workload, size=self.size)) for name in names}
        # A variant with the same settings as its method would repeat every run.
        twins = [name for name in names if name in VARIANTS and plain[name] == plain.get(name.split("_")[0])]
        return [name for name in names if name not in twins]

    def _setting(self, data_dir: Path, pauses: Path) -> Setting:
        return Setting(
            self.workload, self.size, data_dir, self.threads, self.batch_size, self.evaluate,
            peer_paths=tuple(self.peer_path), deadline=time.time() + 60 * self.minutes,
            workload_changes=parse_settings(self.workload_set), pauses=pauses,
        )  # fmt: skip

    def _head(self, setting: Setting, made_up: bool) -> dict[str, Any]:
        workload = setting.make_workload()
        own = workload.steps[self.size]
        return {
            "workload": self.workload, "size": self.size,
            "steps": self.steps or (min(own, SMOKE_STEPS) if self.size == "smoke" else own),
            "batch_size": workload.batch_size, "examples": workload.examples,
            "workload_settings": dict(setting.workload_changes), "metric": workload.metric,
            "metric_better": "higher" if workload.higher_is_better else "lower", "everything": self.evaluate,
            "loss": "mean of 10 training steps", "schedule": "warm-up over 5 % of the steps, then cosine to nothing",
            "clock": "processor" if self.threads == 1 else "wall", "threads": self.threads,
            "factors": [float(f"{factor:.4g}") for factor in self.factors],
            "share_target": TARGETS.get(self.workload, TARGET), "made_up_data": made_up,
        }  # fmt: skip

    def _report(self, results: dict[str, Any], path: Path) -> None:
        store.save(path, results)
        report.console().print(printed(results))
        report.print_path("results", path)
        report.print_path("report", write_report(results, self.out_dir))


def command_line(words: Sequence[str]) -> str:
    """Return a command line that others can use, with their own folders."""
    shown, before = ["python -m benchmarks"], ""
    for word in words:
        folder = before in {"--data-dir", "--out-dir", "--results"}
        peer = not word.startswith("--") and "=" in word and "/" in word
        shown.append("…" if folder else f"{word.partition('=')[0]}=…" if peer else word)
        before = word if word.startswith("--") else ""
    return " ".join(shown)


def _failed(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a full run failed, or all runs of an optimizer did, so that it has no full run."""
    able = {run["optimizer"] for run in runs if not run["failed"]}
    return any(run["failed"] and (run["phase"] != "sift" or run["optimizer"] not in able) for run in runs)


def _drop_outdated(results: dict[str, Any], names: list[str], setting: Setting) -> None:
    """Remove failed runs and runs with changed recipes or packages, so that they are repeated."""

    def stays(run: Mapping[str, Any]) -> bool:
        if run["optimizer"] not in names:
            return True
        if run["failed"] or run["versions"] != versions(run["optimizer"]):
            return False
        job = Job(run["optimizer"], run["phase"], run["factor"], run["seed"], run["steps"])
        return bool(run["key"] == key_of(job, recipe_of(job, setting)))

    results["runs"] = [run for run in results["runs"] if stays(run)]


def _best(runs: list[dict[str, Any]], names: list[str], budget: Budget) -> list[str]:
    """Return the best two of our methods and the best first-order optimizer, once all have a full run."""
    first = [run for run in runs if run["phase"] == "final" and run["seed"] == 0 and run["steps"] == budget.steps]
    if any(job.phase == "sift" or job.seed == 0 for job in pending(runs, names, (), budget)):
        return []
    ranked = sorted((run for run in first if run["optimizer"] in names), key=end_loss)
    ours = [run["optimizer"] for run in ranked if run["ours"]]
    return ours[:2] + [run["optimizer"] for run in ranked if run["order"] == "first"][:1]


@contextmanager
def _workers(jobs: int) -> Iterator[Any]:
    """Yield a function that starts a run: in this process if ``jobs`` is 1, and in other processes otherwise."""
    if jobs == 1:
        yield _now
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield lambda job, setting: pool.submit(execute, job, setting)


def _now(job: Job, setting: Setting) -> Future[dict[str, Any]]:
    future: Future[dict[str, Any]] = Future()
    try:
        future.set_result(execute(job, setting))
    except TimeoutError as err:
        future.set_exception(err)
    return future
