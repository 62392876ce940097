"""Any server with OpenAI's completions endpoint (raw prompts) or its chat endpoint."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

import httpx

from sg_rlhf.eval.chat_prompts import messages
from sg_rlhf.eval.engines.base import Completion, EngineOptions, Request
from sg_rlhf.tasks.questions import EvalError, one_line
from sg_rlhf.tasks.suite import FinishReason

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


class Server:
    """A server and its model.

    Args:
        concurrency: most connections at a time.
        chat: use the chat endpoint.
        system_prompt: system turn of a chat; None: no such turn.
        chat_template_kwargs: arguments of the server's chat template.

    Attributes:
        served: name under which the server knows the model.
        context: tokens of prompt and response, or None if the server does not tell.
        is_vllm: it is vLLM, which takes more sampling parameters and counts tokens.

    Raises:
        EvalError: it does not answer, or does not serve the model; names those that it serves.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        location: str,
        concurrency: int = 1,
        chat: bool = False,
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        key = os.environ.get("OPENAI_API_KEY", "none")
        try:
            self.client = httpx.Client(
                base_url=base_url.rstrip("/") + "/",
                headers={"Authorization": f"Bearer {key}"},
                timeout=TIMEOUT,
                limits=httpx.Limits(max_connections=concurrency),
                trust_env=not is_loopback(base_url),
            )
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
        self.base_url = base_url
        self.path = "chat/completions" if chat else "completions"
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
        self.context: int | None = entry.get("max_model_len")
        self.is_vllm = entry.get("owned_by") == "vllm"

    def _entries(self) -> list[dict[str, Any]]:
        try:
            answer = self.client.get("models", timeout=30.0)
            answer.raise_for_status()
            return [dict(entry) for entry in answer.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise EvalError(
                f"--base-url {self.base_url}: no OpenAI-compatible server there "
                f"({one_line(error)}); expected such as http://localhost:8000/v1"
            ) from None

    def prompt_fields(self, prompt: str) -> dict[str, Any]:
        """The fields of a request that hold the prompt."""
        if self._chat:
            return {"messages": messages(prompt, self._system_prompt), **self._template}
        return {"prompt": prompt}

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Tokens of prompts; empty if the server does not tokenize (only vLLM does).

        Raises:
            EvalError: the server went away.
        """
        if not self.is_vllm:
            return [[] for _ in prompts]
        url = self.base_url.rstrip("/").removesuffix("/v1") + "/tokenize"
        found: list[list[int]] = []
        for prompt in prompts:
            try:
                answer = self.client.post(
                    url, json={"model": self.served, **self.prompt_fields(prompt)}
                )
                answer.raise_for_status()
                found.append(list(answer.json()["tokens"]))
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise EvalError(f"{url}: {one_line(error)}") from None
        return found


class OpenAIEngine:
    """Up to `concurrency` requests at once; the server batches them."""

    def __init__(self, options: EngineOptions) -> None:
        assert options.base_url is not None
        self._server = Server(
            options.base_url,
            options.model.name,
            options.model.location,
            options.concurrency,
            options.chat,
            options.system_prompt,
            options.chat_template_kwargs,
        )
        self._read = _read_message if options.chat else _read_text
        self._pool = ThreadPoolExecutor(options.concurrency)
        self._pending: set[Future[Completion]] = set()

    def add(self, requests: Sequence[Request]) -> None:
        self._pending |= {self._pool.submit(self._complete, request) for request in requests}

    def step(self) -> list[Completion]:
        done, self._pending = wait(self._pending, return_when=FIRST_COMPLETED)
        return [future.result() for future in done]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._server.client.close()

    def _complete(self, request: Request) -> Completion:
        body: dict[str, Any] = {
            "model": self._server.served,
            **self._server.prompt_fields(request.prompt),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
        }
        if request.temperature > 0.0:
            body["seed"] = request.seed
        if self._server.is_vllm:
            # Left out, the server would take these from the model's generation_config.json:
            # Qwen2.5's repetition penalty of 1.05 changes even greedy responses.
            body |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        text, reason, tokens = self._post(body)
        return Completion(request.key, text, reason, tokens)

    def _post(self, body: dict[str, Any]) -> tuple[str, FinishReason, int]:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._server.client.post(self._server.path, json=body)
            except httpx.TransportError as error:
                problem = one_line(error)
            else:
                problem = f"{answer.status_code} {' '.join(answer.text.split())[:200]}"
                if answer.status_code == 200:
                    try:
                        return self._read(answer.json())
                    except (ValueError, LookupError, TypeError, AttributeError):
                        # A proxy's page, which may be gone in a moment.
                        problem = f"expected a completion (JSON with choices), found {problem}"
                elif answer.status_code != 429 and answer.status_code < 500:
                    break
            if attempt < ATTEMPTS:
                time.sleep(2.0**attempt)
        raise EvalError(f"--base-url {self._server.base_url}: {problem}")


def _read_text(answer: Any) -> tuple[str, FinishReason, int]:
    """Text, finish reason and tokens of a completion; any error if it is none."""
    text = answer["choices"][0]["text"]
    if not isinstance(text, str):
        raise TypeError
    return text, _finish_reason(answer), _tokens(answer)


def _read_message(answer: Any) -> tuple[str, FinishReason, int]:
    """The same of a chat completion.

    A server with a reasoning parser gives the reasoning apart from the answer. Only the answer is
    graded; it is empty if the limit ended the reasoning. The tokens count both.
    """
    message = answer["choices"][0]["message"]
    text = message["content"]
    if text is None and (message.get("reasoning") or message.get("reasoning_content")):
        text = ""
    if not isinstance(text, str):
        raise TypeError
    return text, _finish_reason(answer), _tokens(answer)


def _finish_reason(answer: Any) -> FinishReason:
    return "length" if answer["choices"][0]["finish_reason"] == "length" else "stop"


def _tokens(answer: Any) -> int:
    return int((answer.get("usage") or {}).get("completion_tokens", 0))
