"""The report of a comparison: its numbers against ones worked out by hand, its page and its tables on made-up runs."""

import copy
import io
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from benchmarks.compare import figures, html, panels, statistics, tables, wording
from benchmarks.compare.overview import best_rows, overview

STEP = math.sqrt(10)
WINDOW_LOSSES = "mean of 10 training steps"
HEAD = {
    "version": 1,
    "workload": "autoencoder",
    "size": "cpu",
    "steps": 600,
    "batch_size": 100,
    "examples": 60000,
    "metric": "test error",
    "metric_better": "lower",
    "loss": WINDOW_LOSSES,
    "schedule": "warm-up over 5 % of the steps, then cosine to nothing",
    "clock": "processor",
    "share_target": 0.2,
    "machines": [
        {
            "python": "3.11.2",
            "torch": "2.13.0",
            "processor": "A processor",
            "threads": 1,
            "gemm_gflops": {"median": 60.0, "best": 66.0},
            "copy_gbytes": {"median": 8.0, "best": 9.0},
            "date": "2026-11-22",
        }
    ],
}
# name: label, ours, order, floor of the loss, steps in which it falls, milliseconds of a step
FIELD = {
    "sgd": ("SGD", False, "first", 0.30, 140, 10.0),
    "adamw": ("AdamW", False, "first", 0.26, 100, 11.0),
    "muon": ("Muon", False, "first", 0.22, 70, 16.0),
    "soap": ("SOAP", False, "first", 0.23, 75, 22.0),
    "shampoo": ("Shampoo", False, "first", 0.24, 80, 25.0),
    "psgd": ("PSGD", False, "first", 0.25, 90, 24.0),
    "schedule_free": ("Schedule-free AdamW", False, "first", 0.27, 95, 12.0),
    "adahessian": ("AdaHessian", False, "second", 0.28, 95, 29.0),
    "kfac": ("K-FAC", True, "second", 0.17, 20, 18.0),
    "ekfac": ("EKFAC", True, "second", 0.18, 22, 20.0),
    "hylo": ("HyLo", True, "second", 0.20, 40, 21.0),
    "mfac": ("M-FAC", True, "second", 0.26, 90, 15.0),
    "sparse_mfac": ("Sparse M-FAC", True, "second", 0.27, 92, 14.0),
    "ggt": ("GGT", True, "second", 0.29, 110, 13.0),
}


def make_run(optimizer="adamw", phase="final", seed=0, losses=(1.0, 0.5), **changes):
    """A run with one point of the curve every ten steps, a hundredth of a second a step."""
    taken = 10 * len(losses)
    order = "first" if optimizer in {"adamw", "sgd", "muon"} else "second"
    return {
        "key": f"{optimizer}-{phase}-{seed}",
        "optimizer": optimizer,
        "label": optimizer.upper(),
        "ours": order == "second",
        "order": order,
        "phase": phase,
        "factor": 1.0,
        "settings": {"lr": 0.1},
        "seed": seed,
        "steps": taken,
        "taken": taken,
        "diverged": False,
        "failed": None,
        "curve": [[10 * (i + 1), loss, 0.1 * (i + 1), 0.2 * (i + 1)] for i, loss in enumerate(losses)],
        "metric": 0.1,
        "optimizer_bytes": 1000,
        "machine": 0,
        "versions": {},
        "note": "",
        **changes,
    }


def make_results(*runs, **changes):
    return {**copy.deepcopy(HEAD), "runs": list(runs), **changes}


def curve_of(name, seed, steps, factor, rng):
    _, _, _, floor, scale, cost = FIELD[name]
    slow = scale * max(1.0, math.log(factor) ** 2) * (1 + 0.03 * seed) * (steps / 600) ** 0.5
    at = np.unique(np.linspace(steps / 60, steps, 60).round().astype(int))
    losses = (floor + (2.3 - floor) * np.exp(-at / slow)) * np.exp(0.01 * rng.standard_normal(len(at)))
    return [[int(s), float(loss), s * cost / 1e3, 1.1 * s * cost / 1e3] for s, loss in zip(at, losses, strict=True)]


