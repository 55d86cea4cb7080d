"""Context managers that record warnings as texts, or turn them into errors."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def warned() -> Iterator[list[str]]:
    """Return a list that contains the texts of all warnings, including repeated ones, once the block has ended."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


def messages_of(action: Callable[[], object]) -> list[str]:
    """Return the texts of all warnings of a call."""
    with warned() as texts:
        action()
    return texts


@contextmanager
def silent() -> Iterator[None]:
    """Turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
