"""The report of a comparison: one HTML file that needs no other file, no network and no script."""

import json
import math
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.compare import figures, statistics, wording
from benchmarks.compare.figures import Against
from benchmarks.compare.statistics import Results, Run
from benchmarks.compare.tables import Rows, failure_rows, reach_rows, result_rows, sift_rows

_STYLE = """
:root { color-scheme: light dark; --back: #eef1f4; --shade: #d5dae0; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --shade: #000; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 1.2rem .8rem 3rem; background: var(--back); color: #1b2128;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; }
section, header { background: #fff; color-scheme: light; border-radius: 8px; padding: 1.1rem 1.4rem; margin: 0 0 1rem;
  box-shadow: 0 1px 3px var(--shade); }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.1rem; margin: 0 0 .6rem; }
p { margin: .5rem 0; max-width: 78ch; }
.said { font-size: 1.05rem; margin: .6rem 0; padding-left: 1.2rem; }
.said li { margin: .15rem 0; max-width: 95ch; }
.note, figcaption { color: #55606c; font-size: .87rem; max-width: 95ch; }
.banner { background: #fff3cd; border: 2px solid #d9a400; border-radius: 6px; padding: .6rem .9rem; font-weight: 600;
  max-width: none; }
.tiles { display: flex; flex-wrap: wrap; gap: .7rem; margin: .9rem 0; padding: 0; list-style: none; }
.tiles li { flex: 1 1 150px; border: 1px solid #dde2e7; border-radius: 6px; padding: .55rem .8rem; }
.tiles b { display: block; font-size: 1.5rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tiles span { color: #55606c; font-size: .83rem; }
.met { border-left: 5px solid #009e73 !important; }
.missed { border-left: 5px solid #d55e00 !important; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1.1rem; margin: .6rem 0 0; }
dt { color: #55606c; }
dd { margin: 0; overflow-wrap: anywhere; }
.box { overflow-x: auto; margin: .4rem 0; }
.box:focus-visible { outline: 2px solid #0072b2; }
table { border-collapse: separate; border-spacing: 0; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .65rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e6eaee; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
.prose td, .prose th { text-align: left; }
.prose td:last-child { white-space: normal; min-width: 22rem; overflow-wrap: anywhere; }
thead th { color: #55606c; font-weight: 600; border-bottom: 2px solid #cfd6dd; vertical-align: bottom; }
tbody th { font-weight: 400; }
tr.ours th, tr.ours td { background: #eef6fb; }
tr.ours th { font-weight: 600; }
figure { margin: 0; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; }
.pair > div { flex: 1 1 300px; min-width: 0; }
svg { display: block; width: 100%; height: auto; }
.wide svg { min-width: 760px; }
details { border-top: 1px solid #e6eaee; padding: .4rem 0; }
summary { cursor: pointer; }
code { font: .85em/1.5 ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
@media (max-width: 600px) { body { padding: .5rem .4rem 2rem; } section, header { padding: .8rem .8rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin: 0 0 .45rem; } }
"""
_MADE_UP = "The data was generated at random in the real format: the code ran, but the numbers below mean nothing."