def field_run(name, phase, seed, steps, factor, rng):
    label, ours, order, *_ = FIELD[name]
    known = {"label": label, "ours": ours, "order": order, "factor": factor, "steps": steps, "taken": steps}
    settings = {"lr": 0.01 * factor, "weight_decay": 0.0, "momentum": 0.9}
    more = {"optimizer_bytes": 1_000_000 * (1 + len(name)), "versions": {"torch": "2.13.0"}, "settings": settings}
    run = make_run(name, phase, seed, **known, **more)
    curve = curve_of(name, seed, steps, factor, rng)
    return {**run, "curve": curve, "metric": None if phase == "sift" else 0.1 * curve[-1][1]}


def field_results():
    """Fourteen optimizers in every phase; one run diverges, one fails, one sift has lost its largest rate."""
    rng = np.random.default_rng(0)
    runs = []
    for name in FIELD:
        runs += [field_run(name, "sift", 0, 100, factor, rng) for factor in (1 / STEP, 1.0, STEP)]
        runs += [field_run(name, "final", seed, 600, 1.0, rng) for seed in range(3)]
    runs += [field_run(name, "short", seed, 120, 1.0, rng) for name in ("kfac", "ekfac") for seed in range(3)]
    broken = next(run for run in runs if (run["optimizer"], run["phase"], run["seed"]) == ("ggt", "final", 2))
    half = broken["curve"][:30]
    broken |= {"diverged": True, "taken": 311, "curve": [*half, [311, None, 4.0, 4.4]], "metric": None}
    failed = next(run for run in runs if (run["optimizer"], run["phase"], run["seed"]) == ("psgd", "final", 1))
    failed |= {"failed": "RuntimeError: <shape> & size", "taken": 0, "curve": [], "metric": None, "optimizer_bytes": 0}
    lost = next(run for run in runs if run["optimizer"] == "sgd" and run["phase"] == "sift" and run["factor"] > 2)
    lost |= {"diverged": True, "taken": 40}
    next(run for run in runs if run["optimizer"] == "muon")["note"] = "float32 iteration"
    return make_results(*runs)


@pytest.fixture(scope="module")
def field():
    return field_results()


@pytest.fixture(scope="module")
def page(field):
    return html.page(field)


