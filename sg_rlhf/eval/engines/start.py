"""Starts an engine, with the environment variables that it needs."""

from __future__ import annotations

import os

from sg_rlhf.eval.engines.base import Engine, EngineName, EngineOptions
from sg_rlhf.sampling import vllm_settings


def set_environment(name: EngineName, cpu: bool, replicas: int) -> None:
    """Variables of vLLM and of the CPU's threads; values that the user exported win.

    To be called before torch is imported, which reads them once.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "false"}
    if name == "vllm":
        wanted["VLLM_LOGGING_LEVEL"] = "ERROR"
    if name == "vllm" and not cpu:
        wanted |= vllm_settings.cuda_variables()
    if name == "vllm" and cpu:
        wanted |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # Else two more processes import vLLM, and outlive a killed one.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    if cpu:
        # One core is left to the process that prepares, grades and writes.
        cores = len(os.sched_getaffinity(0)) // replicas
        wanted["OMP_NUM_THREADS"] = str(max(1, cores - 1))
    for variable, value in wanted.items():
        os.environ.setdefault(variable, value)


def start(options: EngineOptions) -> Engine:
    """Start an engine, or several as Ray actors.

    Raises:
        EvalError: it cannot start as asked; one line for the user.
    """
    if options.replicas > 1:
        from sg_rlhf.eval.engines.replicas import Replicas

        return Replicas(options, start_one)
    return start_one(options)


def start_one(options: EngineOptions) -> Engine:
    """Start one engine in this process."""
    # Each engine's library takes seconds to import, and one suffices.
    if options.name == "vllm":
        from sg_rlhf.eval.engines.vllm import VllmEngine

        return VllmEngine(options)
    from sg_rlhf.eval.engines.openai import OpenAIEngine

    return OpenAIEngine(options)
