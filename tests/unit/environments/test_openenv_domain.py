"""Environments of OpenEnv, and the command that serves ours."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from sg_rlhf.environments import openenv_domain
from sg_rlhf.environments.command import main
from sg_rlhf.environments.openenv_domain import (
    OpenEnvEnvironment,
    OpenEnvSettings,
    check,
    reset_options,
)
from sg_rlhf.tasks import rollout
from sg_rlhf.tasks.grade import Grade

# -- Episodes of an OpenEnv environment as rollouts, with a server of the protocol ---------------


END = 0


class Letters:
    """A codec of letters: 0 ends a turn, and "<e>" in a text is that token."""

    ids_per_token = 1
    control_tokens = ("<e>",)
    control_ids = frozenset({END})

    def encode(self, text: str) -> list[int]:
        first, *parts = text.split("<e>")
        return [*map(ord, first), *(i for part in parts for i in (END, *map(ord, part)))]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("<e>" if i == END else chr(i) for i in token_ids)


#: What a client says -> what the environment answers.
Answer = Callable[[dict[str, Any]], dict[str, Any]]


def counting(said: list[dict[str, Any]], length: int) -> Answer:
    """An environment that repeats what it hears, and ends after ``length`` actions."""

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        said.append(message)
        steps = sum(m["type"] == "step" for m in said)
        done = steps == length
        text = f"r{message['data'].get('seed')}" if message["type"] == "reset" else "<e>heard"
        observation = {"text": text, "metadata": {"correct": False} if done else {}}
        return {
            "type": "observation",
            "data": {"observation": observation, "reward": 0.5 if steps else None, "done": done},
        }

    return answer


def with_server(answer: Answer, use: Callable[[str], Awaitable[Any]]) -> Any:
    """``use`` with the address of a server that answers so."""

    async def socket(request: web.Request) -> web.WebSocketResponse:
        channel = web.WebSocketResponse()
        await channel.prepare(request)
        async for message in channel:
            assert message.type == WSMsgType.TEXT
            await channel.send_json(answer(json.loads(message.data)))
        return channel

    async def run() -> Any:
        app = web.Application()
        app.router.add_get("/ws", socket)
        async with TestServer(app) as server:
            return await use(str(server.make_url("")))

    return asyncio.run(run())


def play(
    answer: Answer, *turns: str, label: str = '{"seed": 3}', budget: int = 100, **settings: Any
) -> tuple[rollout.Trajectory, Grade, list[str]]:
    """An episode in which the model writes these turns; what it read before each."""
    script, read = list(turns), []

    async def generate(context: list[int], limit: int, _: tuple[str, ...]) -> rollout.Generation:
        read.append(Letters().decode(context))
        ids = Letters().encode(script.pop(0))
        return rollout.Generation(ids[:limit], len(ids) > limit)

    async def use(url: str) -> Any:
        environment = OpenEnvEnvironment(OpenEnvSettings(url=url, **settings))
        episode = environment.begin({"answer": label}, Letters())
        prompt = Letters().encode("prompt")
        found = await rollout.rollout(environment, episode, prompt, budget, generate, Letters())
        return found, await asyncio.to_thread(episode.grade), read

    return cast(tuple[rollout.Trajectory, Grade, list[str]], with_server(answer, use))


def test_turns_are_actions_and_observations_are_replies() -> None:
    said: list[dict[str, Any]] = []
    found, grade, read = play(counting(said, 2), "one<e>", "two", between="[{text}<e>]")
    assert said == [
        {"type": "reset", "data": {"seed": 3}}, {"type": "step", "data": {"text": "one"}},
        {"type": "step", "data": {"text": "two"}},
    ]  # fmt: skip
    # The environment's own "<e>" is letters; that of the template is the token.
    assert read == ["prompt", "promptone<e>[< e>heard<e>]"]
    assert found.token_ids.count(END) == 2
    assert found.turns == ["one<e>", "two"] and not found.truncated
    assert (grade.reward, grade.correct, grade.logs) == (1.0, False, {"ended": 1.0})


@pytest.mark.parametrize(
    ("settings", "turns", "text"),
    [
        ({"max_turns": 2}, 2, "promptone< e>heardone"),
        ({"budget": 27}, 1, "promptone"),  # the observation would leave nothing to answer in
        ({"budget": 2}, 1, "prompton"),
    ],
)
def test_an_episode_that_is_not_over_is_truncated(
    settings: dict[str, Any], turns: int, text: str
) -> None:
    found, grade, _ = play(counting([], 9), "one", "one", "one", **settings)
    assert found.truncated and grade.logs == {"ended": 0.0}
    assert len(found.turns) == turns and grade.reward == 0.5 * turns
    assert Letters().decode(found.token_ids) == text


def test_what_an_environment_does_wrong_is_one_line() -> None:
    error = {"type": "error", "data": {"message": "no such\nfield", "code": "VALIDATION_ERROR"}}
    with pytest.raises(rollout.EnvironmentFailed, match="reset failed: .*no such") as failed:
        play(lambda _: error, "one")
    assert "\n" not in str(failed.value)
    with pytest.raises(rollout.EnvironmentFailed, match=r"fields metadata, text"):
        play(counting([], 2), "one", observation="board")
    with pytest.raises(ValueError, match="expected a JSON object"):
        play(counting([], 2), "one", label="gold")


@pytest.mark.parametrize(("refusals", "timeout_s"), [(3, 30.0), (1000, 0.5)])
def test_a_full_server_is_asked_again_until_the_timeout(refusals: int, timeout_s: float) -> None:
    said: list[dict[str, Any]] = []
    counted = counting(said, 1)
    full = {"type": "error", "data": {"message": "at capacity", "code": "CAPACITY_REACHED"}}
    resets = iter([full] * refusals)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        refused = next(resets, None) if message["type"] == "reset" else None
        return refused or counted(message)

    if refusals > 3:
        with pytest.raises(rollout.EnvironmentFailed, match="at capacity"):
            play(answer, "a", timeout_s=timeout_s)
    else:
        _, found, _ = play(answer, "a", timeout_s=timeout_s)
        assert found.reward == 0.5 and next(resets, None) is None


def test_a_server_that_is_away_is_told_before_the_run() -> None:
    with pytest.raises(
        ValueError, match=r"^http://127.0.0.1:9: no OpenEnv server: .*sg.openenv.url"
    ):
        check(OpenEnvSettings(url="http://127.0.0.1:9", timeout_s=5))


def test_rows_are_the_beginnings_of_episodes() -> None:
    async def use(url: str) -> Any:
        return await asyncio.to_thread(openenv_domain.generate, url, "text", '{"size": 1}', 1, 1, 4)

    said: list[dict[str, Any]] = []
    train, test, _ = with_server(counting(said, 9), use)
    assert [(row["input"], row["answer"]) for row in (*test, *train)] == [
        ("r4", '{"size": 1, "seed": 4}'), ("r5", '{"size": 1, "seed": 5}')
    ]  # fmt: skip
    resets = [message["data"] for message in said if message["type"] == "reset"]
    assert resets == [{"size": 1, "seed": 4}, {"size": 1, "seed": 5}]
    assert reset_options('{"index": 2}') == {"index": 2}


# -- `sg-rlhf serve-env`: wrong input is one line and exit status 2 ------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kkk", "--data", "{data}"], "domain 'kkk': expected one of kk, math, search"),
        (["kk", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["kk", "--data", "{empty}"], "empty.jsonl: no rows"),
        (
            ["kk", "--data", "{chat}"],
            "chat.jsonl, line 1: input: [{'role': 'user'}], expected messages",
        ),
        (["kk", "--data", "{data}", "--set", "url=x"], "--set url=x: expected KEY=VALUE"),
        (["kk", "--data", "{data}", "--port", "70000"], "--port: 70000: expected a port"),
        (["kk", "--data", "{data}", "--port", "-1"], "--port: -1: expected a port"),
        (
            ["search", "--data", "{data}", "--set", "max_turns=many"],
            "max_turns=many: Input should be a va",
        ),
        (
            ["search", "--data", "{data}", "--set", "turns=2"],
            "--set turns=2: expected KEY=VALUE, each key once, of url,",
        ),
        (["search", "--data", "{data}"], "expected"),
        (["kk"], "the following arguments are required: --data"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("data", "empty", "chat")}
    files["data"].write_text(json.dumps({"input": "Who?", "answer": "no list"}) + "\n")
    files["empty"].write_text("")
    files["chat"].write_text(json.dumps({"input": [{"role": "user"}], "answer": "x"}) + "\n")
    try:
        status = main([word.format(**files) for word in words])
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_without_openenv_the_line_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.delitem(sys.modules, "sg_rlhf.environments.openenv", raising=False)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input": "Who?", "answer": "(1) Zoey is a knight"}) + "\n")
    assert main(["kk", "--data", str(data)]) == 2
    assert capsys.readouterr().err.strip().endswith("pip install '.[openenv]'")
