"""Block sizes of the fused log-probs on a GPU: time and memory of forward and backward.

    python bench/head_blocks.py        heads of Qwen2.5's 3B and 7B, a minute on an H100

A block is some rows (positions) times some columns (of the vocabulary). Small blocks need little
memory and many launches. ``default`` is what a run uses.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch

from bench.common import provenance, write
from sg_rlhf.algo.log_probs import fused_log_probs
from tests.gpu.measure import GIB, costs

VOCABULARY = 151_936
HIDDEN = {"3B": 2048, "7B": 3584}
TOKENS = (256, 1024, 4096, 20_480)
ROWS = (4096, 8192)
COLUMNS = (2048, 4096, 8192, 16_384, 32_768)


def step(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: Any) -> None:
    """Forward and backward."""
    log_probs, _ = fused_log_probs.selected_log_probs(
        hidden, weight, targets, temperature=0.7, chunk=chunk
    )
    torch.autograd.grad(log_probs.sum(), (hidden, weight))


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/head_blocks.json"))
    parser.add_argument("--heads", nargs="+", choices=HIDDEN, default=list(HIDDEN))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    result = provenance("bench/head_blocks.py", "torch", "triton")
    result |= {"gpu": torch.cuda.get_device_name(), "rows": []}
    for model in arguments.heads:
        size = HIDDEN[model]
        for tokens in arguments.tokens:
            torch.manual_seed(0)
            new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
            hidden = torch.randn(tokens, size, **new).requires_grad_()
            weight = (torch.randn(VOCABULARY, size, **new) * 3 / size**0.5).requires_grad_()
            targets = torch.randint(0, VOCABULARY, (tokens,), device="cuda")
            gradients = 2 * (hidden.numel() + weight.numel())
            for rows in ROWS if tokens > ROWS[0] else ROWS[:1]:
                fused_log_probs._ROWS["cuda"] = rows
                calls = {
                    str(chunk or "default"): functools.partial(step, hidden, weight, targets, chunk)
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
