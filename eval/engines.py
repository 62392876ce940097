"""Engines: what turns prompts into responses. Each one is a file; this is what they share.

An engine takes all requests at once (`add`) and gives responses back as they finish (`step`), so
that its own scheduler batches them and a killed run loses only what was under way.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from eval.model import Model

EngineName = Literal["vllm", "openai", "hf"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

FinishReason = Literal["stop", "length", "prompt_too_long"]


@dataclass(frozen=True)
class Request:
    """One response to be made.

    Attributes:
        key: unique; the completion carries it.
        prompt: raw text.
        prompt_ids: its tokens, special ones that the tokenizer adds included; empty where only
            the server knows them.
        temperature: 0 is greedy.
        max_tokens: of the response; prompt and response fit into the model's context.
        seed: of this sample alone, so that its response does not depend on what else is sampled.
        stop: the response ends with the token that completes one of these, which belongs to it.
    """

    key: str
    prompt: str
    prompt_ids: tuple[int, ...]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
        tokens: length of the response in tokens.
        token_ids: the tokens as they were sampled; empty where a server does not tell.
    """

    key: str
    text: str
    finish_reason: FinishReason
    tokens: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineOptions:
    """How to start an engine.

    Attributes:
        context: most tokens of prompt and response together that any request needs.
        dtype: torch's name of the weights' type, or "auto" for the model's own.
        cpu: there is no CUDA device.
    """

    name: EngineName
    model: Model
    context: int
    dtype: str
    cpu: bool
    tensor_parallel: int = 1
    replicas: int = 1
    base_url: str | None = None
    concurrency: int = 128


def set_environment(name: EngineName, cpu: bool, replicas: int) -> None:
    """Variables of vLLM and of the CPU's threads; values that the user exported win.

    To be called before torch is imported, which reads them once.
    """
    wanted = {"TOKENIZERS_PARALLELISM": "false"}
    if name == "vllm":
        wanted["VLLM_LOGGING_LEVEL"] = "ERROR"
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


class Engine(Protocol):
    """What `eval.run` and the replicas drive."""

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, to be served in this order as far as the engine can."""

    def step(self) -> list[Completion]:
        """Work on; returns what has finished since the last call, often nothing."""

    def close(self) -> None:
        """Free everything. Called once, also after an error."""


def drain(engine: Engine, requests: Sequence[Request]) -> Iterator[list[Completion]]:
    """Serve all requests; yields responses as they finish, each once."""
    engine.add(requests)
    left = {request.key for request in requests}
    while left:
        done = engine.step()
        for completion in done:
            left.remove(completion.key)
        if done:
            yield done


def start(options: EngineOptions) -> Engine:
    """Start an engine, or several as Ray actors.

    Raises:
        EvalError: it cannot start as asked; one line for the user.
    """
    if options.replicas > 1:
        from eval.engine_replicas import Replicas

        return Replicas(options)
    return start_one(options)


def start_one(options: EngineOptions) -> Engine:
    """Start one engine in this process."""
    # Each engine's library takes seconds to import, and one suffices.
    if options.name == "vllm":
        from eval.engine_vllm import VllmEngine

        return VllmEngine(options)
    if options.name == "hf":
        from eval.engine_hf import HfEngine

        return HfEngine(options)
    from eval.engine_openai import OpenAIEngine

    return OpenAIEngine(options)


def sample_seed(seed: int, benchmark: str, question: str, sample: int) -> int:
    """The seed of one sample: the same in every run, whatever was done before. Below 2^31."""
    text = f"{seed}/{benchmark}/{question}/{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
