"""The limit of a collective operation: a rank waits so long for the others, then the run stops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def limited(original: Callable[..., None]) -> Callable[[Any], None]:
    """Wrap ``DeepspeedStrategy.setup_distributed``: ``sg.collective_timeout`` is its time-out."""

    @functools.wraps(original)
    def setup_distributed(strategy: Any) -> None:
        original(strategy, timeout=timedelta(seconds=strategy.args.sg.collective_timeout))

    return setup_distributed
