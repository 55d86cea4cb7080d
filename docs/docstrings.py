"""Part of the site build: how docstrings that are written for readers of the source look on a page.

``Example:`` becomes the section that shows code as code, and the two colons before a block of code become one. A class
whose docstring is completed by ``options.complete_docstring`` is imported, so that its page agrees with ``help()``. The
default of a field of an object with options is shown without the keys that are declared with it.
"""

import importlib
import inspect
import re
from typing import Any

import griffe

CHANGES = ((re.compile(r"^Example:$", re.M), "Examples:"), (re.compile(r"::(?=\n\n)"), ":"))


class Docstrings(griffe.Extension):
    """Called by mkdocstrings."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "_option":
            attr.value = attr.value.arguments[0]

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            if obj.is_class and any("complete_docstring" in str(decorator.value) for decorator in obj.decorators):
                cls = getattr(importlib.import_module(obj.module.path), obj.name)
                obj.docstring.value = inspect.getdoc(cls) or ""
            for pattern, words in CHANGES:
                obj.docstring.value = pattern.sub(words, obj.docstring.value)
