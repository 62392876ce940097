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
            "ds.zero_stage": (before.zero_stage, after.zero_stage),
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
    """The settings that fit with a reserve and, of these, are fastest; None if none fits.

    Tried are the engines' tensor parallelism, ZeRO-2 in place of ZeRO-3, offload, vLLM's share and
    micro-batches. Of equally fast settings the first is taken, in the order: fewer GPUs for an
    engine, the ZeRO stage, offload, share and micro-batches as they are.
    """
    if run.cpu or not run.colocated or run.ranks > hardware.gpus:
        return None
    found: list[Choice] = []
    parts = [n for n in (1, 2, 4, 8) if n <= run.gpus_per_node and run.ranks % n == 0]
    stages = dict.fromkeys((run.zero_stage, min(run.zero_stage, 2)))
    offloads = dict.fromkeys((run.adam_offload, False, True))
    shares = dict.fromkeys((run.gpu_memory_utilization, *UTILIZATIONS))
    for engine_tp, stage, offload, share in itertools.product(parts, stages, offloads, shares):
        tried = replace(
            run,
            engine_tp=engine_tp,
            engines=run.ranks // engine_tp,
            zero_stage=stage,
            adam_offload=offload,
            gpu_memory_utilization=share,
        )
        choice = _with_micro_batches(tried, hardware, assumptions)
        if choice is not None:
            found.append(choice)
    return min(
        found,
        key=lambda choice: (bool(choice.memory.tight), round(choice.time.seconds, 1)),
        default=None,
    )


def _with_micro_batches(
    run: RunShape, hardware: Hardware, assumptions: Assumptions
) -> Choice | None:
    plan = memory_plan(run, hardware)
    found: list[Choice] = []
    most = (LARGEST_TRAIN_MICRO, LARGEST_ROLLOUT_MICRO)
    for train, rollout in dict.fromkeys(((run.train_micro, run.rollout_micro), most)):
        sizes = min(plan.train_micro, max(train, 1)), min(plan.rollout_micro, max(rollout, 1))
        if 0 in sizes:
            return None
        tried = replace(run, train_micro=sizes[0], rollout_micro=sizes[1])
        memory = memory_plan(tried, hardware)
        time = time_plan(tried, hardware, assumptions) if memory.fits else None
        if time:
            found.append(Choice(tried, memory, time))
    return min(
        found, key=lambda choice: (bool(choice.memory.tight), choice.time.seconds), default=None
    )
