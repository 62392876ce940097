"""A plan as text for the terminal."""

from __future__ import annotations

from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.memory import MemoryPlan


def memory_lines(plan: MemoryPlan) -> list[str]:
    """Table of a GPU by phase, then the node, the disk and the verdict."""
    lines = [f"memory plan for {plan.hardware.describe()}"]
    if plan.moments:
        lines += ["", *_gpu_table(plan)]
    if plan.cache:
        cache = plan.cache
        lines.append(
            f"vLLM: {max(0.0, cache.gib):.1f} GiB of keys and values a GPU, "
            f"{cache.sequences:.0f} sequences of {plan.run.max_len:,} tokens an engine"
        )
    lines += ["", f"host memory, GiB a node: {plan.host_gib:,.1f} of "
              f"{plan.hardware.host_memory_gib:,.0f}"]  # fmt: skip
    lines += [f"  {name:<34}{size / GIB:8.1f}" for name, size in plan.host.items()]
    free = plan.hardware.disk_free_gb
    of_free = "" if free is None else f" of {free:,.0f} that are free"
    lines += ["", f"disk, GB: {plan.disk_gb:,.1f}{of_free}"]
    lines += [f"  {name:<34}{size / 1e9:8.1f}" for name, size in plan.disk.items()]
    return [*lines, "", *verdict(plan)]


def _gpu_table(plan: MemoryPlan) -> list[str]:
    names = list(dict.fromkeys(n for m in plan.moments.values() for n in m.lines))
    head = f"GPU memory, GiB of {plan.hardware.gpu_memory_gib:.1f}"
    rows = [f"{head:<34}" + "".join(f"{phase:>8}" for phase in plan.moments)]
    for name in names:
        sizes = [moment.lines.get(name, 0.0) / GIB for moment in plan.moments.values()]
        if max(sizes) >= 0.05:
            rows.append(f"  {name:<32}" + "".join(f"{s:8.1f}" if s else f"{'-':>8}" for s in sizes))
    totals = [moment.total / GIB for moment in plan.moments.values()]
    rows.append(f"  {'together':<32}" + "".join(f"{total:8.1f}" for total in totals))
    return rows


def verdict(plan: MemoryPlan) -> list[str]:
    """Fits or not, by how much, and what to do."""
    if not plan.fits:
        first = "does not fit:"
    elif plan.moments:
        left = plan.hardware.gpu_memory_gib - plan.peak_gib
        first = f"fits: {plan.peak_phase} takes most, {left:.1f} GiB of a GPU stay free"
    else:
        first = "fits"
    return [first, *(f"  {line}" for line in (*plan.problems, *plan.remarks))]
