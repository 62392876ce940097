"""How far an asynchronous run samples ahead of its updates, by its settings."""

from __future__ import annotations

from typing import Any, NamedTuple


class AsyncConfig(NamedTuple):
    """How far ahead.

    Attributes:
        rollouts: how many may be asked for before the one that is trained is through.
        bound: the largest staleness of a token that is trained.
        drop: leave out what is too old; else it is never asked for too early.
        batch: prompts of a rollout.
        unit: prompts that are asked for together.
        overlaps: units are sampled beside each other (``train.partial_rollout_enable``), and not
            one after the other, where what an engine computes together is always the same.
        filters: whether prompts without a signal are replaced (``algo.dynamic_filtering_enable``).
    """

    rollouts: int
    bound: int
    drop: bool
    batch: int
    unit: int
    overlaps: bool = False
    filters: bool = False


def async_config(args: Any) -> AsyncConfig | None:
    """The settings of a run; None of a synchronous one."""
    if not args.train.async_enable:
        return None
    bound, queue = args.sg.max_staleness, args.train.async_queue_size
    drop = args.sg.stale == "drop"
    batch = args.rollout.batch_size
    return AsyncConfig(
        rollouts=queue if drop else min(bound, queue),
        bound=bound,
        drop=drop,
        batch=batch,
        unit=args.rollout.vllm_generate_batch_size or batch,
        overlaps=args.train.partial_rollout_enable,
        filters=args.algo.dynamic_filtering_enable,
    )
