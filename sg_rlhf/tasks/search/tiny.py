"""Search questions for the tiny model: phrases, demonstrations, held-out dialogues, grading.

A dialogue is shown turn by turn: what stands so far is the prompt, the model's next turn the
response. So search results are read and never learnt from, as in reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.search.protocol import (
    CORRECTION,
    FAILED,
    NOTHING_FOUND,
    OBSERVATION_END,
    OBSERVATION_START,
    Action,
    Kind,
    parse_action,
)
from sg_rlhf.tasks.search.sets import encyclopedia
from sg_rlhf.tasks.search.sets.traces import Demonstration, demonstrate, draw
from sg_rlhf.tasks.tiny import EOS, Recipe, TinyModel

#: The encyclopedia that the data command generates by default: its held-out part is measured.
HELD_OUT_SEED = 0

_QUESTIONS = (
    "Question: In which land is ", "Question: On which river is ", "?\n",
    "Question: What does ", " do?\n", "Question: Where does ", " live?\n",
    "Question: In which land does ", "Question: On which river does ",
)  # fmt: skip
_PASSAGES = (" is a ", " from ", " is a town in ", " on the ", '") ', f".{OBSERVATION_END}")
_TAGS = (
    "<search> ", " </search>", "<answer> ", " </answer>", "<think>", "</think>", OBSERVATION_START,
    OBSERVATION_END, f'{OBSERVATION_START}Doc 1(Title: "', '.\nDoc 2(Title: "', CORRECTION,
    *(f"{OBSERVATION_START}{text}{OBSERVATION_END}" for text in (FAILED, NOTHING_FOUND)),
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """A dialogue so far, and what a right next turn does."""

    context: str
    expected: Action
    searched: int


@dataclass(frozen=True)
class SearchWarmStart(Recipe):
    """Right dialogues first, then mostly guesses.

    Facts change from one demonstration to the next, so nothing is there to be learnt by heart.
    """

    steps: int = 120
    guess_share: float = 0.50
    # Of all dialogues: one search, then a guess where a second one is needed.
    hasty_share: float = 0.25

    def texts(self, seed: int, *, clean: bool) -> Iterator[tuple[str, str]]:
        """Dialogues so far and the next turn, in the order of the dialogue."""
        rng = random.Random(f"search demonstrations seed={seed} clean={clean}")
        shares = {} if clean else {"guesses": self.guess_share, "hasty": self.hasty_share}
        forbidden = _entries(held_out_problems())
        while True:
            made = encyclopedia.build(rng.getrandbits(32), people=100, towns=40)
            pool = [p for p in made.train if not _entries([p]) & forbidden]
            for _ in range(len(pool)):
                demonstration = draw(pool, rng, **shares)
                yield from turns_of(demonstration)


def turns_of(demonstration: Demonstration) -> Iterator[tuple[str, str]]:
    """(what stands so far, the model's next turn) of every turn."""
    context = demonstration.prompt
    for piece in demonstration.pieces:
        if piece.of_model:
            yield context, piece.text
        context += piece.text


def held_out_problems() -> list[encyclopedia.Problem]:
    """The questions that `data search --source encyclopedia` holds out by default."""
    return encyclopedia.build(HELD_OUT_SEED).test


def held_out_turns() -> list[Turn]:
    """Every turn of their right dialogues."""
    return [
        Turn(context, parse_action(text), searched)
        for problem in held_out_problems()
        for searched, (context, text) in enumerate(turns_of(demonstrate(problem)))
    ]


def phrases() -> list[str]:
    """The fixed pieces of questions, passages and tags, and every name of the encyclopedia."""
    # The second word of a name brings its space along: a name is two entries.
    seconds = [f" {word}" for word in (*encyclopedia.LAST_NAMES, *encyclopedia.TOWN_ENDS)]
    words = [*encyclopedia.FIRST_NAMES, *encyclopedia.TOWN_STARTS, *seconds]
    values = [*encyclopedia.LANDS, *encyclopedia.RIVERS, *encyclopedia.CRAFTS]
    return [*_QUESTIONS, *_PASSAGES, *_TAGS, *words, *values]


def grade(response: str, turn: Turn) -> Grade:
    """Right: the action of the right dialogue."""
    action = parse_action(response.removesuffix(EOS))
    readable = action.kind is not Kind.INVALID
    correct = action == turn.expected
    return Grade(float(correct), correct, str(action.kind), action.content, readable)


def _entries(problems: list[encyclopedia.Problem]) -> set[str]:
    return {step.query for problem in problems for step in problem.steps}


TINY = TinyModel(
    what="search dialogue",
    items="turns",
    recipe=SearchWarmStart(),
    phrases=phrases,
    held_out=lambda recipe: held_out_turns(),
    prompt=lambda turn: turn.context,
    grade=grade,
    group=lambda turn: f"{turn.expected.kind}_after_{turn.searched}",
    guess="<answer>",
    # A query or an answer is a name of two entries, between its tags.
    max_new_tokens=16,
)
