"""The grader: totals, its rules against a slow restatement, and hostile text."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sg_rlhf.tasks.kk.grading import READINGS, Reason, parse_answer_key, score
from sg_rlhf.tasks.kk.puzzle import generate
from sg_rlhf.tasks.kk.render import render_answer

PUZZLES = [puzzle for n in range(2, 9) for puzzle in generate(n, 12, seed=9)]
GOLD = "(1) Zoey is a knight\n(2) Jack is a knave\n(3) Mia is a knight"
GOOD = f"because</think><answer>{GOLD}</answer>"


def answered(text: str) -> str:
    return f"some thoughts</think>\n<answer>{text}</answer><|im_end|>"


def slow_score(response: str, roles: dict[str, str]) -> float:
    """The rules of the reference reward, restated with regexes (quadratic, fine here)."""
    text = "<think>" + response
    order = re.findall(r"<think>|</think>|<answer>|</answer>", text)
    if order != ["<think>", "</think>", "<answer>", "</answer>"]:
        return -3.0
    answer = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)[-1].strip()
    if not answer or len(re.findall("knight|knave", answer.lower())) != len(roles):
        return -1.0
    found = {}
    for name in roles:
        said = re.findall(rf"\b{name}\b\s+is\s+a\s+(knight|knave)\b", answer, re.IGNORECASE)
        if not said:
            return -1.0
        found[name] = said[0].lower()
    return 3.0 if found == roles else -0.5


@pytest.mark.parametrize("puzzle", PUZZLES[::3], ids=str)
def test_gold_and_every_flip(puzzle):
    gold = puzzle.solution_text_format
    result = score(answered(gold), gold)
    assert (result.reward, result.correct, result.reason) == (3.0, True, Reason.CORRECT)
    assert score(answered(gold), gold, "table5").reward == 3.0
    assert score(answered(gold), gold, reading="strict").correct
    for person in range(puzzle.n_people):
        flipped = tuple(k ^ (i == person) for i, k in enumerate(puzzle.solution))
        text = answered(render_answer(puzzle.names, flipped))
        result = score(text, gold)
        assert (result.reward, result.correct, result.reason) == (-0.5, False, Reason.WRONG)
        assert result.extracted == render_answer(puzzle.names, flipped)
        assert score(text, gold, "table5").reward == -2.5
        assert score(text, gold, reading="strict").reason is Reason.WRONG
    nobody = answered(render_answer(puzzle.names, [not k for k in puzzle.solution]))
    assert score(nobody, gold).reward == -0.5
    assert score(nobody, gold, "table5").reward == -3.0


def test_every_broken_format():
    tags = ["</think>", "<answer>", "</answer>"]
    well_formed = tuple(tags)
    seen = 0
    for length in range(5):
        for sequence in itertools.product(["<think>", *tags], repeat=length):
            if sequence == well_formed:
                continue
            response = "hm " + f"\n{GOLD}\n".join(sequence) + GOLD
            for scheme in ("reference", "table5"):
                result = score(response, GOLD, scheme)
                assert (result.reward, result.reason) == (-3.0, Reason.BAD_FORMAT)
                assert not result.format_ok
            seen += 1
    assert seen == 1 + 4 + 16 + 64 + 256 - 1


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "  \n ",
        "I do not know",
        "(1) Zoey is a knight\n(2) Jack is a knave",  # one missing
        GOLD + "\n(4) Ann is a knave",  # one too many
        GOLD + "\nknights",  # a role word too many
        GOLD.replace("Mia", "Ann"),
        GOLD.replace("Mia", "Mias"),
        GOLD.replace("Mia", "AMia"),
        GOLD.replace("Mia is a", "Mia is not a"),
        GOLD.replace("Mia is a", "Mia: a"),
        GOLD.replace("Mia is a knight", "Mia is a knightly person"),
    ],
)
def test_unreadable_answers(answer):
    result = score(answered(answer), GOLD)
    assert (result.reward, result.reason, result.format_ok) == (-1.0, Reason.UNPARSEABLE, True)
    assert score(answered(answer), GOLD, "table5").reward == -3.0


def test_names_are_not_patterns():
    gold = "(1) A.x is a knight\n(2) B(b is a knave"
    assert score(answered(gold), gold).reward == 3.0
    assert score(answered(gold.replace("A.x", "Abx")), gold).reward == -1.0


@pytest.mark.parametrize(
    ("answer", "reference", "strict"),
    [
        (GOLD, 3.0, 3.0),
        (GOLD.upper(), 3.0, 3.0),
        (GOLD.replace("\n", " "), 3.0, 3.0),
        (GOLD.replace(" ", " \n\t"), 3.0, -1.0),
        ("Well: " + GOLD, 3.0, -1.0),
        (f"\n{GOLD}.\n", 3.0, 3.0),
        ("Mia is a knight, Jack is a knave, and Zoey is a knight.", 3.0, 3.0),
        ("1. Zoey is a knight;\n2. Jack  is a knave;\n- Mia is a knight", 3.0, 3.0),
        (GOLD.replace("Jack is a knave", "Jack is a knight"), -0.5, -0.5),
        # Emphasis: the reference cannot read it.
        ("**Zoey** is a **knight**\n**Jack** is a **knave**\n* `Mia` is a _knight_", -1.0, 3.0),
        ("**(1) Zoey is a knight**\n**(2) Jack is a knave**\n**(3) Mia is a knight**", 3.0, 3.0),
        # Reported, denied and conditional speech.
        (GOLD.replace("Zoey", "It is false that Zoey"), 3.0, -1.0),
        (GOLD.replace("knight\n", "knight, or not\n"), 3.0, -1.0),
        (GOLD.replace("Zoey", "If Jack lies, Zoey"), 3.0, -1.0),
        ("The opposite is true:\n" + GOLD, 3.0, -1.0),
        (GOLD + "\nNone of this holds.", 3.0, -1.0),
        (GOLD.replace("Mia is a knight", "Is it so that Mia is a knight?"), 3.0, -1.0),
        # Other people's names.
        (GOLD.replace("Mia", "Anna-Mia"), 3.0, -1.0),
        (GOLD.replace("Mia", "Old Mia"), 3.0, -1.0),
        (GOLD.replace("Mia", "Mia's brother, Mia"), 3.0, -1.0),
        # Left to the reference: a statement twice, one missing, over two lines.
        (GOLD + "\nZoey is a knight", -1.0, -1.0),
        (GOLD.replace("Mia is a knight", "Zoey is a knight"), -1.0, -1.0),
        ("Zoey is a knight\nJack is a knave", -1.0, -1.0),
        (GOLD.replace(" is", "\nis"), 3.0, -1.0),
        ("", -1.0, -1.0),
    ],
)  # fmt: skip
def test_the_two_readings(answer, reference, strict):
    assert score(answered(answer), GOLD).reward == reference
    assert score(answered(answer), GOLD, reading="strict").reward == strict


_PIECES = st.lists(
    st.sampled_from(
        [
            *["</think>", "<answer>", "</answer>", "<think>"],
            *["Zoey", "Jack", "Mia", "zoey", " is a ", " is\na\t", "knight", "knave", "Knave"],
            *[GOLD, "\n", " ", ",", "Zoey is a knave", "Jack is a knave", "Mia is a knight", "s"],
        ]
    ),
    max_size=14,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(st.one_of(_PIECES, _PIECES.map(lambda body: f"x</think><answer>{body}</answer>")))
@example(GOOD)
@example("</think><answer>Zoey is a knave Jack is a knave Mia is a knight</answer>")
@example("</think><answer>zoey is a Knight,Jack is a knave,Mia is a knights</answer>")
def test_the_rules_restated(response):
    assert score(response, GOLD).reward == slow_score(response, parse_answer_key(GOLD))


@settings(max_examples=400, deadline=None)
@given(_PIECES)
@example(GOLD)
def test_what_is_right_strictly_is_right_for_the_reference(body):
    response = f"x</think><answer>{body}</answer>"
    if score(response, GOLD, reading="strict").correct:
        assert score(response, GOLD).correct


@settings(max_examples=150, deadline=None)
@given(st.text(), st.text())
@example("\ud800", "\x00")
@example("İİ ſ K", "ß")
def test_never_an_exception_on_any_text(before, inside):
    for response in (before, inside, f"{before}</think><answer>{inside}</answer>"):
        for scheme, reading in itertools.product(("reference", "table5"), READINGS):
            reached = score(response, GOLD, scheme, reading).reward
            assert reached in (3.0, -0.5, -1.0, -2.5, -3.0)


MEGA = 2**20


@pytest.mark.parametrize(
    "hostile",
    [
        "<answer>" * (MEGA // 8),
        "</think>" * (MEGA // 8),
        "<" * MEGA,
        "<answer" * (MEGA // 7),
        "</think><answer>" + "Zoey " * (MEGA // 5) + "</answer>",
        "</think><answer>" + "Zoey" + " " * MEGA + "</answer>",
        "</think><answer>" + "Zoey is" + " " * MEGA + "knight knave knight</answer>",
        "</think><answer>" + "Zoey is a " * (MEGA // 10) + "knight knave knight</answer>",
        "</think><answer>" + "knight" * (MEGA // 6) + "</answer>",
    ],
    ids=lambda text: text[:24],
)
def test_a_megabyte_of_hostile_text_is_graded_at_once(hostile):
    start = time.process_time()
    for reading in READINGS:
        assert score(hostile, GOLD, reading=reading).reward in (-1.0, -3.0)
    assert time.process_time() - start < 1.0  # linear: about 20 ms; quadratic: minutes


@pytest.mark.parametrize(
    "gold", ["", "Zoey is a knight", "(1) Zoey is a king", "(1) Al is a knight\n(2) Al is a knave"]
)
def test_a_bad_gold_is_an_error_not_a_reward(gold):
    with pytest.raises(ValueError, match="reference answer line"):
        score(GOOD, gold)


@pytest.mark.parametrize(
    ("choice", "known"),
    [({"scheme": "table6"}, "reference, table5"), ({"reading": "lenient"}, "reference, strict")],
)
def test_an_unknown_scheme_or_reading_is_refused(choice, known):
    with pytest.raises(ValueError, match=known):
        score(GOOD, GOLD, **choice)
