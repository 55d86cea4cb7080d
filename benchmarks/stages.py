"""Stages of a step of K-FAC and EK-FAC, each beside the time that its own FLOPs take at the rate of large products."""

import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from benchmarks import report
from benchmarks.contender import Contender
from benchmarks.machine import Rate
from benchmarks.report import value
from benchmarks.timing import StepClass, Work
from secondorder import SecondOrderOptimizer
from secondorder.diagnostics import StageClock

ROUNDS = 3
"""Refresh intervals of steps that are looked into."""
SHOWN: Mapping[str, StepClass] = {"precondition": "plain", "capture": "factor", "refresh": "refresh"}
"""The stages that FLOPs set a floor for, and the class of steps that is looked into for each."""


def stage_times(run: Contender) -> dict[str, float]:
    optimizer = run.trainer.optimizer
    assert isinstance(optimizer, SecondOrderOptimizer)
    clock = StageClock(run.trainer.precision.device)
    times: dict[str, list[float]] = {stage: [] for stage in SHOWN}
    optimizer.time_stages(clock)
    try:
        for _ in range(ROUNDS * run.measured.refresh):
            kind = run.next_class
            run.step(record=False)
            found = clock.last_step()
            for stage, shown in SHOWN.items():
                if kind == shown:
                    times[stage].append(found.get(stage, 0.0) / 1e3)
    finally:
        optimizer.time_stages(None)
    return {stage: statistics.median(values) for stage, values in times.items() if values}


def stage_figures(run: Contender, work: Work, gemm: Rate) -> dict[str, dict[str, float]]:
    flops = {"precondition": work.precondition, "capture": work.triangles + work.scale, "refresh": work.refresh}
    return {
        stage: {"flops": flops[stage], "seconds": spent, "floor": flops[stage] / (1e9 * gemm.median)}
        for stage, spent in stage_times(run).items()
    }


def stage_table(results: list[dict[str, Any]]) -> Table:
    rows = [
        {"label": result["label"], "stage": stage, **found, "ratio": found["seconds"] / found["floor"]}
        for result in results
        for stage, found in result.get("stages", {}).items()
    ]
    caption = (
        "Medians. Floor: the FLOPs of the stage at the measured rate of matrix products; of the products behind the "
        "factors one triangle counts. Capture is of a step that updates factors; with EK-FAC's scale, where it is "
        "measured example by example."
    )
    columns = {
        "optimizer": value("label"),
        "stage": value("stage"),
        "GFLOP": value("flops", ".2f", 1e-9),
        "ms": value("seconds", ".2f", 1e3),
        "floor ms": value("floor", ".2f", 1e3),
        "ratio": value("ratio", ".2f"),
    }
    return report.table_of("Stages of a step", rows, columns, caption)
