"""Parts of the site build: a public name that nobody explains stops it, and the changelog becomes a page.

Public are the names in ``__all__`` of the modules below; without ``__all__``, what a module defines and does not begin
with an underscore. Modules of ``secondorder.integrations`` are read, not imported: what they integrate may be missing.
Protocols there say what an argument must have, and are no part of what is offered.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPT = re.compile(r'<span class="gp">([^<]*)</span>')
MODULES = ("secondorder", *(f"secondorder.{m}" for m in ("comm", "diagnostics", "nn", "schedule", "switching")))
INTEGRATIONS = "secondorder.integrations"
#: Modules there that only the others use.
INNER = {"stepwise"}


def _undocumented_members(cls: type) -> list[str]:
    """Public functions and properties that a class has from this package, not from torch, and nobody explained.

    An override may leave the explaining to a base class of the package.
    """
    kinds = (property, staticmethod, classmethod)
    explained: dict[str, bool] = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "secondorder":
            continue
        for name, value in vars(base).items():
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds)):
                explained[name] = explained.get(name, False) or bool(value.__doc__)
    return [name for name, has_docstring in explained.items() if not has_docstring]


def public_names(module: Any) -> list[str]:
    """What a module offers."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", None) == module.__name__]


def api_pages() -> str:
    """The pages of the API, one after the other."""
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))


def _on_the_page(api_page: str) -> dict[str, Any]:
    """Return the objects that the pages of the API show, by path; None for those that are not imported."""
    found: dict[str, Any] = {}
    for path in re.findall(r"^::: ([\w.]+)$", api_page, re.M):
        owner, _, name = path.rpartition(".")
        found[path] = None if path.startswith(INTEGRATIONS) else _attribute(owner, name)
    return found


def _attribute(owner: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(owner), name, None)
    except ImportError:
        return None


def undocumented(module: Any, api_page: str) -> list[str]:
    """Return one sentence for each name that has no docstring, or no place on a page of the API."""
    missing = []
    shown = _on_the_page(api_page)
    for name in public_names(module):
        value, path = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            if path not in MODULES:
                missing.append(f"{name} is a public module that docs/hooks.py does not look at")
            continue
        if not callable(value):  # a constant such as __version__ has no docstring of its own
            if name not in api_page:
                missing.append(f"{name} is not mentioned in docs/api")
            continue
        if path not in shown and not any(value is other for other in shown.values()):
            missing.append(f"{name} has no '::: {path}' in docs/api")
        # Of a class its own, not by inspect.getdoc: a docstring inherited from torch explains nothing.
        if not (vars(value).get("__doc__") if isinstance(value, type) else value.__doc__):
            missing.append(f"{name} has no docstring")
        if isinstance(value, type):
            missing += [f"{name}.{member} has no docstring" for member in _undocumented_members(value)]
    return missing


def undocumented_source(module: str, source: str, api_page: str) -> list[str]:
    """The same for a module that is only read."""
    tree = ast.parse(source)
    listed = next((ast.literal_eval(s.value) for s in tree.body if isinstance(s, ast.Assign) and _is_all(s)), None)
    missing = []
    for node in tree.body:
        if not isinstance(node, _DEFINITIONS) or _is_protocol(node):
            continue
        if node.name.startswith("_") if listed is None else node.name not in listed:
            continue
        path = f"{module}.{node.name}"
        if path not in _on_the_page(api_page):
            missing.append(f"{node.name} has no '::: {path}' in docs/api")
        if not ast.get_docstring(node):
            missing.append(f"{node.name} has no docstring")
        # An override of somebody else's hook says what its base says: only what is new has to be explained.
        new = node.body if isinstance(node, ast.ClassDef) and not node.bases else []
        members = [m for m in new if isinstance(m, _DEFINITIONS) and not m.name.startswith("_")]
        missing += [f"{node.name}.{m.name} has no docstring" for m in members if not ast.get_docstring(m)]
    return missing


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _is_all(statement: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in statement.targets)


def _is_protocol(node: ast.AST) -> bool:
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in bases)


def everything_undocumented(api_page: str, modules: Iterable[str] = MODULES) -> list[str]:
    """What is missing in all public modules, with the module in front."""
    missing = []
    for name in modules:
        missing += [f"{name}: {line}" for line in undocumented(importlib.import_module(name), api_page)]
    for file in sorted((ROOT / INTEGRATIONS.replace(".", "/")).glob("[!_]*.py")):
        if file.stem in INNER:
            continue
        name = f"{INTEGRATIONS}.{file.stem}"
        found = undocumented_source(name, file.read_text(encoding="utf-8"), api_page)
        missing += [f"{name}: {line}" for line in found]
    return missing


def changelog() -> str:
    """The changelog, with links that lead from a page next to the others."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with the files of the site: the changelog becomes a page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "changelog.md", content=changelog()))
    return files


def on_config(config: Any) -> Any:
    """Called by mkdocs before it reads any page."""
    from mkdocs.exceptions import PluginError

    missing = everything_undocumented(api_pages())
    if missing:
        raise PluginError("public names without documentation:\n  " + "\n  ".join(missing))
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs for each page: prompts become decoration, so that the button for copying leaves them out."""
    return PROMPT.sub(r'<span class="prompt" data-prompt="\1"></span>', html)
