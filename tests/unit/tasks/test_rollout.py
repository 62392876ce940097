"""The dialogue of a rollout, and chat prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sg_rlhf.tasks import chat
from sg_rlhf.tasks.codec import CharacterCodec
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.kk.domain import KK
from sg_rlhf.tasks.rollout import Reply, SingleTurn, Turn
from sg_rlhf.tasks.search.environment import SearchEnvironment
from sg_rlhf.tasks.search.limits import Limits
from sg_rlhf.tasks.search.settings import SearchSettings
from tests.unit.tasks.search.http_retriever import Retriever, running

# -- Episodes in text: single-turn ones, and search dialogues against a real retriever -----------


ROW = {"input": "Question: Who?\n", "answer": json.dumps(["Ada"])}
SEARCHES = "<search> Ada </search>"


@pytest.fixture
def retriever() -> Iterator[Retriever]:
    with running() as server:
        yield server


def play(url: str, *turns: str, **settings: object) -> tuple[list[Reply], Grade]:
    """The replies to the turns, the last of which must end the episode, and its grade."""

    async def replies() -> tuple[list[Reply], Grade]:
        search = SearchSettings(url=url, **settings)  # type: ignore[arg-type]
        environment = SearchEnvironment(search, limits=Limits(retries=0, outage_s=0.0))
        episode = environment.begin(ROW, CharacterCodec())
        try:
            return [await episode.step(Turn(turn)) for turn in turns], episode.grade()
        finally:
            await environment.aclose()

    found, grade = asyncio.run(replies())
    assert [reply.done for reply in found] == [False] * (len(turns) - 1) + [True]
    return found, grade


def test_a_response_is_graded_and_ends_the_episode() -> None:
    row = {"input": "A puzzle.", "answer": "(1) Zoey is a knight"}
    episode = SingleTurn(KK.grade).begin(row, CharacterCodec())
    right = "She tells the truth. </think><answer> (1) Zoey is a knight </answer>"
    assert asyncio.run(episode.step(Turn(right))).done
    assert episode.grade() == KK.grade(right, row["answer"])
    assert episode.grade().correct


def test_a_search_is_answered_and_the_answer_graded(retriever: Retriever) -> None:
    (first, _), grade = play(retriever.url, SEARCHES, "<answer> Ada </answer>")
    assert first.text.startswith('\n\n<information>Doc 1(Title: "About Ada")')
    assert first.text.endswith("</information>\n\n")
    assert retriever.requests[0]["queries"] == ["Ada"]
    assert (grade.reward, grade.correct) == (1.0, True)


@pytest.mark.parametrize(("scheme", "reward"), [("sign", -1.0), ("binary", 0.0)])
def test_a_wrong_answer_has_the_rewards_of_the_setting(
    retriever: Retriever, scheme: str, reward: float
) -> None:
    _, grade = play(retriever.url, "<answer> Bob </answer>", reward=scheme)
    assert grade.reward == reward


def test_a_long_result_is_cut(retriever: Retriever) -> None:
    long = {"document": {"id": "1", "contents": f'"T"\n{"word " * 5000}'}, "score": 1.0}
    with retriever.answering(lambda body: (200, {"result": [[long]]})):
        (first, _), _ = play(
            retriever.url, SEARCHES, "<answer> Ada </answer>", observation_tokens=50
        )
    assert 150 < len(first.text) < 300 and first.text.endswith("</information>\n\n")


# -- What is said of prompts in another family's form --------------------------------------------


#: Knows no control tokens.
TOKENIZER = SimpleNamespace(convert_tokens_to_ids=lambda token: None, unk_token_id=None)


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nx", "<|start_header_id|>user"])
def test_the_remedy_is_one_for_every_domain(prompt):
    with pytest.raises(ValueError, match="has no token") as raised:
        chat.check_format(prompt, TOKENIZER)
    remedy, for_kk = str(raised.value).split("; for Knights & Knaves, ")
    assert remedy.endswith("rows of messages with data.apply_chat_template=true")
    assert for_kk == "`sg-rlhf data kk --chat-template MODEL`"


def test_plain_text_has_no_form():
    chat.check_format("What is 1 + 1?", TOKENIZER)
