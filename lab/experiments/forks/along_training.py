"""Gradients and sharpness along training, of the runs with seed 0.

    python -m lab.experiments.forks.along_training

For each corpus: the start model, and GRPO and GRPO-SG outside the clip after 20 and 40 rollouts.
Each model answers 16 prompts x 8 for the gradients (Eq. 17, 18); sharpness (Eq. 14) is on one batch
of the start model. Writes along_training.json and prints its table.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file, save_file

from lab.measure import minibatch_gradients, sharpness, token_gradients
from sg_rlhf.common.atomic_io import write_whole

HERE = Path(__file__).parent
RUNS = Path("runs/forks")
OUT = HERE / "along_training.json"
ARMS, CORPORA, MIDDLE, LAST = ("grpo", "sg_outside"), ("r", "d"), 20, 40
BATCH = [
    "--data", str(RUNS / "data/arithmetic/train.jsonl"), "--threads", "2",
    "--reward", "module:lab.experiments.forks.reward", "--prompts", "16", "--group", "8",
]  # fmt: skip
ALGORITHMS = [f"configs/algorithms/{name}.yaml" for name in ("grpo", "grpo_sg_outside")]
RHO = 0.05


def checkpoint(run: Path, rollout: int, scratch: Path) -> Path:
    """A run's model after a rollout, as a Hugging Face folder."""
    final = run / "checkpoints/final"
    if rollout == LAST:
        return final
    out = scratch / f"{run.parent.parent.name}_{run.parent.name}_{rollout}"
    shutil.copytree(final, out, dirs_exist_ok=True)
    states = get_fp32_state_dict_from_zero_checkpoint(
        str(run / "checkpoints/deepspeed/_actor"), tag=f"global_step{rollout}"
    )
    names = load_file(final / "model.safetensors").keys()
    save_file(
        {name: states[name].contiguous() for name in names},
        out / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    return out


def models(corpus: str, scratch: Path) -> Iterator[tuple[str, int, Path]]:
    """(arm, rollout, model) of a corpus; the start model first."""
    yield "start", 0, RUNS / "starts" / f"{corpus}0"
    for arm in ARMS:
        (run,) = (RUNS / f"{corpus}0" / arm).glob("s0-*")
        for rollout in (MIDDLE, LAST):
            yield arm, rollout, checkpoint(run, rollout, scratch)


def measured(
    main: Callable[[Sequence[str]], int], scratch: Path, *arguments: str
) -> dict[str, Any]:
    """The JSON of a measured model; its table goes to the terminal."""
    out = scratch / "measured.json"
    if main([*arguments, *BATCH, "--json", str(out)]):
        raise SystemExit(1)
    return dict(json.loads(out.read_text())["models"][0])


def row(arm: str, rollout: int, model: Path, corpus: str, scratch: Path) -> dict[str, Any]:
    """All figures of one model."""
    name = ["--model", str(model)]
    tokens = measured(token_gradients.main, scratch, *name, "--tokens", "1024")
    spread = measured(
        minibatch_gradients.main, scratch, *name, "--batches", "10", "--warm-up", "0",
        "--algorithm", *ALGORITHMS,
    )  # fmt: skip
    start, kept = RUNS / "starts" / f"{corpus}0", scratch / f"{corpus}.json"
    rise = measured(
        sharpness.main, scratch, *name, "--rho", str(RHO), "--sampler", str(start),
        "--batch", str(kept),
    )  # fmt: skip
    grpo, outside = spread["algorithms"]
    return {
        "corpus": corpus, "arm": arm, "rollout": rollout, **tokens["sum"],
        "factor": tokens["summary"]["grad_norm_over_one_minus_p"],
        "spread_grpo": grpo["spread"], "spread_outside": outside["spread"],
        "size_outside": outside["size"], "cosine_outside": outside["cosine"],
        "sharpness": rise["results"][0]["sharpness"],
        "first_order": rise["results"][0]["first_order"],
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| corpus | model | rollouts | over the sum of norms | over the bound | over independent "
        "| mean cosine | spread, GRPO | spread, outside | sharpness |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        lines.append(
            f"| {r['corpus'].upper()} | {r['arm']} | {r['rollout']} | {r['over_sum_of_norms']:.4f} "
            f"| {r['over_bound']:.5f} | {r['over_independent']:.2f} | {r['mean_cosine']:+.5f} "
            f"| {r['spread_grpo']:.3f} | {r['spread_outside']:.3f} | {r['sharpness']:.4f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Exit status 0."""
    scratch = RUNS / "along_training"
    scratch.mkdir(parents=True, exist_ok=True)
    rows = [
        row(arm, rollout, model, corpus, scratch)
        for corpus in CORPORA
        for arm, rollout, model in models(corpus, scratch)
    ]
    write_whole(OUT, json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
