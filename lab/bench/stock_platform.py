"""Stock OpenRLHF on a machine without a GPU: what its own classes need there, and nothing else.

Its trainer, experience maker, sample generator, losses, log-probs over logits and loop of the
weight sync are upstream's. Of the overlay's table come the rows of the platform: meanings of
``torch.cuda`` calls, gloo for NCCL, bf16 products in float32, and attention for packed samples,
which upstream has from flash-attn. The engine is upstream's with the settings of vLLM's CPU worker.
"""

from __future__ import annotations

from typing import Any

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.model import packed_attention
from sg_rlhf.overlay.patches import flash_attn_shim, table

HOOK = "lab.bench.stock_platform.install"
#: "1" leaves the engine in upstream's bfloat16, whatever ``ds.param_dtype`` says.
AS_SHIPPED = "BENCH_STOCK_AS_SHIPPED"

PLATFORM = (
    *(p for p in table.PATCHES if p.when in (platform.is_cpu, platform.emulates_bf16)),
    *(p for p in table.PATCHES if p.name.endswith(f"[{packed_attention.VARLEN}]")),
    table.Patch("openrlhf.trainer.ray.ppo_actor", "stateless_init_process_group",
                "sg_rlhf.overlay.cpu.gloo:stateless_init_process_group", "needs NCCL"),
    table.Patch("openrlhf.trainer.ray.vllm_engine", "RolloutRayActor",
                   "lab.bench.stock_engine:RemoteCpuRolloutActor",
                   "takes vLLM's settings for the CPU"),
)  # fmt: skip

#: Ray CPUs: its training loop and its trainer are actors of one each.
UPSTREAMS_CONTROLLERS = 2


def install() -> None:
    """In the driver, and first in every worker."""
    platform.install()
    flash_attn_shim.install()
    table.apply_at_import(PLATFORM)


def train(args: Any) -> None:
    """Upstream's whole training in a Ray cluster of this machine; ends what it started."""
    import importlib

    from sg_rlhf.overlay.driver import ray_session as session
    from sg_rlhf.ray_session import cluster as ray_cluster

    needed = session.accelerators_needed(args)
    try:
        ray_cluster.start(
            runtime_env={
                "env_vars": session.worker_variables(args, on_cpu=True),
                "worker_process_setup_hook": HOOK,
            },
            log_to_driver=False,
            logging_level="warning",
            num_gpus=needed,
            num_cpus=needed + UPSTREAMS_CONTROLLERS,
            object_store_memory=512 * 2**20,
        )
        install()
        importlib.import_module("openrlhf.cli.train_ppo_ray").train(args)
    finally:
        session.shut_down(local=True, run_dir=None)