class TestStatistics:
    def test_best_factor_is_of_the_lowest_finite_loss_and_of_equals_the_smaller(self):
        trials = ((0.1, 0.9), (1.0, 0.4), (3.0, 0.4))
        runs = [make_run("kfac", "sift", factor=factor, losses=(1.0, loss)) for factor, loss in trials]
        runs.append(make_run("kfac", "sift", factor=10.0, losses=(1.0, 0.1), diverged=True))
        results = make_results(*runs)
        assert statistics.best_factor(results, "kfac") == 1.0
        assert statistics.sift_losses(results, "kfac") == {0.1: 0.9, 1.0: 0.4, 3.0: 0.4, 10.0: math.inf}
        assert not statistics.at_edge(results, "kfac")

    def test_best_factor_of_diverged_trials_is_none(self):
        results = make_results(make_run("kfac", "sift", diverged=True), make_run("kfac", "sift", losses=(1.0, None)))
        assert statistics.best_factor(results, "kfac") is None

    def test_best_factor_at_the_end_of_the_row_is_told(self):
        runs = [make_run("kfac", "sift", factor=f, losses=(1.0, loss)) for f, loss in ((1.0, 0.4), (3.0, 0.3))]
        assert statistics.at_edge(make_results(*runs), "kfac")

    def test_factors_that_rounding_tells_apart_are_one(self):
        runs = [make_run("kfac", "sift", factor=factor) for factor in (1.0 / STEP / STEP, 0.1)]
        assert list(statistics.sift_losses(make_results(*runs), "kfac")) == [0.1]

    def test_summary_by_hand(self):
        """Finals 0.2, 0.4, 0.6: mean 0.4, standard deviation of the sample 0.2. A step costs 10 ms, of SGD 5 ms."""
        finals = [make_run("kfac", seed=seed, losses=(1.0, loss)) for seed, loss in enumerate((0.2, 0.4, 0.6))]
        fast = make_run("sgd", curve=[[10, 1.0, 0.05, 0.2], [20, 0.8, 0.1, 0.4]])
        found = statistics.summarize(make_results(*finals, fast), "kfac")
        assert (found.loss.mean, found.loss.low, found.loss.high) == pytest.approx((0.4, 0.2, 0.6))
        assert found.loss.deviation == pytest.approx(0.2)
        assert found.step_cost == pytest.approx(2.0)
        assert found.seconds.mean == pytest.approx(0.2)
        assert found.megabytes == pytest.approx(0.001)
        assert (found.seeds, found.incomplete) == (3, False)

    def test_step_cost_is_none_without_sgd(self):
        assert statistics.summarize(make_results(make_run("kfac")), "kfac").step_cost is None

    def test_reference_is_the_lowest_mean_of_the_first_order(self):
        runs = [make_run("adamw", losses=(1.0, 0.4)), make_run("muon", losses=(1.0, 0.3))]
        results = make_results(*runs, make_run("kfac", losses=(1.0, 0.1)))
        assert statistics.best_first(results) == "muon"
        assert [(t.optimizer, t.loss) for t in statistics.targets(results)] == [("muon", 0.3), ("adamw", 0.4)]

    def test_reference_with_a_diverged_seed_is_passed_over_and_named(self):
        runs = [make_run("adamw", losses=(1.0, 0.4)), make_run("muon", losses=(1.0, 0.3))]
        results = make_results(*runs, make_run("muon", seed=1, diverged=True))
        assert statistics.best_first(results) == "adamw"
        assert statistics.passed_over(results) == ["MUON"]
        assert "MUON ended lower where all went well, but not every seed finished." in wording.summary(results)

    def test_no_reference_without_a_first_order_run_that_finished(self):
        results = make_results(make_run("adamw", diverged=True), make_run("kfac"))
        assert statistics.best_first(results) is None
        assert statistics.targets(results) == []
        assert "no reference yet" in wording.summary(results)[0]
        assert "<table" in html.page(results)

    def test_reach_by_hand(self):
        """The reference is at 0.5 after 40 steps and 0.4 s, seeds of ours after 20 and 30 steps, one never."""
        reference = make_run("adamw", losses=(2.0, 1.0, 0.7, 0.5))
        ours = [(2.0, 0.5, 0.4, 0.3), (2.0, 1.0, 0.4, 0.5), (2.0, 1.0, 0.9, 0.8)]
        results = make_results(reference, *(make_run("kfac", seed=s, losses=losses) for s, losses in enumerate(ours)))
        found = statistics.reach(results, "kfac", statistics.target_of(results, "adamw"), "final")
        assert (found.reached, found.seeds, found.everywhere) == (2, 3, False)
        assert (found.steps, found.steps_share) == pytest.approx((25, 25 / 40))
        assert (found.seconds, found.seconds_share) == pytest.approx((0.25, 0.25 / 0.4))
        assert not found.met(1.0)

    def test_seconds_follow_the_clock_of_the_file(self):
        results = make_results(make_run("adamw"), clock="wall")
        assert statistics.target_of(results, "adamw").seconds == pytest.approx(0.4)

    def test_unknown_clock_is_told(self):
        with pytest.raises(ValueError, match="'sundial'"):
            statistics.clock_column(make_results(clock="sundial"))

    def test_short_runs_are_judged_by_their_end_alone(self):
        """The first dips below the target on its way and ends above it, the second ends below."""
        reference = make_run("adamw", losses=(2.0, 1.0, 0.7, 0.5))
        short = [make_run("kfac", "short", seed, losses) for seed, losses in enumerate([(0.4, 0.6), (0.9, 0.5)])]
        results = make_results(reference, *short)
        found = statistics.reach(results, "kfac", statistics.target_of(results, "adamw"), "short")
        assert (found.reached, found.seeds, found.steps, found.steps_share) == (1, 2, 20, 0.5)

    def test_points_before_a_full_window_do_not_count(self):
        run = make_run("kfac", curve=[[5, 0.1, 0.05, 0.1], [20, 0.4, 0.2, 0.4]])
        assert statistics.first_reach(run, 0.5, 2) == (20, 0.2)

    @pytest.mark.parametrize(
        ("losses", "step"),
        [
            ((1.0, 0.4, 0.6, 0.5, 0.5), 40),  # the dip at 20 is of one point
            ((1.0, 0.4, 0.6, 0.6, 0.5), 50),  # the end counts by itself
            ((1.0, 0.4, 0.6, 0.5, 0.6), None),
            ((1.0, 0.4, None, 0.5, 0.6), None),
            ((0.5, 0.5), 10),
        ],
    )
    def test_one_point_below_the_target_is_luck_unless_it_is_the_last(self, losses, step):
        found = statistics.first_reach(make_run(losses=losses), 0.5, 2)
        assert found == (None if step is None else (step, pytest.approx(step / 100)))

    def test_diverged_run_has_reached_nothing(self):
        assert statistics.first_reach(make_run(losses=(0.1, 0.1), diverged=True), 0.5, 2) is None

    def test_target_is_met_at_its_very_share(self):
        found = statistics.reach(
            results := make_results(make_run(losses=(1.0,) * 9 + (0.5,)), make_run("kfac", "short", losses=(0.6, 0.5))),
            "kfac",
            statistics.target_of(results, "adamw"),
            "short",
        )
        assert found.met(0.2)
        assert not found.met(0.1)

    def test_best_of_ours_prefers_more_seeds_then_fewer_steps(self):
        reference = make_run("adamw", losses=(1.0,) * 9 + (0.5,))
        quick = make_run("kfac", losses=(0.4, 0.4))
        slow = make_run("hylo", losses=(0.9, 0.4))
        target = statistics.target_of(make_results(reference), "adamw")
        assert statistics.best_of_ours(make_results(reference, slow, quick), target).optimizer == "kfac"
        broken = make_run("kfac", seed=1, diverged=True)
        assert statistics.best_of_ours(make_results(reference, slow, quick, broken), target).optimizer == "hylo"

    def test_every_run_that_did_not_finish_is_told_with_its_reason(self, field):
        found = [(run["label"], run["phase"], why) for run, why in statistics.unfinished(field)]
        assert found == [
            ("SGD", "sift", "diverged after 40 of 100 steps"),
            ("PSGD", "final", "failed: RuntimeError: <shape> & size"),
            ("GGT", "final", "diverged after 311 of 600 steps"),
        ]

    def test_run_that_was_cut_short_does_not_count(self):
        assert statistics.flaw(make_run(steps=100)) == "ended after 20 of 100 steps"


