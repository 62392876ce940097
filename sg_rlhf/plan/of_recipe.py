"""The plan of a recipe: for which machine, whether it fits, how long a rollout takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sg_rlhf.config import Config
from sg_rlhf.machine.gather import gather
from sg_rlhf.machine.hardware import Hardware, named, of_gpus, of_machine
from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.memory import TIGHT, MemoryPlan
from sg_rlhf.plan.run_shape import RunShape, run_shape
from sg_rlhf.plan.time import DEFAULT, Assumptions, TimePlan, time_plan

#: vLLM's shares and the largest micro-batches, of training and scoring, that are tried. Beyond
#: these a micro-batch gains nothing that the estimate knows of.
UTILIZATIONS = (0.5, 0.6, 0.7, 0.8, 0.85)
LARGEST_MICRO = (8, 16)


@dataclass(frozen=True)
class Plan:
    """A recipe's plan; ``why`` says how the machine was chosen."""

    run: RunShape
    hardware: Hardware
    assumptions: Assumptions = DEFAULT
    why: str = ""
    rollouts: int | None = None

    @cached_property
    def memory(self) -> MemoryPlan:
        """Memory and disk."""
        return MemoryPlan(self.run, self.hardware)

    @cached_property
    def time(self) -> TimePlan | None:
        """How long a rollout takes; None without GPUs."""
        return time_plan(self.run, self.hardware, self.assumptions)

    def lines(self) -> list[str]:
        """For the terminal."""
        found = self.memory.lines(self.why)
        if not self.memory.fits:
            remedy = fastest(self.run, self.hardware)
            changed = remedy.overrides(self.run) if remedy else ""
            return [*found, f"  fits with {changed}"] if changed else found
        if self.time is None:
            return [*found, "time: no estimate for a machine without GPUs"]
        found += self.time.lines(self.rollouts)
        other = fastest(self.run, self.hardware, self.assumptions)
        if other and other.seconds <= 0.9 * self.seconds:
            changed = other.overrides(self.run)
            found.append(f"faster, and fits: {changed} ({other.seconds:.0f} s a rollout)")
        return found

    @property
    def seconds(self) -> float:
        """Of a rollout; infinite where there is no estimate."""
        return self.time.seconds if self.time else math.inf

    def overrides(self, before: RunShape) -> str:
        """The keys that differ from those of another run, as ``key=value``."""
        old, new = before.settings, self.run.settings
        return " ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in new.items()
            if value != old[key]
        )

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        memory = self.memory
        phases = {
            phase: {
                "gib": round(moment.total / GIB, 2),
                "lines": {name: round(size / GIB, 3) for name, size in moment.lines.items()},
            }
            for phase, moment in memory.moments.items()
        }
        allocated = round(memory.policy_tensors_gib("update"), 2) if phases else None
        return {
            "model": self.run.model.name,
            "hardware": {**asdict(self.hardware), "why": self.why},
            "fits": memory.fits,
            "problems": list(memory.problems),
            "remarks": list(memory.remarks),
            "gpu_memory": phases,
            "gpu_memory_gib": round(memory.peak_gib, 2) if phases else None,
            "gpu_memory_phase": memory.peak_phase or None,
            "policy_allocated_gib": allocated,
            "kv_cache_gib": round(memory.cache.gib, 2) if memory.cache else None,
            "kv_cache_sequences": round(memory.cache.sequences, 1) if memory.cache else None,
            "host_memory_gib": round(memory.host_gib, 2),
            "host_memory": {name: round(size / GIB, 3) for name, size in memory.host.items()},
            "disk_gb": round(memory.disk_gb, 2),
            "disk": {name: round(size / 1e9, 3) for name, size in memory.disk.items()},
            "largest_micro_batch_size": {
                "train": memory.train_micro, "rollout": memory.rollout_micro,
            },
            "time": self.time.as_json() if self.time else None,
            "rollouts": self.rollouts,
        }  # fmt: skip


