"""Output during a run: a live display on a terminal, and plain lines otherwise."""

import io

from rich.console import Console

from benchmarks.live import LINES, board
from benchmarks.runner import race
from tests.support.workloads import trainer_of

OPTIMIZERS = {"kfac": {"graft": None, "kl_clip": 1e-4}, "mfac": {}, "sgd": {}}


def show(runs, steps, console):
    with board("digits", runs, steps, console=console) as update:
        race(runs, steps, update)


def test_a_terminal_shows_every_figure_and_the_last_step():
    runs = [trainer_of(name, "digits", **changes) for name, changes in OPTIMIZERS.items()]
    console = Console(file=io.StringIO(), record=True, force_terminal=True, width=200)
    show(runs, 6, console)
    shown = " ".join(console.export_text().split())
    last = shown[shown.rindex("KFAC 6/6") :]
    found = runs[0].optimizer.diagnostics()
    words = [f"loss {runs[0].history.loss_at(6):.4g}", f"staleness {max(found['staleness'].values())}", "M-FAC 6/6"]
    for word in (*words, f"kl factor {found['kl_clip_factor']:.3g}", "damping ", "ms/step ", "SGD 6/6"):
        assert word in last


def test_a_pipe_gets_a_few_plain_lines_and_no_more_after_a_divergence():
    out = io.StringIO()
    show([trainer_of("kfac", "digits")], 23, Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert 5 <= len(lines) <= LINES
    assert lines[-1].startswith("KFAC: step 23/23, loss ")
    for name in ("lr 0.02", "damping ", "staleness ", "ms/step "):
        assert name in lines[-1]
    assert "\x1b" not in out.getvalue()
    out, run = io.StringIO(), trainer_of("sgd", "digits", lr=1e30)
    show([run], 10, Console(file=out, width=120))
    assert len(run.history.losses) < 10
    assert len(set(out.getvalue().splitlines())) == len(out.getvalue().splitlines())
