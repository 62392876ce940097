"""The engines of evaluations: their environment, and servers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sg_rlhf.eval.engines import server
from sg_rlhf.eval.engines.base import Sample
from sg_rlhf.eval.engines.server import ServerEngine
from sg_rlhf.eval.engines.vllm import set_environment
from sg_rlhf.eval.model import cpu_only
from sg_rlhf.eval.run import main
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.questions import EvalError, Question
from tests.http_server import Handler, serving

TINY = Path(__file__).parents[3] / "sg_rlhf" / "tiny" / "math_tiny"

# -- What an engine's process finds in its environment before its library is imported ------------


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that the test may fill; it is as before afterwards."""
    for name in [*os.environ]:
        if name.startswith(("VLLM_", "SG_", "OMP_", "PYTORCH_", "TOKENIZERS_")):
            monkeypatch.delenv(name)
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("cpu", "expected"), [(False, "0"), (True, None)])
def test_flashinfers_sampler_is_off_on_cuda(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, expected: str | None
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", {**os.environ})
        set_environment(cpu)
        assert os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") == expected
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "1"
        set_environment(cpu)
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


@pytest.mark.usefixtures("empty")
def test_torch_is_asked_for_gpus_without_initialising_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has initialised CUDA cannot be forked, and vLLM forks its engine."""
    import torch

    asked = []
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0")  # the build for CUDA
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: asked.append(torch.cuda._nvml_based_avail())
    )
    assert cpu_only()
    assert asked == [True]
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")


# -- A server whose answers are no completions: one line that shows what came --------------------


GOOD = {"choices": [{"text": "yes", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
WRONG = {
    "a proxy's page": b"<html>Sign in</html>",
    "no choices": b"{}",
    "an empty list": b'{"choices": []}',
    "a list": b"[1]",
    "no text": b'{"choices": [{"finish_reason": "stop"}]}',
    "text that is none": b'{"choices": [{"text": null, "finish_reason": "stop"}]}',
    "usage that is none": b'{"choices": [{"text": "", "finish_reason": "stop"}], "usage": [1]}',
}


class Here:
    """A server: what it answers, one after the other, the last one from then on."""

    def __init__(self) -> None:
        self.models: bytes = b'{"data": [{"id": "served"}]}'
        self.answers: list[bytes] = []


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Here, str]]:
    async def at_once(_seconds: float) -> None:
        pass

    monkeypatch.setattr(server.asyncio, "sleep", at_once)
    state = Here()

    class Completions(Handler):
        def do_GET(self) -> None:
            self.answer(state.models)

        def do_POST(self) -> None:
            self.content()
            self.answer(state.answers.pop(0) if len(state.answers) > 1 else state.answers[0])

    with serving(Completions) as url:
        yield state, f"{url}/v1"


def complete(url: str) -> str:
    engine = ServerEngine(url, "served", "served")
    sample = Sample(SUITES["kk"].benchmarks[0], Question("k", "p", "g"), 0, (), 5, 0)
    try:
        return asyncio.run(engine.generate(sample)).response
    finally:
        engine.close()


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_an_answer_that_is_no_completion_is_named(answer: bytes, here: tuple[Here, str]) -> None:
    state, url = here
    state.answers = [answer]
    with pytest.raises(EvalError, match="expected a completion") as raised:
        complete(url)
    assert url in str(raised.value) and answer.decode()[:20] in str(raised.value)


def test_one_that_is_gone_in_a_moment_is_asked_again(here: tuple[Here, str]) -> None:
    state, url = here
    state.answers = [WRONG["a proxy's page"], json.dumps(GOOD).encode()]
    assert complete(url) == "yes"


@pytest.mark.parametrize("models", [b"<html>", b"[]", b'{"data": ["served"]}', b'{"data": 1}'])
def test_a_list_of_models_that_is_none_is_named(models: bytes, here: tuple[Here, str]) -> None:
    state, url = here
    state.models = models
    with pytest.raises(EvalError, match="no OpenAI-compatible server there"):
        ServerEngine(url, "served", "served")


# -- Proxies: as the environment says, but never for this machine itself -------------------------

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_this_machine_is_asked_without_the_proxy(
    here: tuple[Here, str], monkeypatch: pytest.MonkeyPatch, proxy: str, host: str
) -> None:
    state, url = here
    monkeypatch.setenv("ALL_PROXY", proxy)
    state.answers = [json.dumps(GOOD).encode()]
    assert complete(url.replace("127.0.0.1", host)) == "yes"


@pytest.mark.usefixtures("no_proxies")
def test_another_server_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Proxy(Handler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.answer(b'{"data": [{"id": "served"}]}')

    with serving(Proxy) as url:
        monkeypatch.setenv("HTTP_PROXY", url)
        assert ServerEngine("http://server.invalid/v1", "served", "served").served == "served"
    assert asked == ["http://server.invalid/v1/models"]


@pytest.mark.usefixtures("no_proxies")
@pytest.mark.parametrize(
    ("proxy", "words"),
    [("socks5://127.0.0.1:1", "pip install socksio"), ("ftp://a", "no usable address")],
)
def test_a_proxy_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, proxy: str, words: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(EvalError, match=words) as raised:
        ServerEngine("http://server.invalid/v1", "served", "served")
    assert "\n" not in str(raised.value)


# -- A vLLM server: token ids in, token ids out --------------------------------------------------


class Vllm(Handler):
    """A vLLM server of the tiny model, which guesses `d` each time."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        entry = {"id": "served", "root": str(TINY), "owned_by": "vllm", "max_model_len": 1024}
        self.answer(json.dumps({"data": [entry]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.content())
        self.asked.append(body)
        ids = AutoTokenizer.from_pretrained(TINY)(" d\n")["input_ids"]
        choice = {"text": " d\n", "finish_reason": "stop", "token_ids": ids}
        found = {"choices": [choice], "usage": {"completion_tokens": len(ids)}}
        self.answer(json.dumps(found).encode())


def test_a_vllm_server_gets_and_returns_token_ids(tmp_path: Path) -> None:
    Vllm.asked = []
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with serving(Vllm) as url:
        given = ["--engine", "openai", "--base-url", f"{url}/v1", "--model", "served"]
        guess = ["--suite", "tests.domains.guess:GUESS", "--limit", "3"]
        assert main([*guess, *given, "--out", str(tmp_path / "dialogues")]) == 0
        dialogues, Vllm.asked = Vllm.asked, []
        sums = ["--suite", "arithmetic", "--only", "sums", "--limit", "1", "--samples", "1"]
        assert main([*sums, *given, "--out", str(tmp_path / "messages")]) == 0
    # A turn's prompt begins with the prompt before, and with the tokens that were returned.
    first = next(body["prompt"] for body in dialogues)
    assert {body["return_token_ids"] for body in dialogues} == {True}
    assert dialogues[0]["stop"] == ["\n"] and dialogues[0]["include_stop_str_in_output"]
    sampled = tokenizer(" d\n")["input_ids"]
    later = [body["prompt"] for body in dialogues if len(body["prompt"]) > len(first)]
    assert later and all(ids[: len(first) + len(sampled)] == first + sampled for ids in later)
    rows = [json.loads(line) for line in (tmp_path / "dialogues" / "samples.jsonl").open()]
    assert len(rows) == 3 and all(row["tokens"] == len(sampled) * len(row["turns"]) for row in rows)
    # Messages are written with the chat template of the server's model.
    (body,) = Vllm.asked
    text = tokenizer.decode(body["prompt"])
    assert text.startswith("<|im_start|>") and text.endswith("<|im_start|>assistant\n")
