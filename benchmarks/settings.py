"""Keywords given on the command line as ``key=value``."""

import ast
from collections.abc import Sequence

from benchmarks.recipes import Setting

_WORDS: dict[str, Setting] = {"true": True, "false": False, "none": None}


def parse_settings(pairs: Sequence[str]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"a setting must look like key=value, got {pair!r}")
        settings[key] = _parse_value(text)
    return settings


def _parse_value(text: str) -> Setting:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    if not isinstance(value, float | int | bool | str | None):
        raise ValueError(f"a setting must be a number, a word, true, false or none, got {text!r}")
    return value
