"""Engines: what turns prompts into responses. Each one is a file; this is what they share.

An engine takes all requests at once (`add`) and gives responses back as they finish (`step`), so
that its own scheduler batches them and a killed run loses only what was under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from sg_rlhf.eval.model import Model
from sg_rlhf.tasks.suite import FinishReason

EngineName = Literal["vllm", "openai", "hf"]
#: Types of the weights; auto: the model's own.
DTYPES = ("auto", "bfloat16", "float16", "float32")
ENGINES: tuple[EngineName, ...] = get_args(EngineName)


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
        stop_ids: tokens that end it beside the model's own ends.
    """

    key: str
    prompt: str
    prompt_ids: tuple[int, ...]
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()


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
        chat: a server gets the prompts through its chat endpoint.
        system_prompt: system turn of these conversations; None: no such turn.
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
    chat: bool = False
    system_prompt: str | None = None


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
