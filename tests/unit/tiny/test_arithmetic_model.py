"""Arithmetic for the tiny model: tokenizer, demonstrations and the grade of a response."""

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sg_rlhf.tasks.math.prompt import SUFFIX, prompt_of
from sg_rlhf.tasks.math.sets.arithmetic import NAMES, THINGS, generate, trace
from sg_rlhf.tasks.math.tiny import TINY, ArithmeticWarmStart, held_out_problems, phrases
from sg_rlhf.tasks.tiny import EOS
from sg_rlhf.tiny.build import shipped
from sg_rlhf.tiny.tokenizer import CONTROL, build_tokenizer
from tests.unit.tiny.texts import texts_with

TOKENIZER = AutoTokenizer.from_pretrained(shipped("math"))
RECIPE = ArithmeticWarmStart()


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def demonstrations(n: int, *, clean: bool, seed: int = 0) -> list[tuple[str, str]]:
    return list(itertools.islice(RECIPE.texts(seed, clean=clean), n))


@given(texts_with(phrases()))
def test_any_text_survives(text):
    assert decode(encode(text)) == text


def test_the_code_builds_the_shipped_tokenizer():
    """A changed template or name changes ids, and the shipped weights would read nonsense."""
    assert build_tokenizer(TINY).get_vocab() == TOKENIZER.get_vocab()


def test_every_phrase_name_and_digit_is_one_token():
    for text in [*CONTROL, *phrases(), *NAMES, *THINGS, SUFFIX, *"0123456789"]:
        assert len(encode(text)) == 1, text


@given(st.from_regex(r"[0-9][0-9 .,$]{0,12}", fullmatch=True))
def test_a_digit_is_one_token_in_every_number(text):
    digits = {encode(digit)[0] for digit in "0123456789"}
    found = [token for token in encode(text) if token in digits]
    assert len(found) == len(re.findall("[0-9]", text))


def test_prompts_and_responses_are_short_and_survive_apart():
    # Training and rollout encode the two apart; the reward reads them decoded together.
    demos = demonstrations(500, clean=False)
    for prompt, response in demos:
        assert decode(encode(prompt) + encode(response + EOS)) == prompt + response + EOS
    assert max(len(encode(prompt)) for prompt, _ in demos) <= 24
    rng = random.Random(0)
    longest = max(len(encode(trace(p, rng, "columns", 0.3))) for p in generate(2000, seed=7))
    assert longest < TINY.max_new_tokens


def test_demonstrations_depend_on_the_seed_alone():
    assert demonstrations(20, clean=False) == demonstrations(20, clean=False)
    assert demonstrations(20, clean=False) != demonstrations(20, clean=False, seed=1)


def test_shares_of_the_mixture():
    mixed = [response for _, response in demonstrations(3000, clean=False)]
    share = sum(TINY.guess in response for response in mixed) / len(mixed)
    assert share == pytest.approx(RECIPE.guess_share, abs=0.03)
    clean = [response for _, response in demonstrations(500, clean=True)]
    assert not any(TINY.guess in response for response in clean)


def test_no_demonstration_is_held_out_or_in_the_data_commands_test_split():
    shown = {prompt for clean in (True, False) for prompt, _ in demonstrations(5000, clean=clean)}
    assert not shown & {TINY.prompt(problem) for problem in held_out_problems()}
    for seed in (0, 1):
        test_split = generate(200, seed, held_out=True, max_operands=3, max_digits=2)
        assert not shown & {prompt_of(problem.text) for problem in test_split}


@pytest.mark.parametrize(
    ("response", "correct", "well_formed"),
    [
        ("\\boxed{96}", True, True),
        ("\\boxed{1}, no: \\boxed{96}<|im_end|>", True, True),
        ("\\boxed{96}, no: \\boxed{1}", False, True),
        ("\\boxed{96}, no: \\boxed{1", True, True),
        ("\\boxed{-96}", False, True),
        ("\\boxed{}", False, False),
        ("96", False, False),
    ],
)
def test_the_last_complete_box_is_graded(response, correct, well_formed):
    problem = next(p for p in generate(5000, seed=0) if p.gold == "96")
    found = TINY.grade(response, problem)
    assert (found.correct, found.format_ok) == (correct, well_formed)
