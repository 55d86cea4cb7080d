"""The study at equal seconds: searches, the length of runs, the verdict, and finished runs, which are not repeated."""

import math

import pytest

from benchmarks.commands import seconds
from benchmarks.commands.seconds import Seconds
from benchmarks.compare.runs import find


def test_a_study_and_its_continuation(study, data_dir, tmp_path, monkeypatch):
    words = {"workload": "digits", "steps": 4, "seeds": 2, "shares": (0.5, 1.0), "optimizers": ("adamw", "orthogonal")}
    assert Seconds(**words, size="smoke", minutes=1e-9, data_dir=data_dir, out_dir=tmp_path).run() == 0
    assert not list(tmp_path.iterdir())
    data = study(Seconds, **words)
    rows = {(row["optimizer"], row["share"]): row for row in data["rows"]}
    assert list(rows) == [("adamw", 0.5), ("orthogonal", 0.5), ("adamw", 1.0), ("orthogonal", 1.0)]
    assert all(len(row["losses"]) == len(row["metrics"]) == 2 for row in rows.values())
    assert sum(row["reference"] for row in rows.values()) == 2
    assert 4 in {row["steps"] for row in data["rows"]}  # T is the time of all steps of the best first-order optimizer
    assert [row["trials"] >= 8 for row in rows.values()] == [True] * 4
    phases = [(cell["of"].get("phase"), cell["of"].get("seed")) for cell in data["cells"][1:]]
    assert {seed for phase, seed in phases if phase == "final"} == {100, 101}
    assert {seed for phase, seed in phases if phase == "sift"} == {0}
    monkeypatch.setattr(seconds, "train", lambda *_: pytest.fail("a finished run was repeated"))
    assert study(Seconds, **words)["rows"] == data["rows"]


def test_settings_after_a_colon_define_a_further_optimizer(study):
    words = {"workload": "digits", "steps": 2, "seeds": 1, "shares": (1.0,)}
    names = ("orthogonal", "orthogonal:momentum=0.5,plain_layers=none")
    with pytest.raises(ValueError, match="a setting must look like key=value"):
        study(Seconds, optimizers=(*names, "adamw:lr"), **words)
    data = study(Seconds, optimizers=names, **words)
    labels = [row["label"] for row in data["rows"]]
    assert labels == ["orthogonal momentum", "orthogonal momentum, momentum=0.5,plain_layers=none"]
    assert 0.5 in {cell["of"]["settings"]["momentum"] for cell in data["cells"][1:]}


def row(losses, order="first", share=1.0, curves=()):
    return {"share": share, "order": order, "losses": losses, "curves": curves, "failed": []}


def test_the_best_first_order_optimizer_of_the_same_time_is_the_reference():
    slow, fast = row([3.0, 3.0], share=0.5), row([2.0, 2.2], share=0.5)
    ours, late = row([1.0, 2.4], "second", 0.5), row([1.0, 1.0])
    seconds._judged([slow, fast, ours, late])
    assert [r["reference"] for r in (slow, fast, ours, late)] == [False, True, False, True]
    assert ours["lower"] == 1
    assert ours["ratio"] == pytest.approx((1 / 2 + 2.4 / 2.2) / 2)


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("adamw", ["lr", "beta2", "schedule"]),
        ("soap", ["lr", "schedule"]),
        ("ekfac_adaptive", ["damping", "schedule"]),
        ("hylo", ["lr", "schedule"]),
        ("lbfgs", ["history_size"]),
    ],
)
def test_searched_settings_depend_on_the_optimizer_and_its_recipe(name, keywords):
    axes = seconds.axes_of(name, find(name).recipe("poisson"))
    assert [key for axis in axes for key in axis.keywords] == keywords


def test_crossings_compare_seconds_at_the_same_loss():
    theirs = [[[3.0, 1.0], [2.0, 4.0], [2.0, 8.0]]]
    assert seconds._crossing([[[3.0, 1.0], [1.9, 3.0]]], theirs) == pytest.approx(3 / 4)
    assert seconds._crossing([[[3.0, 1.0], [None, 3.0]]], theirs) is None


def test_intervals():
    shown = seconds._interval("losses", {"losses": [1.0, 2.0, 3.0], "failed": []})
    assert shown == f"2 ± {4.302652729911275 / math.sqrt(3):.2g}"
    assert seconds._interval("losses", {"losses": [1.0, math.inf], "failed": []}) == "diverged"


def test_invalid_options_are_refused(study):
    for options, words in [
        ({"first_seed": 0}, "seed must be below first_seed=0"),
        ({"seeds": 0}, "seeds must be positive"),
        ({"optimizers": ("kfac",)}, "at least one of the optimizers must be a first-order one"),
    ]:
        with pytest.raises(ValueError, match=words):
            study(Seconds, workload="digits", **options)
