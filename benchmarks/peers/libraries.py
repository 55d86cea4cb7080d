"""Imports of other projects: only when one is built, and with a word on where to get it."""

import importlib
import importlib.metadata
import importlib.util
from typing import Any

PACKAGES = {"pytorch_optimizer": "pytorch-optimizer", "schedulefree": "schedulefree", "singd": "singd"}
"""Names of distributions, by what is imported."""


class PeerMissingError(ImportError):
    """A package of another project is not installed."""


def library(name: str) -> Any:
    package = name.split(".")[0]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # a package that it needs itself
            raise
        raise PeerMissingError(
            f"{PACKAGES[package]} is not installed: pip install secondorder[peers], or pip install {PACKAGES[package]}"
        ) from error
    return importlib.import_module(name)


def has_library(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # None stands for it in sys.modules
        return False


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES.values():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
