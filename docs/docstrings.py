"""Part of the site build: how docstrings that are written for readers of the source look on a page.

``Example:`` becomes the section that shows code as code, and the two colons before a block of code become one.
"""

import re
from typing import Any

import griffe

CHANGES = ((re.compile(r"^Example:$", re.M), "Examples:"), (re.compile(r"::(?=\n\n)"), ":"))


class Docstrings(griffe.Extension):
    """Called by mkdocstrings."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            for pattern, words in CHANGES:
                obj.docstring.value = pattern.sub(words, obj.docstring.value)
