"""Case memory: peaks of an update beside the plan, for models that no kernel here could compute.

The allocations of rank 0 of N ranks in an update of a recipe, by the real DeepSpeed, overlay and
allocator. The other ranks do not exist: collectives return at once, and large tensors have no
values. So sizes and lifetimes of tensors are shown, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from sg_rlhf.plan import gpu_memory, shapes
from sg_rlhf.plan.gpu_memory import GIB
from sg_rlhf.plan.of_recipe import Plan, load_for, plan_of
from tests.gpu.launch import ROOT
from tests.gpu.result import Job, Record

#: Recipe, hardware, further keys. Below ZeRO-3 DeepSpeed flattens all weights in host memory, so
#: there it is the recipe of 0.5B. Its optimizer stays on the GPU, as in stage f of the GPU tests.
CASES = (
    ("grpo_qwen2.5-3b-instruct", "8x80gb", ()),
    ("grpo_qwen2.5-3b-instruct", "4x80gb", ()),
    ("grpo_1xgpu", "1x80gb", ("ds.adam_offload=false",)),
    ("grpo_qwen2.5-7b-instruct-1m", "8x80gb", ()),
)
#: Share of the plan by which a peak may differ.
TOLERANCE = 0.1
#: Micro-batches of an optimizer step. ZeRO-3 fetches ahead from the second pass on.
MICRO_BATCHES, STEPS = 2, 2


def run(record: Record, job: Job) -> None:
    """Each update twice: with room to spare, and on a device with just the plan's memory."""
    for index, (recipe, hardware, overrides) in enumerate(CASES):
        name = " ".join((recipe, hardware, *overrides))
        planned = _plan(recipe, hardware, overrides).memory.policy_allocated_gib
        found = _process(index)
        if found is None:
            raise RuntimeError(f"{name}: no figures, see the log")
        record.figure(name, {"planned_gib": planned, **found})
        difference = found["allocated_gib"] / planned - 1.0
        record.within(f"{name}: allocated beside the plan", abs(difference), TOLERANCE)
        least = planned * (1.0 + gpu_memory.GAPS) + gpu_memory.CONTEXT / GIB
        record.check(
            f"{name}: runs in the plan's {least:.1f} GiB", _process(index, least) is not None
        )


def _process(index: int, gib: float | None = None) -> dict[str, float] | None:
    """The figures of a case, a rank of its own job; None if it failed."""
    limit = {} if gib is None else {"SOFTWARE_GPU_GIB": str(gib)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.software_gpu.memory_peaks", str(index)],
        cwd=ROOT, env={**os.environ, **limit}, stdout=subprocess.PIPE, text=True,
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


def measure(plan: Plan) -> dict[str, float]:
    """The peak of two optimizer steps, GiB."""
    run_shape = plan.run
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(run_shape.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "SG_PLATFORM": "cuda",
    }  # fmt: skip
    from sg_rlhf.overlay.patches import table

    table.install()
    import torch
    from openrlhf.models import Actor
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.gpu.policy_engine import policy_engine

    torch.cuda.set_device(0)
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
    actor = Actor(engine, temperature=run_shape.temperature)
    actor.packing_samples, actor.is_vlm = True, False
    actor.train()
    size = (run_shape.train_micro, run_shape.max_len)
    tokens = torch.randint(5, 1000, size, device="cuda")
    attended = torch.ones_like(tokens)
    responses = torch.ones(size[0], run_shape.max_new_tokens, dtype=torch.bool, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for micro_batch in range(STEPS * MICRO_BATCHES):
        last = micro_batch % MICRO_BATCHES == MICRO_BATCHES - 1
        engine.set_gradient_accumulation_boundary(last)
        log_probs, _ = actor(tokens, responses, attention_mask=attended, return_output=True)
        engine.backward(-(log_probs * responses).sum() / tokens.numel())
        if last:
            engine.step()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "device_gib": (total - free) / GIB,
    }


if __name__ == "__main__":
    print(json.dumps(measure(_plan(*CASES[int(sys.argv[1])]))))