class TestWording:
    def reference(self):
        return make_run("adamw", losses=(1.0,) * 9 + (0.5,))

    @pytest.mark.parametrize(
        ("losses", "verdict"),
        [
            ((0.6, 0.5), "Target: 0.2 of the steps: met."),
            ((0.7, 0.6, 0.5), "Target: 0.2 of the steps: missed."),
            ((0.7, 0.6), "Target: 0.2 of the steps: missed."),
        ],
    )
    def test_verdict(self, losses, verdict):
        results = make_results(self.reference(), make_run("kfac", "short", losses=losses))
        assert verdict in wording.summary(results)

    def test_sentence_names_share_of_steps_and_seconds(self):
        results = make_results(self.reference(), make_run("kfac", "short", losses=(0.6, 0.5)))
        said = " ".join(wording.summary(results))
        assert "KFAC reached that loss in 0.20 of ADAMW's steps and 0.20 of its seconds" in said
        assert "(1 of 1 seed)" in said

    def test_missed_by_a_seed_is_said(self):
        runs = [make_run("kfac", "short", seed, losses) for seed, losses in enumerate([(0.6, 0.5), (0.6, 0.6)])]
        said = " ".join(wording.summary(make_results(self.reference(), *runs)))
        assert "(1 of 2 seeds). Target: 0.2 of the steps: missed, because every seed" in said

    def test_none_of_ours_near(self):
        said = wording.summary(make_results(self.reference(), make_run("kfac", losses=(1.0, 0.8))))
        assert "None of ours reached that loss; the nearest, KFAC, ended at 0.8000." in said

    def test_budgets_are_stated(self, field):
        said = wording.fairness(field)
        assert said[0].startswith("Equal budgets: every optimizer had 3 learning rates, each for 100 steps;")
        assert "No first-order optimizer had such runs." in said[1]

    def test_second_rates_are_told(self):
        trials = [make_run(name, "sift", factor=f) for name in ("kfac", "adamw") for f in (1.0, 3.0)]
        other = make_run("kfac", "long", factor=3.0, losses=(1.0, 0.7))
        said = wording.fairness(make_results(*trials, make_run("kfac"), make_run("kfac", seed=1), other, make_run()))
        assert said[0].endswith("the best rate then ran for all 600 steps with 1 seed.")
        assert said[1] == (
            "These also ran whole at the next lower rate, and with 2 seeds at the better one: "
            "KFAC 0.5000 at × 1 and 0.7000 at × 3."
        )
        assert not any("Fewer" in text or "another rate" in text for text in said)

    def test_who_has_fewer_full_runs_is_told(self):
        results = make_results(make_run(), make_run(seed=1), make_run("kfac"), make_run("ggt", "sift", diverged=True))
        assert "Fewer full runs than 2: KFAC 1, GGT 0." in wording.fairness(results)

    def test_full_runs_of_another_rate_are_told(self):
        trials = [make_run("kfac", "sift", factor=f, losses=(1.0, loss)) for f, loss in ((1.0, 0.5), (3.0, 0.4))]
        assert any(
            "KFAC took another rate" in text for text in wording.fairness(make_results(*trials, make_run("kfac")))
        )
        taken = make_run("kfac", factor=3.0000001)
        assert not any("another rate" in text for text in wording.fairness(make_results(*trials, taken)))

    def test_number_of_ours_that_the_best_was_chosen_from(self):
        results = make_results(self.reference(), *(make_run(name, losses=(0.6, 0.5)) for name in ("kfac", "ggt")))
        assert any(sentence.startswith("Best of 2 of ours: KFAC reached") for sentence in wording.summary(results))

    def test_machines_that_differ_are_told(self):
        other = {**HEAD["machines"][0], "gemm_gflops": {"median": 30.0, "best": 31.0}}
        results = make_results(make_run(), make_run(seed=1, machine=1), machines=[HEAD["machines"][0], other])
        assert any("30 to 60 GFLOP/s" in sentence for sentence in wording.fairness(results))
        results["machines"][1]["processor"] = "Another processor"
        assert any("different processors" in sentence for sentence in wording.fairness(results))

    def test_whose_keywords_were_tuned_is_told_by_the_sources(self):
        runs = [make_run("kfac", source="tuned here"), make_run("adamw", source="tuned here")]
        runs.append(make_run("muon", source="its README"))
        assert wording.fairness(make_results(*runs))[-2:] == [
            "Keywords beyond the rate were tuned here, workload by workload, for KFAC; ADAMW.",
            "These have those of their authors: MUON (its README).",
        ]
        older = make_results(make_run("kfac"), make_run("muon"), make_run("gone", label="GONE"))
        tuned, others = wording.fairness(older)[-2:]  # runs without a source: that of their recipes
        assert tuned.endswith("for KFAC; GONE.")
        assert re.match(r"These have those of their authors: MUON \(.+\)\.$", others)
        assert not any("Keywords" in text for text in wording.fairness(make_results()))

    def test_notes_are_told_once(self):
        runs = [make_run(name, seed=seed, note="as it is") for name in ("muon", "adamw") for seed in range(2)]
        said = wording.fairness(make_results(*runs, make_run("sgd", note="other")))
        assert said[-2:] == ["MUON and ADAMW: as it is.", "SGD: other."]

    def test_numbers(self):
        assert [wording.number(value) for value in (None, 0.5, 1234.4, 12345.0)] == ["–", "0.5000", "1234", "1.234e+04"]


