"""Output during a run: a live display on a terminal, and plain lines otherwise."""

import io
from functools import partial

from rich.console import Console

from benchmarks.live import LINES, Board
from benchmarks.recipes import METHODS
from benchmarks.runner import Trainer, race
from benchmarks.workloads import make_workload


def trainer(name, changes=()):
    workload = make_workload("digits", None, "smoke", None, {})
    method = METHODS[name]
    return Trainer(method.label, workload, partial(method.build, workload="digits", changes=dict(changes)))


def terminal():
    return Console(file=io.StringIO(), record=True, force_terminal=True, width=200)


def show(runs, steps, console, now):
    with Board("digits", runs, steps, console=console, now=now) as board:
        race(runs, steps, board.update)


def test_a_terminal_shows_every_figure():
    clock = iter(range(1000))
    runs = [trainer("kfac", {"graft": None, "kl_clip": 1e-4}), trainer("mfac"), trainer("sgd")]
    console = terminal()
    show(runs, 6, console, lambda: float(next(clock)))
    shown = " ".join(console.export_text().split())
    last = shown[shown.rindex("KFAC 6/6") :]
    found = runs[0].optimizer.diagnostics()
    for word in (
        f"loss {runs[0].history.loss_at(6):.4g}",
        "damping ",
        f"kl factor {found['kl_clip_factor']:.3g}",
        f"staleness {max(found['staleness'].values())}",
        "ms/step ",
        "precondition ",
        "M-FAC 6/6",
        "SGD 6/6",
    ):
        assert word in last
    assert "capture " in shown
    assert runs[0].optimizer.stage_clock is None


def test_updates_are_rare_and_the_last_step_is_always_shown():
    console, run = terminal(), trainer("sgd")
    show([run], 40, console, lambda: 0.0)  # no time passes
    shown = console.export_text()
    assert shown.count("loss ") <= 4  # the first and the last step, and the end of the display
    assert "40/40" in shown


def test_a_pipe_gets_a_few_plain_lines():
    out = io.StringIO()
    run = trainer("kfac")
    show([run], 23, Console(file=out, width=120), lambda: 0.0)
    lines = out.getvalue().splitlines()
    assert 5 <= len(lines) <= LINES
    assert lines[-1].startswith("KFAC: step 23/23, loss ")
    for name in ("lr 0.02", "damping ", "staleness ", "ms/step "):
        assert name in lines[-1]
    assert "\x1b" not in out.getvalue()
    assert run.optimizer.diagnostics()["stage_ms"] == {}


def test_a_run_that_diverged_prints_nothing_more():
    out, run = io.StringIO(), trainer("sgd", {"lr": 1e30})
    show([run], 40, Console(file=out, width=120), lambda: 0.0)
    assert len(run.history.losses) < 40
    lines = out.getvalue().splitlines()
    assert len(set(lines)) == len(lines)
