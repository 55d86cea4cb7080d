"""Tables of the documentation are those of the results that are kept."""

from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.commands.overview import load, renewed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence.md"


def test_the_page_shows_the_results_that_are_kept():
    text = PAGE.read_text(encoding="utf-8")
    comparisons = load(ROOT / "benchmarks" / "results")
    assert renewed(text, comparisons) == text, "python -m benchmarks study overview --page docs/evidence.md renews it"
    for name in comparisons:
        assert f"<!-- results: {name} -->" in text


def test_a_block_is_renewed_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: all -->\nold\n<!-- end of results -->\nafter\n")
    words = ["study", "overview", "--results", str(ROOT / "benchmarks" / "results"), "--page", str(page)]
    assert main(words) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- results: all -->\n\n**Best of ours")
    assert text.endswith("\n\n<!-- end of results -->\nafter\n")
    assert "old" not in text
    assert main(words) == 0
    assert page.read_text() == text


def test_what_is_not_there_is_named(tmp_path, capsys):
    assert main(["study", "overview", "--results", str(tmp_path)]) == 2
    assert "holds no results of compare" in capsys.readouterr().err
    with pytest.raises(ValueError, match="wants results of nothing"):
        renewed("<!-- results: nothing -->\n<!-- end of results -->", {})
