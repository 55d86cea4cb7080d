"""Part of the site build: stop it where the package offers a name that the documentation does not explain."""

import inspect
from pathlib import Path
from typing import Any

API_PAGE = Path(__file__).parent / "api.md"


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


def undocumented(package: Any, api_page: str) -> list[str]:
    """What is missing, one sentence each: a docstring, or a place on the API page."""
    missing = []
    for name in package.__all__:
        value = getattr(package, name)
        if not callable(value):  # a constant such as __version__ has no docstring of its own
            if name not in api_page:
                missing.append(f"{name} is not mentioned in docs/api.md")
            continue
        if f"::: {package.__name__}.{name}\n" not in api_page + "\n":
            missing.append(f"{name} has no '::: {package.__name__}.{name}' in docs/api.md")
        # Of a class its own, not by inspect.getdoc: a docstring inherited from torch explains nothing.
        if not (vars(value).get("__doc__") if isinstance(value, type) else value.__doc__):
            missing.append(f"{name} has no docstring")
        if isinstance(value, type):
            missing += [f"{name}.{member} has no docstring" for member in _undocumented_members(value)]
    return missing


def on_config(config: Any) -> Any:
    """Called by mkdocs before it reads any page."""
    from mkdocs.exceptions import PluginError

    import secondorder

    missing = undocumented(secondorder, API_PAGE.read_text(encoding="utf-8"))
    if missing:
        raise PluginError("public names without documentation:\n  " + "\n  ".join(missing))
    return config
