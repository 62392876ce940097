"""Slow, independent versions of what the K&K code computes, and fixtures in the data's shape."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from sg_rlhf.tasks.kk.puzzle import Puzzle

# Logic-RL's prompt, written out once more: the product's own template must not check itself.
LOGIC_RL_PROMPT = """\
<|im_start|>system
You are a helpful assistant. The assistant first thinks about the reasoning process in the mind \
and then provides the user with the answer. The reasoning process and answer are enclosed within \
<think> </think> and<answer> </answer> tags, respectively, i.e., <think> reasoning process here \
</think><answer> answer here </answer>.  Now the user asks you to solve a logical reasoning \
problem. After thinking, when you finally reach a conclusion, clearly state the identity of each \
character within <answer> </answer> tags. i.e., <answer> (1) Zoey is a knight
(2) ... </answer>.
<|im_end|>
<|im_start|>user
QUIZ
<|im_end|>
<|im_start|>assistant
<think>"""


def as_python(statement: tuple[Any, ...]) -> str:
    """A statement as a Python expression over a list `k` (True = knight)."""
    tag, *rest = statement
    if tag == "telling-truth":
        return f"k[{rest[0]}]"
    if tag == "lying":
        return f"(not k[{rest[0]}])"
    parts = [as_python(part) for part in rest]
    if tag == "not":
        return f"(not {parts[0]})"
    joint = {"and": " and ", "or": " or ", "->": " <= ", "<=>": " == "}[tag]
    return "(" + joint.join(parts) + ")"


def brute_force(statements: tuple[Any, ...]) -> list[tuple[bool, ...]]:
    """All solutions, by evaluating Python expressions under each of the 2^n assignments."""
    claims = [compile(as_python(s), "claim", "eval") for s in statements]
    everyone = itertools.product((True, False), repeat=len(statements))
    return [k for k in everyone if all(eval(c, {"k": k}) == k[i] for i, c in enumerate(claims))]


def read_claim(text: str, names: list[str]) -> tuple[Any, ...]:
    """The statement that a claim of depth 2 states, read from its English."""
    if match := re.fullmatch(r"If (.*) then (.*)", text):
        return ("->", *(read_claim(part, names) for part in match.groups()))
    for words, tag in ((" if and only if ", "<=>"), (" and ", "and"), (" or ", "or")):
        if words in text:
            return (tag, *(read_claim(part, names) for part in text.split(words)))
    match = re.fullmatch(r"(\w+) is (not )?a (knight|knave)", text)
    assert match, text
    leaf = ("telling-truth" if match[3] == "knight" else "lying", names.index(match[1]))
    return ("not", leaf) if match[2] else leaf


_REPORTS = [
    re.compile(pattern)
    for pattern in (
        r"(?P<name>\w+) (?:said|noted|stated|remarked|commented|was heard saying), "
        r'"(?P<claim>[^"]*)"\.?',
        r'(?P<name>\w+) asserted: "(?P<claim>[^"]*)"\.',
        r"(?P<name>\w+) (?:said|told you|expressed) that (?P<claim>[^\".]*)\.",
        r'As (?P<name>\w+) put it, "(?P<claim>[^"]*)"\.',
        r'According to (?P<name>\w+), "(?P<claim>[^"]*)"\.',
        r"In (?P<name>\w+)'s words: \"(?P<claim>[^\"]*)\"\.",
        r'In a statement by (?P<name>\w+): "(?P<claim>[^"]*)"\.',
        r'"(?P<claim>[^"]*)" - (?P<name>\w+)\.',
        r'"(?P<claim>[^"]*)," (?P<name>\w+) (?:claimed|mentioned|declared)\.',
    )
]


def read_quiz(quiz: str) -> tuple[list[str], tuple[Any, ...]]:
    """Names and statements of a quiz, read from its text alone."""
    match = re.fullmatch(
        r"A very special island is inhabited only by knights and knaves\. Knights always tell the "
        r"truth, and knaves always lie\. You meet (\d+) inhabitants: ([\w, ]+?), and (\w+)\. (.*) "
        r"So who is a knight and who is a knave\?",
        quiz,
    )
    assert match, quiz
    names = [*match[2].split(", "), match[3]]
    assert int(match[1]) == len(names)
    rest, statements = match[4], []
    for name in names:
        report = next(m for p in _REPORTS if (m := p.match(rest)) and m["name"] == name)
        statements.append(read_claim(report["claim"].removesuffix("."), names))
        rest = rest[report.end() :].removeprefix(" ")
    assert not rest, rest
    return names, tuple(statements)


def statements_of(n: int, max_leaves: int = 6) -> st.SearchStrategy[tuple[Any, ...]]:
    """Hypothesis: any well-formed statement about n people."""
    leaf = st.tuples(st.sampled_from(["telling-truth", "lying"]), st.integers(0, n - 1))

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            inner.map(lambda s: ("not", s)),
            st.tuples(st.sampled_from(["->", "<=>"]), inner, inner),
            st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3)).map(
                lambda t: (t[0], *t[1])
            ),
        )

    return st.recursive(leaf, extend, max_leaves=max_leaves)


def puzzle_statements(max_people: int = 5) -> st.SearchStrategy[tuple[Any, ...]]:
    """Hypothesis: the statements of 1 to `max_people` people."""
    return st.integers(1, max_people).flatmap(lambda n: st.tuples(*[statements_of(n)] * n))


def logic_rl_row(puzzle: Puzzle, index: int = 0) -> dict[str, Any]:
    """A row of the Logic-RL parquet's shape."""
    return {
        "quiz": puzzle.quiz,
        "names": list(puzzle.names),
        "knight_knave": {"knight": "knight", "knave": "knave"},
        "solution": list(puzzle.solution),
        "solution_text": "",
        "solution_text_format": puzzle.solution_text_format,
        "cot_head": "Let's think step by step.",
        "cot_repeat_steps": ["A step."],
        "cot_foot": "Done.",
        "statements": repr(puzzle.statements),
        "index": 100 + index,
        "data_source": "kk_logic",
        "prompt": [{"role": "user", "content": LOGIC_RL_PROMPT.replace("QUIZ", puzzle.quiz)}],
        "ability": "logic",
        "reward_model": {
            "style": "rule",
            "ground_truth": {
                "solution_text_format": puzzle.solution_text_format,
                "statements": repr(puzzle.statements),
            },
        },
        "extra_info": {"index": index, "split": "train"},
    }


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
