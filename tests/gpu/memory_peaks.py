"""Stage h: peaks of a recipe's phases beside the plan, for recipes of several GPUs on one.

Rank 0 of N ranks scores, updates and sends its weights, by the real DeepSpeed, overlay and
allocator. The other ranks and the engines do not exist: collectives return at once, so what a rank
gathers is not the model. Sizes and lifetimes of tensors are shown, and where the host waits. The
software GPU runs it too (tests/software_gpu); there large tensors have no values at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sg_rlhf.plan import gpu_memory, shapes
from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.load import load_for
from sg_rlhf.plan.of_recipe import Plan, plan_of
from sg_rlhf.plan.run_shape import RunShape
from tests.gpu.launch import ROOT, probe
from tests.gpu.result import Job, Record, StageSkippedError

#: Recipe, hardware, further keys. Below ZeRO-3 a software GPU cannot hold 3B in host memory, so
#: there it is the recipe of 0.5B. Its optimizer stays on the GPU, as in stage f of the GPU tests.
CASES = (
    ("grpo_qwen2.5-3b-instruct", "8x80gb", ()),
    ("grpo_qwen2.5-3b-instruct", "4x80gb", ()),
    ("grpo_1xgpu", "1x80gb", ("ds.adam_offload=false",)),
    ("grpo_qwen2.5-7b-instruct-1m", "8x80gb", ()),
)
#: Share of the plan by which a peak may differ.
TOLERANCE = 0.1
PHASES = ("score", "update", "sync")
#: Micro-batches of an optimizer step. ZeRO-3 fetches ahead from the second pass on.
MICRO_BATCHES, STEPS = 2, 2


def run(record: Record, job: Job) -> None:
    """Each recipe twice: with room to spare, and with just the memory of the plan."""
    if not job.on_cuda:
        raise StageSkippedError("a CPU's allocator counts no peaks")
    # In a process of its own: this one takes nothing of the GPU.
    room = probe()["gpu"]["memory_gib"]
    for index, (recipe, hardware, overrides) in enumerate(CASES):
        name = " ".join((recipe, hardware, *overrides))
        plan = _plan(recipe, hardware, overrides)
        # While it scores and sends weights, the optimizer's states are in host memory.
        planned = {phase: plan.memory.policy_tensors_gib(phase) for phase in PHASES}
        least = planned["update"] * (1.0 + gpu_memory.GAPS)
        needed = least + gpu_memory.CONTEXT / GIB
        if needed > room:
            record.skip(name, f"needs {needed:.1f} GiB, found {room}")
            continue
        found = _process(index)
        if found is None:
            raise RuntimeError(f"{name}: no figures, see the log")
        record.figure(name, {"planned_gib": planned, **found})
        for phase, expected in planned.items():
            difference = found[f"{phase}_gib"] / expected - 1.0
            record.within(f"{name}: {phase} beside the plan", abs(difference), TOLERANCE)
        waits, layers = found["host_waits"], plan.run.model.num_layers
        record.check(f"{name}: no wait of the host in a layer", waits < layers, waits, layers)
        record.check(
            f"{name}: runs in the {least:.1f} GiB that the plan gives PyTorch",
            _process(index, least) is not None,
        )


def _process(index: int, gib: float | None = None) -> dict[str, float] | None:
    """The figures of a case, a rank of its own job; None if it failed.

    Args:
        gib: the most that PyTorch may take of the device.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.memory_peaks", str(index), *([str(gib)] if gib else [])],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _plan(recipe: str, hardware: str, overrides: tuple[str, ...]) -> Plan:
    file = ROOT / "configs" / "kk" / f"{recipe}.yaml"
    config, machine = load_for([str(file)], overrides, hardware)
    plan = plan_of(config, hardware=machine)
    assert plan is not None
    return plan


def measure(plan: Plan, gib: float | None) -> dict[str, float]:
    """The peak of each phase and of the device, GiB, and the host's waits in a micro-batch.

    Args:
        gib: the most that PyTorch may take of the device.
    """
    run_shape = plan.run
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(run_shape.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "SG_PLATFORM": "cuda",
    }  # fmt: skip
    from sg_rlhf.overlay.patches import table

    table.install()
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from sg_rlhf.overlay.model.log_prob_head import PolicyModel
    from tests.gpu.measure import host_waits
    from tests.gpu.policy_engine import policy_engine

    torch.cuda.set_device(0)
    if gib:
        torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.mem_get_info()[1])
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=run_shape.ranks)
    import deepspeed
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    deepspeed.init_distributed(dist_backend="nccl")
    # The gradients have no values, so neither has their norm.
    for module in (stage3, stage_1_and_2):
        module.is_invalid_grad_norm = lambda norm: False
    engine = policy_engine(
        shapes.table()[run_shape.model.name], run_shape.zero_stage, "cuda",
        adam_offload=run_shape.adam_offload, checkpointing=run_shape.checkpointing,
    )  # fmt: skip
    engine.optimizer.check_grad_overflow = False
    actor = PolicyModel(engine, temperature=run_shape.temperature)
    actor.packing_samples, actor.is_vlm = True, False

    def log_probs(samples: int) -> torch.Tensor:
        """Of the responses of a micro-batch of the longest samples."""
        tokens = torch.randint(5, 1000, (samples, run_shape.max_len), device="cuda")
        responses = torch.ones(samples, run_shape.max_new_tokens, dtype=torch.bool, device="cuda")
        found, _ = actor(
            tokens, responses, attention_mask=torch.ones_like(tokens), return_output=True
        )
        return found * responses / tokens.numel()

    def score() -> None:
        actor.eval()
        with torch.no_grad():
            for _ in range(MICRO_BATCHES):
                log_probs(run_shape.rollout_micro)

    def update() -> None:
        actor.train()
        for micro_batch in range(STEPS * MICRO_BATCHES):
            last = micro_batch % MICRO_BATCHES == MICRO_BATCHES - 1
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(-log_probs(run_shape.train_micro).sum())
            if last:
                engine.step()

    def peak_above(held: float, phase: Callable[[], None]) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        phase()
        return (held + torch.cuda.max_memory_allocated() - before) / GIB

    # ZeRO-3 gathers more while it scores once it has seen an update.
    found = {"update_gib": peak_above(torch.cuda.memory_allocated(), update)}
    free, total = torch.cuda.mem_get_info()
    found |= {
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "device_gib": (total - free) / GIB,
    }
    weights = gpu_memory.policy(run_shape)
    found["score_gib"] = peak_above(weights, score)
    engine.empty_partition_cache()  # a weight sync finds no parameter that is being fetched
    found["sync_gib"] = peak_above(weights, _sender(run_shape, actor).send)
    actor.train()
    return found | {"host_waits": host_waits(lambda: log_probs(run_shape.train_micro))}


def _sender(run_shape: RunShape, actor: Any) -> Any:
    """The weight sync with no engine to call."""
    from sg_rlhf.overlay.weight_sync.sender import WeightSync

    class NoEngines(WeightSync):
        def _call_engines(self, *_: Any, **__: Any) -> None:
            pass

    args = SimpleNamespace(
        ds=SimpleNamespace(zero_stage=run_shape.zero_stage),
        vllm=SimpleNamespace(enable_prefix_caching=False, sync_backend="nccl"),
    )
    strategy = SimpleNamespace(args=args)
    return NoEngines(SimpleNamespace(strategy=strategy, use_cuda_ipc=False, actor=actor))


if __name__ == "__main__":
    index, *limit = sys.argv[1:]
    print(json.dumps(measure(_plan(*CASES[int(index)]), float(limit[0]) if limit else None)))
