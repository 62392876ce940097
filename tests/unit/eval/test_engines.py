"""The engines of evaluations: their environment, replicas, and servers."""

from __future__ import annotations

import heapq
import json
import os
import random
from collections.abc import Iterator
from importlib import metadata

import pytest

from sg_rlhf.eval.engines import openai
from sg_rlhf.eval.engines.base import EngineOptions, Request
from sg_rlhf.eval.engines.openai import Server
from sg_rlhf.eval.engines.replicas import MAX_IN_FLIGHT, Shares, _Worker, hub_variables
from sg_rlhf.eval.engines.start import set_environment, start_one
from sg_rlhf.eval.model import cpu_only, served_model
from sg_rlhf.tasks.questions import EvalError
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
@pytest.mark.parametrize(
    ("engine", "cpu", "expected"),
    [("vllm", False, "0"), ("vllm", True, None), ("openai", False, None)],
)
def test_flashinfers_sampler_is_off_on_cuda(
    monkeypatch: pytest.MonkeyPatch, engine: str, cpu: bool, expected: str | None
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", {**os.environ})
        set_environment(engine, cpu, replicas=1)  # type: ignore[arg-type]
        assert os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") == expected
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "1"
        set_environment(engine, cpu, replicas=1)  # type: ignore[arg-type]
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


# -- Which engine of several gets which request: all are answered, and no engine waits for nothing


def request(key: str) -> Request:
    return Request(key, "", (), 0.0, 1.0, 1, 0)


class World:
    """Engines that answer some of their requests per call, in the order that chance gives."""

    def __init__(self, engines: int, rng: random.Random) -> None:
        self.shares, self.rng = Shares(engines), rng
        self.open: list[list[Request]] = [[] for _ in range(engines)]
        self.running: set[int] = set()

    def add(self, requests: list[Request]) -> None:
        self.shares.add(requests)
        for engine in set(range(len(self.open))) - self.running:
            self.feed(engine)

    def feed(self, engine: int) -> None:
        self.open[engine] += self.shares.take(engine)
        assert self.shares.held[engine] == len(self.open[engine]) <= MAX_IN_FLIGHT
        if self.open[engine]:
            self.running.add(engine)

    def step(self) -> list[Request]:
        assert self.running, "requests are open and no engine works"
        engine = self.rng.choice(sorted(self.running))
        self.running.remove(engine)
        held = self.open[engine]
        count = self.rng.randint(1, max(1, len(held) // 3))
        done, self.open[engine] = held[:count], held[count:]
        self.shares.finished(engine, count)
        self.feed(engine)
        return done


@pytest.mark.parametrize("seed", range(20))
def test_every_turn_of_dialogues_is_answered(seed: int) -> None:
    """Turns come a few at a time: what an engine may hold falls while it holds more."""
    rng = random.Random(seed)
    world = World(4, rng)
    turns = {f"d{i}": rng.randint(1, 5) for i in range(1500)}
    world.add([request(key) for key in turns])
    running, now, later = len(turns), 0, []
    while running or later:
        due = []
        while later and (later[0][0] <= now or not (running or due)):
            due.append(request(heapq.heappop(later)[1]))
        if due:
            world.add(due)
        done = world.step()
        running += len(due) - len(done)
        now += 1
        for answered in done:
            turns[answered.key] -= 1
            if turns[answered.key]:
                heapq.heappush(later, (now + rng.randint(1, 6), answered.key))
    assert set(turns.values()) == {0}


def test_requests_given_at_once_are_shared_and_some_are_kept_for_whoever_is_first() -> None:
    world = World(4, random.Random(0))
    world.add([request(str(i)) for i in range(600)])
    assert [len(held) for held in world.open] == [100] * 4
    answered = 0
    while answered < 600:
        answered += len(world.step())
    assert world.shares.held == [0] * 4


def test_an_engine_in_another_process_finds_the_hubs_variables(monkeypatch) -> None:
    """On a machine that joined a cluster they are not in the environment."""
    wanted = {"HF_HOME": "/disk/hub", "HF_TOKEN": "t", "HF_HUB_OFFLINE": "1"}
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTHER", "x")
    given = hub_variables()
    assert given.items() >= wanted.items() and "OTHER" not in given
    found: dict[str, str] = {}
    with monkeypatch.context() as there:
        there.setattr(os, "environ", {})
        _Worker(None, lambda _: found.update(os.environ), given)
    assert found == given


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
    monkeypatch.setattr(openai.time, "sleep", lambda _seconds: None)
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
    options = EngineOptions("openai", served_model("served"), 0, "auto", cpu=False, base_url=url)
    engine = start_one(options)
    try:
        engine.add([Request("k", "p", (), 0.0, 1.0, 5, 0)])
        (done,) = engine.step()
        return done.text
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
        Server(url, "served", "served")


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
        assert Server("http://server.invalid/v1", "served", "served").served == "served"
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
        Server("http://server.invalid/v1", "served", "served")
    assert "\n" not in str(raised.value)
