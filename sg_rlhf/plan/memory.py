"""Whether a run fits a machine: GPU memory in the largest phase of a rollout, host memory, disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sg_rlhf.machine.hardware import Hardware
from sg_rlhf.plan import gpu_memory as gpu
from sg_rlhf.plan import phases
from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.phases import Cache, Moment
from sg_rlhf.plan.run_shape import RunShape

#: A phase that leaves less than this share of the GPU may still fail, by fragmentation: the
#: allocator held 3.6 GiB beside planned 14 and 6.3 beside 72 (tests/gpu/README.md).
TIGHT = 0.1


@dataclass(frozen=True)
class MemoryPlan:
    """Memory and disk of a run, and what the machine has; without GPUs only the host counts."""

    run: RunShape
    hardware: Hardware

    @cached_property
    def moments(self) -> Mapping[str, Moment]:
        """For each phase its largest moment on a GPU; of the CPU, none."""
        return {} if self.run.cpu else phases.largest(phases.moments(self.run, self.hardware))

    @cached_property
    def host(self) -> Mapping[str, float]:
        """Bytes of a node by line."""
        return phases.host_lines(self.run)

    @cached_property
    def disk(self) -> Mapping[str, float]:
        """Bytes by line."""
        return phases.disk_lines(self.run)

    @cached_property
    def cache(self) -> Cache | None:
        """vLLM's keys and values; None without GPUs."""
        return None if self.run.cpu else phases.cache_of(self.run, self.hardware)

    @cached_property
    def train_micro(self) -> int:
        """The largest ``train.micro_batch_size`` that fits and divides the batch; 0 if none."""
        return self._largest_micro("train_micro", self.run.train_batch, "update")

    @cached_property
    def rollout_micro(self) -> int:
        """The same of ``rollout.micro_batch_size``."""
        return self._largest_micro("rollout_micro", self.run.samples, "score")

    def _largest_micro(self, field: str, batch: int, phase: str) -> int:
        if self.run.cpu or self.run.train_tokens:  # the latter: by tokens, whatever the number
            return int(getattr(self.run, field))
        of_rank = max(1, batch // self.run.ranks)
        for size in range(of_rank, 0, -1):
            if of_rank % size:
                continue
            changed: dict[str, Any] = {field: size}
            tried = MemoryPlan(replace(self.run, **changed), self.hardware)
            if tried.moments[phase].total <= self.hardware.gpu_memory_gib * GIB:
                return size
        return 0

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Why it does not fit, one line each."""
        return tuple(_problems(self))

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know beside that."""
        return tuple(_remarks(self))

    @property
    def fits(self) -> bool:
        """Whether nothing stands against it."""
        return not self.problems

    @property
    def peak_phase(self) -> str:
        """The phase that takes most of a GPU; "" without GPUs."""
        return max(self.moments, key=lambda phase: self.moments[phase].total, default="")

    @property
    def peak_gib(self) -> float:
        """GPU memory of that phase."""
        return self.moments[self.peak_phase].total / GIB if self.moments else 0.0

    @property
    def tight(self) -> list[str]:
        """Phases that leave less than :data:`TIGHT`; `sample` has vLLM's own limit."""
        available = self.hardware.gpu_memory_gib
        return [
            phase
            for phase, moment in self.moments.items()
            if 0 <= available - moment.total / GIB < TIGHT * available and phase != "sample"
        ]

    def policy_tensors_gib(self, phase: str) -> float:
        """Tensors of the policy's process in a phase; in `update`, the peak that a run measures."""
        return (phases.tensors(self.moments[phase].lines) - gpu.reference(self.run)) / GIB

    @property
    def host_gib(self) -> float:
        """Memory of a node."""
        return sum(self.host.values()) / GIB

    @property
    def disk_gb(self) -> float:
        """Disk of a run at its end, GB (1e9)."""
        return sum(self.disk.values()) / 1e9

    def lines(self, why: str = "") -> list[str]:
        """As text: a table of a GPU by phase, the node, the disk, the verdict."""
        of_what = f" ({why})" if why else ""
        found = [f"memory plan for {self.hardware.describe()}{of_what}"]
        if self.moments:
            found += ["", *_gpu_table(self.moments, self.hardware.gpu_memory_gib)]
        if self.cache:
            found.append(
                f"vLLM: {max(0.0, self.cache.gib):.1f} GiB of keys and values a GPU, "
                f"{self.cache.sequences:.0f} sequences of {self.run.max_len:,} tokens an engine"
            )
        has = f"{self.hardware.host_memory_gib:,.0f}"
        title = f"host memory, GiB a node: {self.host_gib:,.1f} of {has}"
        found += ["", *_sizes(title, self.host, GIB)]
        free = self.hardware.disk_free_gb
        of_free = "" if free is None else f" of {free:,.0f} that are free"
        found += ["", *_sizes(f"disk, GB: {self.disk_gb:,.1f}{of_free}", self.disk, 1e9)]
        return [*found, "", *self.verdict()]

    def verdict(self) -> list[str]:
        """Fits or not, by how much, and what to do."""
        if not self.fits:
            first = "does not fit:"
        elif self.moments:
            left = self.hardware.gpu_memory_gib - self.peak_gib
            first = f"fits: {self.peak_phase} takes most, {left:.1f} GiB of a GPU stay free"
        else:
            first = "fits"
        return [first, *(f"  {line}" for line in (*self.problems, *self.remarks))]


def _problems(plan: MemoryPlan) -> Iterable[str]:
    run, hardware = plan.run, plan.hardware
    if run.gpus > hardware.gpus and not run.cpu:
        yield f"GPUs: {run.gpus}, and there are {hardware.gpus}"
    yield from _gpu_problems(plan)
    if plan.host_gib > hardware.host_memory_gib:
        yield (
            f"host memory: {plan.host_gib:.0f} GiB a node, "
            f"{plan.host_gib - hardware.host_memory_gib:.0f} GiB more than there are"
        )
    free = hardware.disk_free_gb
    if free is not None and plan.disk_gb > free:
        yield f"disk: {plan.disk_gb:.0f} GB, {plan.disk_gb - free:.0f} GB more than are free"


def _gpu_problems(plan: MemoryPlan) -> Iterable[str]:
    for phase, moment in plan.moments.items():
        over = moment.total / GIB - plan.hardware.gpu_memory_gib
        if over <= 0:
            continue
        line = f"{phase}: {moment.total / GIB:.1f} GiB a GPU, {over:.1f} GiB too much"
        key, size = {
            "update": ("train.micro_batch_size", plan.train_micro),
            "score": ("rollout.micro_batch_size", plan.rollout_micro),
        }.get(phase, ("", 0))
        if size:
            line += f"; {key}={size} is the largest that fits"
        elif key:
            line += f"; no {key} fits"
        elif phase == "sample":
            line += "; lower vllm.gpu_memory_utilization"
        yield line
    cache = plan.cache
    if cache and cache.sequences < 1:
        yield (
            f"vLLM: {cache.gib:.1f} GiB for keys and values, less than one sequence of "
            f"data.max_len={plan.run.max_len}; vllm.tensor_parallel_size or "
            "vllm.gpu_memory_utilization must be larger"
        )


def _remarks(plan: MemoryPlan) -> Iterable[str]:
    run, cache = plan.run, plan.cache
    if run.not_planned:
        yield f"memory and time are without the {' and the '.join(run.not_planned)} model"
    if plan.tight:
        yield f"tight: {', '.join(plan.tight)} leaves less than {TIGHT:.0%} for fragmentation"
    if cache and 1 <= cache.sequences < cache.wanted:
        yield (
            f"vLLM: {cache.sequences:.0f} of an engine's {cache.wanted} sequences run at a time "
            "if all are as long as they may be; the others wait"
        )
    if run.ranks > 1 and not run.packing:
        yield (
            "ds.packing_samples=false: ranks compute padding and wait longer for each other; true "
            "packs"
        )
    larger = [
        f"{key}={most}"
        for key, now, most in (
            ("train.micro_batch_size", run.train_micro, plan.train_micro),
            ("rollout.micro_batch_size", run.rollout_micro, plan.rollout_micro),
        )
        if most > now and run.train_tokens is None and plan.fits
    ]
    if larger:
        yield f"{' and '.join(larger)} would fit"


def _gpu_table(moments: Mapping[str, Moment], available_gib: float) -> list[str]:
    """A row of each line and a column of each phase, GiB; lines below 0.05 are left out."""
    names = list(dict.fromkeys(name for moment in moments.values() for name in moment.lines))
    head = f"GPU memory, GiB of {available_gib:.1f}"
    rows = [f"{head:<34}" + "".join(f"{phase:>8}" for phase in moments)]
    for name in names:
        gib = [moment.lines.get(name, 0.0) / GIB for moment in moments.values()]
        if max(gib) >= 0.05:
            rows.append(f"  {name:<32}" + "".join(f"{g:8.1f}" if g else f"{'-':>8}" for g in gib))
    totals = [moment.total / GIB for moment in moments.values()]
    rows.append(f"  {'together':<32}" + "".join(f"{total:8.1f}" for total in totals))
    return rows


def _sizes(title: str, lines: Mapping[str, float], unit: float) -> list[str]:
    """A title and a row of each line; those below 0.05 are left out."""
    shown = {name: size / unit for name, size in lines.items() if size / unit >= 0.05}
    return [title, *(f"  {name:<34}{size:8.1f}" for name, size in shown.items())]
