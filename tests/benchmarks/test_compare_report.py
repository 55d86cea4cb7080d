"""The report of a comparison: its numbers agree with results by hand; its page and tables are those of made-up runs."""

import copy
import io
import math
import re

import pytest
from rich.console import Console

from benchmarks.commands.overview import best_rows, overview
from benchmarks.compare import figures, statistics, tables, wording
from benchmarks.compare.tables import page as report_page
from benchmarks.compare.tables import write_report
from benchmarks.plot import look

STEP = math.sqrt(10)
HEAD = {
    "workload": "autoencoder", "size": "cpu", "steps": 600, "metric": "test error", "metric_better": "lower",
    "loss": "mean of 10 training steps", "clock": "processor", "share_target": 0.2,
    "command": "python -m benchmarks compare --workload autoencoder --size cpu --steps 600",
    "machines": [{"processor": "A processor", "gemm_gflops": {"median": 60.0, "best": 66.0}}],
}  # fmt: skip
LABELS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon", "kfac": "K-FAC", "ggt": "GGT"}
ENDS = {"sgd": 0.9, "adamw": 0.6, "muon": 0.5, "kfac": 0.3, "ggt": 0.7}  # final losses


def make_run(optimizer="adamw", phase="final", seed=0, losses=(1.0, 0.5), **changes):
    """A run with a point of the curve every ten steps, and a hundredth of a second per step."""
    taken = 10 * len(losses)
    order = "first" if optimizer in {"adamw", "sgd", "muon"} else "second"
    return {
        "optimizer": optimizer, "label": optimizer.upper(), "ours": order == "second", "order": order, "phase": phase,
        "factor": 1.0, "settings": {"lr": 0.1}, "seed": seed, "steps": taken, "taken": taken, "diverged": False,
        "failed": None, "metric": 0.1, "optimizer_bytes": 1000, "machine": 0, "note": "",
        "curve": [[10 * (i + 1), loss, 0.1 * (i + 1), 0.2 * (i + 1)] for i, loss in enumerate(losses)], **changes,
    }  # fmt: skip


def make_results(*runs, **changes):
    return {**copy.deepcopy(HEAD), "runs": list(runs), **changes}


@pytest.fixture
def field():
    """Five optimizers in every phase; one run diverges, one fails, and one diverges at its largest rate."""
    runs = {}
    for name, label in LABELS.items():
        end = ENDS[name]
        for factor in (1 / STEP, 1.0, STEP):
            losses = (1.0, end + abs(math.log(factor)))
            runs[name, "sift", factor] = make_run(name, "sift", losses=losses, factor=factor, label=label)
        for seed in range(3):
            runs[name, "final", seed] = make_run(name, seed=seed, losses=(2.0, *[end] * 9), label=label)
    for seed in range(3):
        runs["kfac", "short", seed] = make_run("kfac", "short", seed, (0.9, 0.5), label="K-FAC")
    runs["ggt", "final", 2] |= {"diverged": True, "taken": 31}
    runs["ggt", "final", 1] |= {"failed": "RuntimeError: <shape> & size", "taken": 0, "curve": []}
    runs["sgd", "sift", STEP] |= {"diverged": True, "taken": 4}
    runs["muon", "sift", 1.0]["note"] = "float32 iteration"
    return make_results(*runs.values())


REFERENCE = make_run("adamw", losses=(1.0,) * 9 + (0.5,))


# ---------------------------------------------------------------------- numbers
def test_the_best_factor_has_the_lowest_finite_loss_and_is_the_smaller_of_equal_ones():
    trials = ((0.1, 0.9), (1.0, 0.4), (3.0, 0.4))
    runs = [make_run("kfac", "sift", factor=factor, losses=(1.0, loss)) for factor, loss in trials]
    runs.append(make_run("kfac", "sift", factor=10.0, losses=(1.0, 0.1), diverged=True))
    results = make_results(*runs)
    assert statistics.best_factor(results, "kfac") == 1.0
    assert statistics.sift_losses(results, "kfac") == {0.1: 0.9, 1.0: 0.4, 3.0: 0.4, 10.0: math.inf}
    assert not statistics.at_edge(results, "kfac")
    assert statistics.at_edge(make_results(*runs[:2]), "kfac")
    lost = make_results(make_run("kfac", "sift", diverged=True), make_run("kfac", "sift", losses=(1.0, None)))
    assert statistics.best_factor(lost, "kfac") is None
    same = [make_run("kfac", "sift", factor=factor) for factor in (1.0 / STEP / STEP, 0.1)]
    assert list(statistics.sift_losses(make_results(*same), "kfac")) == [0.1]  # equal up to rounding


