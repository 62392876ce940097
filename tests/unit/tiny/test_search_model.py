"""Search dialogues for the tiny model: tokenizer, demonstrations and the grade of a turn."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

from transformers import AutoTokenizer

from sg_rlhf.config import load_config
from sg_rlhf.tasks.search.protocol import CORRECTION, parse_action
from sg_rlhf.tasks.search.sets import encyclopedia
from sg_rlhf.tasks.search.sets.traces import demonstrate
from sg_rlhf.tasks.search.settings import SearchSettings
from sg_rlhf.tasks.search.tiny import (
    TINY,
    SearchWarmStart,
    Turn,
    held_out_problems,
    held_out_turns,
    phrases,
    turns_of,
)
from sg_rlhf.tasks.tiny import EOS
from sg_rlhf.tiny.build import check, shipped
from sg_rlhf.tiny.tokenizer import CONTROL, build_tokenizer
from tests.unit.config.test_config import CONFIGS

TOKENIZER = build_tokenizer(TINY)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def demonstrations(n: int, *, clean: bool, seed: int = 0) -> list[tuple[str, str]]:
    return list(itertools.islice(SearchWarmStart().texts(seed, clean=clean), n))


def test_the_shipped_build_is_that_of_the_recipe_and_the_code() -> None:
    manifest = check(shipped("search"))
    assert manifest["recipe"] == asdict(SearchWarmStart())
    built = AutoTokenizer.from_pretrained(shipped("search"))
    # A changed template or name changes ids, and the shipped weights would read nonsense.
    assert built.get_vocab() == TOKENIZER.get_vocab()
    # It can read an answer out of a passage, and has not the habit of searching for it.
    assert manifest["greedy"]["accuracy_answer_after_1"] > 0.95
    assert manifest["sampled_at_0.7"]["accuracy_search_after_0"] < 0.6


def test_every_phrase_is_one_token() -> None:
    for text in [*CONTROL, *phrases(), CORRECTION]:
        assert len(encode(text)) == 1, text


def test_a_dialogue_encodes_the_same_whole_and_in_pieces() -> None:
    # The warm start encodes what stands so far at once, the agent piece by piece.
    for problem in held_out_problems():
        trace = demonstrate(problem)
        parts = [encode(text) for text in (trace.prompt, *(p.text for p in trace.pieces))]
        assert encode(trace.prompt + trace.response) == [t for part in parts for t in part]


def test_the_recipes_budgets_hold_the_longest_dialogue() -> None:
    config = load_config(CONFIGS / "search" / "grpo_sg_tiny_cpu.yaml")
    chosen: Any = config.sg.domains["search"]
    assert isinstance(chosen, SearchSettings)
    for problem in held_out_problems():
        trace = demonstrate(problem)
        for piece in trace.pieces:
            cap = chosen.turn_tokens if piece.of_model else chosen.observation_tokens
            assert len(encode(piece.text)) + 1 <= cap
        assert len(encode(trace.response)) <= config.value("rollout.max_new_tokens") // 2
        prompt_room = config.value("data.max_len") - config.value("rollout.max_new_tokens")
        assert len(encode(trace.prompt)) <= prompt_room
        searches = sum(not piece.of_model for piece in trace.pieces)
        assert searches <= chosen.max_turns


def test_turns_rebuild_the_dialogue() -> None:
    trace = demonstrate(held_out_problems()[0])
    turns = list(turns_of(trace))
    assert turns[0][0] == trace.prompt
    context, last = turns[-1]
    assert context + last == trace.prompt + trace.response
    assert [text for _, text in turns] == [p.text for p in trace.pieces if p.of_model]


def test_no_demonstration_asks_about_a_held_out_person_or_town() -> None:
    names = {step.query for p in held_out_problems() for step in p.steps}
    for context, _ in demonstrations(3000, clean=False):
        question = context.partition("\n")[0]
        assert not any(name in question for name in names)


def test_facts_are_not_to_be_learnt_by_heart() -> None:
    answers: dict[str, set[str]] = {}
    for context, text in demonstrations(30_000, clean=True):
        question = context.partition("\n")[0]
        if text.startswith("<answer>") and "What does" in question:
            answers.setdefault(question, set()).add(text)
    often = [len(found) for found in answers.values()]
    assert len(often) > 100 and sum(often) / len(often) > 2


def test_shares_of_the_mixture() -> None:
    first = [
        text for context, text in demonstrations(6000, clean=False) if context.count("\n") == 1
    ]
    guessed = sum(text.startswith("<answer>") for text in first) / len(first)
    assert abs(guessed - SearchWarmStart().guess_share) < 0.05
    clean = [t for c, t in demonstrations(3000, clean=True) if c.count("\n") == 1]
    assert all(text.startswith("<search>") for text in clean)


def test_demonstrations_depend_on_the_seed_alone() -> None:
    assert demonstrations(50, clean=False) == demonstrations(50, clean=False)
    assert demonstrations(50, clean=False) != demonstrations(50, clean=False, seed=1)


def test_the_grade_of_a_turn_is_its_action() -> None:
    def verdict(response: str, turn: Turn) -> tuple[bool, bool]:
        found = TINY.grade(response, turn)
        return found.correct, found.format_ok

    turns = held_out_turns()
    assert {TINY.group(turn) for turn in turns} == {
        "search_after_0", "search_after_1", "answer_after_1", "answer_after_2",
    }  # fmt: skip
    for turn in turns[:50]:
        action = turn.expected
        right = f"<{action.kind}> {action.content} </{action.kind}>"
        assert verdict(right + EOS, turn) == (True, True)
        assert verdict("<search> Nobody </search>" + EOS, turn) == (False, True)
        assert verdict(right.removesuffix(">") + EOS, turn) == (False, False)
        assert parse_action(right) == action


def test_every_name_of_the_encyclopedia_is_short() -> None:
    for record in encyclopedia.build(1).corpus:
        assert len(encode(record["contents"].partition("\n")[0].strip('"'))) == 2
