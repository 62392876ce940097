"""The three Knights & Knaves harnesses, held to what the published code computes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.tasks.kk.harnesses import (
    GRADERS,
    PROMPTS,
    grade_logic_rl,
    grade_official,
    grade_paper,
)
from sg_rlhf.tasks.kk.puzzle import generate

GOLD = "(1) Zoey is a knight\n(2) Jack is a knave"


def tagged(answer: str) -> str:
    return f"some thoughts</think><answer>{answer}</answer>"


@pytest.mark.parametrize("n_people", range(2, 9))
def test_a_gold_answer_is_right_under_every_harness(n_people):
    for puzzle in generate(n_people, 5, seed=1):
        gold = puzzle.solution_text_format
        assert grade_official(f" by cases.\nCONCLUSION:\n{gold}", gold).correct
        assert grade_logic_rl(tagged(gold), gold).correct
        assert grade_paper(tagged(gold), gold).correct
        wrong = gold.replace("knight", "KNAVE").replace("knave", "knight").replace("KNAVE", "knave")
        assert not grade_official(f"CONCLUSION:\n{wrong}", gold).correct
        assert not grade_logic_rl(tagged(wrong), gold).correct
        assert not grade_paper(tagged(wrong), gold).correct


@pytest.mark.parametrize(
    ("response", "correct", "reason"),
    [
        ("CONCLUSION:\n(1) Zoey is a knight\n(2) Jack is a knave", True, "correct"),
        ("Conclusion: Jack is a knave, Zoey is a knight.", True, "correct"),
        # an empty text after the first spelling lets the next one count
        ("conclusion: Zoey is a knight, Jack is a knave. CONCLUSION:", True, "correct"),
        # what stands before the word does not count
        ("Zoey is a knight. Jack is a knave. CONCLUSION: see above", False, "wrong"),
        # between the first and the second
        ("CONCLUSION: Zoey is a knight CONCLUSION: Jack is a knave", False, "wrong"),
        ("CONCLUSION: (1) Zoey is a knight (2) Jack is a knave (3) x", False, "beyond_list"),
        ("CONCLUSION: Zoey is a knight, if Jack is a knave", False, "contains_if"),
        ("CONCLUSION: Zoey is a knight, Jack is a knave, in this life", False, "contains_if"),
        # cut off before the harness looks
        ("CONCLUSION: Zoey is a knight, Jack is a knave ### if", True, "correct"),
        ("CONCLUSION: Zoey is a knight ### Question: Jack is a knave", False, "wrong"),
        # both at once is right, as in the official code
        (
            "CONCLUSION: Zoey is a knight, Zoey is a knave, Jack is a knave",
            True,
            "correct",
        ),
        # without the word: a complete numbered list
        ("(1) Zoey is a knight (2) Jack is a knave", True, "correct"),
        ("Zoey is a knight, Jack is a knave", False, "no_conclusion"),
        ("", False, "no_conclusion"),
        ("CONCLUSION: zoey is a knight, jack is a knave", False, "wrong"),
    ],
)
def test_official(response, correct, reason):
    verdict = grade_official(response, GOLD)
    assert (verdict.correct, verdict.reason) == (correct, reason)
    assert (verdict.extracted is None) == (reason == "no_conclusion")


@pytest.mark.parametrize(
    ("response", "logic_rl", "paper"),
    [
        (tagged(GOLD), True, True),
        # looser than the reward: words between, "not", more role words, a second <think>
        (tagged("Zoey: definitely a knight\nJack must be a knave"), True, False),
        (tagged("Zoey is a knight\nJack is not a knave"), True, False),
        (tagged(GOLD + "\nso one knight"), True, False),
        (tagged("ZOEY is a KNIGHT\njack is a Knave"), True, True),
        ("<think>again" + tagged(GOLD), True, False),
        # the first role word after the name, on its line
        (tagged("Zoey and Jack are knave and knight"), False, False),
        (tagged("Zoey\nis a knight. Jack is a knave"), False, True),
        (tagged("Zoey is a knight"), False, False),
        (tagged(""), False, False),
        # tags
        (GOLD, False, False),
        (f"<answer>{GOLD}</answer></think>", False, False),
        (tagged(GOLD) + "<answer>", False, False),
    ],
)
def test_logic_rl_and_the_reward_differ_where_they_should(response, logic_rl, paper):
    assert grade_logic_rl(response, GOLD).correct == logic_rl
    assert grade_paper(response, GOLD).correct == paper


WORDS = ["Zoey", "Jack", " is a ", "knight", "knave", " ", "\n", "x"]


@given(st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_the_linear_search_of_logic_rl_finds_what_its_pattern_finds(answer):
    expected = {}
    for name in ("Zoey", "Jack"):
        match = re.search(rf"\b{name}\b.*?\b(knight|knave)\b", answer, re.IGNORECASE)
        expected[name] = match.group(1).lower() if match else None
    verdict = grade_logic_rl(tagged(answer), GOLD)
    assert verdict.correct == (expected == {"Zoey": "knight", "Jack": "knave"})
    if answer.strip():
        assert (verdict.reason == "unparseable") == (None in expected.values())


def test_hostile_text_takes_linear_time():
    for grade in (grade_official, grade_logic_rl, grade_paper):
        assert not grade(tagged("Zoey " * 200_000), GOLD).correct
        assert not grade("CONCLUSION:" * 100_000, GOLD).correct


def test_prompts_are_those_of_the_harnesses():
    official = PROMPTS["official"]("QUIZ")
    assert official.endswith("\n\n### Question: QUIZ\n### Answer: Let's think step by step")
    assert official.startswith("Your task is to solve a logical reasoning problem. You are given")
    assert "CONCLUSION:\n(1) ...\n(2) ...\n(3) ...\n" in official
    assert PROMPTS["logic_rl"]("QUIZ") == PROMPTS["paper"]("QUIZ")
    assert PROMPTS["paper"]("QUIZ").endswith("<|im_start|>assistant\n<think>")
    assert PROMPTS.keys() == GRADERS.keys()
