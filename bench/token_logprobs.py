"""Log-probs of tokens under the head of a 3B to 8B model: memory and time of each way to them.

    python bench/token_logprobs.py --out bench/results/token_logprobs_cpu.json
    python bench/token_logprobs.py --device cuda --tokens 1024,4096,8192,16384,32768 \\
        --out bench/results/token_logprobs_cuda.json

``logits`` is upstream's path: logits of the model's dtype, a float32 copy, divided by the
temperature, the entropy of the whole vocabulary, the log-probs. Each measurement is a process of
its own. Memory is the peak above the inputs and their gradients, in % of the float32 logits. Time
is the median of forward and backward over the repeats, by turns. The entropy is computed and only
logged, as the recipes do.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import provenance
from peer_heads import PEERS, load
from torch import Tensor

from sg_rlhf.algo.token_logprobs import log_probs_from_logits, selected_log_probs
from sg_rlhf.overlay import flash_attn_stand_in
from sg_rlhf.plan.shapes import shape_of

MODELS = ("Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B-Instruct")
TEMPERATURE = 0.7


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
    return selected_log_probs(hidden, weight, targets, temperature=temperature, with_entropy=True)


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).to(torch.float32)
    return logits.div_(temperature)


def _entropy(logits: Tensor) -> Tensor:
    p = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(p * logits, dim=-1)


def logits(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
    """Upstream's own functions where OpenRLHF is there (its entropy is compiled on CUDA)."""
    try:
        flash_attn_stand_in.install()
        from openrlhf.models.utils import compute_entropy
        from openrlhf.models.utils import log_probs_from_logits as of_upstream
    except ImportError:
        compute_entropy, of_upstream = _entropy, log_probs_from_logits
    z = _logits(hidden, weight, temperature)
    entropy = (compute_entropy if hidden.is_cuda else _entropy)(z)
    return of_upstream(z, targets), entropy


def measure(
    way: str, model: str, tokens: int, device: str, dtype: str, repeats: int
) -> dict[str, Any]:
    """One way at one size, in this process."""
    folder = Path(sys.argv[sys.argv.index("--peers") + 1])
    head = {"ours": ours, "logits": logits}.get(way) or load(way, folder)
    shape = shape_of(model)
    assert shape is not None
    generator = torch.Generator(device).manual_seed(0)
    new: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype), "generator": generator}
    hidden = torch.randn(tokens, shape.hidden_size, **new).requires_grad_()
    weight = torch.randn(shape.vocab_size, shape.hidden_size, **new).mul_(0.02).requires_grad_()
    targets = torch.randint(0, shape.vocab_size, (tokens,), device=device, generator=generator)
    # The gradients' own memory is everyone's.
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)

    def once(count: slice) -> tuple[float, float]:
        started = time.perf_counter()
        log_probs, _ = head(hidden[count], weight, targets[count], TEMPERATURE)
        _wait(device)
        between = time.perf_counter()
        log_probs.sum().backward()
        _wait(device)
        return between - started, time.perf_counter() - between

    once(slice(8))  # compiles, loads libraries
    before = _memory(device, reset=True)
    seconds = [once(slice(None)) for _ in range(repeats)]
    extra = _memory(device) - before
    forward, backward = (statistics.median(part) for part in zip(*seconds, strict=True))
    full = 4 * tokens * shape.vocab_size
    return {
        "forward_seconds": round(forward, 4),
        "backward_seconds": round(backward, 4),
        "extra_mib": round(extra / 2**20, 1),
        "percent_of_fp32_logits": round(100 * extra / full, 1),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _memory(device: str, reset: bool = False) -> int:
    """Peak bytes so far; on CUDA since the reset."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Every way at every size, then the JSON and a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", help="of hidden and weight [float32 on cpu, bfloat16 on cuda]")
    parser.add_argument("--models", default=",".join(MODELS), help="ids of sg_rlhf.plan.shapes")
    parser.add_argument("--tokens", default="1024", help="numbers of tokens, by commas [1024]")
    parser.add_argument("--ways", default=",".join(["logits", "ours", *PEERS]))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peers", type=Path, default=Path(".cache/peers"), help="peers' sources")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    if arguments.one:
        way, model, tokens = arguments.one.split(",")
        print(
            json.dumps(measure(way, model, int(tokens), arguments.device, dtype, arguments.repeats))
        )
        return
    rows = []
    for model in arguments.models.split(","):
        for tokens in map(int, arguments.tokens.split(",")):
            for way in arguments.ways.split(","):
                row = {"model": model, "tokens": tokens, "way": way}
                if arguments.device == "cpu" and way in PEERS and PEERS[way].needs_cuda:
                    rows.append({**row, "skipped": "a Triton kernel: needs CUDA"})
                    continue
                done = subprocess.run(
                    [
                        sys.executable, __file__, "--one", f"{way},{model},{tokens}",
                        "--device", arguments.device, "--dtype", dtype,
                        "--repeats", str(arguments.repeats), "--peers", str(arguments.peers),
                    ],
                    capture_output=True, text=True,
                )  # fmt: skip
                found = (
                    json.loads(done.stdout.splitlines()[-1])
                    if done.returncode == 0
                    else {"failed": (done.stderr.strip().splitlines() or ["killed"])[-1][:200]}
                )
                rows.append({**row, **found})
                print(rows[-1], flush=True)
    result = {
        **provenance("token_logprobs.py", "torch"),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "dtype": dtype,
        "peers": {name: peer.origin for name, peer in PEERS.items()},
        "rows": rows,
    }
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
