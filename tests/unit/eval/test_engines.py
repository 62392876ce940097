"""The engines of evaluations: their environment, and servers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from importlib import metadata

import pytest

from sg_rlhf.eval.engines import server
from sg_rlhf.eval.engines.base import Sample
from sg_rlhf.eval.engines.server import ServerEngine
from sg_rlhf.eval.engines.vllm import set_environment
from sg_rlhf.eval.model import cpu_only
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.questions import EvalError, Question
from tests.http_server import Handler, serving

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
