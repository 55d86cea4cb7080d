"""Tutorials: each is a script in ``docs/tutorials``, and a page with what the script printed and drew.

Scripts are in the percent format: ``# %% [markdown]`` begins text, ``# %%`` begins code. The page next to a script is
made from it and committed, so it is also the cache of the results: it names the digest of the code that it shows. The
site build runs only scripts whose code has another digest; a change of the text alone runs nothing. By hand::

    python docs/gallery.py             # run what changed
    python docs/gallery.py two-ranks   # run this one in any case, for example after a change of the package
"""

import ast
import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "tutorials"
SCRIPTS = sorted(FOLDER.glob("*.py"))
#: Scripts that torchrun starts, and in how many processes. The page has what rank 0 prints and draws.
RANKS = {"two-ranks": 2}
SECONDS = 600
HEAD = "<!-- Made from {} by docs/gallery.py. Change the script, not this page. Digest of its code: {} -->"
#: A block of code on a page, and the results after it.
SHOWN = re.compile(
    r"^```python\n.*?^```\n((?:\n<!-- output -->\n```text\n.*?^```\n)?(?:\n!\[[^\n]*\]\(images/[^\n]*\)\n)*)",
    re.M | re.S,
)
#: Color of text and axes, which is readable on light and on dark pages.
INK = "#7D8590"
#: No frame that hides a curve, and the same bytes for the same figures.
STYLE = {
    "axes.edgecolor": INK, "axes.facecolor": "none", "axes.formatter.min_exponent": 4, "axes.grid": True,
    "axes.grid.axis": "y", "axes.labelcolor": INK, "axes.spines.right": False, "axes.spines.top": False,
    "axes.titlecolor": INK, "figure.facecolor": "none", "font.size": 10, "grid.color": "#7D859040",
    "legend.frameon": False, "lines.linewidth": 1.8, "path.simplify_threshold": 0.5, "savefig.facecolor": "none",
    "svg.hashsalt": "tutorials", "text.color": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


class Cell(NamedTuple):
    """Text or code of a script, with the number of the lines before it."""

    is_code: bool
    text: str
    line: int


def cells(script: Path) -> list[Cell]:
    """Return the cells of a script in order."""
    found, source = [], script.read_text(encoding="utf-8")
    for match in re.finditer(r"^# %%([^\n]*)\n(.*?)(?=^# %%|\Z)", source, re.M | re.S):
        is_code = "markdown" not in match[1]
        text = match[2] if is_code else re.sub("^# ?", "", match[2], flags=re.M)
        found.append(Cell(is_code, text.strip("\n") + "\n", source[: match.start(2)].count("\n")))
    return found


def digest(script: Path) -> str:
    """Return what stands for the code of a script, without its text."""
    return hashlib.sha256("".join(cell.text for cell in cells(script) if cell.is_code).encode()).hexdigest()[:16]


def is_current(script: Path) -> bool:
    """Return whether the page of a script has the results of its code."""
    page = script.with_suffix(".md")
    return page.exists() and HEAD.format(script.name, digest(script)) in page.read_text(encoding="utf-8")


def rendered(script: Path, results: list[str]) -> str:
    """Return the page of a script."""
    parts, left = [HEAD.format(script.name, digest(script)) + "\n"], iter(results)
    parts += [f"```python\n{cell.text}```\n{next(left)}" if cell.is_code else cell.text for cell in cells(script)]
    return "\n".join(parts)


def missing(script: Path) -> list[str]:
    """Return the packages that a script imports and that are not installed."""
    nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return sorted(name for name in {name.split(".")[0] for name in names} if not importlib.util.find_spec(name))


def run(script: Path, images: Path = FOLDER / "images") -> list[str]:
    """Run a script in processes of its own; for each of its blocks of code the results, as they stand on the page."""
    ranks = RANKS.get(script.stem)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}  # it prints
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [sys.executable, *launcher, __file__, "--execute", str(script), str(images), str(out)]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
        if ended.returncode:
            raise RuntimeError(f"{script.name} failed:\n{ended.stderr}")
        found: list[str] = json.loads(out.read_text(encoding="utf-8"))
    return found


def execute(script: Path, images: Path, out: Path) -> None:
    """Run the code of a script in this process, and write what it printed and drew."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(STYLE)
    is_first = os.environ.get("RANK", "0") == "0"
    links: list[str] = []
    drawn = 0

    def show() -> None:
        nonlocal drawn
        for figure in map(plt.figure, plt.get_fignums()):
            drawn += 1
            path = images / f"{script.stem}-{drawn}.svg"
            if is_first:
                figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
                links.append(f"\n![{figure.get_suptitle()}](images/{path.name})\n")
            if is_first and drawn == 1:
                thumbnail(figure.axes[0], images / f"{script.stem}-small.svg")
        plt.close("all")

    plt.show = show
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    results = []
    for cell in cells(script):
        if not cell.is_code:
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * cell.line + cell.text, str(script), "exec"), names)
        text = re.sub("[ \t]+$", "", printed.getvalue(), flags=re.M).strip("\n")
        results.append((f"\n<!-- output -->\n```text\n{text}\n```\n" if text else "") + "".join(links))
        links.clear()
    if is_first:
        out.write_text(json.dumps(results), encoding="utf-8")


def thumbnail(axes: Any, path: Path) -> None:
    """Draw the lines of a panel again, small and without words."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4, 1.5), layout="constrained")
    small = figure.subplots()
    for line in axes.lines:
        small.plot(*line.get_data(), color=line.get_color(), linestyle=line.get_linestyle())
    small.set(xscale=axes.get_xscale(), yscale=axes.get_yscale(), ylim=axes.get_ylim())
    small.grid(visible=False)
    small.tick_params(which="both", bottom=False, left=False, labelbottom=False, labelleft=False)
    figure.savefig(path, metadata={"Date": None})


def update(script: Path, *, anew: bool = False) -> None:
    """Write the page of a script, and run the script before where its code changed."""
    page = script.with_suffix(".md")
    current = is_current(script) and not anew
    if not current and (absent := missing(script)):
        raise ModuleNotFoundError(
            f"tutorials/{script.name} has changed and cannot run: {', '.join(absent)} not installed. Run "
            f"`python docs/gallery.py {script.stem}` where it is (`make test-integrations` makes .venv-integrations)"
        )
    results = SHOWN.findall(page.read_text(encoding="utf-8")) if current else run(script)
    text = rendered(script, results)
    if not page.exists() or text != page.read_text(encoding="utf-8"):
        page.write_text(text, encoding="utf-8")


def on_pre_build(config: Any, **_: Any) -> None:
    """Called by mkdocs before it looks for pages. With --strict, a page that cannot be renewed ends the build."""
    from mkdocs.exceptions import PluginError

    for script in SCRIPTS:
        try:
            update(script)
        except (ModuleNotFoundError, RuntimeError) as error:
            if config.strict:  # --quiet would hide a warning, and --strict count none that is hidden
                raise PluginError(str(error)) from None
            logging.getLogger("mkdocs.gallery").warning(str(error))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--execute"]:
        execute(*map(Path, sys.argv[2:]))
    else:
        for script in [FOLDER / f"{name}.py" for name in sys.argv[1:]] or SCRIPTS:
            update(script, anew=len(sys.argv) > 1)
