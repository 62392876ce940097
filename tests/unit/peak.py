"""What tensors take that are alive at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Bytes of tensors that are alive under it, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self.alive:
                self.alive[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, key)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self.alive.pop(key)
