"""Output during a run: a live display on a terminal, and plain lines otherwise."""

import io
from functools import partial

from rich.console import Console

from benchmarks.live import LINES, board
from benchmarks.recipes import METHODS
from benchmarks.runner import Trainer, race
from benchmarks.workloads import make_workload


def trainer(name, changes=()):
    method = METHODS[name]
    make = partial(method.build, workload="digits", changes=dict(changes))
    return Trainer(method.label, make_workload("digits", None, "smoke"), make)


def show(runs, steps, console):
    with board("digits", runs, steps, console=console) as update:
        race(runs, steps, update)


def test_a_terminal_shows_every_figure_and_the_last_step():
    runs = [trainer("kfac", {"graft": None, "kl_clip": 1e-4}), trainer("mfac"), trainer("sgd")]
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=200)
    show(runs, 6, console)
    shown = " ".join(console.export_text().split())
    last = shown[shown.rindex("KFAC 6/6") :]
    found = runs[0].optimizer.diagnostics()
    for word in (
        f"loss {runs[0].history.loss_at(6):.4g}",
        "damping ",
        f"kl factor {found['kl_clip_factor']:.3g}",
        f"staleness {max(found['staleness'].values())}",
        "ms/step ",
        "M-FAC 6/6",
        "SGD 6/6",
    ):
        assert word in last


def test_a_pipe_gets_a_few_plain_lines_and_no_more_after_a_divergence():
    out = io.StringIO()
    show([trainer("kfac")], 23, Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert 5 <= len(lines) <= LINES
    assert lines[-1].startswith("KFAC: step 23/23, loss ")
    for name in ("lr 0.02", "damping ", "staleness ", "ms/step "):
        assert name in lines[-1]
    assert "\x1b" not in out.getvalue()
    out, run = io.StringIO(), trainer("sgd", {"lr": 1e30})
    show([run], 10, Console(file=out, width=120))
    assert len(run.history.losses) < 10
    assert len(set(out.getvalue().splitlines())) == len(out.getvalue().splitlines())
