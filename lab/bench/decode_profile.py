"""Where a decoding step of a rollout engine goes: kernels, Python, CUDA graphs.

    python lab/bench/decode_profile.py                            Qwen2.5-3B, random weights, a GPU
    python lab/bench/decode_profile.py --model small --device cpu --sequences 4 --steps 5

The engine has a run's settings, in this process. Each case prefills all sequences, decodes some
steps to warm up, times ``--steps`` steps, and profiles as many more. ``ms`` is a step without the
profiler, ``kernel_ms`` the kernels of a profiled step: where it is far below ``ms``, the GPU waits
for Python. ``graph_launches`` of a step are 0 where it did not run as a CUDA graph. The attention
backend and the graph mode are printed and in the result, which is written after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Before other packages named tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.bench.common import at_least, provenance, write
from sg_rlhf.plan.shapes import table

SMALL = "small"
#: Steps before the timed ones, after the prompts are computed.
WARM_UP = 10
#: Kernels, and functions of the host, that are listed.
LISTED = 15


def write_config(folder: Path, name: str) -> None:
    """The model's folder; the weights are random, and there is no tokenizer."""
    from tests.gpu.random_qwen2 import SMALL as SMALL_SHAPE

    shape = SMALL_SHAPE | {"model_type": "qwen2"} if name == SMALL else dict(table()[name])
    config = {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16", **shape}
    (folder / "config.json").write_text(json.dumps(config))


def make_engine(folder: Path, context: int, arguments: argparse.Namespace) -> Any:
    """vLLM's engine in this process, with the arguments of a rollout engine."""
    from sg_rlhf.overlay.patches import table as patches

    patches.install()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from sg_rlhf.overlay.rollout.engine import CPU_WORKER_EXTENSION, WORKER_EXTENSION
    from sg_rlhf.sampling import vllm_settings

    settings: dict[str, Any] = vllm_settings.engine_settings_here()
    if arguments.device == "cpu":
        settings |= vllm_settings.cpu_settings(context) | {"dtype": "float32"}
        settings["worker_extension_cls"] = CPU_WORKER_EXTENSION
    else:
        gpu = vllm_settings.first_gpu()
        settings |= vllm_settings.cuda_settings(gpu.gib if gpu else 0.0)
        settings["worker_extension_cls"] = WORKER_EXTENSION
    settings |= {
        "load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs", "max_logprobs": 1, "disable_log_stats": True,
        "max_model_len": context, **json.loads(arguments.engine_args),
    }  # fmt: skip
    return LLMEngine.from_engine_args(EngineArgs(model=str(folder), **settings))


def add_requests(engine: Any, sequences: int, log_probs: bool, arguments: Any) -> None:
    """One request per sequence, as a rollout makes them: seeded, eight to a prompt."""
    import torch
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    draw = torch.Generator().manual_seed(sequences)
    for number in range(sequences):
        if number % 8 == 0:
            prompt = torch.randint(0, 1000, (arguments.prompt,), generator=draw).tolist()
        sampling = SamplingParams(
            temperature=0.7, seed=number, max_tokens=arguments.context, ignore_eos=True,
            detokenize=False, logprobs=0 if log_probs else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        engine.add_request(f"{sequences}-{log_probs}-{number}",
                           TokensPrompt(prompt_token_ids=prompt), sampling)  # fmt: skip


def milliseconds(engine: Any, steps: int, device: str) -> float:
    """Mean time of a step."""
    from tests.gpu.measure import synchronize

    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    synchronize(device)
    return 1000 * (time.perf_counter() - began) / steps


def profiled(engine: Any, steps: int, device: str) -> dict[str, Any]:
    """The kernels and the host's functions of a step, those that take longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds) as profiler:
        milliseconds(engine, steps, device)
    on_gpu, on_host, launches = {}, {}, 0
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            on_gpu[event.key] = (event.self_device_time_total / 1000 / steps, event.count / steps)
        else:
            on_host[event.key] = (event.self_cpu_time_total / 1000 / steps, event.count / steps)
        launches += event.count if "GraphLaunch" in event.key else 0
    return {
        "kernel_ms": round(sum(ms for ms, _ in on_gpu.values()), 3),
        "graph_launches": launches / steps,
        "kernels": _largest(on_gpu),
        "host": _largest(on_host),
    }


def _largest(found: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    ordered = sorted(found.items(), key=lambda item: -item[1][0])[:LISTED]
    return [
        {"name": name[:120], "ms": round(ms, 4), "calls": round(calls, 1)}
        for name, (ms, calls) in ordered
    ]


def measure(engine: Any, sequences: int, log_probs: bool, arguments: Any) -> dict[str, Any]:
    """One case; its requests are gone afterwards."""
    add_requests(engine, sequences, log_probs, arguments)
    tokens = sequences * arguments.prompt
    # The prompts take so many steps at most.
    for _ in range(-(-tokens // 2048) + WARM_UP):
        engine.step()
    row = {"sequences": sequences, "log_probs": log_probs, "prompt": arguments.prompt}
    row["ms"] = round(milliseconds(engine, arguments.steps, arguments.device), 3)
    row |= profiled(engine, arguments.steps, arguments.device)
    row["unfinished"] = engine.get_num_unfinished_requests()
    engine.abort_request([f"{sequences}-{log_probs}-{k}" for k in range(sequences)])
    while engine.has_unfinished_requests():
        engine.step()
    return row


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="Qwen/Qwen2.5-3B-Instruct", choices=[SMALL, *sorted(table())]
    )
    parser.add_argument("--sequences", nargs="+", type=at_least(1), default=[128, 256])
    parser.add_argument("--prompt", type=at_least(1), default=512, help="tokens of a prompt [512]")
    parser.add_argument("--context", type=at_least(64), default=2048, help="data.max_len [2048]")
    parser.add_argument("--steps", type=at_least(1), default=30, help="of each measurement [30]")
    parser.add_argument("--engine-args", default="{}", help="vLLM's arguments as JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("lab/bench/results/decode_profile.json"))
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "SG_PLATFORM": arguments.device}
    if arguments.device == "cuda":
        from sg_rlhf.sampling import vllm_settings

        os.environ |= vllm_settings.cuda_variables()
    result = provenance("lab/bench/decode_profile.py", "torch", "transformers")
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), arguments.model)
        began = time.perf_counter()
        engine = make_engine(Path(folder), arguments.context, arguments)
        result["start_seconds"] = round(time.perf_counter() - began, 1)
        (result["engine"],) = engine.collective_rpc("engine_facts")
        print(json.dumps(result["engine"]), f"start: {result['start_seconds']} s", flush=True)
        result |= {"model": arguments.model, "rows": []}
        for sequences in arguments.sequences:
            for log_probs in (True, False):
                row = measure(engine, sequences, log_probs, arguments)
                result["rows"].append(row)
                write(result, arguments.out)
                shown = {k: v for k, v in row.items() if not isinstance(v, list)}
                print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
