"""What is warned of inside a ``with`` block: the texts, or an error for each of them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def warned() -> Iterator[list[str]]:
    """A list that has the texts of all warnings once the block has ended, those that repeat themselves among them."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


def messages_of(action: Callable[[], object]) -> list[str]:
    """The texts of all warnings of a call."""
    with warned() as texts:
        action()
    return texts


@contextmanager
def silent() -> Iterator[None]:
    """A warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
