"""The interface of engines, which generate responses. Each engine is a module of its own.

An engine takes all requests at once (`add`) and returns responses as they finish (`step`). Its own
scheduler batches them, and a killed run loses only the requests in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from sg_rlhf.eval.model import Model
from sg_rlhf.tasks.suite import FinishReason

EngineName = Literal["vllm", "openai"]
#: Types of the weights; auto: the model's own.
DTYPES = ("auto", "bfloat16", "float16", "float32")
ENGINES: tuple[EngineName, ...] = get_args(EngineName)


@dataclass(frozen=True)
class Request:
    """A request for one response.

    Attributes:
        key: unique; the completion carries it.
        prompt: raw text.
        prompt_ids: its token ids, with the special tokens that the tokenizer adds; empty if only
            the server knows them.
        temperature: 0 is greedy.
        max_tokens: of the response; prompt and response fit into the model's context.
        seed: of this sample, so that its response does not depend on the other samples.
        stop: the response ends with, and includes, the token that completes one of these.
        stop_ids: token ids that end it, besides the model's own.
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
        token_ids: the sampled tokens; empty if a server does not return them.
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
        chat_template_kwargs: arguments of the server's chat template.
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
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """An engine, as `eval.run` and the replicas use it."""

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests; the engine serves them in this order as far as it can."""

    def step(self) -> list[Completion]:
        """Do some work; returns the responses that finished since the last call, often none."""

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
