"""Runs the training of a driver in a forked Ray worker, which has the imports already."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import ray

from sg_rlhf.overlay.reporting.errors import reraise_run_error


def import_module(name: str) -> None:
    """Import a module in a worker, which Ray keeps for :func:`run`."""
    ray.get(_import.remote(name))


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a worker, and return its result."""
    return ray.get(_run.remote(function, *arguments))


# Without CPUs, because these tasks only wait for others. Without retries, because Ray must not
# start a run again that has failed.


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]  # Ray has no types
def _import(name: str) -> None:
    importlib.import_module(name)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]  # Ray has no types
def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        reraise_run_error(error)  # as many levels of Ray's errors as without this task
        raise