def test_a_summary_by_hand():
    """The final losses have mean 0.4 and standard deviation 0.2. A step takes 10 ms, and one of SGD 5 ms."""
    finals = [make_run("kfac", seed=seed, losses=(1.0, loss)) for seed, loss in enumerate((0.2, 0.4, 0.6))]
    fast = make_run("sgd", curve=[[10, 1.0, 0.05, 0.2], [20, 0.8, 0.1, 0.4]])
    found = statistics.summarize(make_results(*finals, fast), "kfac")
    assert (found.loss.mean, found.loss.low, found.loss.high) == pytest.approx((0.4, 0.2, 0.6))
    assert (found.loss.deviation, found.step_cost) == pytest.approx((0.2, 2.0))
    assert (found.seconds.mean, found.megabytes) == pytest.approx((0.2, 0.001))
    assert (found.seeds, found.incomplete) == (3, False)
    assert statistics.summarize(make_results(*finals), "kfac").step_cost is None  # without SGD


def test_the_reference_is_the_lowest_mean_among_first_order_optimizers_without_unfinished_seeds():
    runs = [make_run("adamw", losses=(1.0, 0.4)), make_run("muon", losses=(1.0, 0.3))]
    results = make_results(*runs, make_run("kfac", losses=(1.0, 0.1)))
    assert statistics.best_first(results) == "muon"
    assert [(t.optimizer, t.loss) for t in statistics.targets(results)] == [("muon", 0.3), ("adamw", 0.4)]
    assert statistics.best_first(make_results(*runs, make_run("muon", seed=1, diverged=True))) == "adamw"
    without = make_results(make_run("adamw", diverged=True), make_run("kfac"))
    assert (statistics.best_first(without), statistics.targets(without)) == (None, [])
    assert "no reference yet" in wording.summary(without)[0]
    assert "| ADAMW |" in report_page(without)


def test_reach_by_hand():
    """The reference reaches 0.5 after 40 steps and 0.4 s, and our seeds after 20 steps, after 30 steps and never."""
    reference = make_run("adamw", losses=(2.0, 1.0, 0.7, 0.5))
    ours = [(2.0, 0.5, 0.4, 0.3), (2.0, 1.0, 0.4, 0.5), (2.0, 1.0, 0.9, 0.8)]
    # Only the final loss of short runs counts: the first is below the target before, and the second ends below it.
    short = [make_run("kfac", "short", seed, losses) for seed, losses in enumerate([(0.4, 0.4, 0.6), (0.9, 0.9, 0.5)])]
    finals = [make_run("kfac", seed=seed, losses=losses) for seed, losses in enumerate(ours)]
    results = make_results(reference, *finals, *short)
    target = statistics.target_of(results, "adamw")
    found = statistics.reach(results, "kfac", target, "final")
    assert (found.reached, found.seeds, found.everywhere) == (2, 3, False)
    assert (found.steps, found.steps_share) == pytest.approx((25, 25 / 40))
    assert (found.seconds, found.seconds_share) == pytest.approx((0.25, 0.25 / 0.4))
    assert not found.met(1.0)
    found = statistics.reach(results, "kfac", target, "short")
    assert (found.reached, found.seeds, found.steps, found.steps_share) == (1, 2, 30, 0.75)


def test_seconds_are_compared_at_the_same_loss():
    """The seeds of the reference end at 0.5 and 0.7, and one of them reaches the mean of 0.6 after 0.3 of 0.4 s."""
    seeds = [make_run(losses=(2, 1, 0.6, 0.5)), make_run(seed=1, losses=(2, 1, 1, 0.7))]
    results = make_results(*seeds, make_run("kfac", losses=(2, 0.6, 0.5, 0.5)))
    target = statistics.target_of(results, "adamw")
    assert (target.seconds, target.crossing) == pytest.approx((0.4, 0.3))
    assert statistics.reach(results, "kfac", target, "final").seconds_share == pytest.approx(0.2 / 0.3)


def test_seconds_are_those_of_the_clock_in_the_file():
    assert statistics.target_of(make_results(make_run(), clock="wall"), "adamw").seconds == pytest.approx(0.4)
    with pytest.raises(ValueError, match="'sundial'"):
        statistics.clock_column(make_results(clock="sundial"))


