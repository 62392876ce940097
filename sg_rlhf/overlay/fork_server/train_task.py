"""Runs upstream's ``train`` in a forked Ray worker, which has the imports already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from sg_rlhf.overlay.reporting.errors import reraise_run_error


def train() -> Callable[[Any], None]:
    """Import upstream in a worker.

    Returns:
        Upstream's ``train``, which runs in such a worker.
    """
    ray.get(_import.remote())
    return lambda args: ray.get(_train.remote(args))


# Without CPUs, because these tasks only wait for others. Without retries, because Ray must not
# start a run again that has failed.


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
        reraise_run_error(error)  # as many levels of Ray's errors as without this task
        raise
