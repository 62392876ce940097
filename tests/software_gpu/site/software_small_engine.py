"""Smaller limits of vLLM and Ray, so that a CPU can follow (SOFTWARE_GPU_SMALL_ENGINE=N)."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

#: Ray's own defaults ask for a CPU per worker and for a third of the host's memory.
RAY_LIMITS = {"num_cpus": 6, "object_store_memory": 300 * 2**20}


def reduce_engine(engine_args: ModuleType) -> None:
    """Limit the tokens and sequences of a step.

    vLLM's profile and warm-up run at these limits, and the CPU computes each of their operations.
    CUDA graphs and the all-reduce kernel of vLLM are off: the software GPU cannot replay the one
    and has no values for the other.
    """
    tokens = int(os.environ["SOFTWARE_GPU_SMALL_ENGINE"])
    sequences = max(1, tokens // 16)
    arguments: Any = engine_args.EngineArgs
    original = arguments.__post_init__

    def limit(self: Any) -> None:
        self.max_num_batched_tokens = min(self.max_num_batched_tokens or tokens, tokens)
        self.max_num_seqs = min(self.max_num_seqs or sequences, sequences)
        self.disable_custom_all_reduce = True
        self.enforce_eager = True
        original(self)

    arguments.__post_init__ = limit


def reduce_ray(ray: Any) -> None:
    """Start a local Ray with the resources of a small host."""
    original = ray.init

    def init(*arguments: Any, **options: Any) -> Any:
        if options.get("address") == "local" and "num_cpus" not in options:
            options = {**RAY_LIMITS, **options}
        return original(*arguments, **options)

    ray.init = init
