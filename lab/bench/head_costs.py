"""One process of ``token_logprobs.py``: seconds of several ways by turns, or the memory of one."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.bench.peer_heads import PEERS, Head, load
from sg_rlhf.algo.log_probs.from_logits import log_probs_from_logits
from sg_rlhf.algo.log_probs.fused_log_probs import selected_log_probs
from sg_rlhf.overlay.patches import flash_attn_shim
from sg_rlhf.plan.shapes import shape_of

TEMPERATURE = 0.7
WAYS = ("logits", "ours", *PEERS)


def why_not(way: str, device: str) -> str | None:
    """Why a way cannot be measured on this kind of device."""
    if device == "cuda":
        return None
    return "a Triton kernel: needs CUDA" if way in PEERS and PEERS[way].needs_cuda else None


def _entropy(logits: Tensor) -> Tensor:
    p = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(p * logits, dim=-1)


def _over_logits() -> Head:
    """Upstream's own functions where OpenRLHF is there (its entropy is compiled on CUDA)."""
    entropy, log_probs = _entropy, log_probs_from_logits
    try:
        flash_attn_shim.install()
        from openrlhf.models import utils
    except ImportError:
        pass
    else:
        log_probs = utils.log_probs_from_logits
        if torch.cuda.is_available():
            entropy = utils.compute_entropy

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
        logits = (hidden @ weight.t()).to(torch.float32).div_(temperature)
        # Only logged, as in the recipes; the old and the reference pass ask for none.
        found = entropy(logits) if torch.is_grad_enabled() else None
        return log_probs(logits, targets), found

    return head


def _head(way: str, peers: Path) -> Head:
    if way == "logits":
        return _over_logits()
    if way != "ours":
        return load(way, peers)

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
        return selected_log_probs(
            hidden, weight, targets, temperature=temperature, with_entropy=torch.is_grad_enabled()
        )

    return head


def _inputs(model: str, tokens: int, device: str, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    shape = shape_of(model)
    assert shape is not None
    generator = torch.Generator(device).manual_seed(0)
    new: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype), "generator": generator}
    hidden = torch.randn(tokens, shape.hidden_size, **new).requires_grad_()
    weight = torch.randn(shape.vocab_size, shape.hidden_size, **new).mul_(0.02).requires_grad_()
    targets = torch.randint(0, shape.vocab_size, (tokens,), device=device, generator=generator)
    return hidden, weight, targets


def _forward(head: Head, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return head(*inputs, TEMPERATURE)[0]


def _without_gradient(head: Head, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    with torch.no_grad():
        _forward(head, inputs)


def _with_gradients(
    head: Head, trained: slice, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """``trained``: of (hidden, weight), those that need a gradient."""
    hidden, weight, targets = inputs
    inputs = (hidden, weight if trained.stop == 2 else weight.detach(), targets)
    return torch.autograd.grad(_forward(head, inputs).sum(), inputs[trained])


#: A step has one pass of "update" or "frozen_head" (LoRA), and one or two of "score": the old
#: log-probs, where they are not the current ones, and the reference's.
PASSES: dict[str, Callable[[Head, tuple[Tensor, Tensor, Tensor]], Any]] = {
    "score": _without_gradient,
    "update": lambda head, inputs: _with_gradients(head, slice(0, 2), inputs),
    "frozen_head": lambda head, inputs: _with_gradients(head, slice(0, 1), inputs),
}


def seconds(
    ways: list[str], model: str, tokens: int, device: str, dtype: str, repeats: int, peers: Path
) -> list[dict[str, Any]]:
    """Seconds of each pass, medians over the repeats; the ways take turns."""
    inputs = _inputs(model, tokens, device, dtype)
    few = (inputs[0][:8].detach().requires_grad_(), inputs[1], inputs[2][:8])
    rows: dict[str, dict[str, Any]] = {}
    heads: dict[str, Head] = {}
    for way in ways:
        try:
            heads[way] = _head(way, peers)
            for one in PASSES.values():
                one(heads[way], few)  # compiles, loads libraries
        except Exception as error:  # a peer's own, of any kind
            heads.pop(way, None)
            rows[way] = {"failed": f"{type(error).__name__}: {error}"[:200]}
    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for name, one in PASSES.items():
            for way, head in heads.items():
                _wait(device)
                started = time.perf_counter()
                one(head, inputs)
                _wait(device)
                taken.setdefault((way, name), []).append(time.perf_counter() - started)
    for way in heads:
        rows[way] = {f"{name}_seconds": statistics.median(taken[way, name]) for name in PASSES}
    return [{"way": way, **rows[way]} for way in ways]


def memory(
    way: str, model: str, tokens: int, device: str, dtype: str, peers: Path
) -> dict[str, Any]:
    """Peak of a pass above the inputs and the gradients that it returns."""
    inputs = _inputs(model, tokens, device, dtype)
    few = (inputs[0][:8].detach().requires_grad_(), inputs[1], inputs[2][:8])
    head = _head(way, peers)
    logits = 4 * tokens * len(inputs[1])
    found: dict[str, Any] = {"way": way}
    for name in ("score", "update"):
        one = partial(PASSES[name], head)
        one(few)
        returned = 0
        if name == "update":
            returned = sum(x.numel() * x.element_size() for x in inputs[:2])
        before = _settled(device)
        one(inputs)
        extra = max(0, _peak(device) - before - returned)
        found[f"{name}_extra_mib"] = round(extra / 2**20, 1)
        found[f"{name}_percent_of_fp32_logits"] = round(100 * extra / logits, 2)
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _settled(device: str) -> int:
    """Bytes in use, from which on the peak counts."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # What is freed goes back to the system, and the peak begins at what is left (proc(5)).
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(value) * 1024
