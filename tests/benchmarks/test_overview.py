"""Tables of the documentation agree with the saved results."""

import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.cli import main
from benchmarks.commands.overview import load, renewed
from benchmarks.plot import look
from benchmarks.report import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    page
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "<!-- results: " in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_saved_results(page):
    text = page.read_text(encoding="utf-8")
    assert renewed(text, load(RESULTS)) == text, f"python -m benchmarks study overview --page {page} renews it"


def test_every_saved_comparison_is_shown():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for name, results in load(RESULTS).items():
        if "runs" in results:
            workload = results["workload"]
            own = (ROOT / "docs" / "evidence" / f"{workload}.md").read_text(encoding="utf-8")
            assert f"<!-- results: {name} -->" in own
            assert f"<!-- results: {name} best -->" in page
            assert f"(images/evidence-{workload}.svg)" in page
            assert f"(evidence/{workload}.md)" in page


def test_a_short_table_has_presets_the_best_adamw_and_kfac_pytorch():
    shown = {name: _rows(f"{name}-cpu best") for name in ("chargpt", "multi30k", "poisson")}
    assert all(len(rows) == 6 for rows in shown.values())
    labels = {name: [row[0] for row in rows] for name, rows in shown.items()}
    assert labels["chargpt"] == [
        "EKFAC, orthogonal", "Muon, momentum 0.85", "K-FAC (kfac-pytorch)", "EKFAC", "SOAP", "AdamW"
    ]  # fmt: skip
    assert "Muon, momentum 0.85" in labels["multi30k"]  # only the better one of two settings
    assert "Muon" not in labels["multi30k"]
    assert labels["poisson"][:2] == [r"HyLo (physics\_informed)", r"EKFAC, quadratic model (least\_squares)"]
    assert shown["chargpt"][0][1:] == ["1.701 ± 0.027", "1.842", "85.1", "1.54", "32.8"]
    assert shown["chargpt"][4][1] == "2.185"  # a single seed has no deviation


def test_a_short_table_of_few_optimizers_has_all_of_them():
    results = load(RESULTS)["chargpt-cpu"]
    runs = [run for run in results["runs"] if run["optimizer"] in {"sgd", "hylo"}]
    assert [row[0] for row in _rows("some best", {"some": {**results, "runs": runs}})] == ["HyLo", "SGD"]


def test_tables_and_parts_of_them_are_shown(tmp_path):
    rows = [("x", "1", "a"), ("y", "2", "b"), ("z", "1", "c")]
    tables = [Table(f"Table {n}", ("name", "ranks", "kept"), rows, "Why.") for n in (1, 2)]
    report.save(tmp_path, "found", tables, {})
    for part, shown, hidden in [
        ("", "Table 1", "Table 3"),
        (" 2", "**Table 2**\n\n| name | ranks | kept |\n| :--- | ---: | ---: |\n| x | 1 | a |", "Table 1"),
        (" ranks=1", "**Table 2 (ranks: 1)**\n\n| name | kept |\n| :--- | ---: |\n| x | a |\n| z | c |\n\nWhy.", "y"),
    ]:
        text = renewed(f"<!-- results: found{part} -->\nold\n<!-- end of results -->\n", load(tmp_path))
        assert shown in text
        assert hidden not in text.replace("Why", "")


def test_columns_have_keys_formats_and_units():
    columns = report.columns("runs; step ms = seconds .1f ms; state, MB = size .2f MB; share = share .0%")
    shown = {title: column({"runs": 3, "seconds": 0.25, "size": 4e6}) for title, column in columns.items()}
    assert shown == {"runs": "3", "step ms": "250.0", "state, MB": "4.00", "share": "-"}


def test_memory_is_summarized_without_variants(tmp_path):
    columns = ("optimizer", "curvature", "total", "× parameters")
    for name, label in (("digits", "KFAC"), ("chargpt", "EKFAC, power 1/2"), ("unet", "KFAC")):
        table = {"title": "", "columns": columns, "rows": [(label, "1.0", "2.0", "3.0")], "caption": ""}
        (tmp_path / f"memory-{name}.json").write_text(json.dumps({"workload": name, "tables": [table]}))
    text = renewed("<!-- results: memory -->\n<!-- end of results -->\n", load(tmp_path))
    assert "| optimizer | chargpt, MB | chargpt, × parameters | digits, MB | digits, × parameters | unet, MB" in text
    assert "| KFAC | – | – | 2.0 | 3.0 | 2.0 | 3.0 |" in text
    assert "power" not in text


def _rows(block, results=None):
    text = renewed(f"<!-- results: {block} -->\n<!-- end of results -->\n", results or load(RESULTS))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_step_times_are_summarized(tmp_path):
    row = {"label": "KFAC", "amortised": {"10/100": {"ratio": 1.5}}}
    for name in ("digits", "chargpt"):
        data = {"workload": name, "batch_size": 8, "results": [row]}
        (tmp_path / f"step-time-{name}.json").write_text(json.dumps(data))
    text = renewed("<!-- results: step-times -->\n<!-- end of results -->\n", load(tmp_path))
    assert "| optimizer | intervals | chargpt, batch 8 | digits, batch 8 |" in text
    assert "| KFAC | 10/100 | 1.50 | 1.50 |" in text


def test_figures_are_drawn_from_stored_results(tmp_path):
    words = ["study", "figures", "--results", str(RESULTS), "--out-dir", str(tmp_path)]
    assert main(words) == 0
    drawn = {path.name for path in tmp_path.iterdir()}
    workloads = {results["workload"] for results in load(RESULTS).values() if "runs" in results}
    assert drawn == {"demo.png", *(f"evidence-{name}.svg" for name in ("batch-size", "density", *workloads))}
    for name, ours in (("chargpt", "EKFAC, orthogonal"), ("poisson", "HyLo")):
        text = (tmp_path / f"evidence-{name}.svg").read_text(encoding="utf-8")
        shown = ("AdamW", "Muon, momentum 0.85", ours, "steps", "processor seconds")
        assert all(f">{label}<" in text for label in shown)
        assert f"stroke: {look(ours, 0)['color'].lower()}" in text
    assert main(["study", "figures", "--results", str(tmp_path / "none")]) == 2


def test_only_the_blocks_of_a_page_are_renewed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: all -->\nold\n<!-- end of results -->\nafter\n")
    words = ["study", "overview", "--results", str(ROOT / "benchmarks" / "results"), "--page", str(page)]
    assert main(words) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- results: all -->\n\n**Best of our methods")
    assert text.endswith("\n\n<!-- end of results -->\nafter\n")
    assert "old" not in text
    assert main(words) == 0
    assert page.read_text() == text


def test_missing_results_are_named(tmp_path, capsys):
    assert main(["study", "overview", "--results", str(tmp_path)]) == 2
    assert "contains no results of compare" in capsys.readouterr().err
    with pytest.raises(ValueError, match="asks for results of 'nothing'"):
        renewed("<!-- results: nothing -->\n<!-- end of results -->", {})
