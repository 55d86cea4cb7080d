"""Keeps the hooks of an optimizer out of copies and pickles of a model.

A copy of a model belongs to no optimizer, and a pickled model has to load without this package. The hooks of a module
are in dictionaries, and ``copy.deepcopy`` and ``pickle`` look up ``__deepcopy__`` and ``__reduce_ex__`` on the object
that they copy. A dictionary therefore gets its own two methods while it contains a hook of an optimizer, and these
methods leave out the hook. The dictionary stays the same object, since handles of other hooks refer to it.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.hooks import RemovableHandle

Entries = OrderedDict[int, Any]


class OwnHook:
    """Base class of the hooks that an optimizer puts on a model.

    A hook that is copied without its dictionary becomes a callable of the standard library that does nothing.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


def conceal(handles: Iterable[RemovableHandle]) -> None:
    """Leave the hooks of these handles out of every copy of their modules."""
    for handle in handles:
        found = _dictionaries(handle)
        for entries in found:
            own = _OwnCopies(entries, found[0])
            vars(entries).update(__deepcopy__=own.deepcopy, __reduce_ex__=own.reduce)


def remove(handles: Iterable[RemovableHandle]) -> None:
    """Remove hooks. A dictionary without other hooks of an optimizer is copied as usual again."""
    for handle in handles:
        handle.remove()
        hooks = handle.hooks_dict_ref()
        if hooks is not None and not any(isinstance(hook, OwnHook) for hook in hooks.values()):
            for entries in _dictionaries(handle):
                for name in ("__deepcopy__", "__reduce_ex__"):
                    vars(entries).pop(name, None)


def _dictionaries(handle: RemovableHandle) -> list[Entries]:
    """Yield the dictionary of a hook, and then those in which its module stores how to call it."""
    found = [reference() for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    return [entries for entries in found if isinstance(entries, OrderedDict)]


class _OwnCopies:
    """The rule for copying one dictionary.

    Args:
        entries: The dictionary.
        hooks: The dictionary with the hooks for its keys.
    """

    def __init__(self, entries: Entries, hooks: Entries) -> None:
        # Use a weak reference, since the dictionary holds this object.
        self._entries, self._hooks = weakref.ref(entries), weakref.ref(hooks)

    def _others(self) -> Entries:
        """The entries that belong to no optimizer."""
        entries, hooks = self._entries() or OrderedDict(), self._hooks() or OrderedDict()
        return OrderedDict((key, x) for key, x in entries.items() if not isinstance(hooks.get(key), OwnHook))

    def deepcopy(self, memo: dict[int, Any]) -> Entries:
        """``__deepcopy__`` of the dictionary."""
        found: Entries = OrderedDict()
        memo[id(self._entries())] = found  # before its hooks are copied, since they may refer to it
        found.update((key, copy.deepcopy(x, memo)) for key, x in self._others().items())
        return found

    def reduce(self, protocol: int) -> tuple[Any, ...]:
        """``__reduce_ex__`` of the dictionary."""
        return OrderedDict, (), None, None, iter(self._others().items())
