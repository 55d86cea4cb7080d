"""Records the operators inside a ``with`` block, and the memory of the tensors that they create."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Parts of the names of operators for whose result the host waits.
WAITING = ("_local_scalar_dense", "equal.default", "nonzero", "masked_select", "bincount")


class Operators(TorchDispatchMode):
    """Records every operator that reaches the dispatcher, also during backward.

    Args:
        *known: Tensors whose memory is not counted as new.

    Attributes:
        names: Names of the operators in order, such as "aten.mm.default".
        storages: Bytes of the new storages, by address.
        nbytes: Bytes of the largest new storage.
        numel: Number of elements of the largest new storage.
    """

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.names: list[str] = []
        self.storages: dict[int, int] = {}
        self.nbytes = self.numel = 0
        self._known = {x.untyped_storage().data_ptr() for x in known}

    @property
    def waits(self) -> list[str]:
        """Names of the operators for whose result the host waits."""
        return [name for name in self.names if any(part in name for part in WAITING)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self.storages[storage.data_ptr()] = storage.nbytes()
                    self.nbytes = max(self.nbytes, storage.nbytes())
                    self.numel = max(self.numel, storage.nbytes() // leaf.element_size())
        return result
