"""Part of the site build: habits of language that a regular expression can find stop it.

``python docs/prose.py [PAGES]`` lists them for all pages, or for these. Code, formulas, comments and tables that are
generated are left out. A phrase in ``ALLOWED`` passes.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: Phrases that pass, everywhere or, as "page: phrase", on one page.
ALLOWED: tuple[str, ...] = ()

#: Parts of a page that are not sentences, each with what takes its place.
_SKIPPED = (
    (re.compile(r"\A---\n.*?^---$", re.M | re.S), ""),
    (re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}).*?^(?P=indent)(?P=fence)[ \t]*$", re.M | re.S), ""),
    (re.compile(r"<!-- results: .*?<!-- end of results -->|<!-- presets -->.*?<!-- end of presets -->", re.S), ""),
    (re.compile(r"<[^<>\n]+>"), ""),
    (re.compile(r"<!--.*?-->|^ *:::.*$", re.M | re.S), ""),
    (re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S), "N"),
    (re.compile(r"\$\$.+?\$\$|\$(?! )[^$\n]+\$", re.S), "N"),
    (re.compile(r"\]\([^)]*\)"), "]"),
)
_STEMS = (
    "categor|custom|factor|final|general|initial|local|marginal|maxim|minim|normal|optim|orthogonal|organ|parallel|"
    "parametr|penal|quant|real|recogn|regular|serial|special|stabil|standard|summar|symmetr|synchron|util|vector|visual"
)
#: Each habit, and the words to write instead.
_RULES = tuple(
    (re.compile(rf"\b(?:{pattern})\b", re.I), instead)
    for pattern, instead in (
        (r"told", "reported, or passed"),
        (r"mend(?:s|ed|ing)?", "fix"),
        (r"dear(?:er|est)?", "expensive"),
        (r"beside", "next to, or in parallel with"),
        (r"examples of a step", "batch size"),
        (r"optimizers? of others", "third-party optimizers"),
        (r"and the like|of late|says? so|nothing to say", "say it, or leave it out"),
        (r"spares?|spared", "save, or avoid"),
        (r"goes by|go by", "use"),
        (r"stands? (?:in|for)", "is in, or represents"),
        (r"pays?", "is worth it"),
        (rf"\w+isations?|(?:{_STEMS})is(?:e[srd]?|ers|ing)|analys(?:ed?|ing)", "the spelling with z"),
        (
            r"(?:behavi|col|fav|harb|hon|neighb)our\w*|licence[sd]?|centre[sd]?|grey|artefacts?|judgement",
            "its American spelling",
        ),
        (
            r"(?:model|label|cancel|travel|signal)l(?:ed|ing)|learnt|spelt|whilst|catalogues?|programmes?",
            "its American spelling",
        ),
    )
)
#: A sentence, heading or cell from its first word to its end. Numbers such as 0.5 end none.
_WHAT = re.compile(
    r"(?:^[ \t>#*\d.-]*|[.!?:|] +|[.:]\n)(?P<what>\[?What\b(?:[^.!?|\n]|[.!?](?!\s|$)|\n(?!\s*\n))*)(?P<end>\W?)", re.M
)


class Finding(NamedTuple):
    """A habit on a line of a page."""

    page: str
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.found!r}: write {self.instead}"


def sentences(text: str) -> str:
    """A page without what is not language, its lines as they were."""
    for pattern, letter in _SKIPPED:
        text = pattern.sub(lambda match, letter=letter: letter + "\n" * match[0].count("\n"), text)
    return text


def findings(page: str, text: str) -> Iterator[Finding]:
    """Habits of a page, rule by rule."""
    lines, text = text.splitlines(), sentences(text)

    def finding(start: int, found: str, instead: str) -> Iterator[Finding]:
        number = text.count("\n", 0, start)
        near = " ".join(lines[number : number + 2]).lower()
        phrases = [phrase.removeprefix(f"{page}: ") for phrase in ALLOWED]
        if not any(phrase.lower() in near for phrase in phrases):
            yield Finding(page, number + 1, " ".join(found.split()), instead)

    for pattern, instead in _RULES:
        for match in pattern.finditer(text):
            yield from finding(match.start(), match[0], instead)
    for match in _WHAT.finditer(text):
        if match["end"] != "?":
            yield from finding(
                match.start("what"), match["what"][:60], "the subject first; only questions start with What"
            )


def pages() -> list[Path]:
    """All pages: those of the site, and those next to it."""
    next_to_it = (ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"))
    return [*filter(Path.exists, next_to_it), *sorted((ROOT / "docs").rglob("*.md"))]


def everything_found(files: Iterable[Path]) -> list[str]:
    """A line for each habit, in the order of pages and lines."""
    found = []
    for file in files:
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.as_posix()
        found += sorted(findings(name, file.read_text(encoding="utf-8")), key=lambda finding: finding.line)
    return [str(finding) for finding in found]


def on_config(config: Any) -> Any:
    """Called by mkdocs before it reads any page."""
    from mkdocs.exceptions import PluginError

    found = everything_found(pages())
    if found:
        raise PluginError("docs/prose.py finds:\n  " + "\n  ".join(found))
    return config


if __name__ == "__main__":
    listed = everything_found([Path(name).resolve() for name in sys.argv[1:]] or pages())
    print("\n".join(listed))
    sys.exit(bool(listed))
