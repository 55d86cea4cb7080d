"""Compares the text that a program printed with the text that a page shows.

Words and whole numbers must be equal. Numbers with a fraction or an exponent must agree up to rounding, which differs
between machines. A time, which is a number before ``ms`` or ``s``, matches any other time. ``...`` on the page matches
any text. Spaces only count as separators, because a number that is a digit longer moves the text that follows.
"""

import math
import re

#: A word without digits, a number, or a single other character.
TOKEN = re.compile(
    r"(?P<elision>\.\.\.)|(?P<number>(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?!\d))|(?P<other>\w+|\S)"
)
TIME = re.compile(r" *(?:ms|µs|s|seconds|minutes)\b")


def _tokens(text: str) -> list[tuple[str, str]]:
    found = []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind == "number" and TIME.match(text, match.end()):
            kind = "time"
        found.append((kind, match[0]))
    return found


def _agree(shown: tuple[str, str], printed: tuple[str, str], tolerance: float) -> bool:
    kind, text = shown
    if kind != printed[0]:
        return False
    if kind == "time":
        return True
    if kind != "number" or text == printed[1]:
        return text == printed[1]
    if not re.search(r"[.e]", text + printed[1]):
        return False
    one, other = (float(number.replace(",", "")) for number in (text, printed[1]))
    # One unit of the last digit on the page, because rounding may go either way.
    digits = len(re.sub(r"e.*", "", text).partition(".")[2])
    unit = 10.0 ** (int(text.partition("e")[2] or 0) - digits)
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1.01 * unit)


def difference(shown: str, printed: str, tolerance: float = 1e-2) -> str | None:
    """Return where a text that a page shows differs from a printed one, or None.

    Args:
        shown: The text of the page.
        printed: The text of the program.
        tolerance: Relative tolerance of numbers that are not whole.
    """
    parts: list[list[tuple[str, str]]] = [[]]
    for token in _tokens(shown):
        if token[0] == "elision":
            parts.append([])
        else:
            parts[-1].append(token)
    found, place = _tokens(printed), 0
    for index, part in enumerate(parts):
        starts = range(place, len(found) - len(part) + 1)
        if index == 0:
            starts = starts[:1]
        elif index == len(parts) - 1 and part:
            starts = starts[-1:]
        for start in starts:
            pairs = zip(part, found[start : start + len(part)], strict=True)
            if all(_agree(a, b, tolerance) for a, b in pairs):
                place = start + len(part)
                break
        else:
            words = " ".join(text for _, text in part)
            return f"the page shows\n{words}\nbut the program printed\n{' '.join(text for _, text in found[place:])}"
    if place != len(found) and parts[-1]:
        return f"the page does not show {' '.join(text for _, text in found[place:])!r}"
    if not parts[-1] and len(parts) == 1 and found:
        return f"the page does not show {printed!r}"
    return None
