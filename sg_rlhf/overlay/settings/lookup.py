"""Read upstream's arguments by dotted keys, as the functions of ``sg_rlhf.config`` do."""

from __future__ import annotations

import operator
from argparse import Namespace
from collections.abc import Callable
from typing import Any


def value_of(args: Namespace) -> Callable[[str], Any]:
    """A function from a dotted key, such as ``train.batch_size``, to its value."""
    return lambda key: operator.attrgetter(key)(args)
