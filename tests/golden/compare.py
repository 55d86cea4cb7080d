# ruff: noqa: T201 - it prints
"""What differs between two records, run by run: where it begins, and in what."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import zip_longest
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

MOST = 12  # lines of one run; the order of the fields puts causes first
FIRST = ("error", "losses", "bits", "half", "messages", "stages", "state")
_NONE = object()


class Difference(NamedTuple):
    """Where two traces differ.

    Attributes:
        field: Keys and numbers of steps on the way there, joined by dots.
        text: Both values.
    """

    field: str
    text: str


def differences(a: Path, b: Path, accept: Path | None, only: str) -> int:
    """Print what differs; 1 if something does that is not accepted."""
    accepted, used = _accepted(accept), Counter[int]()
    names = sorted({str(f.relative_to(d).with_suffix("")) for d in (a, b) for f in d.rglob("*.json")})
    unequal, fields, equal = 0, Counter[str](), 0
    for name in (n for n in names if fnmatchcase(n, only)):
        found = [json.loads(f.read_text()) if (f := d / f"{name}.json").exists() else _NONE for d in (a, b)]
        if name.startswith("cost/"):
            _print_cost(name, *found)
            continue
        kept = []
        for difference in _compare(*found, ""):
            rule = next((i for i, r in enumerate(accepted) if _fits(r, name, difference.field)), None)
            if rule is None:
                kept.append(difference)
            else:
                used[rule] += 1
        equal += not kept
        if kept:
            unequal += 1
            fields.update({_kind(d.field) for d in kept})
            _print_run(name, kept)
    for i, rule in enumerate(accepted):
        print(f"accepted {used[i]} times: {' '.join(rule)}")
    if unequal:
        print("runs that differ, by field: " + ", ".join(f"{field} {n}" for field, n in fields.most_common()))
    print(f"{equal} runs are equal, {unequal} differ")
    return int(unequal > 0)


def _accepted(file: Path | None) -> list[list[str]]:
    lines = file.read_text().splitlines() if file is not None else []
    return [line.split(None, 1) for line in lines if line.strip() and not line.startswith("#")]


def _fits(rule: list[str], name: str, field: str) -> bool:
    return fnmatchcase(name, rule[0]) and fnmatchcase(field, rule[1] if len(rule) > 1 else "*")


def _compare(a: Any, b: Any, at: str) -> Iterator[Difference]:
    if a is _NONE or b is _NONE:
        yield Difference(at, f"only in {'B' if a is _NONE else 'A'}: {_short(b if a is _NONE else a)}")
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            yield from _compare(a.get(key, _NONE), b.get(key, _NONE), f"{at}.{key}" if at else key)
        if a.keys() == b.keys() and list(a) != list(b):
            yield Difference(f"{at}.(order)", f"{list(a)} -> {list(b)}")
    elif isinstance(a, list) and isinstance(b, list):
        for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=_NONE)):
            yield from _compare(x, y, f"{at}.{i}")
    elif type(a) is not type(b) or (a != b and not (a != a and b != b)):
        start = max(0, len(commonprefix([str(a), str(b)])) - 40)
        yield Difference(at, f"{_short(a, start)} -> {_short(b, start)}")


def _short(value: Any, start: int = 0) -> str:
    """A value in one line; of a long text the part that begins there."""
    if isinstance(value, str) and len(value) > 110 and start:
        value = f"...{value[start:]}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 110 else f"{text[:107]}..."


def _kind(field: str) -> str:
    """A field without its rank, steps and names."""
    parts = [part for part in field.split(".") if not part.startswith("rank ") and not part.isdigit()]
    return parts[0] if parts else "the run itself"


def _print_run(name: str, found: list[Difference]) -> None:
    print(f"\n{name}: {len(found)} differences")
    heads: dict[str, list[Difference]] = {}
    for difference in found:
        heads.setdefault(_head(difference.field), []).append(difference)
    order = sorted(heads, key=lambda h: next((i for i, f in enumerate(FIRST) if f in h.split(".")), len(FIRST)))
    for head in order[:MOST]:
        first = heads[head][0]
        more = f"   (and {len(heads[head]) - 1} more)" if len(heads[head]) > 1 else ""
        print(f"  {_with_step(first.field)}: {first.text}{more}")
    if len(order) > MOST:
        print(f"  ... and in {', '.join(order[MOST:])}")


def _head(field: str) -> str:
    """The part of a field up to its first number, at most three keys."""
    return ".".join(re.split(r"\.\d+", field)[0].split(".")[:3])


def _with_step(field: str) -> str:
    return re.sub(r"\b(losses|bits|stages|messages)\.(\d+)", r"\1 of step \2", field)


def _print_cost(name: str, a: Any, b: Any) -> None:
    if a is _NONE or b is _NONE:
        return
    for key in (k for k in a if k.endswith("per step")):
        print(f"{name}: {key} {a[key]:g} -> {b.get(key, 0):g} ({b.get(key, 0) / a[key] - 1:+.1%})")