def plan_of(
    config: Config,
    *,
    hardware: Hardware | None = None,
    why: str = "",
    rollouts: int | None = None,
    assumptions: Assumptions = DEFAULT,
) -> Plan | None:
    """The plan of a loaded recipe; None where its model's shape is not known.

    Args:
        hardware: None for this machine, or, if it has no GPU, the recipe's (:func:`machine_for`).

    Raises:
        ConfigError, ValueError: as :func:`run_shape`.
    """
    run = run_shape(config)
    if run is None:
        return None
    if hardware is None:
        hardware, why = machine_for(run)
    return Plan(run, hardware, assumptions, why, rollouts)


def fastest(run: RunShape, hardware: Hardware, assumptions: Assumptions = DEFAULT) -> Plan | None:
    """The fastest settings of engines and trainer that fit, with a reserve; None if none fits.

    Of equally fast ones the first: fewer GPUs for an engine, then vLLM's share as it is.
    """
    if run.cpu or not run.colocated or run.ranks > hardware.gpus:
        return None
    parts = [n for n in (1, 2, 4, 8) if n <= run.gpus_per_node and run.ranks % n == 0]
    shares = dict.fromkeys((run.gpu_memory_utilization, *UTILIZATIONS))
    found = []
    for engine_tp, share in itertools.product(parts, shares):
        tried = replace(
            run, engine_tp=engine_tp, engines=run.ranks // engine_tp, gpu_memory_utilization=share
        )
        found.append(fastest_update(tried, hardware, assumptions))
    return _best(found)


def fastest_update(
    run: RunShape,
    hardware: Hardware,
    assumptions: Assumptions = DEFAULT,
    fixed: Collection[str] = (),
) -> Plan | None:
    """The fastest ZeRO stage, offload, recomputation and micro-batches that fit; None if none fits.

    Those whose keys are in ``fixed`` stay.
    """

    def values(key: str, current: Any, *others: Any) -> list[Any]:
        return list(dict.fromkeys((current, *(() if key in fixed else others))))

    lower = [stage for stage in (2, 1) if stage < run.zero_stage]
    micros = [(run.train_micro, run.rollout_micro)]
    if not {"train.micro_batch_size", "rollout.micro_batch_size"} & set(fixed):
        micros.append(LARGEST_MICRO)
    found = []
    for stage, offload, checkpointing in itertools.product(
        values("ds.zero_stage", run.zero_stage, *lower),
        values("ds.adam_offload", run.adam_offload, False, True),
        values("actor.gradient_checkpointing_enable", run.checkpointing, False),
    ):
        if stage == 1 and run.grad_bytes > run.weight_bytes:
            continue  # without offload another optimizer of DeepSpeed, whose states do not sleep
        tried = replace(run, zero_stage=stage, adam_offload=offload, checkpointing=checkpointing)
        most = MemoryPlan(tried, hardware)
        for train, rollout in dict.fromkeys(micros):
            train, rollout = min(most.train_micro, train), min(most.rollout_micro, rollout)
            if train and rollout:
                changed = replace(tried, train_micro=train, rollout_micro=rollout)
                found.append(Plan(changed, hardware, assumptions))
    return _best(found, is_full)


def _best(
    plans: Iterable[Plan | None], is_full: Callable[[Plan], bool] = lambda plan: False
) -> Plan | None:
    """The fastest that fits, with a reserve if any does; of equally fast ones the first."""
    return min(
        (plan for plan in plans if plan and plan.memory.fits and plan.time),
        key=lambda plan: (bool(plan.memory.tight), is_full(plan), round(plan.seconds, 1)),
        default=None,
    )


def is_full(plan: Plan) -> bool:
    """Whether a phase leaves less than a tenth of a GPU, sampling included."""
    available = plan.hardware.gpu_memory_gib
    return available - plan.memory.peak_gib < TIGHT * available


def machine_for(run: RunShape) -> tuple[Hardware, str]:
    """This machine, or, if it has no GPU and the recipe needs one, the recipe's; and why."""
    here = gather(Path("."))
    if run.cpu:
        return of_machine(here, gpus=()), "this machine"
    if here.gpus:
        return of_machine(here, run.nodes), "this machine"
    try:
        return named(run.hardware), f"the recipe's hardware, {run.hardware}; no GPU is here"
    except ValueError:
        guess = of_gpus("h100", nodes=run.nodes, gpus_per_node=math.ceil(run.gpus / run.nodes))
        return guess, "assumed; no GPU is here and the recipe names no hardware"
