"""Measure how well a pretrained model solves variants of the domain `arithmetic` before training.

A task can be trained on if the model starts between 10 and 60 % and most groups of responses have
right and wrong ones: only these groups have a signal.

    sg-rlhf data model smollm2-135m --out data/smollm2-135m
    python -m lab.experiments.smollm2_135m.start_accuracy --model data/smollm2-135m
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from sg_rlhf.data_io import model_folder
from sg_rlhf.sampling import vllm_settings
from sg_rlhf.tasks.arithmetic.data import DATA, generate
from sg_rlhf.tasks.arithmetic.domain import grade

HERE = Path(__file__).parent
#: Keys of `--generate` that differ from the defaults.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"first": 9, "shown": 0},
    {"first": 9, "form": "number"},
    {"first": 99, "form": "number"},
    {"first": 9},
    {"first": 29},
    {"first": 49},
    {"first": 99},
    {"first": 99, "second": 99},
)
PROMPTS, GROUP, MAX_TOKENS, TEMPERATURE = 64, 8, 24, 1.0


def measure(engine: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Figures of one variant: a row of the table."""
    from vllm import SamplingParams

    assert DATA.generator is not None
    keys = {**DATA.generator.defaults, "count": PROMPTS, "test_count": 0, **variant}
    rows, _, _ = generate(**keys)
    settings = SamplingParams(n=GROUP, temperature=TEMPERATURE, max_tokens=MAX_TOKENS, seed=0)
    began = time.monotonic()
    answered = engine.chat([row["input"] for row in rows], settings, use_tqdm=False)
    seconds = time.monotonic() - began
    groups = [
        [grade(response.text, row["answer"]).correct for response in group.outputs]
        for group, row in zip(answered, rows, strict=True)
    ]
    responses = [response for group in answered for response in group.outputs]
    return {
        **variant,
        "accuracy": sum(map(sum, groups)) / len(responses),
        "groups_with_signal": sum(0 < sum(group) < GROUP for group in groups) / PROMPTS,
        "tokens": sum(len(response.token_ids) for response in responses) / len(responses),
        "truncated": sum(r.finish_reason == "length" for r in responses) / len(responses),
        "prompt_tokens": sum(len(group.prompt_token_ids) for group in answered) / PROMPTS,
        "seconds": round(seconds, 1),
        "example": responses[0].text,
    }


def table(result: dict[str, Any]) -> str:
    """The table of the tutorial."""
    lines = [
        "| sums | shown | accuracy | groups with signal | tokens | truncated | a response |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    assert DATA.generator is not None
    for row in result["variants"]:
        keys = {**DATA.generator.defaults, **row}
        shown = f"{keys['shown']}, {keys['form']}" if keys["shown"] else "none"
        text = " ".join(row["example"].split())
        lines.append(
            f"| to {keys['first']} + {keys['second']} | {shown} | {row['accuracy']:.2f} "
            f"| {row['groups_with_signal']:.2f} | {row['tokens']:.1f} | {row['truncated']:.2f} "
            f"| `{text[:40]}` |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure every variant, write the JSON file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, type=Path, help="folder of the model")
    parser.add_argument("--out", type=Path, default=HERE / "start_accuracy.json")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    # Blocks of 32 tokens: the responses to a prompt of 90 tokens then share two of them.
    engine = LLM(
        str(args.model), dtype="float32", max_model_len=512, block_size=32,
        enable_prefix_caching=True, **vllm_settings.cpu_settings(512, 2**30),
    )  # fmt: skip
    result: dict[str, Any] = {
        "model": model_folder.source(args.model) or str(args.model),
        "prompts": PROMPTS, "group": GROUP, "max_tokens": MAX_TOKENS, "temperature": TEMPERATURE,
        "variants": [],
    }  # fmt: skip
    for variant in VARIANTS:
        result["variants"].append(measure(engine, variant))
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(table(result).splitlines()[-1], result["variants"][-1]["seconds"], flush=True)
    print(table(result))


if __name__ == "__main__":
    main()