def test_one_point_below_the_target_only_counts_if_it_is_the_last():
    for losses, step in [
        ((1.0, 0.4, 0.6, 0.5, 0.5), 40),  # a single point at 20 does not count
        ((1.0, 0.4, 0.6, 0.6, 0.5), 50),  # the last point counts
        ((1.0, 0.4, 0.6, 0.5, 0.6), None),
        ((1.0, 0.4, None, 0.5, 0.6), None),
        ((0.5, 0.5), 10),
    ]:
        found = statistics.first_reach(make_run(losses=losses), 0.5, 2)
        assert found == (None if step is None else (step, pytest.approx(step / 100)))
    assert statistics.first_reach(make_run(losses=(0.1, 0.1), diverged=True), 0.5, 2) is None
    early = make_run(curve=[[5, 0.1, 0.05, 0.1], [20, 0.4, 0.2, 0.4]])  # 5 steps do not fill a window
    assert statistics.first_reach(early, 0.5, 2) == (20, 0.2)


def test_the_best_of_ours_has_more_seeds_then_fewer_steps():
    quick, slow = make_run("kfac", losses=(0.4, 0.4)), make_run("hylo", losses=(0.9, 0.4))
    target = statistics.target_of(make_results(REFERENCE), "adamw")
    assert statistics.best_of_ours(make_results(REFERENCE, slow, quick), target).optimizer == "kfac"
    broken = make_run("kfac", seed=1, diverged=True)
    assert statistics.best_of_ours(make_results(REFERENCE, slow, quick, broken), target).optimizer == "hylo"


def test_every_run_that_did_not_finish_is_listed_with_its_reason(field):
    assert [(run["label"], run["phase"], why) for run, why in statistics.unfinished(field)] == [
        ("SGD", "sift", "diverged after 4 of 20 steps"),
        ("GGT", "final", "failed: RuntimeError: <shape> & size"),
        ("GGT", "final", "diverged after 31 of 100 steps"),
    ]


# ---------------------------------------------------------------------- words
def test_the_verdict():
    for seeds, text in [
        ([(0.6, 0.5)], "(1 of 1 seed). The target of 0.2 of the steps is met."),  # at exactly this share
        ([(0.7, 0.6, 0.5)], "The target of 0.2 of the steps is missed."),
        ([(0.7, 0.6)], "None of our methods reached that loss; the nearest, KFAC, ended at 0.6000. The target of 0.2"),
        ([(0.6, 0.5), (0.6, 0.6)], "(1 of 2 seeds). The target of 0.2 of the steps is missed, because every seed"),
        (
            [(0.6, 0.5)],
            "KFAC is the best: it reached that loss in 0.20 of ADAMW's steps and 0.20 of the seconds in which ADAMW",
        ),
    ]:
        runs = [make_run("kfac", "short", seed, losses) for seed, losses in enumerate(seeds)]
        assert text in " ".join(wording.summary(make_results(REFERENCE, *runs)))


def test_budgets_are_stated(field):
    sentences = wording.budget(field)
    assert sentences[0].startswith("Every optimizer tried 3 learning rates, each for 20 steps. The best rate")
    assert "No first-order optimizer had such runs." in sentences[1]


def test_second_rates_and_changes_of_speed_are_reported():
    trials = [make_run(name, "sift", factor=f) for name in ("kfac", "adamw") for f in (1.0, 3.0)]
    other = make_run("kfac", "long", factor=3.0, losses=(1.0, 0.7))
    slow = {**HEAD["machines"][0], "gemm_gflops": {"median": 30.0, "best": 31.0}}
    runs = [*trials, make_run("kfac"), make_run("kfac", seed=1, machine=1), other, make_run()]
    results = make_results(*runs, machines=[HEAD["machines"][0], slow])
    text = " ".join(wording.budget(results))
    assert "The best rate then ran for all 600 steps with 1 seed. The leaders also completed a run" in text
    assert (
        "with 2 seeds. Losses of the first seed, by multiple of the recipe's rate: KFAC 0.5000 at × 1 and 0.7" in text
    )
    assert "30 to 60 GFLOP/s" in text
    slow["processor"] = "another one"
    assert "different processors" in " ".join(wording.budget(results))


def test_the_sources_show_which_optimizers_were_tuned():
    runs = [make_run("kfac", source="tuned here"), make_run("muon", source="its README")]
    assert wording.sources(make_results(*runs)) == {"KFAC": "tuned here, for each workload", "MUON": "its README"}
    older = wording.sources(make_results(make_run("kfac"), make_run("muon"), make_run("gone", label="GONE")))
    assert older["KFAC"] == older["GONE"] == "tuned here, for each workload"  # runs without a source: of their recipes
    assert older["MUON"].startswith("learning rates tuned here on digits")
    noted = [make_run(name, seed=seed, note="as it is") for name in ("muon", "adamw") for seed in range(2)]
    sentences = wording.budget(make_results(*noted, make_run("sgd", note="other")))
    assert sentences[-2:] == ["MUON and ADAMW: as it is.", "SGD: other."]


