"""Any server with OpenAI's completions endpoint (raw prompts) or its chat endpoint.

A vLLM server gets token ids and returns them, if the tokenizer of its model can be loaded here.
Several GPUs are the server's: `vllm serve --data-parallel-size N`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from sg_rlhf.eval.chat_prompts import messages
from sg_rlhf.eval.engines.base import Sample
from sg_rlhf.tasks.questions import EvalError, one_line

ATTEMPTS = 5
# A response of many thousand tokens on a loaded server takes its time.
TIMEOUT = httpx.Timeout(connect=10.0, read=3600.0, write=60.0, pool=None)


def is_loopback(url: str) -> bool:
    """Whether an address is this machine's own, which no proxy can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class ServerEngine:
    """A server and its model; it batches what it is sent.

    Args:
        model, location: the names under which the server may know the model.

    Attributes:
        served: name under which the server knows the model.
        root: where the server has the model from: a folder or a hub id, if it tells.
        context: tokens of prompt and response, or None if the server does not tell.
        is_vllm: it is vLLM, which takes more sampling parameters, counts tokens and returns them.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        location: str,
        in_flight: int = 1,
        chat: bool = False,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        key = os.environ.get("OPENAI_API_KEY", "none")
        try:
            settings: dict[str, Any] = {
                "base_url": base_url.rstrip("/") + "/",
                "headers": {"Authorization": f"Bearer {key}"},
                "timeout": TIMEOUT,
                "trust_env": not is_loopback(base_url),
            }
            self._client = httpx.Client(**settings)
            limits = httpx.Limits(max_connections=in_flight)
            self._many = httpx.AsyncClient(limits=limits, **settings)
        except ImportError:  # socksio
            raise EvalError(
                f"--base-url {base_url}: the environment names a SOCKS proxy, which needs a "
                "package: pip install socksio; or unset ALL_PROXY, or add the host to NO_PROXY"
            ) from None
        except (ValueError, httpx.InvalidURL) as error:
            raise EvalError(
                f"--base-url {base_url}: it, or the proxy of the environment (ALL_PROXY, "
                f"HTTP_PROXY, HTTPS_PROXY), is no usable address: {one_line(error)}"
            ) from None
        self.base_url, self.in_flight = base_url, in_flight
        self._path = "chat/completions" if chat else "completions"
        self._chat, self._system_prompt = chat, system_prompt
        # The field of vLLM and SGLang. Other servers may refuse an unknown field.
        self._template: dict[str, Any] = (
            {"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}
        )
        entries = self._entries()
        for entry in entries:
            if {model, location} & {str(entry.get("id")), str(entry.get("root"))}:
                break
        else:
            names = ", ".join(str(entry.get("id")) for entry in entries) or "no model"
            raise EvalError(f"--model {model}: not served at {base_url}, which serves {names}")
        self.served = str(entry["id"])
        self.root = str(entry.get("root") or "")
        self.context: int | None = entry.get("max_model_len")
        self.is_vllm = entry.get("owned_by") == "vllm"

    def _entries(self) -> list[dict[str, Any]]:
        try:
            answer = self._client.get("models", timeout=30.0)
            answer.raise_for_status()
            return [dict(entry) for entry in answer.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise EvalError(
                f"--base-url {self.base_url}: no OpenAI-compatible server there "
                f"({one_line(error)}); expected such as http://localhost:8000/v1"
            ) from None

    def _prompt_fields(self, prompt: str) -> dict[str, Any]:
        """The fields of a request that hold the prompt."""
        if self._chat:
            return {"messages": messages(prompt, self._system_prompt), **self._template}
        return {"prompt": prompt}

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Tokens of prompts; empty if the server does not tokenize (only vLLM does)."""
        if not self.is_vllm:
            return [[] for _ in prompts]
        url = self.base_url.rstrip("/").removesuffix("/v1") + "/tokenize"
        found: list[list[int]] = []
        for prompt in prompts:
            try:
                answer = self._client.post(
                    url, json={"model": self.served, **self._prompt_fields(prompt)}
                )
                answer.raise_for_status()
                found.append(list(answer.json()["tokens"]))
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise EvalError(f"{url}: {one_line(error)}") from None
        return found

    async def generate(self, sample: Sample) -> Sample:
        settings = sample.benchmark.settings
        body: dict[str, Any] = {
            "model": self.served,
            **self._prompt_fields(sample.question.prompt),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_tokens": sample.max_tokens,
        }
        if settings.temperature > 0.0:
            body["seed"] = sample.seed
        if self.is_vllm:
            # Left out, the server would take these from the model's generation_config.json:
            # Qwen2.5's repetition penalty of 1.05 changes even greedy responses.
            body |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        if sample.prompt_ids:
            body |= {
                "prompt": list(sample.prompt_ids),
                "return_token_ids": True,
                "stop": list(sample.stop),
                "stop_token_ids": list(sample.stop_ids),
                "include_stop_str_in_output": bool(sample.stop),
            }
        return replace(sample, **await self._post(body))

    def close(self) -> None:
        self._client.close()

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The server's response, as fields of a `Sample`."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = await self._many.post(self._path, json=body)
            except httpx.TransportError as error:
                problem = one_line(error)
            else:
                problem = f"{answer.status_code} {' '.join(answer.text.split())[:200]}"
                if answer.status_code == 200:
                    try:
                        return _read(answer.json())
                    except (ValueError, LookupError, TypeError, AttributeError):
                        # A proxy's page, which may be gone in a moment.
                        problem = f"expected a completion (JSON with choices), found {problem}"
                elif answer.status_code != 429 and answer.status_code < 500:
                    break
            if attempt < ATTEMPTS:
                await asyncio.sleep(2.0**attempt)
        raise EvalError(f"--base-url {self.base_url}: {problem}")


def _read(completion: Any) -> dict[str, Any]:
    """The response in a completion or a chat completion; an error if it is neither.

    A server with a reasoning parser gives the reasoning apart from the answer. Only the answer is
    graded; it is empty if the limit ended the reasoning. The tokens count both.
    """
    choice = completion["choices"][0]
    if "message" in choice:
        message = choice["message"]
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        text = "" if message["content"] is None and reasoning else message["content"]
    else:
        text = choice["text"]
    if not isinstance(text, str):
        raise TypeError
    return {
        "response": text,
        "finish_reason": "length" if choice["finish_reason"] == "length" else "stop",
        "tokens": int((completion.get("usage") or {}).get("completion_tokens", 0)),
        "token_ids": tuple(choice.get("token_ids") or ()),
    }
