"""Our estimators of the KL in the reward, in upstream's experience maker.

Upstream calls a function of a module, which does not know the run's settings. Callers of upstream's
code select the KL with :func:`kl_context` around it.
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
    """Upstream's signature; calls the function of :func:`kl_context`, or upstream's outside."""
    return (_current.get() or upstream.compute_approx_kl)(*args, **kwargs)


@contextlib.contextmanager
def kl_context(dispatch: Dispatch) -> Iterator[None]:
    """Within this block, upstream's code computes its KL with ``dispatch``.

    Args:
        dispatch: see :func:`sg_rlhf.overlay.learner.policy_loss.kl_dispatcher`.
    """
    token = _current.set(dispatch)
    try:
        yield
    finally:
        _current.reset(token)
