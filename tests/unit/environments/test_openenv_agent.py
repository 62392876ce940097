"""Episodes of an OpenEnv environment as rollouts, with a server of the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

from sg_rlhf.environments import openenv_domain
from sg_rlhf.environments.openenv_domain import OpenEnvSettings, check, reset_options
from sg_rlhf.overlay.reporting.errors import RewardError
from sg_rlhf.overlay.rollout.openenv_agent import AgentExecutor

END = 0


class Letters:
    """A tokenizer of letters: 0 ends a turn, and "<e>" in a text is that token unless split."""

    all_special_ids = (END,)

    def __call__(self, text: str, add_special_tokens: bool, **options: Any) -> dict[str, Any]:
        parts = [text] if options.get("split_special_tokens") else text.split("<e>")
        ids = [ord(c) for c in parts[0]]
        for part in parts[1:]:
            ids += [END, *map(ord, part)]
        return {"input_ids": ids}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join("<e>" if i == END else chr(i) for i in ids)


class Params(SimpleNamespace):
    def clone(self) -> Params:
        return Params(**vars(self))


class Engine:
    """Writes the turns of a script, one after another; keeps what it was asked."""

    def __init__(self, *turns: str) -> None:
        self._turns = list(turns)
        self.asked: list[tuple[str, int, Any]] = []

    async def generate(self, context: list[int], params: Any) -> Any:
        self.asked.append((Letters().decode(context), params.max_tokens, params.stop))
        ids = Letters()(self._turns.pop(0), add_special_tokens=False)["input_ids"]
        reason = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        log_probs = [{i: SimpleNamespace(logprob=-i / 8)} for i in ids]
        output = SimpleNamespace(token_ids=ids, logprobs=log_probs, finish_reason=reason)
        return SimpleNamespace(outputs=[output])


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


def rollout(answer: Answer, engine: Engine, label: str = '{"seed": 3}', **settings: Any) -> Any:
    params = Params(max_tokens=settings.pop("budget", 100), min_tokens=1, logprobs=0, stop=None)

    async def use(url: str) -> Any:
        agent = AgentExecutor(OpenEnvSettings(url=url, **settings))
        return await agent.execute("prompt", label, params, 200, Letters(), engine)

    return with_server(answer, use)


def test_turns_are_actions_and_observations_are_not_trained() -> None:
    said: list[dict[str, Any]] = []
    engine = Engine("one<e>", "two")
    found = rollout(counting(said, 2), engine, between="[{text}<e>]", stop=["two"])
    assert said == [
        {"type": "reset", "data": {"seed": 3}}, {"type": "step", "data": {"text": "one"}},
        {"type": "step", "data": {"text": "two"}},
    ]  # fmt: skip
    text = Letters().decode(found["observation_tokens"])
    assert text == "promptone<e>[<e>heard<e>]two"
    # The environment's own "<e>" is letters; that of the template is the token.
    assert found["observation_tokens"].count(END) == 2
    assert [text_of(found, span) for span in found["action_ranges"]] == ["one<e>", "two"]
    assert len(found["rollout_log_probs"]) == len(found["observation_tokens"])
    assert found["rollout_log_probs"][6] == -ord("o") / 8 and found["rollout_log_probs"][10] == 0.0
    assert (found["reward"], found["truncated"], found["scores"]) == (1.0, False, 0.0)
    assert found["extra_logs"] == {"correct": 0.0, "turns": 2.0, "ended": 1.0}
    assert engine.asked[1][0] == "promptone<e>[<e>heard<e>]" and engine.asked[0][2] == ["two"]


def text_of(found: dict[str, Any], span: tuple[int, int]) -> str:
    return Letters().decode(found["observation_tokens"][slice(*span)])


@pytest.mark.parametrize(
    ("settings", "turns", "text"),
    [
        ({"max_turns": 2}, 2, "promptone<e>heardone"),
        ({"budget": 11}, 1, "promptone"),  # the observation would leave nothing to answer in
        ({"budget": 2}, 1, "prompton"),
    ],
)
def test_an_episode_that_is_not_over_is_truncated(
    settings: dict[str, Any], turns: int, text: str
) -> None:
    found = rollout(counting([], 9), Engine("one", "one", "one"), **settings)
    assert found["truncated"] and found["extra_logs"]["ended"] == 0.0
    assert found["extra_logs"]["turns"] == turns and found["reward"] == 0.5 * turns
    assert Letters().decode(found["observation_tokens"]) == text


def test_what_an_environment_does_wrong_is_one_line() -> None:
    error = {"type": "error", "data": {"message": "no such\nfield", "code": "VALIDATION_ERROR"}}
    with pytest.raises(RewardError, match="reset failed: .*no such") as failed:
        rollout(lambda _: error, Engine())
    assert "\n" not in str(failed.value)
    with pytest.raises(RewardError, match=r"fields metadata, text"):
        rollout(counting([], 2), Engine("one"), observation="board")
    with pytest.raises(RewardError, match="expected a JSON object"):
        rollout(counting([], 2), Engine("one"), label="gold")


def test_a_server_that_is_away_is_told_before_the_run() -> None:
    with pytest.raises(
        ValueError, match=r"^http://127.0.0.1:9: no OpenEnv server: .*sg.openenv.url"
    ):
        check(OpenEnvSettings(url="http://127.0.0.1:9", timeout_s=5))


def test_rows_are_the_beginnings_of_episodes() -> None:
    async def use(url: str) -> Any:
        settings = OpenEnvSettings(url=url)
        return await openenv_domain.begin(settings, [{"seed": 4}, {"seed": 5}])

    assert with_server(counting([], 9), use) == ["r4", "r5"]
    assert reset_options('{"index": 2}') == {"index": 2}
