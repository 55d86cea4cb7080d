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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.667", "0.767"),
        ("loss 0", "cost 0"),
        ("1,437 images in 3", "1,438 images in 3"),
        ("99\n", "98\n"),
        ("0\n...", "...\n0"),
    ],
)
def test_a_page_that_shows_something_else_fails(page: Path, old: str, new: str) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:\d+: the page "):
        run(changed(page, old, new), set())


def test_output_of_a_block_that_prints_nothing_fails(page: Path) -> None:
    with pytest.raises(AssertionError, match="loss 0.667"):
        run(changed(page, 'print("loss", value)', "value"), set())


def test_output_is_required_unless_other_libraries_print(page: Path) -> None:
    changed(page, "<!-- output -->\n```text\nloss 0.667\n```\n", "")
    with pytest.raises(AssertionError, match=r"page\.md:3: prints, but no output block follows"):
        run(page, set())
    page.write_text("<!-- example: integrations -->\n```python\nprint(1)\n```\n", encoding="utf-8")
    run(page, {"integrations"})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<!-- output -->\n```text\nloss 0.667\n```\n\n", ""),
        ("loss 0.667", "loss 0.5"),
        ("    <!-- output -->\n    ```text\n    1,437 images in 31.5 ms\n    ```\n\n", ""),
        ("\n99", "\n98"),
    ],
)
def test_the_output_of_a_page_is_renewed(page: Path, old: str, new: str) -> None:
    renew(changed(page, old, new), set())
    run(page, set())
    renewed = page.read_text(encoding="utf-8")
    renew(page, set())
    assert page.read_text(encoding="utf-8") == renewed


def test_output_that_is_no_longer_printed_is_removed(page: Path) -> None:
    renew(changed(page, 'print("loss", value)', "value"), set())
    assert "loss" not in page.read_text(encoding="utf-8")


def test_a_page_that_agrees_is_not_changed(page: Path) -> None:
    renew(page, set())
    assert page.read_text(encoding="utf-8") == PAGE


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
