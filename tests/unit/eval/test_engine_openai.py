"""A server whose answers are no completions: one line that shows what came."""

from __future__ import annotations

import http.server
import json
from collections.abc import Iterator

import pytest

from sg_rlhf.eval.engines import openai
from sg_rlhf.eval.engines.base import EngineOptions, Request
from sg_rlhf.eval.engines.openai import Server
from sg_rlhf.eval.engines.start import start_one
from sg_rlhf.eval.model import served_model
from sg_rlhf.tasks.questions import EvalError
from tests.http_server import serving

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

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(state.models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(state.answers.pop(0) if len(state.answers) > 1 else state.answers[0])

        def _answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with serving(Handler) as url:
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
