"""Block sizes of the fused log-probs on a GPU: time and memory of forward and backward.

    python lab/bench/head_blocks.py        heads of Qwen2.5's 3B and 7B, a minute on an H100

A block is some rows (positions) times some columns (of the vocabulary). Small blocks need little
memory and many launches. ``default`` is what a run uses.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

# Before other packages named tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.bench.common import at_least, provenance, write
from sg_rlhf.algo.log_probs import fused_log_probs
from tests.gpu import log_prob_head
from tests.gpu.measure import GIB, costs
from tests.gpu.result import Job

HIDDEN = {name: log_prob_head.HIDDEN[f"qwen2.5-{name.lower()}"] for name in ("3B", "7B")}
TOKENS = (256, 1024, 4096, 20_480)
ROWS = (4096, 8192)
COLUMNS = (2048, 4096, 8192, 16_384, 32_768)


def head(chunk: int | None, *data: torch.Tensor) -> torch.Tensor:
    """Log-probs by blocks of so many columns."""
    temperature = log_prob_head.TEMPERATURE
    return fused_log_probs.selected_log_probs(*data, temperature=temperature, chunk=chunk)[0]


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("lab/bench/results/head_blocks.json"))
    parser.add_argument("--heads", nargs="+", choices=HIDDEN, default=list(HIDDEN))
    parser.add_argument("--tokens", nargs="+", type=at_least(1), default=list(TOKENS))
    parser.add_argument("--repeats", type=at_least(1), default=5)
    arguments = parser.parse_args()
    result = provenance("lab/bench/head_blocks.py", "torch", "triton")
    result |= {"gpu": torch.cuda.get_device_name(), "rows": []}
    job = Job("cuda", small=False, model=None, scratch=Path())
    for model in arguments.heads:
        for tokens in arguments.tokens:
            data = log_prob_head.inputs(tokens, HIDDEN[model], log_prob_head.VOCABULARY, job)
            gradients = sum(x.numel() * x.element_size() for x in data[:2])
            for rows in ROWS if tokens > ROWS[0] else ROWS[:1]:
                fused_log_probs._ROWS["cuda"] = rows
                calls: dict[str, Callable[[], object]] = {
                    str(chunk or "default"): functools.partial(
                        log_prob_head.with_gradients, functools.partial(head, chunk), *data
                    )
                    for chunk in (None, *COLUMNS)
                }
                for name, cost in costs(calls, "cuda", repeats=arguments.repeats).items():
                    row = {"head": model, "tokens": tokens, "block_rows": rows, "columns": name}
                    row["ms"] = cost.milliseconds
                    if cost.peak_bytes is not None:
                        row["extra_gib"] = round((cost.peak_bytes - gradients) / GIB, 3)
                    result["rows"].append(row)
                    print(row, flush=True)
            write(result, arguments.out)


if __name__ == "__main__":
    main()
