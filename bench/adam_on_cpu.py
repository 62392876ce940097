"""An Adam step in host memory, with DeepSpeed's compiled kernel and with torch's fused one.

    DS_ACCELERATOR=cpu python bench/adam_on_cpu.py --out bench/results/adam_on_cpu.json

What ``ds.adam_offload`` runs on a machine with GPUs: DeepSpeed's own is compiled at first use
against a CUDA toolkit, the other comes with torch (sg_rlhf/overlay/model/adam.py). Turn by turn,
float32, on one thread and on two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from arguments import as_json
from machine import provenance

PARAMETERS = 50_000_000
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


def optimizer(compiled: bool) -> torch.optim.Optimizer:
    """DeepSpeed's compiled Adam, or torch's fused one, over the same parameter and gradient."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(PARAMETERS, generator=generator))
    parameter.grad = torch.randn(PARAMETERS, generator=generator)
    if not compiled:
        return torch.optim.AdamW([parameter], fused=True, **SETTINGS)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([parameter], **SETTINGS)


def timed(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, by turns; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(statistics.median(of[1:]), 1) for name, of in times.items()}


def main() -> None:
    """Time both and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each [15]")
    arguments = parser.parse_args()
    both = {"deepspeed_ms": optimizer(compiled=True), "torch_ms": optimizer(compiled=False)}
    result = {
        **provenance("adam_on_cpu.py", "torch", "deepspeed"),
        "parameters": PARAMETERS,
        "threads": {},
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        steps = {name: each.step for name, each in both.items()}
        result["threads"][str(threads)] = timed(steps, arguments.repeats)
    own, other = (each.param_groups[0]["params"][0] for each in both.values())
    result["largest_difference"] = (own - other).abs().max().item()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(as_json(result))
    for threads, of in result["threads"].items():
        print(f"threads {threads}: {of}")


if __name__ == "__main__":
    main()
