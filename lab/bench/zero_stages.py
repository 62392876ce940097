"""Time of one micro-batch under DeepSpeed's ZeRO stages on one GPU: what ZeRO-3's Python costs.

    python lab/bench/zero_stages.py                       Qwen2.5's 0.5B and 3B, random weights
    python lab/bench/zero_stages.py --profile             also print where the host's time goes

Engine and model are made as a run makes them (overlay, varlen attention, checkpointed layers), but
without the head, whose cost is measured by tests/gpu/log_prob_head.py. A pass is timed to its end
on the GPU. ``host`` is when Python has launched all of it: where it is close to the whole time, the
GPU waits for Python.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import multiprocessing
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Before other packages named tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.bench.common import at_least, provenance, write
from sg_rlhf.plan.shapes import table
from tests.gpu import zero3
from tests.gpu.measure import synchronize
from tests.gpu.policy_engine import policy_engine

#: ``3leaf``: ZeRO-3 with decoder layers as leaf modules, as a run on GPUs has it.
STAGES = ("3", "3leaf", "2", "1")
#: Of ``--offload``: whether the optimizer is in host memory.
OFFLOAD = {"no": (False,), "yes": (True,), "both": (False, True)}
#: Passes before the timed ones: DeepSpeed records the order of the modules in the first.
WARM_UP = 2
MODELS = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct")


def passes(engine: Any, samples: int, tokens: int, device: str) -> dict[str, Callable[[], None]]:
    """Scoring (no gradient) and training on a packed row of ``samples`` x ``tokens``."""
    ids = torch.randint(0, 1000, (1, samples * tokens), device=device)

    def forward() -> Any:
        # A tensor of its own for each pass, as each micro-batch of a run has: the row is cached
        # for its positions.
        positions = torch.arange(tokens, device=device).repeat(samples)[None]
        out = engine(input_ids=ids, position_ids=positions, logits_to_keep=1)
        return out.logits.float().sum()

    def score() -> None:
        engine.eval()
        with torch.no_grad():
            forward()

    def train() -> None:
        engine.train()
        engine.backward(forward())
        engine.step()

    return {"score": score, "train": train}


def timed(run: Callable[[], None], repeats: int, device: str) -> dict[str, float]:
    """Median milliseconds of a pass, and of the host's part of it."""
    host, whole = [], []
    for _ in range(WARM_UP + repeats):
        synchronize(device)
        began = time.perf_counter()
        run()
        launched = time.perf_counter()
        synchronize(device)
        host.append(launched - began)
        whole.append(time.perf_counter() - began)
    return {
        "ms": round(1000 * statistics.median(whole[WARM_UP:]), 1),
        "host_ms": round(1000 * statistics.median(host[WARM_UP:]), 1),
    }


def profile(run: Callable[[], None]) -> None:
    """Print the functions that take most of the host's time in a pass."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def measure(
    name: str, stage: str, offload: bool, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of a model under a stage. In a process of its own, which gives all memory back."""
    zero3.start(arguments.device)
    shape = dict(table()[name])
    if arguments.layers:
        shape["num_hidden_layers"] = arguments.layers
    # No step is due: a pass is timed, not the optimizer.
    engine = policy_engine(
        shape, int(stage[0]), arguments.device, accumulation=1000, leaf=stage == "3leaf",
        adam_offload=offload,
    )  # fmt: skip
    rows = []
    for samples in arguments.samples:
        for kind, run in passes(engine, samples, arguments.tokens, arguments.device).items():
            row = {"model": name.split("/")[-1], "zero_stage": stage, "offload": offload,
                   "pass": kind, "layers": shape["num_hidden_layers"],
                   "samples": samples}  # fmt: skip
            row |= timed(run, arguments.repeats, arguments.device)
            row["host_ms_per_layer"] = round(row["host_ms"] / shape["num_hidden_layers"], 2)
            rows.append(row)
            print(row, flush=True)
            if arguments.profile and samples == arguments.samples[0]:
                profile(run)
    torch.distributed.destroy_process_group()
    return rows


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=sorted(table()))
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument(
        "--offload", choices=OFFLOAD, default="no",
        help="optimizer in host memory, where gradients are then summed [no]",
    )  # fmt: skip
    parser.add_argument(
        "--samples", nargs="+", type=at_least(1), default=[1, 4, 16], help="of a micro-batch"
    )
    parser.add_argument("--tokens", type=at_least(1), default=1280, help="of a sample [1280]")
    parser.add_argument("--layers", type=at_least(1), help="fewer layers, to try the script")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("lab/bench/results/zero_stages.json"))
    arguments = parser.parse_args()
    result = provenance(
        "lab/bench/zero_stages.py", "torch", "deepspeed", "transformers", "openrlhf"
    )
    if arguments.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    result["rows"] = []
    for name in arguments.models:
        for stage, offload in itertools.product(arguments.stages, OFFLOAD[arguments.offload]):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                result["rows"] += pool.apply(measure, (name, stage, offload, arguments))
            write(result, arguments.out)


if __name__ == "__main__":
    main()
