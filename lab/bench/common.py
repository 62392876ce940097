"""Common parts of the benchmarks: arguments, result files, ranks, memory and growth.

Importing it needs the standard library alone, and no torch, which reads its threads once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sg_rlhf.common.resources import machine, processor

__all__ = ["machine", "processor"]

ROOT = Path(__file__).parents[2]
TINY_RECIPES = {
    "grpo_sg": ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml",
    "grpo": ROOT / "configs" / "kk" / "grpo_tiny_cpu.yaml",
}
#: Phases of a rollout whose seconds ``metrics.jsonl`` has as ``timing/PHASE``.
PHASES = ("generation", "make_experience", "ppo_train", "broadcast", "step_total")


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number, ``least`` or more."""

    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number, {least} or more, not {text}"
            )
        return found

    return number


def provenance(script: str, *packages: str) -> dict[str, Any]:
    """The origin of a result: command, date, machine, versions of the packages.

    Args:
        script: path in the repository, such as ``lab/bench/growth.py``.
    """
    return {
        "command": " ".join([f"python {script}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {name: metadata.version(name) for name in packages},
    }


def write(result: dict[str, Any], out: Path) -> None:
    """Write a result as JSON; make its folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_json(result))


def as_json(result: dict[str, Any]) -> str:
    """A result as JSON with one entry per line, and one line per entry of a long entry."""
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {_lines(v)}" for k, v in result.items()) + "\n}\n"


def _lines(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= 160 or not isinstance(value, dict | list):
        return text
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"  {json.dumps(v, ensure_ascii=False)}" for v in value) + "\n ]"
    lines = (f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
    return "{\n" + ",\n".join(lines) + "\n }"


def rank_outputs(command: Sequence[str], count: int, limit: float = 300.0) -> list[str]:
    """Run a command as each of ``count`` ranks of one job; return each rank's output.

    When one fails, or after ``limit`` seconds, the others are killed: they would wait for it.

    Raises:
        SystemExit: with the standard error of the rank that failed.
    """
    from sg_rlhf.overlay.cluster.free_port import free_port

    of_job = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count),
        "LOCAL_RANK": "0",
    }  # fmt: skip
    with contextlib.ExitStack() as files:
        said = [
            (files.enter_context(tempfile.TemporaryFile("w+")),
             files.enter_context(tempfile.TemporaryFile("w+")))
            for _ in range(count)
        ]  # fmt: skip
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, **of_job, "RANK": str(index)}, stdout=out, stderr=errors
            )
            for index, (out, errors) in enumerate(said)
        ]
        until = time.monotonic() + limit
        try:
            while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
                if time.monotonic() > until:
                    sys.exit(f"{' '.join(command)}: not done after {limit:g} s")
                time.sleep(0.05)
        finally:
            failed = [index for index, rank in enumerate(ranks) if rank.poll()]
            for rank in ranks:
                rank.kill()
                rank.wait()
        if failed:
            _, errors = said[failed[0]]
            errors.seek(0)
            sys.exit(f"{' '.join(command)}, rank {failed[0]}: {errors.read().strip()}")
        found = []
        for out, _ in said:
            out.seek(0)
            found.append(out.read())
        return found


def tree_memory_gb(pid: int) -> float:
    """Proportional set size of a process and its descendants in GiB: shared pages count once."""
    import psutil

    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 2**30


def peak_bytes(action: Callable[[], object]) -> int:
    """Most bytes of CPU tensors at one time while ``action`` runs, beyond those before it.

    Counted allocation by allocation, so it is the same in every run and no other process matters.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size, by least squares over the three largest sizes.

    1 is linear. A fixed cost per step lowers the slope, least among the largest sizes.
    """
    x, y = ([math.log(v) for v in values[-3:]] for values in (sizes, seconds))
    return statistics.linear_regression(x, y).slope