class Balance(HTMLParser):
    """Follows which elements are open."""

    EMPTY = frozenset(("meta", "link", "br", "img", "hr", "input"))

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.ids, self.targets, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.seen.append(tag)
        self.ids += [known["id"]] if "id" in known else []
        self.targets += [value for name, value in attrs if name in {"href", "src", "xlink:href"}]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


class TestPage:
    def test_elements_are_balanced_and_identifiers_unique(self, page):
        parser = Balance()
        parser.feed(page)
        parser.close()
        assert parser.open == []
        assert len(parser.ids) == len(set(parser.ids))
        assert parser.seen.count("svg") == 4
        assert parser.seen.count("details") == len(FIELD)
        assert "script" not in parser.seen

    def test_nothing_outside_is_asked_for(self, page):
        parser = Balance()
        parser.feed(page)
        assert all(target.startswith("#") and target[1:] in parser.ids for target in parser.targets)
        assert "@import" not in page
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))

    def test_head_says_what_was_run_and_where(self, page):
        for told in (
            "autoencoder, size cpu: 60000 training examples",
            "600 steps of 100 examples",
            WINDOW_LOSSES,
            "warm-up over 5 % of the steps",
            "matrix products 60 GFLOP/s (best 66)",
            "torch 2.13.0",
            "python -m benchmarks compare --workload autoencoder --size cpu --steps 600",
            "float32 iteration",
        ):
            assert told in page

    def test_texts_are_escaped(self, page):
        assert "&lt;shape&gt; &amp; size" in page
        assert "<shape>" not in page

    def test_labels_of_any_letters_are_escaped_everywhere(self, field):
        odd = copy.deepcopy({**field, "runs": [run for run in field["runs"] if run["optimizer"] in {"kfac", "muon"}]})
        for run in odd["runs"]:
            run["label"] = f"{run['label']} <b> & $x$ | [red]_*"
        parser = Balance()
        parser.feed(html.page(odd))
        assert parser.open == []
        assert parser.seen.count("b") == 3  # the large figures
        assert "K-FAC <b> & $x$ | [red]_*" in "".join(parser.text)
        Console(file=io.StringIO()).print(*tables.summary_tables(odd))

    def test_banner_of_made_up_data(self, field, page):
        assert "mean nothing" not in page
        assert "mean nothing" in html.page({**make_results(make_run(), make_run("kfac")), "made_up_data": True})

    def test_written_to_a_new_folder(self, tmp_path):
        html.write_report(make_results(make_run(), make_run("kfac")), tmp_path / "new" / "report.html")
        assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")

    @pytest.mark.parametrize("runs", [[], [make_run("kfac", "sift")], [make_run(losses=(), failed="ValueError: no")]])
    def test_unfinished_comparisons_have_a_page(self, runs):
        results = make_results(*runs)
        parser = Balance()
        parser.feed(html.page(results))
        assert parser.open == []
        assert tables.markdown(results)


