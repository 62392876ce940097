"""Upstream's ``compute_approx_kl``, by the loss whose update is under way.

Upstream calls a function of a module, which knows neither the run's settings nor the policy loss
whose weights a weighted KL shares. Whoever runs upstream's code says so around it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
from openrlhf.models import utils as upstream

Dispatch = Callable[..., torch.Tensor]

_current: contextvars.ContextVar[Dispatch | None] = contextvars.ContextVar("kl", default=None)


def compute_approx_kl(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Upstream's signature; inside :func:`computed_by` that function, elsewhere upstream's own."""
    return (_current.get() or upstream.compute_approx_kl)(*args, **kwargs)


@contextlib.contextmanager
def kl_context(dispatch: Dispatch) -> Iterator[None]:
    """Have upstream's code in this block compute its KL by ``dispatch``.

    Args:
        dispatch: as ``losses.kl_dispatcher`` makes it.
    """
    token = _current.set(dispatch)
    try:
        yield
    finally:
        _current.reset(token)