def write_report(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    title = f"{results['workload']} ({results['size']}): optimizers compared"
    parts = [
        _head(results, title),
        _table(result_rows(results)),
        *(_table(reach_rows(results, target)) for target in statistics.targets(results)),
        _losses(results),
        _each(results),
        _table(sift_rows(results)),
        _table(failure_rows(results), "prose"),
        _settings(results),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _paragraphs(texts: Iterable[str], kind: str = "") -> str:
    return "\n".join(f"<p{_class(kind)}>{escape(text)}</p>" for text in texts)


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _head(results: Results, title: str) -> str:
    banner = f'<p class="banner">{escape(_MADE_UP)}</p>' if results.get("made_up_data") else ""
    facts = "\n".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>" for name, text in _facts(results))
    said = "\n".join(f"<li>{escape(sentence)}</li>" for sentence in wording.summary(results))
    return (
        f"<header>\n<h1>{escape(title)}</h1>\n{banner}\n{_tiles(results)}\n"
        f'<ul class="said">\n{said}\n</ul>\n'
        f"{_paragraphs(wording.fairness(results), 'note')}\n<dl>\n{facts}\n</dl>\n</header>"
    )


def _tiles(results: Results) -> str:
    """Return the figures of the first sentence in large type, none while there is no reference."""
    target = statistics.target_of(results, statistics.best_first(results))
    best = statistics.best_of_ours(results, target) if target else None
    if target is None or best is None:
        return ""
    aim = results["share_target"]
    seeds = f"seeds of {best.label} that reached {wording.number(target.loss)}, {target.label}'s final loss"
    tiles = [("met" if best.everywhere else "missed", f"{best.reached} of {best.seeds}", seeds)]
    answer = wording.verdict(best.met(aim))
    tiles.append((answer, wording.share(best.steps_share), f"of {target.label}'s steps; target {aim:g}: {answer}"))
    seconds = f"of the seconds in which {target.label} itself gets to that loss"
    tiles.append(("plain", wording.share(best.seconds_share), seconds))
    items = (f'<li class="{kind}"><b>{escape(big)}</b><span>{escape(text)}</span></li>' for kind, big, text in tiles)
    return f'<ul class="tiles">{"".join(items)}</ul>'


def _facts(results: Results) -> list[tuple[str, str]]:
    """Return what was run and where, the values as HTML."""
    held_out = "all held-out data" if results.get("everything") else "the workload's sample of held-out data"
    scaled = ", scaled to its speed at the start by steps of SGD in between" if results.get("reference_seconds") else ""
    clock = f"processor time{scaled}" if results["clock"] == "processor" else "wall-clock time"
    facts = [
        ("workload", f"{results['workload']}, size {results['size']}: {results['examples']} training examples"),
        ("full run", f"{results['steps']} steps of {results['batch_size']} examples"),
        ("loss", f"training loss, {results['loss']}"),
        ("metric", f"{results['metric']} on {held_out}; {results['metric_better']} is better"),
        ("schedule", f"{results['schedule']}; an optimizer with its own schedule keeps it"),
        ("seconds", f"{clock} of zero_grad, forward, backward and step, without drawing batches or evaluating"),
    ]
    if changes := results.get("workload_settings"):
        facts.append(("changed in the workload", _keywords(changes)))
    facts += [(f"machine {index + 1}", _machine(results, index)) for index in _used(results)]
    shown = [(name, escape(text)) for name, text in facts]
    return [
        *shown,
        ("versions", escape(_versions(results["runs"]))),
        ("command", f"<code>{escape(command(results))}</code>"),
    ]


def _used(results: Results) -> list[int]:
    return sorted({run["machine"] for run in results["runs"]})


def _machine(results: Results, index: int) -> str:
    known = results["machines"][index]
    runs = sum(run["machine"] == index for run in results["runs"])
    gemm, copying = known["gemm_gflops"], known["copy_gbytes"]
    threads = f"{known['threads']} thread{'s' * (known['threads'] != 1)}"
    return (
        f"{known['processor']}, {threads}, {known['date']}, Python {known['python']}, "
        f"torch {known['torch']}; measured next to its {runs} runs: matrix products {gemm['median']:g} GFLOP/s "
        f"(best {gemm['best']:g}), copying {copying['median']:g} GB/s (best {copying['best']:g})"
    )


def _versions(runs: Iterable[Run]) -> str:
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, version in (run.get("versions") or {}).items():
            found.setdefault(name, {})[str(version)] = None
    return ", ".join(f"{name} {' and '.join(found[name])}" for name in sorted(found)) or "no other packages"


def _keywords(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "none"


def command(results: Results) -> str:
    """Return the command line that the file of results was made with, or one that makes such a file."""
    made = f"python -m benchmarks compare --workload {results['workload']} --size {results['size']}"
    return str(results.get("command") or f"{made} --steps {results['steps']} --batch-size {results['batch_size']}")


def _table(table: Rows, kind: str = "") -> str:
    """Return a section with one table in a box that scrolls by itself, empty for a table without rows."""
    if not table.rows:
        return ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(_row(cells, index in table.ours) for index, cells in enumerate(table.rows))
    return (
        f"<section>\n<h2>{escape(table.title)}</h2>\n"
        f'<div class="box" tabindex="0" role="region" aria-label="{escape(table.title)}">\n<table{_class(kind)}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>\n"
        f"{_paragraphs([table.caption] if table.caption else [], 'note')}\n</section>"
    )


def _row(cells: tuple[str, ...], ours: bool) -> str:
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
    return f'<tr{_class("ours" * ours)}><th scope="row">{escape(cells[0])}</th>{rest}</tr>'


def _losses(results: Results) -> str:
    if not any(math.isfinite(statistics.final_loss(run)) for run in statistics.select(results, "final")):
        return ""
    shown: tuple[Against, ...] = ("steps", "seconds")
    drawn = "\n".join(
        f"<div>{figures.svg(figures.losses_figure(results, key), f'loss-{key}', f'Training loss against {key}')}</div>"
        for key in shown
    )
    longer = figures.cut_off(results)
    more = f" Runs that continue beyond the panel of seconds: {', '.join(longer)}." if longer else ""
    caption = (
        "Lines are means over the seeds, and bands show their range. The reference is the best first-order optimizer. "
        "The tinted corner is the target: a loss not above the line within its share of the steps. "
        f"Short runs end with a dot, and runs that did not finish end with a cross.{more}"
    )
    return f"<section>\n<h2>Loss against steps and seconds</h2>\n{_figure(drawn, 'pair', caption)}</section>"


def _figure(drawn: str, kind: str, caption: str) -> str:
    scrolls = ' tabindex="0"' if "box" in kind else ""
    return (
        f'<figure>\n<div class="{kind}"{scrolls}>\n{drawn}\n</div>\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n"
    )


def _each(results: Results) -> str:
    if not any(run["curve"] for run in statistics.select(results, "final")):
        return ""
    drawn = figures.svg(figures.each_figure(results), "each", "Training loss of every optimizer, one panel each")
    caption = (
        "Optimizers are sorted by final loss, and bands show the range of the seeds. The other optimizers are gray. "
        "The thin line is the final loss of the best first-order optimizer. A cross marks a run that did not finish."
    )
    return f"<section>\n<h2>Each optimizer</h2>\n{_figure(drawn, 'box wide', caption)}</section>"


def _settings(results: Results) -> str:
    items = "\n".join(_setting(results, name) for name in statistics.optimizers(results))
    return f"<section>\n<h2>Settings</h2>\n{items}\n</section>" if items else ""


def _setting(results: Results, optimizer: str) -> str:
    runs = statistics.select(results, optimizer=optimizer)
    phases = {run["phase"]: run for run in runs}  # the last of each
    name, run = ("full runs", phases["final"]) if "final" in phases else ("a trial", runs[0])
    lines = [f"<p>{name}: <code>{escape(_plain(run['settings']))}</code></p>"]
    notes = list(dict.fromkeys(run["note"] for run in runs if run.get("note")))
    more = f' <span class="note">{escape("; ".join(notes))}</span>' if notes else ""
    return f"<details>\n<summary>{escape(runs[0]['label'])}{more}</summary>\n" + "\n".join(lines) + "\n</details>"


def _plain(settings: Mapping[str, Any]) -> str:
    return json.dumps(dict(settings), ensure_ascii=False, default=str)
