"""The tokenizer of Knights & Knaves: exact round trips, short prompts, the same ids as shipped."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sg_rlhf.tasks.kk.prompt import build_chat_prompt, build_prompt
from sg_rlhf.tasks.kk.puzzle import generate
from sg_rlhf.tasks.kk.render import NAMES
from sg_rlhf.tasks.kk.tiny import TINY, phrases
from sg_rlhf.tasks.kk.traces import trace
from sg_rlhf.tasks.tiny import EOS
from sg_rlhf.tiny.build import shipped
from sg_rlhf.tiny.tokenizer import CONTROL, build_tokenizer
from tests.unit.tiny.texts import texts_with

TOKENIZER = AutoTokenizer.from_pretrained(shipped("kk"))


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


@given(texts_with(phrases()))
def test_any_text_survives(text):
    assert decode(encode(text)) == text


@given(st.binary(max_size=40))
def test_any_bytes_that_are_text_survive(data):
    text = data.decode("latin-1")
    assert decode(encode(text)) == text


@pytest.mark.parametrize(("n_people", "mean"), [(2, 28), (3, 37), (4, 47)])
def test_prompts_are_short_and_survive(n_people, mean):
    prompts = [build_prompt(puzzle.quiz) for puzzle in generate(n_people, 100, seed=5)]
    encoded = [encode(prompt) for prompt in prompts]
    assert [decode(ids) for ids in encoded] == prompts
    assert sum(map(len, encoded)) / 100 == pytest.approx(mean, abs=1)


def test_prompt_plus_response_is_the_concatenation():
    # Training and rollout encode the two apart; the reward reads them decoded together.
    rng = random.Random(0)
    for puzzle in generate(3, 50, seed=6):
        prompt, response = build_prompt(puzzle.quiz), trace(puzzle, rng, "search", 0.2) + EOS
        assert decode(encode(prompt) + encode(response)) == prompt + response
        assert encode(response)[-1] == TOKENIZER.eos_token_id


def test_a_response_of_three_people_fits():
    rng = random.Random(0)
    lengths = [len(encode(trace(p, rng, "search", 0.2))) for p in generate(3, 500, seed=7)]
    assert max(lengths) < 256


def test_every_phrase_and_name_is_one_token():
    for text in [*CONTROL, *phrases(), *NAMES]:
        assert len(encode(text)) == 1, text


def test_chat_template_gives_the_raw_prompt():
    quiz = generate(2, 1, seed=8)[0].quiz
    assert build_chat_prompt(quiz, TOKENIZER) == build_prompt(quiz)


def test_special_tokens():
    assert TOKENIZER.eos_token == EOS
    assert TOKENIZER.pad_token_id not in (None, TOKENIZER.eos_token_id)
    assert len(TOKENIZER) == 520


def test_the_code_builds_the_shipped_tokenizer():
    """A changed name, frame or prompt changes ids, and the shipped weights would read nonsense."""
    assert build_tokenizer(TINY).get_vocab() == TOKENIZER.get_vocab()


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least 3"):
        build_tokenizer(TINY, vocab_size=300)