class TestFigures:
    def test_named_lines_stay_few(self, field):
        named = figures.highlighted(field)
        assert list(named) == ["kfac", "ekfac", "hylo", "muon", "adamw", "sgd"]
        legend = figures.losses_figure(field, "steps").legends[0]
        assert len(legend.get_texts()) <= 11

    def test_long_labels_are_cut_and_dollars_are_no_mathematics(self):
        assert figures.escaped("Muon (Newton-Schulz, float32 iteration)") == "Muon (Newton-Schulz, flo…"[:23] + "…"
        assert figures.escaped("a $b$") == r"a \$b\$"

    def test_loss_is_logarithmic_where_it_spans_more_than_five(self, field):
        assert figures.losses_figure(field, "steps").axes[0].get_yscale() == "log"
        results = make_results(make_run(losses=(1.0, 0.5)), make_run("kfac", losses=(1.0, 0.4)))
        assert figures.losses_figure(results, "seconds").axes[0].get_yscale() == "linear"

    def test_text_of_figures_is_text(self, page):
        assert re.search(r"<text[^>]*>optimizer steps</text>", page)

    def test_every_optimizer_has_a_panel_and_tells_its_broken_seeds(self, field):
        shown = [axes.get_title(loc="left") for axes in panels.each_figure(field).axes if axes.get_visible()]
        assert len(shown) == len(FIELD)
        assert "GGT (2 of 3)" in shown

    def test_runs_beyond_the_panel_are_named(self):
        slow = make_run("kfac", curve=[[10, 1.0, 5.0, 5.0], [20, 0.4, 9.0, 9.0]])
        results = make_results(make_run(), slow)
        assert figures.cut_off(results) == ["KFAC"]
        assert "beyond the panel of seconds: KFAC." in html.page(results)


