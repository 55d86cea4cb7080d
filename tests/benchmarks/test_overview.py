"""Tables of the documentation are those of the results that are kept."""

import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.cli import main
from benchmarks.commands.overview import load, renewed
from benchmarks.report import make_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    page
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "<!-- results: " in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_results_that_are_kept(page):
    text = page.read_text(encoding="utf-8")
    assert renewed(text, load(RESULTS)) == text, f"python -m benchmarks study overview --page {page} renews it"


def test_every_comparison_that_is_kept_is_shown():
    shown = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for name, results in load(RESULTS).items():
        assert f"<!-- results: {name} -->" in shown or "runs" not in results


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
    assert drawn == {"demo.png", *(f"evidence-{name}.svg" for name in ("batch-size", "curves", "density", "worlds"))}
    curves = (tmp_path / "evidence-curves.svg").read_text(encoding="utf-8")
    assert all(f">{label}<" in curves for label in ("AdamW", "Muon, momentum 0.85", "SOAP", "EKFAC, orthogonal"))
    assert main(["study", "figures", "--results", str(tmp_path / "none")]) == 2


def test_tables_of_any_command_are_shown(tmp_path):
    report.save(tmp_path, "found", [make_table(f"Table {n}", ("a", "b"), [("x", str(n))], "Why.") for n in (1, 2)], {})
    text = "<!-- results: found 2 -->\nold\n<!-- end of results -->\n"
    assert "\n\n**Table 2**\n\n| a | b |\n| :--- | ---: |\n| x | 2 |\n\nWhy.\n\n" in renewed(text, load(tmp_path))
    assert "Table 1" in renewed(text.replace(" 2", ""), load(tmp_path))


def test_a_block_is_renewed_and_nothing_else(tmp_path):
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


def test_what_is_not_there_is_named(tmp_path, capsys):
    assert main(["study", "overview", "--results", str(tmp_path)]) == 2
    assert "contains no results of compare" in capsys.readouterr().err
    with pytest.raises(ValueError, match="asks for results of 'nothing'"):
        renewed("<!-- results: nothing -->\n<!-- end of results -->", {})
