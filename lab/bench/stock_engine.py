"""Upstream's rollout engine with what vLLM's CPU worker asks for, and nothing else of ours."""

from __future__ import annotations

import os
from typing import Any

import openrlhf.trainer.ray.vllm_engine as upstream
import ray

from lab.bench.stock_platform import AS_SHIPPED
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.rollout.engine import CPU_WORKER_EXTENSION
from sg_rlhf.overlay.settings import worker_settings


class CpuRolloutActor(upstream.RolloutRayActor.__ray_metadata__.modified_class):
    """Upstream's actor in the settings that ``sg_rlhf.overlay.rollout.engine`` gives its own."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it, as upstream's is
        self, *args: Any, **kwargs: Any
    ) -> None:
        kwargs["worker_extension_cls"] = CPU_WORKER_EXTENSION
        if os.environ.get(AS_SHIPPED) != "1":
            kwargs["dtype"] = worker_settings.current().engine_dtype
        if not platform.has_bf16_units():
            kwargs["dtype"] = "float32"
        await super().__init__(*args, **kwargs)


RemoteCpuRolloutActor = ray.remote(CpuRolloutActor)
