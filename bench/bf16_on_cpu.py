"""The bf16 work of the tiny model's update, as torch does it and as the CPU platform does.

    python bench/bf16_on_cpu.py --out bench/results/bf16_on_cpu.json

A linear layer, and causal attention forward and backward with a padding mask, on one micro-batch.
Without bf16 units in the processor torch emulates the products; converting to float32 first is
then faster, and rounds once. See sg_rlhf/overlay/cpu/platform.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from arguments import as_json
from machine import machine, processor
from torch.nn.functional import scaled_dot_product_attention

from sg_rlhf.overlay.cpu import platform

RESPONSES, LENGTH = 32, 100
WIDTH, FEED_FORWARD = 128, 384
HEADS, HEAD_SIZE = 4, 32


def compared(
    inputs: tuple[torch.Tensor, ...], product: Callable[..., torch.Tensor], repeats: int = 15
) -> dict[str, float]:
    """Median times of forward and backward in bf16 and through float32, turn by turn."""
    times: dict[str, list[float]] = {"bf16_ms": [], "float32_ms": []}
    outputs = {}
    for turn in range(repeats + 1):
        for name in times:
            leaves = [x.bfloat16().requires_grad_() for x in inputs]
            start = time.perf_counter()
            wanted = leaves if name == "bf16_ms" else [x.float() for x in leaves]
            outputs[name] = product(*wanted).bfloat16()
            outputs[name].sum().backward()
            if turn:  # the first call warms up
                times[name].append((time.perf_counter() - start) * 1e3)
    bf16, float32 = (statistics.median(times[name]) for name in times)
    difference = (outputs["bf16_ms"].float() - outputs["float32_ms"].float()).detach().abs().max()
    return {
        "bf16_ms": round(bf16, 2),
        "float32_ms": round(float32, 2),
        "ratio": round(bf16 / float32, 2),
        "largest_difference": difference.item(),
    }


def main() -> None:
    """Time both on one thread and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, w = torch.randn(RESPONSES * LENGTH, WIDTH), torch.randn(FEED_FORWARD, WIDTH)
    q, k, v = (torch.randn(RESPONSES, HEADS, LENGTH, HEAD_SIZE) for _ in range(3))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(RESPONSES, 1, -1, -1)
    result = {
        "command": f"python bench/bf16_on_cpu.py --out {out}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": processor(), "memory_gb": machine()["memory_gb"]},
        "bf16_units": platform.has_bf16_units(),
        "threads": 1,
        "torch": torch.__version__,
        "linear": {
            "shape": [RESPONSES * LENGTH, WIDTH, FEED_FORWARD],
            **compared((x, w), lambda x, w: x @ w.t()),
        },
        "attention": {
            "shape": [RESPONSES, HEADS, LENGTH, HEAD_SIZE],
            **compared((q, k, v), lambda *qkv: scaled_dot_product_attention(*qkv, attn_mask=mask)),
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_json(result))
    for part in ("linear", "attention"):
        print(
            "{}: bf16 {bf16_ms} ms, through float32 {float32_ms} ms, ratio {ratio}".format(
                part, **result[part]
            )
        )


if __name__ == "__main__":
    main()
