"""A bf16 linear layer of the tiny model, as torch multiplies it and as the CPU platform does.

    python bench/bf16_linear.py --out bench/results/bf16_linear.json

Without bf16 units in the processor torch emulates the product; converting to float32 first is then
faster, and rounds once. See sg_rlhf/overlay/cpu/platform.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sg_rlhf.overlay.cpu import platform

TOKENS, WIDTH, FEED_FORWARD = 3200, 128, 384


def milliseconds(product: Callable[[], object], repeats: int = 15) -> float:
    """Median time of one call."""
    product()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        product()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Time both on one thread and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    w = torch.randn(FEED_FORWARD, WIDTH).bfloat16()
    native = milliseconds(lambda: x @ w.t())
    converted = milliseconds(lambda: (x.float() @ w.float().t()).bfloat16())
    difference = ((x @ w.t()).float() - (x.float() @ w.float().t()).bfloat16().float()).abs().max()
    result = {
        "command": "python bench/bf16_linear.py",
        "date": time.strftime("%Y-%m-%d"),
        "bf16_units": platform.has_bf16_units(),
        "shape": [TOKENS, WIDTH, FEED_FORWARD],
        "threads": 1,
        "torch": torch.__version__,
        "bf16_ms": native,
        "float32_ms": converted,
        "ratio": native / converted,
        "largest_difference": float(difference),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"bf16 {native:.1f} ms, float32 {converted:.1f} ms, ratio {native / converted:.1f}")


if __name__ == "__main__":
    main()
