"""How long the tests' hostile answers take by the wall clock, one after the other.

    python -m lab.experiments.graders.grading_limits --out FILE

The limit of an answer is processor time (`sg_rlhf.tasks.math.answers.pool`); on a machine
that is not starved the two should agree. What is above the limit is the pool's notice of a worker's
end and, for an answer that finds no worker, the start of one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from tqdm import tqdm

from lab.bench.common import provenance, write
from lab.experiments.graders import options
from sg_rlhf.tasks.math.answers.pool import DEFAULT_WORKERS
from sg_rlhf.tasks.math.grading import WorkerPool, grade
from tests.unit.tasks.math.test_grading_hostile import HOSTILE


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.graders.grading_limits", description=__doc__.split("\n")[0]
    )
    options.add(parser, "--out")
    args = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    pool = WorkerPool(DEFAULT_WORKERS)
    grade(r"\boxed{x+1}", "1+x", pool)  # start it
    taken: dict[str, dict[str, Any]] = {}
    for name, answer in tqdm(HOSTILE.items(), desc="answers", disable=None):
        begun = time.perf_counter()
        reason = grade(f"So \\boxed{{{answer}}}.", "5", pool).reason
        taken[name] = {"seconds": round(time.perf_counter() - begun, 2), "reason": str(reason)}
    pool.close()
    slowest = max(taken, key=lambda name: taken[name]["seconds"])
    result = {
        **provenance("lab/experiments/graders/grading_limits.py", "math-verify", "sympy"),
        "load_before": load,
        "limit_s": pool.limit_s,
        "answers": len(taken),
        "slowest": {"name": slowest, **taken[slowest]},
        "seconds": taken,
    }
    write(result, args.out)
    seconds = taken[slowest]["seconds"]
    print(f"{args.out}: {len(taken)} answers, the slowest ({slowest}) {seconds} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
