"""The natural language of Knights & Knaves: names, claims and quizzes as in the official data."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sg_rlhf.tasks.kk.logic import LEAVES, Statement

# Common English first names: the ones met in the data (a prompt in other names would be a shift of
# distribution that nobody asked for).
NAMES: tuple[str, ...] = (
    "Abigail", "Aiden", "Alexander", "Amelia", "Aria", "Aurora", "Ava", "Avery", "Benjamin",
    "Charlotte", "Chloe", "Daniel", "David", "Elizabeth", "Ella", "Emily", "Emma", "Ethan",
    "Evelyn", "Grace", "Harper", "Henry", "Isabella", "Jack", "Jackson", "Jacob", "James", "Joseph",
    "Liam", "Lily", "Logan", "Lucas", "Luke", "Mason", "Matthew", "Mia", "Michael", "Noah",
    "Oliver", "Olivia", "Owen", "Penelope", "Riley", "Samuel", "Scarlett", "Sebastian", "Sofia",
    "Sophia", "Victoria", "William", "Zoey",
)  # fmt: skip

INTRO = (
    "A very special island is inhabited only by knights and knaves. "
    "Knights always tell the truth, and knaves always lie. "
)
QUESTION = "So who is a knight and who is a knave?"

# The 18 ways in which the data reports a claim. Punctuation differs between them on purpose.
FRAMES: tuple[str, ...] = (
    "{name} said that {claim}.",
    "{name} told you that {claim}.",
    "{name} expressed that {claim}.",
    '{name} said, "{claim}."',
    '{name} noted, "{claim}".',
    '{name} stated, "{claim}".',
    '{name} remarked, "{claim}".',
    '{name} commented, "{claim}".',
    '{name} asserted: "{claim}".',
    '{name} was heard saying, "{claim}".',
    'As {name} put it, "{claim}".',
    'According to {name}, "{claim}".',
    'In {name}\'s words: "{claim}".',
    'In a statement by {name}: "{claim}".',
    '"{claim}" - {name}.',
    '"{claim}," {name} claimed.',
    '"{claim}," {name} mentioned.',
    '"{claim}," {name} declared.',
)


def role(is_knight: bool) -> str:
    """The word for a person's role, "knight" or "knave"."""
    return "knight" if is_knight else "knave"


def is_simple(statement: Statement) -> bool:
    """Whether a statement is about one person: "is a knight", "is a knave" or "is not a ..."."""
    return statement[0] in LEAVES or (statement[0] == "not" and statement[1][0] in LEAVES)


def render_claim(
    statement: Statement, names: Sequence[str], mark: Callable[[Statement], str] = lambda _: ""
) -> str:
    """A statement as English, e.g. "If Zoey is a knave then Jack is not a knight".

    Deeper sub-claims than the data's are put in brackets. `mark` gives text behind each simple one.
    """
    tag = statement[0]
    if is_simple(statement):
        person, is_not = statement[1], ""
        if tag == "not":
            tag, person = person
            is_not = "not "
        return f"{names[person]} is {is_not}a {role(tag == 'telling-truth')}{mark(statement)}"
    parts = [render_claim(part, names, mark) for part in statement[1:]]
    parts = [
        text if is_simple(part) else f"({text})"
        for part, text in zip(statement[1:], parts, strict=True)
    ]
    if tag == "not":
        return f"it is not the case that {parts[0]}"
    if tag == "->":
        return f"If {parts[0]} then {parts[1]}"
    return {"and": " and ", "or": " or ", "<=>": " if and only if "}[tag].join(parts)


def render_quiz(names: Sequence[str], statements: Sequence[Statement], rng: random.Random) -> str:
    """The full quiz text, each claim in a frame drawn uniformly from `FRAMES`."""
    claims = [
        rng.choice(FRAMES).format(name=names[speaker], claim=render_claim(statement, names))
        for speaker, statement in enumerate(statements)
    ]
    # The comma before "and" is the data's own, for two people too.
    people = ", ".join(names[:-1]) + f", and {names[-1]}"
    return f"{INTRO}You meet {len(names)} inhabitants: {people}. {' '.join(claims)} {QUESTION}"


def render_answer(names: Sequence[str], solution: Sequence[bool]) -> str:
    """The numbered answer that the reward function reads: "(1) Zoey is a knight\\n(2) ..."."""
    pairs = enumerate(zip(names, solution, strict=True), start=1)
    return "\n".join(f"({i}) {name} is a {role(knight)}" for i, (name, knight) in pairs)
