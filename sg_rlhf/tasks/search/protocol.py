"""The texts that pass between a model and its search engine (Search-R1, arXiv 2503.09516).

What the model may write, and what comes of it:

| the turn holds                          | outcome                                           |
|-----------------------------------------|---------------------------------------------------|
| `<search> query </search>` first        | the query is searched; anything behind is ignored |
| `<answer> text </answer>` first         | the dialogue ends with this answer                |
| neither, an unclosed or an empty query  | invalid: the correction text follows              |
| `<information>`, a made-up `Doc 1`      | nothing is searched and nothing counts as found;  |
|                                         | the format is not ok                              |
| a tag inside a query or an answer       | it is part of the query's or the answer's text    |

A block runs from the first opening tag of its kind to the first closing tag behind it, as in the
reference. A turn has one action. An answer comes from the model's own text alone.

Protocol tags and control tokens in retrieved text are rewritten, so that it cannot close its block,
open an answer, or end the turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

STOP_STRINGS = ("</search>", "</answer>")

CORRECTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between "
    "<search> and </search>. If I want to give the final answer, I should put the answer between "
    "<answer> and </answer>. Let me try again.\n"
)
OBSERVATION_START = "\n\n<information>"
OBSERVATION_END = "</information>\n\n"
# Where the reference has a crash (no server) or an empty block (no passage), the model is told.
FAILED = "The search failed: the search engine gave no answer. No passage was retrieved."
NOTHING_FOUND = "The search found no passage."

# Text that a token cap can never reach is cut first, so that no passage costs seconds to tokenise.
CHARS_PER_TOKEN = 32

_NAME = r"(?:/\s*)?(?:think|search|information|answer)\b"
_TAG = re.compile(rf"<(\s*{_NAME}[^<>]*)>", re.IGNORECASE)
_TAG_START = re.compile(rf"<(?=\s*{_NAME})", re.IGNORECASE)
_HEADING = re.compile(r"^([ \t]*Doc \d+)\(", re.MULTILINE)
_INFORMATION = re.compile(r"</?information>")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Kind(StrEnum):
    """What a turn of the model amounts to."""

    SEARCH = "search"
    ANSWER = "answer"
    INVALID = "invalid"


@dataclass(frozen=True)
class Action:
    """What a turn asks for; `content` is the query or the answer, without outer white space."""

    kind: Kind
    content: str = ""


@dataclass(frozen=True)
class Passage:
    """One retrieved passage; `title` as the corpus has it, with its quotation marks."""

    id: str
    title: str
    text: str
    score: float | None

    @classmethod
    def from_contents(cls, id: str, contents: str, score: float | None) -> Passage:
        """A passage of the corpus, whose first line is its title."""
        title, _, text = contents.partition("\n")
        return cls(id, title, text, score)


def parse_action(turn: str) -> Action:
    """The first whole action of a turn. Linear in its length, and defined for any text."""
    found = []
    for kind in (Kind.SEARCH, Kind.ANSWER):
        block = _first_block(turn, kind)
        if block is not None:
            found.append((block[0], Action(kind, block[1])))
    action = min(found, default=(0, Action(Kind.INVALID)), key=lambda item: item[0])[1]
    # The reference searches for nothing; we say what a query looks like.
    if action.kind is Kind.SEARCH and not clean_query(action.content, 1):
        return Action(Kind.INVALID)
    return action


def answer_of(text: str) -> str | None:
    """The first answer block of a text that is the model's alone, or None."""
    block = _first_block(text, Kind.ANSWER)
    return None if block is None else block[1]


def clean_query(query: str, max_chars: int) -> str:
    """A query that any server can read: no control characters, white space collapsed, cut."""
    return " ".join(_CONTROL.sub(" ", query).split())[:max_chars].rstrip()


def claims_information(turn: str) -> bool:
    """Whether the model wrote the tags that only the search engine writes."""
    return _INFORMATION.search(turn) is not None


def sanitize(text: str, control_tokens: Iterable[str] = ()) -> str:
    """Retrieved text without protocol tags, headings like ours, or control tokens."""
    text = _TAG.sub(r"[\1]", text)
    # What is left was nested or has no end.
    text = _TAG_START.sub("[", text)
    text = _HEADING.sub(r"\1 (", text)
    for token in control_tokens:
        if len(token) > 1 and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def count_tags(text: str) -> int:
    """How many protocol tags stand in a text, whole or not."""
    return sum(1 for _ in _TAG_START.finditer(text))


def headings(text: str) -> list[str]:
    """The beginnings of lines that begin as a passage does, such as `Doc 2`."""
    return [found[1].strip() for found in _HEADING.finditer(text)]


def format_passages(passages: Sequence[Passage], control_tokens: Iterable[str] = ()) -> str:
    """The inside of an observation: a line `Doc 1(Title: "...") text` per passage."""
    if not passages:
        return NOTHING_FOUND
    tokens = list(control_tokens)
    lines = []
    for number, passage in enumerate(passages, start=1):
        title = sanitize(passage.title, tokens)
        text = sanitize(passage.text, tokens)
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()


def _first_block(text: str, kind: Kind) -> tuple[int, str] | None:
    """Where the first whole block of a kind starts, and its content; None without one.

    `str.find` keeps this linear on hostile text, where a lazy regex is quadratic.
    """
    opening, closing = f"<{kind}>", f"</{kind}>"
    start = text.find(opening)
    if start < 0:
        return None
    inside = start + len(opening)
    end = text.find(closing, inside)
    return None if end < 0 else (start, text[inside:end].strip())
