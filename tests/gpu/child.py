"""The process of one stage: ``python -m tests.gpu.child --module M --folder DIR ...``."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path

from tests.gpu.result import Job, Record, StageSkippedError


def main() -> int:
    """Run the stage; returns 1 if it raised. What it checked is in ``record.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    scratch = arguments.folder / "scratch"
    scratch.mkdir()
    record = Record(arguments.folder / "record.json")
    job = Job(
        arguments.device, arguments.preset == "small", arguments.model or None, scratch,
        tuple(arguments.set),
    )  # fmt: skip
    try:
        importlib.import_module(arguments.module).run(record, job)
    except StageSkippedError as why:
        record.end(skipped=str(why))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        record.end(error=f"{type(error).__name__}: {text[:300]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
