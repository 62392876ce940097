"""The long profile: `python -m tests.fuzz [--seconds N] [--only NAME ...] [--json FILE]`.

Each target gets an equal share of the time, new inputs each time, and a line: how many inputs, and
what failed first. Exit status 1 if any did.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings

from lab.bench.common import write
from tests.fuzz.targets import TARGETS

BATCH = 200


def fuzz(name: str, seconds: float) -> dict[str, Any]:
    """Inputs for one target until the time is over or one fails."""
    target, inputs, slowness = TARGETS[name]
    count, failure = 0, ""
    started = time.monotonic()

    def fresh() -> Callable[[Any], None]:
        def counted(value: Any) -> None:
            nonlocal count
            count += 1
            target(value)

        return counted

    batch = settings(
        max_examples=max(10, BATCH // slowness), database=None, deadline=None, derandomize=False,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    while not failure and time.monotonic() - started < seconds:
        try:
            given(inputs)(batch(fresh()))()  # settings take a function once
        except Exception:
            failure = traceback.format_exc()
    return {"inputs": count, "seconds": round(time.monotonic() - started, 1), "failure": failure}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together")
    parser.add_argument("--only", nargs="*", default=[], choices=[*TARGETS], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there, too")
    args = parser.parse_args()
    names = args.only or [*TARGETS]
    found = {}
    for name in names:
        found[name] = fuzz(name, args.seconds / len(names))
        said = found[name]["failure"].strip().splitlines()
        print(
            f"{name:10} {found[name]['inputs']:8} inputs {found[name]['seconds']:7.1f} s  "
            f"{said[-1] if said else 'no failure'}",
            flush=True,
        )
        if said:
            print(found[name]["failure"], flush=True)
    if args.json:
        write(found, args.json)
    return int(any(one["failure"] for one in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
