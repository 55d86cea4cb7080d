"""Pages show what their code prints: a difference is an error, and one command updates the output."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.code_blocks import ROOT, blocks, renew, run
from tests.support.outputs import difference

PAGE = """# A page

```python
value = 2 / 3
print("loss", value)
```

<!-- output -->
```text
loss 0.667
```

* In a list:

    ```python
    print(f"{1437:,} images in {value:.1f} ms")
    ```

    <!-- output -->
    ```text
    1,437 images in 31.5 ms
    ```

```python
for number in range(100):
    print(number)
```

<!-- output -->
```text
0
...
99
```

<!-- example: fragment -->
```python
print(unheard_of)
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


def changed(page: Path, old: str, new: str) -> Path:
    assert old in PAGE
    page.write_text(PAGE.replace(old, new), encoding="utf-8")
    return page


def test_a_page_that_shows_what_it_prints_passes(page: Path) -> None:
    assert run(page, set())["value"] == 2 / 3
    assert [block.is_output for block in blocks(page)] == [False, True, False, True, False, True, False]


FIRST_OUTPUT = "<!-- output -->\n```text\nloss 0.667\n```\n\n"
#: Changes of the page, and the error that each causes. After `renew`, every page passes.
WRONG = [
    ("0.667", "0.767", "the page "),
    ("loss 0.667", "cost 0.667", "the page "),
    ("1,437 images in 3", "1,438 images in 3", "the page "),
    ("99\n", "98\n", "the page "),
    ("0\n...", "...\n0", "the page "),
    ('print("loss", value)', "value", r"the page [\s\S]*loss 0\.667"),
    (FIRST_OUTPUT, "", "prints, but no output block follows"),
    ("    <!-- output -->\n    ```text\n    1,437 images in 31.5 ms\n    ```\n\n", "", "prints, but no"),
]


@pytest.mark.parametrize(("old", "new", "error"), WRONG)
def test_a_page_that_shows_something_else_fails_and_can_be_renewed(page: Path, old: str, new: str, error: str) -> None:
    changed(page, old, new)
    with pytest.raises(AssertionError, match=rf"page\.md:\d+: {error}"):
        run(page, set())
    renew(page, set())
    run(page, set())
    renewed = page.read_text(encoding="utf-8")
    assert ("loss" in renewed) == (new != "value")  # output that is no longer printed is removed
    renew(page, set())
    assert page.read_text(encoding="utf-8") == renewed


def test_a_page_that_agrees_is_not_changed(page: Path) -> None:
    renew(page, set())
    assert page.read_text(encoding="utf-8") == PAGE


def test_output_is_not_required_if_other_libraries_print(page: Path) -> None:
    page.write_text("<!-- example: integrations -->\n```python\nprint(1)\n```\n", encoding="utf-8")
    run(page, {"integrations"})


def test_the_command_updates_a_page(page: Path) -> None:
    changed(page, "loss 0.667", "loss 0.5")
    subprocess.run([sys.executable, "-m", "tests.support.code_blocks", str(page)], cwd=ROOT, check=True)
    assert "loss 0.6666666666666666\n" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("shown", "printed", "agree"),
    [
        ("a 1.00 b", "a  1.004 b", True),
        ("a 1.00 b", "a 1.2 b", False),
        ("1.0e-05", "1.01e-05", True),
        ("1.0e-05", "1.0e-04", False),
        ("12 steps", "13 steps", False),
        ("12 ms", "13 ms", True),
        ("3.1 s", "40.2 s", True),
        ("-1.5", "1.5", False),
        ("factors 65, 128", "factors 65, 129", False),
        ("version 2.13.0", "version 2.13.1", False),
        ("... end", "a b c end", True),
        ("start ... end", "start end", True),
        ("start ...", "begin x", False),
        ("a ... b ... c", "a x b y c", True),
        ("a ... b ... c", "a x c", False),
        ("a", "a b", False),
        ("a b", "a", False),
        ("", "a", False),
        ("True", "False", False),
    ],
)
def test_outputs_are_compared(shown: str, printed: str, agree: bool) -> None:
    assert (difference(shown, printed) is None) == agree