# ---------------------------------------------------------------------- the page
def test_the_page_states_the_runs_and_their_settings(field, tmp_path):
    for run in field["runs"]:
        run["label"] = run["label"].replace("K-FAC", "K-FAC <b> & $x$ | [red]_*")
    page = write_report(field, tmp_path / "new").read_text(encoding="utf-8")
    for text in (
        "python -m benchmarks compare --workload autoencoder --size cpu --steps 600",
        "float32 iteration",
        r"\<shape> & size",
        r'| K-FAC \<b> & $x$ \| \[red]\_\* | tuned here, for each workload | {"lr": 0.1} |',
        "**Reaching the final loss of Muon: ",
    ):
        assert text in page
    assert "K-FAC <b>" not in page
    (shown,) = re.findall(r"!\[.+\]\((.+)\)", page)
    assert (tmp_path / "new" / shown).is_file()
    assert "mean nothing" not in page
    assert "mean nothing" in report_page({**make_results(make_run(), make_run("kfac")), "made_up_data": True})


def test_unfinished_comparisons_have_a_page(tmp_path):
    for runs in [[], [make_run("kfac", "sift")], [make_run(losses=(), failed="ValueError: no")]]:
        page = write_report(make_results(*runs), tmp_path).read_text(encoding="utf-8")
        assert page.startswith("# autoencoder (cpu): optimizers compared\n")
        assert "![" not in page


# ---------------------------------------------------------------------- figures and tables
def test_an_optimizer_has_the_same_color_in_every_picture(field, monkeypatch):
    assert look("K-FAC", 3) == look("KFAC", 0) != look("KFAC, quadratic model", 0)
    assert look("KFAC, quadratic model", 0)["color"] == look("KFAC", 0)["color"]
    labels = ("KFAC", "EKFAC", "HyLo", "M-FAC", "sparse M-FAC", "GGT", "SGD", "AdamW", "Muon", "SOAP", "Shampoo")
    assert len({tuple(look(label, 0).values()) for label in labels}) == len(labels)
    assert figures.shown(field) == ["adamw", "muon", "kfac"]
    drawn = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.update({path: figure}))
    figures.draw_losses(field, "losses")
    colors = {line.get_color() for axes in drawn["losses"].axes for line in axes.lines}
    assert {look(LABELS[name], 0)["color"] for name in figures.shown(field)} == colors
    assert drawn["losses"].axes[0].get_yscale() == "log"


def test_the_terminal_shows_every_optimizer_and_table(field):
    out = io.StringIO()
    Console(file=out, width=200).print(tables.printed(field))
    titles = (
        "Reaching the final loss of Muon", "Reaching the final loss of AdamW", "did not finish", "Learning rates tried",
    )  # fmt: skip
    assert all(text in out.getvalue() for text in (*titles, *LABELS.values()))
    for block in map(tables.markdown_table, tables.all_rows(field)):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def test_measures_of_quality_have_columns_and_only_our_methods_have_verdicts(field):
    results = make_results(make_run(quality={"BLEU": 30.0}), make_run(seed=1, quality={"BLEU": 32.0}))
    table = tables.result_rows(results)
    assert table.rows[0][table.columns.index("BLEU")] == "31.00"
    table = tables.reach_rows(field, statistics.targets(field)[0])
    verdicts = {(row[0], row[1]): row[-1] for row in table.rows}
    assert (verdicts["K-FAC", "short"], verdicts["AdamW", "full"]) == ("met", "–")


def test_the_overview_has_one_row_for_each_workload(field):
    """Our method reaches the loss after a tenth of the reference's seconds, and its complete run takes as long."""
    text = overview([field, {**field, "workload": "digits", "share_target": 0.01}])
    rows = [line for line in text.splitlines() if line.startswith(("| autoencoder", "| digits"))]
    assert "| met |" in rows[0]
    assert "| missed |" in rows[1]
    results = make_results(REFERENCE, make_run("kfac", losses=(0.4,) * 10))
    table = best_rows([results])
    found = dict(zip(table.columns, table.rows[0], strict=True))
    assert (found["relative seconds"], found["complete run, seconds"]) == ("0.10", "1.00")
