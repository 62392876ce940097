"""`--chat-template`: prompts in the model's template, or as messages to a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sg_rlhf.eval import chat_prompts
from sg_rlhf.eval.engines.base import Sample
from sg_rlhf.eval.engines.server import ServerEngine
from sg_rlhf.eval.model import open_model
from sg_rlhf.eval.run import main
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.math.grading import grade_many
from sg_rlhf.tasks.questions import EvalError, Question, generated_source
from sg_rlhf.tasks.suite import Benchmark, Sampling, Suite, with_messages_written
from tests.http_server import Handler, serving

TINY = Path(__file__).parents[3] / "sg_rlhf" / "tiny" / "math_tiny"
QUESTION = Question("one", "What is 1 + 1?", ["2"])
BENCHMARK = Benchmark(
    name="one",
    family="one",
    title="One",
    size=1,
    settings=Sampling(temperature=0.0, max_tokens=8),
    load=lambda folder: ([QUESTION], [generated_source("here", [QUESTION])]),
    grade=grade_many,
    licence="ours",
)


def loaded(prompt: str) -> list[Benchmark]:
    return [replace(BENCHMARK, questions=[Question("one", prompt, ["2"], bare="1 + 1")])]


def test_the_prompt_is_the_users_turn_of_the_models_template():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    (found,) = chat_prompts.with_template(loaded("Hi"), tokenizer, "Be brief.")
    (question,) = found.questions
    assert question.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert question.problem == "1 + 1"
    (found,) = chat_prompts.with_template(loaded("Hi"), tokenizer, None)
    assert found.questions[0].prompt.startswith("<|im_start|>user\nHi")


def test_arguments_of_a_template_reach_the_prompt(tmp_path):
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if not enable_thinking %}#{% endif %}"
    )
    args = argparse.Namespace(
        engine="vllm", revision=None, dtype="auto", chat_template_kwargs={"enable_thinking": False}
    )
    tokenizer = open_model(args, str(model)).tokenizer
    (found,) = chat_prompts.with_template(loaded("Hi"), tokenizer, None)
    assert found.questions[0].prompt == "Hi#"
    args.chat_template_kwargs = {"enable_thinkng": False}
    with pytest.raises(EvalError, match="--chat-template-kwargs: enable_thinkng: the model's chat"):
        open_model(args, str(model))


def test_a_model_without_a_template_and_a_prompt_that_is_a_chat_are_refused():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = None
    with pytest.raises(EvalError, match="--chat-template: the model's tokenizer has none"):
        chat_prompts.with_template(loaded("Hi"), tokenizer, None)
    with pytest.raises(EvalError, match=r"--chat-template: the prompts of one .*ChatML"):
        chat_prompts.refuse_chats(loaded("<|im_start|>user\nHi<|im_end|>\n"))


def test_messages_need_a_template_that_takes_them():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    question = Question("one", "", "2", messages=[{"role": "user", "content": "1 + 1"}])
    asked = [replace(BENCHMARK, questions=[question])]
    for template, words in (
        (None, "the model's tokenizer has no chat template"),
        ("{{ raise_exception('no such role') }}", "no such role"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(EvalError, match=f"^one: one: its messages: {words}$"):
            with_messages_written(asked, tokenizer)


def test_a_template_that_refuses_a_system_turn_is_one_line():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(EvalError, match="--chat-template: System role not supported"):
        chat_prompts.with_template(loaded("Hi"), tokenizer, "S")


class Chat(Handler):
    """An OpenAI-compatible server that keeps the requests and answers with `message`."""

    requests: list[tuple[str, dict[str, Any]]]
    message: dict[str, Any]

    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": "served"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.content())
        self.requests.append((self.path, body))
        choice = {"message": self.message, "finish_reason": "stop"}
        found = {"choices": [choice], "usage": {"completion_tokens": 3}}
        self.answer(json.dumps(found).encode())


@pytest.fixture
def server() -> Iterator[tuple[type[Chat], str]]:
    Chat.requests, Chat.message = [], {"content": r"\boxed{2}"}
    with serving(Chat) as url:
        yield Chat, f"{url}/v1"


def test_a_server_gets_messages_through_its_chat_endpoint(server, monkeypatch, tmp_path):
    handler, url = server
    monkeypatch.setitem(SUITES, "math", Suite("math", "One question", (BENCHMARK,)))
    out = tmp_path / "out"
    options = ["--chat-template", "--system-prompt", "Be brief.", "--temperature", "0.5"]
    options += ["--chat-template-kwargs", '{"enable_thinking": false}']
    given = ["--suite", "math", "--model", "served", "--engine", "openai", "--base-url", url]
    assert main([*given, "--out", str(out), *options]) == 0
    ((path, body),) = handler.requests
    assert path == "/v1/chat/completions" and "prompt" not in body
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
    ]
    assert body["temperature"] == 0.5
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    results = json.loads((out / "results.json").read_text())
    assert results["chat"] == {"system_prompt": "Be brief."}
    assert results["chat_template_kwargs"] == {"enable_thinking": False}
    assert results["overrides"] == {"temperature": 0.5}
    assert results["benchmarks"]["one"]["scores"]["accuracy"]["value"] == 1.0
    line = "**Other settings than the paper's, not comparable:** --temperature 0.5, --chat-template"
    assert line in (out / "table.md").read_text()
    # Another system prompt is another run.
    again = [*given, "--out", str(out), "--resume", "--chat-template", "--temperature", "0.5"]
    assert main(again) == 2


@pytest.mark.parametrize(
    ("message", "text"),
    [({"content": "2", "reasoning": "1 + 1 is 2"}, "2"), ({"content": None, "reasoning": "1"}, "")],
)
def test_reasoning_that_a_server_gives_apart_is_not_graded(message, text, server):
    handler, url = server
    handler.message = message
    engine = ServerEngine(url, "served", "served", chat=True)
    try:
        done = asyncio.run(engine.generate(Sample(BENCHMARK, QUESTION, 0, (), 5, 0)))
    finally:
        engine.close()
    assert (done.response, done.tokens) == (text, 3)


def test_template_arguments_without_a_template_are_refused(puzzle_folder, tmp_path, capsys):
    model = shutil.copytree(TINY, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking %}{% endif %}")
    given = ["--suite", "kk", "--data-dir", str(puzzle_folder), "--model", str(model)]
    given += ["--limit", "1", "--chat-template-kwargs", '{"enable_thinking": true}']
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --chat-template-kwargs: needs --chat-template")
    assert not (tmp_path / "out").exists()
