"""Stage d: a model's weights from one process to another on the same GPU, over CUDA IPC.

As upstream's weight sync does it where trainer and engine share a GPU: a copy of a tensor, its
handle (``reduce_tensor``) in a message, the other process opens the handle on its own device index,
copies the tensor into its model and answers; then the next one. 434 tensors make a Qwen2.5-3B.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from sg_rlhf.plan.shapes import ModelShape, shape_of
from tests.gpu.measure import GIB
from tests.gpu.result import Job, Record

MODEL = "Qwen/Qwen2.5-3B-Instruct"
SMALL = ModelShape(
    name="small", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    intermediate_size=64, vocab_size=101, tied=True, qkv_bias=True, qk_norm=False,
)  # fmt: skip
#: The index of the device in what ``reduce_tensor`` gives; upstream writes its own there.
DEVICE_ARGUMENT = 6
#: Entries of a tensor that a checksum takes at once.
CHUNK = 2**24
TIMEOUT = 60.0


def tensors_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a Qwen2, in the model's order."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}"
        for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            found[f"{at}.self_attn.{name}.weight"] = (size, hidden)
            found[f"{at}.self_attn.{name}.bias"] = (size,)
        found[f"{at}.self_attn.o_proj.weight"] = (hidden, queries)
        found[f"{at}.mlp.gate_proj.weight"] = (inner, hidden)
        found[f"{at}.mlp.up_proj.weight"] = (inner, hidden)
        found[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        found[f"{at}.input_layernorm.weight"] = (hidden,)
        found[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    found["model.norm.weight"] = (hidden,)
    if not shape.tied:
        found["lm_head.weight"] = (shape.vocab_size, hidden)
    return found


def checksum(tensor: Tensor) -> int:
    """Of the bits and their places: entries times 1, 2, ... 65,521 and again, in wrapping int64."""
    bits = tensor.detach().view(torch.int16).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].long()
        places = torch.arange(start, start + len(part), device=bits.device) % 65_521 + 1
        total += (part * places).sum()
    return int(total)


def filled(shapes: dict[str, tuple[int, ...]], device: str, seed: int) -> dict[str, Tensor]:
    """bfloat16 tensors with random entries."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }


def engine(shapes: dict[str, tuple[int, ...]], device: str, inbox: Any, outbox: Any) -> None:
    """The other process: its own tensors, which take the values that come."""
    try:
        weights = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=device)
            for name, shape in shapes.items()
        }
        outbox.put(("ready", os.getpid()))
        while (message := inbox.get()) is not None:
            name, handle = message
            if device == "cuda":
                function, arguments = handle
                arguments = list(arguments)
                arguments[DEVICE_ARGUMENT] = torch.cuda.current_device()
                weight = function(*arguments)
            else:
                weight = handle
            weights[name].copy_(weight)
            if device == "cuda":
                torch.cuda.synchronize()
            del weight
            outbox.put(("loaded", name))
        outbox.put(("checksums", {name: checksum(tensor) for name, tensor in weights.items()}))
    except Exception as error:  # for the process that waits
        outbox.put(("failed", f"{type(error).__name__}: {error}"))


def answer(outbox: Any, child: Any) -> tuple[str, Any]:
    """What the engine says; an error where it has died or is silent.

    Raises:
        RuntimeError: so.
    """
    import queue

    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            kind, content = outbox.get(timeout=1.0)
        except queue.Empty:
            if child.is_alive() and time.monotonic() < deadline:
                continue
            status = child.exitcode
            raise RuntimeError(f"the engine's process is silent (exit status {status})") from None
        if kind == "failed":
            raise RuntimeError(f"in the engine's process: {content}")
        return kind, content


def sync(weights: dict[str, Tensor], device: str, inbox: Any, outbox: Any, child: Any) -> float:
    """Send every tensor and wait for its answer; returns the seconds."""
    started = time.perf_counter()
    for name, tensor in weights.items():
        # It lives until the answer: the other process maps this memory.
        weight = tensor.clone()
        if device == "cuda":
            inbox.put((name, reduce_tensor(weight)))
        else:
            inbox.put((name, weight))
        answer(outbox, child)
        del weight
    return time.perf_counter() - started


def run(record: Record, job: Job) -> None:
    """Twice, as the first sync opens what the later ones find open."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            record.check(f"{name} has no expandable_segments", False)
            return
    shape = SMALL if job.small else shape_of(MODEL)
    assert shape is not None, MODEL
    shapes = tensors_of(shape)
    context = processes.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=engine, args=(shapes, job.device, inbox, outbox), daemon=True)
    child.start()
    try:
        kind, pid = answer(outbox, child)
        record.check("the engine is another process", kind == "ready" and pid != os.getpid())
        size = sum(torch.Size(s).numel() for s in shapes.values()) * 2
        weights: dict[str, Tensor] = {}
        for seed in range(2):
            weights.clear()
            weights = filled(shapes, job.device, seed)
            seconds = sync(weights, job.device, inbox, outbox, child)
            record.figure(
                f"sync_{seed + 1}",
                {"seconds": seconds, "gb_per_s": size / seconds / 1e9,
                 "ms_per_tensor": 1000 * seconds / len(shapes)},
            )  # fmt: skip
        inbox.put(None)
        _, found = answer(outbox, child)
    finally:
        child.join(10.0)
        if child.is_alive():
            child.kill()
    expected = {name: checksum(tensor) for name, tensor in weights.items()}
    wrong = [name for name in expected if found.get(name) != expected[name]]
    record.figure("tensors", len(shapes))
    record.figure("gib", size / GIB)
    record.check(f"all {len(shapes)} checksums are equal", not wrong, ", ".join(wrong[:5]) or None)
    if not job.on_cuda:
        record.skip("CUDA IPC", "there is no CUDA: tensors went through shared memory instead")
