"""What an update costs beside its arithmetic, as counts and ratios on a CPU.

    python lab/bench/update_costs.py --out lab/bench/results/update_costs.json

``python``     processor time of a layer's passes (forward, recomputed, backward) in a tiny model:
               ZeRO-3, ZeRO-3 with layers as leaf modules, ZeRO-2, and no ZeRO at all, in turns.
               The arithmetic is next to nothing, so this is Python's part.
``transfers``  how often a parameter's gradient crosses to the host's memory or back in an optimizer
               step with ``ds.adam_offload``, by ZeRO stage and ``ds.grad_accum_dtype``. Counted in
               DeepSpeed's own functions.
``sums``       the error of a sum of noisy bf16 gradients over micro-batches, kept in bf16 and in
               float32, as a share of the sum.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

# Before other packages named tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.bench.common import at_least, provenance, write
from tests.gpu import zero3
from tests.gpu.policy_engine import policy_engine

SHAPE: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "tie_word_embeddings": True,
}  # fmt: skip
TOKENS = 16
WAYS = ("3", "3leaf", "2", "none")
#: (ZeRO stage, ds.grad_accum_dtype); None is bf16.
OFFLOADED = ((3, None), (2, None), (2, "fp32"), (1, None))


def loss_of(model: Any) -> Any:
    """Of a row of tokens, made anew for each pass as in a run."""
    ids = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS))
    positions = torch.arange(TOKENS)[None]
    return model(input_ids=ids, position_ids=positions, logits_to_keep=1).logits.float().sum()


def layer_seconds(way: str, layers: int, repeats: int, turns: Any, done: Any) -> list[float]:
    """Processor seconds of a layer's two passes, each time this way gets its turn."""
    zero3.start("cpu")
    torch.set_num_threads(1)
    shape = SHAPE | {"num_hidden_layers": layers}
    stage = 2 if way == "none" else int(way[0])
    engine = policy_engine(shape, stage, "cpu", accumulation=10**6, leaf=way == "3leaf")
    if way == "none":
        import copy

        plain = copy.deepcopy(engine.module)
        for parameter in plain.parameters():
            parameter.__dict__.pop("grad_accum", None)
        engine.destroy()

    def run() -> None:
        if way == "none":
            loss_of(plain).backward()
        else:
            engine.backward(loss_of(engine))
            engine.step()

    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        turns.acquire()
        began = time.process_time()
        run()
        seconds.append((time.process_time() - began) / layers)
        done.release()
    return seconds


def python_per_layer(layers: int, repeats: int) -> dict[str, Any]:
    """All ways take turns, a pass each; the median of each, and ratios to no ZeRO."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(len(WAYS)) as pool:
        turns = {way: manager.Semaphore(0) for way in WAYS}
        done = manager.Semaphore(0)
        waiting = {
            way: pool.apply_async(layer_seconds, (way, layers, repeats, turns[way], done))
            for way in WAYS
        }
        for _ in range(repeats):
            for way in WAYS:
                turns[way].release()
                while not done.acquire(timeout=5):
                    if waiting[way].ready():
                        waiting[way].get()
        seconds = {way: statistics.median(found.get()) for way, found in waiting.items()}
    return {
        "layers": layers,
        "repeats": repeats,
        "milliseconds": {way: round(1000 * value, 2) for way, value in seconds.items()},
        "leaf_over_plain": round(seconds["3leaf"] / seconds["3"], 3),
        "leaf_over_zero2": round(seconds["3leaf"] / seconds["2"], 3),
        "leaf_over_none": round(seconds["3leaf"] / seconds["none"], 3),
        "zero3_over_none": round(seconds["3"] / seconds["none"], 3),
    }


def transfers(stage: int, sums: str | None, micro_batches: int) -> dict[str, Any]:
    """Transfers of a gradient in one optimizer step, by what DeepSpeed calls."""
    zero3.start("cpu")
    torch.set_num_threads(1)
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    count: Counter[str] = Counter()

    def counted(owner: Any, name: str, amount: Any) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            for kind, number in amount(self, *args).items():
                count[kind] += number
            return original(self, *args, **kwargs)

        setattr(owner, name, call)

    below_3, at_3 = DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
    counted(below_3, "async_accumulate_grad_in_cpu_via_gpu",
            lambda self, param: {"sum": 2 if self.micro_step_id else 1})  # fmt: skip
    counted(below_3, "async_inplace_copy_grad_to_fp32_buffer_from_gpu",
            lambda self, param: {"step": 1})  # fmt: skip
    # The first micro-batch copies to the host and back, the others from the host and to it.
    counted(at_3, "partition_grads", lambda self, params, parts: {"sum": 2 * len(params)})
    counted(at_3, "_offload_grad_partition_at_boundary", lambda self, *_: {"step": 1})
    torch.manual_seed(0)
    engine = policy_engine(
        SHAPE | {"num_hidden_layers": 2}, stage, "cpu", accumulation=micro_batches,
        checkpointing=False, adam_offload=True, fp32_sums=sums == "fp32",
    )  # fmt: skip
    parameters = sum(1 for _ in engine.module.parameters())
    norms = []
    for _ in range(2):
        torch.manual_seed(0)
        count.clear()
        for _ in range(micro_batches):
            engine.backward(loss_of(engine))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    if not count["step"]:  # the float32 partition is copied as it is
        count["step"] = parameters
    return {
        "zero_stage": stage, "sums": sums or "bf16", "micro_batches": micro_batches,
        "parameters": parameters, "while_summing": count["sum"] / parameters,
        "at_the_step": count["step"] / parameters,
        "crossings": (count["sum"] + count["step"]) / parameters, "grad_norm": norms[0],
    }  # fmt: skip


def sum_errors(terms: int) -> dict[str, Any]:
    """RMS error of a sum of bf16 terms, each as noisy as it is large, by the sum's dtype."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(terms, 100_000, generator=generator)
    gradients = (1 + noise).to(torch.bfloat16)
    exact = gradients.double().sum(0)
    found: dict[str, Any] = {"terms": terms}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        total = torch.zeros(gradients.shape[1], dtype=dtype)
        for term in gradients:
            total += term.to(dtype)
        error = (total.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        found[name] = float(f"{float(error):.3g}")
    return found


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=at_least(1), default=36)
    parser.add_argument("--repeats", type=at_least(1), default=7)
    parser.add_argument("--micro-batches", type=at_least(2), default=4)
    parser.add_argument("--terms", type=at_least(2), default=64)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    result = provenance(
        "lab/bench/update_costs.py", "torch", "deepspeed", "transformers", "openrlhf"
    )
    result["sums"] = sum_errors(arguments.terms)
    print(result["sums"], flush=True)
    result["transfers"] = []
    for stage, sums in OFFLOADED:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(transfers, (stage, sums, arguments.micro_batches))
        result["transfers"].append(row)
        print(row, flush=True)
    result["python"] = python_per_layer(arguments.layers, arguments.repeats)
    print(result["python"])
    write(result, arguments.out)


if __name__ == "__main__":
    main()
