"""Knights & Knaves for the tiny model: phrases, demonstrations, held-out puzzles, grading."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.kk.grading import score
from sg_rlhf.tasks.kk.prompt import SYSTEM, THINK, build_prompt
from sg_rlhf.tasks.kk.puzzle import Puzzle, generate
from sg_rlhf.tasks.kk.render import FRAMES, INTRO, NAMES, QUESTION
from sg_rlhf.tasks.kk.traces import trace
from sg_rlhf.tasks.tiny import Recipe, TinyModel

# Most people in a puzzle whose answer lines are one entry each; longer answers are spelt out.
_ANSWER_LINES = 8

_PROMPT_PHRASES = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n",
    "<|im_start|>user\n",
    f"{INTRO}You meet ",
    " inhabitants: ",
    ", and ",
    ", ",
    QUESTION,
    "\n<|im_end|>\n<|im_start|>assistant\n",
)
_CLAIM_PHRASES = (
    " is a knight",
    " is a knave",
    " is not a knight",
    " is not a knave",
    "If ",
    " then ",
    " and ",
    " or ",
    " if and only if ",
)
# " no\nTry " is one decision (this assignment fails, on to the next), hence one entry.
_TRACE_PHRASES = (
    "Try ", "=knight ", "=knave ", ": ", " T", " F", " ok ", " ok",
    " no\nTry ", " no\nGuess", " no", "Guess",
)  # fmt: skip


@dataclass(frozen=True)
class WarmStart(Recipe):
    """Searches first, then mostly guesses."""

    steps: int = 1000
    people: tuple[int, ...] = (2, 3)
    guess_share: float = 0.60
    # Of the searches: the share with flipped verdicts, and the probability of a flip there.
    flipped_share: float = 1 / 3
    flip_verdict_p: float = 0.2

    def texts(self, seed: int, *, clean: bool) -> Iterator[tuple[str, str]]:
        """Prompts and responses, sizes and styles mixed at random."""
        rng = random.Random(f"demonstrations seed={seed} clean={clean}")
        guess_share = 0.0 if clean else self.guess_share
        flipped_share = 0.0 if clean else self.flipped_share
        forbidden = {puzzle.structure for puzzle in held_out_puzzles(self.people)}
        while True:
            pools = {
                n: iter(generate(n, 2048, rng.getrandbits(32), distinct="names"))
                for n in self.people
            }
            while True:
                puzzle = next(pools[rng.choice(self.people)], None)
                if puzzle is None:
                    break
                if puzzle.structure in forbidden:
                    continue
                if rng.random() < guess_share:
                    text = trace(puzzle, rng, "guess")
                else:
                    flipped = rng.random() < flipped_share
                    text = trace(puzzle, rng, "search", self.flip_verdict_p if flipped else 0.0)
                yield build_prompt(puzzle.quiz), text


# How many puzzles of each size are held out. Two people have only 184 structures at the data's
# depth.
HELD_OUT = {2: 100, 3: 200}
# The data command draws its test split the same way, and its default seed is this one: a run on
# generated data with at most this many test puzzles is tested on puzzles that the warm start has
# not seen either.
_HELD_OUT_SEED = 0


def held_out_puzzles(people: Sequence[int] = tuple(HELD_OUT)) -> list[Puzzle]:
    """Puzzles whose statements no demonstration has, whatever the names and the phrasing."""
    return [puzzle for n in people for puzzle in generate(n, HELD_OUT[n], _HELD_OUT_SEED)]


def phrases() -> list[str]:
    """The stock phrases of the puzzle templates, and each name once, without spaces around it."""
    tags = [THINK, "</think>", "<answer>", "</answer>", "<answer>(1) "]
    lines = [f"\n({i}) " for i in range(2, _ANSWER_LINES + 1)]
    # The fixed pieces of "{name} said, \"{claim}.\" ": a frame is followed by a space, always.
    frames = [piece for frame in FRAMES for piece in re.split(r"{name}|{claim}", f"{frame} ")]
    pieces = [*tags, *lines, *_PROMPT_PHRASES, *frames, *_CLAIM_PHRASES, *_TRACE_PHRASES, *NAMES]
    return [text for text in dict.fromkeys(pieces) if len(text) > 1]


def grade(response: str, puzzle: Puzzle) -> Grade:
    """The training reward's own verdict."""
    result = score(response, puzzle.solution_text_format)
    return replace(result, format_ok=result.extracted is not None)


TINY = TinyModel(
    what="Knights & Knaves",
    items="puzzles",
    recipe=WarmStart(),
    phrases=phrases,
    held_out=lambda recipe: held_out_puzzles(recipe.people),
    prompt=lambda puzzle: build_prompt(puzzle.quiz),
    grade=grade,
    group=lambda puzzle: f"{puzzle.n_people}_people",
    guess="Guess",
    # Longer than any search over 3 people, flipped verdicts included.
    max_new_tokens=256,
)
