"""Part of the site build: the overview of the API, links from each name to its source, and from docstrings to names."""

import html
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
API = Path(__file__).resolve().parent / "api"
OVERVIEW = "<!-- overview -->"
#: A name in a docstring, as Sphinx would have it: ``:class:`~package.Name```, as HTML and as text.
ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|exc):(?:<code>|`)(~?)([\w.]+)(?:</code>|`)")
HEADING = re.compile(r'(<h\d id="(secondorder[\w.]*)" class="doc doc-heading">.*?)(</h\d>)', re.S)
SHOWN = re.compile(r"^::: ([\w.]+)$", re.M)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ margin: 1rem; font: 14px/1.45 monospace; color-scheme: light dark; }} pre {{ margin: 0; }}
.linenos {{ color: gray; padding-right: 1em; user-select: none; }} span:target {{ background: #ffb74d55; }}
{light}
@media (prefers-color-scheme: dark) {{ body {{ background: #1e2129; color: #ddd; }} {dark} }}
</style></head><body><p><a href="{back}">API reference</a> · {title}</p>{code}</body></html>
"""


@cache
def package() -> Any:
    """The package, read without running it."""
    return griffe.load("secondorder", search_paths=[ROOT], resolve_aliases=True)


def found(path: str) -> Any:
    """The object of a path such as ``secondorder.KFAC.step``, inherited or not; None if there is none."""
    try:
        item = package().get_member(path.split(".", 1)[1]) if "." in path else package()
    except KeyError:
        return None
    return item.final_target if item.is_alias else item


def source_of(path: str) -> tuple[str, int] | None:
    """The file of a name, from the root of the repository, and the line in it."""
    item = found(path)
    if item is None or item.lineno is None:
        return None
    return Path(item.filepath).relative_to(ROOT).as_posix(), item.lineno


def summary(path: str) -> str:
    """The first sentence of the docstring of a name, as Markdown."""
    item = found(path)
    text = " ".join(item.docstring.value.split("\n\n")[0].split()) if item is not None and item.docstring else ""
    text = ROLE.sub(lambda match: f"`{match[2].rpartition('.')[2] if match[1] else match[2]}`", text)
    return re.split(r"(?<=[.:]) (?=[A-Z`])", text.replace("``", "`"))[0].replace("|", "\\|").removesuffix(".")


def overview() -> str:
    """One table for each page of the API, in the order of the settings, with one line per name."""
    parts = []
    for name in re.findall(r"api/([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))[1:]:
        page = API / name
        text = page.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        rows = [f"| [`{p.rpartition('.')[2]}`]({page.name}#{p}) | {summary(p)} |" for p in SHOWN.findall(text)]
        parts.append("\n".join([f"## [{title}]({page.name})", "", "| name | summary |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def with_sources(text: str, url: str, sources: set[str]) -> str:
    """The HTML of a page with a link to the source in each heading; the files are added to the set."""

    def heading(match: re.Match[str]) -> str:
        place = source_of(match[2])
        if place is None:
            return match[0]
        file, line = place
        sources.add(file)
        target = f"{'../' * url.count('/')}source/{file}.html#L-{line}"
        return f'{match[1]} <a class="source-link" data-search-exclude href="{target}">source</a>{match[3]}'

    return HEADING.sub(heading, text)


def linked(text: str, url: str, places: dict[str, str]) -> str:
    """The HTML of a page, where names in docstrings are links if a page explains them; its own entries come first."""
    ids = sorted(places, key=lambda name: places[name] != url)

    def link(match: re.Match[str]) -> str:
        short, name = match.groups()
        last = name.rpartition(".")[2]
        words = f"<code>{last if short else name}</code>"
        ends = (f".{name}", f".{last}") if name.startswith("secondorder.") else (f".{name}",)
        ends += (f".{last}",) if "." not in name else ()
        target = next((i for end in ("", *ends) for i in ids if i == name or (end and i.endswith(end))), None)
        if target is None:
            return words
        page = "" if places[target] == url else "../" * url.count("/") + places[target]
        return f'<a href="{page}#{target}">{words}</a>'

    return ROLE.sub(link, text)


def highlighted(file: str) -> str:
    """A page with a file of the package, in which each line can be linked to."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    light, dark = (HtmlFormatter(style=style, linenos="inline", linespans="L") for style in ("default", "monokai"))
    code = highlight((ROOT / file).read_text(encoding="utf-8"), PythonLexer(), light)
    colors = [re.sub(r"background[^;}]*;?", "", style.get_style_defs(".highlight")) for style in (light, dark)]
    back = "../" * (file.count("/") + 1) + "api/index.html"
    return PAGE.format(title=html.escape(file), light=colors[0], dark=colors[1], back=back, code=code)


# ---------------------------------------------------------------------- called by mkdocs
_SOURCES: set[str] = set()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for each page."""
    return markdown.replace(OVERVIEW, overview()) if OVERVIEW in markdown else markdown


def on_env(env: Any, files: Any, **_: Any) -> Any:
    """Called when all pages are HTML."""
    pages = [file.page for file in files.documentation_pages() if file.page and file.page.content]
    places = {name: page.url for page in pages for name in re.findall(r'id="(secondorder\.[\w.]+)"', page.content)}
    for page in pages:
        page.content = linked(with_sources(page.content, page.url, _SOURCES), page.url, places)
    return env


def on_post_build(config: Any) -> None:
    """Called when the site is written: adds the files that its pages link to."""
    for file in sorted(_SOURCES):
        place = Path(config.site_dir) / "source" / f"{file}.html"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(highlighted(file), encoding="utf-8")
    _SOURCES.clear()
