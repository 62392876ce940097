"""The settings of a run that fit on a machine, and of those the fastest by the estimate."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from sg_rlhf.machine.hardware import Hardware
from sg_rlhf.plan.memory import MemoryPlan, memory_plan
from sg_rlhf.plan.run_shape import RunShape
from sg_rlhf.plan.time import DEFAULT, Assumptions, TimePlan, time_plan

#: Micro-batches beyond these gain nothing that the estimate knows of.
LARGEST_TRAIN_MICRO, LARGEST_ROLLOUT_MICRO = 8, 16
UTILIZATIONS = (0.5, 0.6, 0.7, 0.8, 0.85)


@dataclass(frozen=True)
class Choice:
    """A run that fits, with its plan."""

    run: RunShape
    memory: MemoryPlan
    time: TimePlan

    def overrides(self, before: RunShape) -> list[str]:
        """What of a recipe must change, as ``key=value``."""
        after = self.run
        pairs = {
            "vllm.tensor_parallel_size": (before.engine_tp, after.engine_tp),
            "vllm.num_engines": (before.engines, after.engines),
            "vllm.gpu_memory_utilization": (
                before.gpu_memory_utilization,
                after.gpu_memory_utilization,
            ),
            "ds.adam_offload": (before.adam_offload, after.adam_offload),
            "train.micro_batch_size": (before.train_micro, after.train_micro),
            "rollout.micro_batch_size": (before.rollout_micro, after.rollout_micro),
        }
        return [
            f"{key}={str(new).lower() if isinstance(new, bool) else new}"
            for key, (old, new) in pairs.items()
            if old != new
        ]


def fastest(run: RunShape, hardware: Hardware, assumptions: Assumptions = DEFAULT) -> Choice | None:
    """Of engines' tensor parallelism, offload, vLLM's share and micro-batches; None if none fits.

    A micro-batch stays as it is if it fits. Of equally fast settings the first is taken, in the
    order: fewer GPUs for an engine, no offload, vLLM's share as it is.
    """
    if run.cpu or not run.colocated or run.ranks > hardware.gpus:
        return None
    found: list[Choice] = []
    shares = (run.gpu_memory_utilization, *UTILIZATIONS)
    parts = [n for n in (1, 2, 4, 8) if n <= run.gpus_per_node and run.ranks % n == 0]
    for engine_tp, offload, share in itertools.product(
        parts, sorted({run.adam_offload, True}), dict.fromkeys(shares)
    ):
        tried = replace(
            run,
            engine_tp=engine_tp,
            engines=run.ranks // engine_tp,
            adam_offload=offload,
            gpu_memory_utilization=share,
        )
        choice = _with_micro_batches(tried, hardware, assumptions)
        if choice is not None:
            found.append(choice)
    return min(found, key=lambda choice: round(choice.time.seconds, 1), default=None)


def _with_micro_batches(
    run: RunShape, hardware: Hardware, assumptions: Assumptions
) -> Choice | None:
    plan = memory_plan(run, hardware)
    sizes = (
        min(plan.train_micro, max(run.train_micro, 1), LARGEST_TRAIN_MICRO),
        min(plan.rollout_micro, max(run.rollout_micro, 1), LARGEST_ROLLOUT_MICRO),
    )
    if 0 in sizes:
        return None
    run = replace(run, train_micro=sizes[0], rollout_micro=sizes[1])
    plan = memory_plan(run, hardware)
    time = time_plan(run, hardware, assumptions) if plan.fits else None
    return Choice(run, plan, time) if time else None
