"""Settings of asynchronous rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class AsyncConfig(NamedTuple):
    """How far generation may run ahead of the updates."""

    max_in_flight: int  # rollouts that may be requested beyond the one that is trained
    max_staleness: int  # largest age of a trained token, in weight syncs
    batch_size: int  # prompts of a rollout
    request_size: int  # prompts that are submitted together
    partial: bool = False  # requests overlap, and a weight sync interrupts them
    dynamic_filtering: bool = False  # prompts without a signal are replaced


def async_config(value: Callable[[str], Any]) -> AsyncConfig | None:
    """The settings of a run; None for a synchronous one."""
    if not value("train.async_enable"):
        return None
    max_staleness, queue_size = value("sg.max_staleness"), value("train.async_queue_size")
    batch_size = value("rollout.batch_size")
    return AsyncConfig(
        max_in_flight=min(max_staleness, queue_size),
        max_staleness=max_staleness,
        batch_size=batch_size,
        request_size=value("rollout.vllm_generate_batch_size") or batch_size,
        partial=value("train.partial_rollout_enable"),
        dynamic_filtering=value("algo.dynamic_filtering_enable"),
    )
