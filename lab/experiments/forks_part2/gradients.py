"""How far each arm turns the update of GRPO on a start model, or on a model that GRPO has trained.

    python -m lab.experiments.forks_part2.gradients r0 d0 r1/grpo/s9

Adds the models to gradients.json, those of runs to trained_gradients.json: cosine with GRPO's
gradient and with its AdamW step, mean over 8 minibatches of 8 prompts x 8 responses, and the
gradient's size over GRPO's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lab.experiments.forks.start_gradients import ARMS, Arms, compared, rounded
from lab.study.plan import load_study
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.data_io.dataset_writer import sha256_of

HERE = Path(__file__).parent
RUNS = Path("runs/forks_part2")
OUT = HERE / "gradients.json"
TRAINED = HERE / "trained_gradients.json"


def folder_of(name: str) -> Path:
    """Of a start model, or of the last model of a run in `RUNS`."""
    if "/" not in name:
        return HERE / "starts" / name
    (run,) = RUNS.glob(f"{name}-*")
    return run / "checkpoints/final"


def figures_of(name: str, arms: Arms) -> dict[str, Any]:
    """The model's hash, and each arm's figures beside the first one's."""
    folder = folder_of(name)
    return {
        "sha256": sha256_of(folder / "model.safetensors"),
        **rounded(compared(folder, RUNS, arms)),
    }


def main(argv: list[str] | None = None) -> int:
    """Exit status 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", help="start models, such as r0, and runs: r1/grpo/s9")
    args = parser.parse_args(argv)
    arms = {arm: ARMS[arm] for arm in load_study(HERE / "study.yaml").file.variants}
    for name in args.models:
        out = TRAINED if "/" in name else OUT
        found = json.loads(out.read_text()) if out.exists() else {}
        found[name] = figures_of(name, arms)
        write_whole(out, json.dumps(found, indent=1) + "\n")
        for arm in arms:
            print(name, arm, found[name][arm])
    return 0


if __name__ == "__main__":
    sys.exit(main())