class TestTables:
    def test_terminal_shows_every_optimizer_and_table(self, field):
        out = io.StringIO()
        for table in tables.summary_tables(field):
            Console(file=out, width=200).print(table)
        assert all(label in out.getvalue() for label, *_ in FIELD.values())
        for title in ("Reaching the final loss of Muon", "Reaching the final loss of AdamW", "did not finish"):
            assert title in out.getvalue()

    def test_markdown_tables_are_regular(self, field):
        blocks = [block for block in tables.markdown(field).split("\n\n") if block.startswith("|")]
        assert len(blocks) == len(tables.all_rows(field))
        for block in blocks:
            assert len({line.replace("\\|", "").count("|") for line in block.splitlines()}) == 1

    def test_measures_of_quality_have_columns(self):
        results = make_results(make_run(quality={"BLEU": 30.0}), make_run(seed=1, quality={"BLEU": 32.0}))
        table = tables.result_rows(results)
        assert table.rows[0][table.columns.index("BLEU")] == "31.00"

    def test_target_is_judged_for_ours_only(self, field):
        table = tables.reach_rows(field, statistics.targets(field)[0])
        verdicts = {(row[0], row[1]): row[-1] for row in table.rows}
        assert verdicts["K-FAC", "short"] == "met"
        assert verdicts["AdamW", "full"] == "–"


class TestOverview:
    def test_one_row_for_each_workload(self, field):
        text = overview([field, {**field, "workload": "digits", "share_target": 0.01}])
        rows = [line for line in text.splitlines() if line.startswith(("| autoencoder", "| digits"))]
        assert "| met |" in rows[0]
        assert "| missed |" in rows[1]

    def test_seconds_up_to_a_crossing_are_not_judged(self):
        """Ours crosses after a tenth of the reference's seconds, and takes as long as it for its whole run."""
        reference = make_run("adamw", losses=(1.0,) * 9 + (0.5,))
        ours = make_run("kfac", losses=(0.4,) * 10)
        results = make_results(reference, ours)
        columns, (row,) = best_rows([results]).columns, best_rows([results]).rows
        found = dict(zip(columns, row, strict=True))
        assert (found["share of seconds"], found["whole run, seconds"]) == ("0.10", "1.00")
        for text in (overview([results]), *wording.summary(results), html.page(results)):
            assert "seconds met" not in text
            assert "both met" not in text
