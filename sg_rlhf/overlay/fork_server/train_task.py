"""Upstream's training loop in a forked process, which has its imports already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from sg_rlhf.overlay.reporting.errors import reraise_run_error


def train() -> Callable[[Any], None]:
    """Upstream's ``train``, once such a process is there."""
    ray.get(_import.remote())
    return lambda args: ray.get(_train.remote(args))


# No CPUs: they wait for the others. No retries: half a run is not begun again.


@ray.remote(num_cpus=0, max_retries=0)
def _import() -> None:
    from sg_rlhf.overlay.patches import table

    table.install_driver()


@ray.remote(num_cpus=0, max_retries=0)
def _train(args: Any) -> None:
    from sg_rlhf.overlay.patches import table

    try:
        table.install_driver().train(args)
    except Exception as error:
        reraise_run_error(error)  # one level of Ray's errors around it, as without this process
        raise
