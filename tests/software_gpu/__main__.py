"""Run the CUDA stack without a GPU.

Installs the packages of requirements/cuda.lock in .cache/software_gpu (about 10 GB, once), builds a
CUDA device made of software in it, and runs the cases one after the other. A case that has passed
at this commit is not run again.

Nothing here is a GPU result: speed, numerics of kernels and the real NCCL are not shown.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.launch import commit
from tests.software_gpu import cases, environment
from tests.software_gpu.cases import Case

OUT = environment.ROOT / "out" / "software_gpu"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.software_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", nargs="*", help="some of them, by name [all]")
    parser.add_argument("--short", action="store_true", help="imports, device and one pipeline")
    parser.add_argument("--again", action="store_true", help="also what has passed at this commit")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results [%(default)s]")
    parser.add_argument("--list", action="store_true", help="the table of the cases, and stop")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; returns the exit status."""
    arguments = parse(argv)
    if arguments.list:
        print(cases.table())
        return 0
    try:
        chosen = cases.chosen(arguments.case, arguments.short)
    except ValueError as error:
        print(f"software GPU: {error}", file=sys.stderr)
        return 2
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        environment.make()
    except subprocess.CalledProcessError as error:
        return 2 if error.returncode == 2 else 1
    environment.raise_open_files()
    failed = False
    for case in chosen:
        if not arguments.again and _has_passed(out / f"{case.name}.json"):
            print(f"{case.name:<16} has passed at this commit; --again runs it once more")
            continue
        failed |= _run(case, out)
    return 1 if failed else 0


def _has_passed(file: Path) -> bool:
    """At this commit, without changes since."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    here = commit()
    known = here is not None and not here.endswith("+changes")
    return known and found["status"] == "passed" and found["commit"] == here


def _run(case: Case, out: Path) -> bool:
    """Returns whether it failed. The case's own process prints its line."""
    seen = environment.variables(case, out)
    command = [str(environment.PYTHON), "-m", "tests.software_gpu.one_case", case.name, str(out)]
    process = subprocess.Popen(command, cwd=environment.ROOT, env=seen)
    try:
        return process.wait() != 0
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        environment.remove_table(Path(seen["SOFTWARE_GPU_TABLE"]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("software GPU: interrupted", file=sys.stderr)
        sys.exit(130)
