"""Sizes as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.phases import Moment


def gpu_table(moments: Mapping[str, Moment], available_gib: float) -> list[str]:
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


def sizes(title: str, lines: Mapping[str, float], unit: float) -> list[str]:
    """A title and a row of each line; those below 0.05 are left out."""
    shown = {name: size / unit for name, size in lines.items() if size / unit >= 0.05}
    return [title, *(f"  {name:<34}{size:8.1f}" for name, size in shown.items())]
