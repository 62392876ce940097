"""One case, by the environment's Python: ``python -m tests.software_gpu.one_case NAME OUT``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.gpu import launch
from tests.gpu.stages import Stage
from tests.software_gpu.cases import BY_NAME


def main(name: str, out: Path) -> int:
    """Run it and print its line; returns 1 if it failed."""
    case = BY_NAME[name]
    found = launch.probe()
    if not launch.is_software(found.get("gpu")):
        print(f"{name}: no software GPU: {found}", file=sys.stderr)
        return 1
    stage = Stage(name, "software", case.proves, (), 60 * case.minutes, case.module)
    outcome = launch.run_stage(
        stage,
        launch.Options(
            device="cuda",
            preset="small",
            out=out,
            logs=out / "logs",
            model=None,
            flags="",
            overrides=case.overrides,
            command="python -m tests.software_gpu",
            file=f"{name}.json",
        ),
        found["gpu"],
    )
    print(f"{name:<16} {outcome.status:<7} {outcome.seconds:5.0f} s  {outcome.note}", flush=True)
    launch.print_details(outcome)
    if outcome.status == "failed":
        print(f"     the whole output: {outcome.log}", file=sys.stderr)
    # A stage that is skipped here has proved nothing.
    return 0 if outcome.status == "passed" else 1


if __name__ == "__main__":
    # The stage is ended with all that it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1], Path(sys.argv[2])))
    except KeyboardInterrupt:
        sys.exit(130)
