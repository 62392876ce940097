"""Knights & Knaves puzzles and their generator.

A puzzle is kept iff exactly one of the 2^n assignments satisfies it. `generate` returns the number
of puzzles asked for or raises; the official generator can return fewer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sg_rlhf.tasks.kk.logic import (
    MAX_PEOPLE,
    MIN_PEOPLE,
    Assignment,
    PuzzleError,
    Statement,
    assignment_at,
    canonical,
    knight_masks,
    truth_mask,
)
from sg_rlhf.tasks.kk.render import NAMES, render_answer, render_quiz

# Draws in a row without a new puzzle after which the space counts as exhausted. With 2 people at
# depth 2 the rarest puzzle has probability 1/1296 or more: it is missed with odds below 1e-6.
_PATIENCE = 20_000


@dataclass(frozen=True)
class Puzzle:
    """One puzzle: `names[i]` says `statements[i]`; `solution[i]` is True for a knight."""

    names: tuple[str, ...]
    statements: tuple[Statement, ...]
    solution: Assignment
    quiz: str

    @property
    def n_people(self) -> int:
        return len(self.names)

    @property
    def solution_text_format(self) -> str:
        """The solution as numbered lines, the data's `solution_text_format`: the reward's gold."""
        return render_answer(self.names, self.solution)

    @property
    def structure(self) -> tuple[Statement, ...]:
        """The statements without names or phrasing, operands in canonical order."""
        return tuple(canonical(statement) for statement in self.statements)

    @property
    def identity(self) -> tuple[tuple[str, Statement], ...]:
        """Who says what, whatever the order of speakers, operands or the phrasing."""
        said = (
            (name, canonical(s, self.names))
            for name, s in zip(self.names, self.statements, strict=True)
        )
        return tuple(sorted(said, key=repr))


def generate(
    n_people: int,
    count: int,
    seed: int,
    *,
    max_depth: int = 2,
    width: int = 2,
    exclude: Iterable[Puzzle] = (),
    distinct: str = "structure",
    on_puzzle: Callable[[], object] | None = None,
) -> list[Puzzle]:
    """Draw `count` distinct puzzles with exactly one solution each.

    The draw depends on (n_people, seed, max_depth, width) alone, so a smaller count gives a prefix
    of a larger one. As in the data nobody says "I am a knave", in whole or in part, and no claim
    combines a sub-claim with itself.

    Args:
        n_people: 2 to 12.
        max_depth: 1 (only plain claims) to 6; the data has 2.
        width: most operands of "and" and "or", 2 to 6; the data has 2.
        exclude: puzzles whose structure must not come back, for instance the test split.
        distinct: "structure" (184 of 2 people at depth 2) or "names" (a structure may return with
            other names).

    Raises:
        PuzzleError: bad arguments, or fewer than `count` puzzles were found: says how many.
    """
    _check_arguments(n_people, count, max_depth, width, distinct)
    rng = random.Random(f"kk n={n_people} seed={seed} depth={max_depth} width={width}")
    knights, full = knight_masks(n_people)
    exclude = tuple(exclude)
    excluded = {puzzle.structure for puzzle in exclude}
    # The same people may say the same things in another order: another structure, one puzzle.
    excluded_identities = {puzzle.identity for puzzle in exclude}
    seen: set[object] = set()
    puzzles: list[Puzzle] = []
    failures = 0
    while len(puzzles) < count:
        if failures >= _PATIENCE:
            raise PuzzleError(
                f"only {len(puzzles)} of {count} puzzles of {n_people} people could be reached "
                f"at depth {max_depth}, width {width}"
                + (f", not counting {len(excluded)} excluded ones" if excluded else "")
                + "; ask for fewer, a greater depth or distinct=names"
            )
        failures += 1
        drawn = _draw(rng, n_people, max_depth, width, knights, full)
        if drawn is None:
            continue
        statements, solution = drawn
        structure = tuple(canonical(statement) for statement in statements)
        if structure in excluded or structure in seen:
            continue
        names = tuple(rng.sample(NAMES, n_people))
        puzzle = Puzzle(names, statements, solution, render_quiz(names, statements, rng))
        key = structure if distinct == "structure" else puzzle.identity
        if key in seen or puzzle.identity in excluded_identities:
            continue
        seen.add(key)
        puzzles.append(puzzle)
        failures = 0
        if on_puzzle is not None:
            on_puzzle()
    return puzzles


def _check_arguments(n_people: int, count: int, max_depth: int, width: int, distinct: str) -> None:
    if not MIN_PEOPLE <= n_people <= MAX_PEOPLE:
        raise PuzzleError(f"n_people must be {MIN_PEOPLE} to {MAX_PEOPLE}, got {n_people}")
    if count < 0:
        raise PuzzleError(f"count must not be negative, got {count}")
    # Claims grow exponentially with depth, and nobody reads a claim of a hundred parts.
    if not 1 <= max_depth <= 6:
        raise PuzzleError(f"max_depth must be 1 to 6, got {max_depth}")
    if not 2 <= width <= 6:
        raise PuzzleError(f"width must be 2 to 6, got {width}")
    if distinct not in ("structure", "names"):
        raise PuzzleError(f"distinct must be 'structure' or 'names', got {distinct!r}")


def _draw(
    rng: random.Random, n: int, max_depth: int, width: int, knights: tuple[int, ...], full: int
) -> tuple[tuple[Statement, ...], Assignment] | None:
    """One random puzzle and its solution, or None if it has none or several."""
    statements = []
    consistent = full
    for speaker in range(n):
        statement = _draw_statement(rng, speaker, n, max_depth, width)
        consistent &= full ^ knights[speaker] ^ truth_mask(statement, knights, full)
        if not consistent:
            return None
        statements.append(statement)
    if consistent & (consistent - 1):
        return None
    return tuple(statements), assignment_at(consistent.bit_length() - 1, n)


def _draw_statement(rng: random.Random, speaker: int, n: int, depth: int, width: int) -> Statement:
    # The data's proportions: a sixth each of plain claims, not, and, or, ->, <=>.
    kind = rng.randrange(6) if depth > 1 else 0
    if kind == 0:
        while True:
            leaf = (rng.choice(("telling-truth", "lying")), rng.randrange(n))
            if leaf != ("lying", speaker):
                return leaf
    if kind == 1:
        while True:
            inner = _draw_statement(rng, speaker, n, depth - 1, width)
            if inner[0] != "not" and inner != ("telling-truth", speaker):
                return ("not", inner)
    # With 2 people a speaker has only 3 plain claims to combine.
    n_parts = rng.randint(2, min(width, 2 * n - 1)) if kind in (2, 3) else 2
    parts: list[Statement] = []
    while len(parts) < n_parts:
        part = _draw_statement(rng, speaker, n, depth - 1, width)
        if part not in parts:
            parts.append(part)
    return (("and", "or", "->", "<=>")[kind - 2], *parts)
