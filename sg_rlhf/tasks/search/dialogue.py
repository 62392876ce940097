"""One dialogue between a model and a search engine, in token ids.

Token in, token out: what the model sampled is kept as the engine returned it and never tokenised
again, so that training scores exactly what was sampled. Only the texts that we add (observations
and corrections) are encoded. A token that ends a turn may hold characters behind the closing tag;
they stay, and are the model's. The token with which the model ends a turn, where a correction
follows, does not: in the reference nothing of it is left either, and no text goes on behind it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.search.grading import occurs_in
from sg_rlhf.tasks.search.protocol import (
    CHARS_PER_TOKEN,
    CORRECTION,
    FAILED,
    OBSERVATION_END,
    OBSERVATION_START,
    STOP,
    Kind,
    Passage,
    claims_information,
    clean_query,
    count_tags,
    format_passages,
    headings,
    parse_action,
)
from sg_rlhf.tasks.search.settings import SearchSettings

_NO_WORD = re.compile(r"[^\w\s]")

#: Tokens that must be left behind an observation; without them no answer could follow it.
ANSWER_TOKENS = 16


class SearchFailed(Exception):
    """A search without a result, because the search engine did not answer; says why."""


@dataclass(frozen=True)
class Generation:
    """What the engine sampled in one turn.

    `log_probs` has a value for each token, or is None; `out_of_tokens`: the limit ended the turn.
    """

    token_ids: Sequence[int]
    out_of_tokens: bool
    log_probs: Sequence[float] | None = None


class Codec(Protocol):
    """The model's tokenizer, without adding or dropping special tokens."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out."""

    @property
    def control_tokens(self) -> Sequence[str]:
        """Strings that it reads as control tokens wherever they stand (see `neutralise`)."""

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of its control tokens."""


#: (context, most new tokens) -> what was sampled; stops at a closing tag of `protocol.STOP`.
Generate = Callable[[list[int], int], Awaitable[Generation]]
#: query -> passages, best first; raises `SearchFailed`.
Search = Callable[[str], Awaitable[Sequence[Passage]]]


@dataclass
class Dialogue:
    """A dialogue so far.

    Attributes:
        token_ids: the prompt, then turns and observations in turn.
        action_ranges: (start, end) of the model's tokens in `token_ids`; all others are not its.
        log_probs: of every token of `token_ids`, 0 where it is not the model's; None without.
        turns: the model's text, turn by turn.
        retrieved: the search results that the model saw, as text without their tags.
        answer: the answer that it ended with; None: it ended without.
        truncated: it ended because no tokens were left, or no turns and it still wanted to search.
        search_seconds: time that the searches took, failed ones included.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    action_ranges: list[tuple[int, int]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    retrieved: list[str] = field(default_factory=list)
    answer: str | None = None
    truncated: bool = False
    searches: int = 0
    failures: int = 0
    empty_results: int = 0
    invalid_actions: int = 0
    search_seconds: float = 0.0

    @property
    def format_ok(self) -> bool:
        """It ended in an answer, every action was valid, and no search result was made up."""
        return (
            bool(self.answer)
            and not self.invalid_actions
            and not any(claims_information(turn) for turn in self.turns)
        )

    def add_turn(self, generation: Generation, text: str) -> None:
        """Append what the model sampled."""
        start = len(self.token_ids)
        self.token_ids.extend(generation.token_ids)
        self.action_ranges.append((start, len(self.token_ids)))
        self.turns.append(text)
        if self.log_probs is not None:
            assert generation.log_probs is not None
            assert len(generation.log_probs) == len(generation.token_ids)
            self.log_probs.extend(generation.log_probs)

    def drop_end_of_turn(self, codec: Codec) -> None:
        """Take back the control token that the last turn ended with, if it did."""
        start, end = self.action_ranges[-1]
        if start == end or self.token_ids[-1] not in codec.control_ids:
            return
        # A tokenizer may have the tags as control tokens of its own.
        if codec.decode(self.token_ids[-1:]).strip() in STOP:
            return
        del self.token_ids[-1]
        self.action_ranges[-1] = (start, end - 1)
        self.turns[-1] = codec.decode(self.token_ids[start:])
        if self.log_probs is not None:
            del self.log_probs[-1]

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append tokens that are not the model's."""
        self.token_ids.extend(token_ids)
        if self.log_probs is not None:
            self.log_probs.extend([0.0] * len(token_ids))


async def run_dialogue(
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    generate: Generate,
    search: Search,
    codec: Codec,
    settings: SearchSettings,
    *,
    with_log_probs: bool = False,
) -> Dialogue:
    """Let the model search and answer.

    `settings.max_turns` turns may search; one more follows that may only answer: a search there is
    not carried out. The dialogue ends earlier with an answer, or when no tokens are left; then no
    observation is appended that the model could not react to.

    Args:
        max_new_tokens: of turns and observations together, behind the prompt.
        with_log_probs: whether `generate` returns log-probs.
    """
    dialogue = Dialogue(list(prompt_ids), [0.0] * len(prompt_ids) if with_log_probs else None)
    end = len(prompt_ids) + max_new_tokens
    for turns_left in range(settings.max_turns, -1, -1):
        room = min(settings.turn_tokens, end - len(dialogue.token_ids))
        generation = await generate(list(dialogue.token_ids), room)
        text = codec.decode(generation.token_ids)
        dialogue.add_turn(generation, text)
        action = parse_action(text)
        if action.kind is Kind.ANSWER:
            dialogue.answer = action.content
            break
        if action.kind is Kind.INVALID:
            dialogue.invalid_actions += 1
        if not turns_left:
            dialogue.truncated = generation.out_of_tokens or action.kind is Kind.SEARCH
            break
        if end - len(dialogue.token_ids) <= ANSWER_TOKENS:
            dialogue.truncated = True
            break
        if action.kind is Kind.INVALID:
            if settings.invalid == "end":
                if not any(tag in text for tag in STOP):
                    dialogue.truncated = generation.out_of_tokens
                    break
                observation = []
            else:
                observation = codec.encode(CORRECTION)
        else:
            query = clean_query(action.content, settings.max_query_chars)
            observation = await _search(dialogue, query, search, codec, settings)
        if end - len(dialogue.token_ids) - len(observation) < ANSWER_TOKENS:
            dialogue.truncated = True
            break
        if action.kind is Kind.INVALID and observation:
            dialogue.drop_end_of_turn(codec)
        dialogue.add_observation(observation)
    return dialogue


async def _search(
    dialogue: Dialogue,
    query: str,
    search: Search,
    codec: Codec,
    settings: SearchSettings,
) -> list[int]:
    dialogue.searches += 1
    started = time.monotonic()
    try:
        passages = await search(query)
    except SearchFailed:
        dialogue.failures += 1
        return encode_observation(FAILED, codec, settings.observation_tokens)
    finally:
        dialogue.search_seconds += time.monotonic() - started
    dialogue.empty_results += not passages
    observation, shown = encode_passages(passages, codec, settings.observation_tokens)
    if passages:
        for tag in (OBSERVATION_START, OBSERVATION_END):
            shown = shown.replace(tag.strip(), " ")
        dialogue.retrieved.append(shown)
    return observation


def encode_passages(passages: Sequence[Passage], codec: Codec, cap: int) -> tuple[list[int], str]:
    """A search result as token ids, at most `cap`, and as the text that they stand for.

    What the tokenizer makes of a text counts, not the text: one that normalises (NFKC) reads a
    fullwidth `＜answer＞` as the tag, and a tag with a soft hyphen in it may lose that. Where its
    reading has a tag too many, or a control token, the passages are neutralised as it reads them;
    and where even that does not help, all but letters and digits go.
    """
    empty = "\n".join(f"Doc {number}(" for number in range(1, len(passages) + 1))
    frame = codec.encode(f"{OBSERVATION_START}{empty}{OBSERVATION_END}")
    expected = codec.decode(frame)
    control = codec.control_ids.difference(frame)
    max_chars = cap * CHARS_PER_TOKEN
    readings: tuple[Callable[[str], str], ...] = (
        str,
        lambda text: codec.decode(codec.encode(text)),
        lambda text: _NO_WORD.sub(" ", text),
    )
    for reading in readings:
        some = []
        for passage in passages:
            title, text = reading(passage.title[:max_chars]), reading(passage.text[:max_chars])
            some.append(replace(passage, title=title, text=text))
        token_ids = encode_observation(format_passages(some, codec.control_tokens), codec, cap)
        shown = codec.decode(token_ids)
        if (
            count_tags(shown) <= count_tags(expected)
            and headings(shown) == headings(expected)[: len(headings(shown))]
            and control.isdisjoint(token_ids)
        ):
            break
    return token_ids, shown


def encode_observation(body: str, codec: Codec, cap: int) -> list[int]:
    """Token ids of a search result with its tags, at most `cap` of them.

    The reference cuts the closing tag off with the rest; here the text is cut and the block closed.
    """
    token_ids = codec.encode(f"{OBSERVATION_START}{body}{OBSERVATION_END}")
    if len(token_ids) <= cap:
        return token_ids
    closing = codec.encode(OBSERVATION_END)
    kept = token_ids[: cap - len(closing)]
    for _ in range(3):  # a character of four bytes can be cut in three places
        if not codec.decode(kept).endswith("\N{REPLACEMENT CHARACTER}"):
            break
        kept.pop()
    return kept + closing


def metrics(dialogue: Dialogue, golds: Sequence[str], grade: Grade) -> dict[str, float]:
    """What is logged of a rollout; the same keys for each, as OpenRLHF needs.

    The log holds means over rollouts, so seconds for one search are `search_seconds / searches`.
    `gold_retrieved`: a gold answer stands in what the model was shown; `answer_retrieved`: its own
    answer does.
    """
    shown = "\n".join(dialogue.retrieved)
    answer = dialogue.answer or ""
    written = sum(end - start for start, end in dialogue.action_ranges)
    first = dialogue.action_ranges[0][0]
    return {
        "correct": float(grade.correct),
        "f1": grade.logs["f1"],
        "format_ok": float(dialogue.format_ok),
        "answered": float(dialogue.answer is not None),
        "turns": float(len(dialogue.turns)),
        "searches": float(dialogue.searches),
        "invalid_actions": float(dialogue.invalid_actions),
        "made_up_information": float(any(map(claims_information, dialogue.turns))),
        "search_seconds": dialogue.search_seconds,
        "retrieval_failures": float(dialogue.failures),
        "retrieval_empty": float(dialogue.empty_results),
        "gold_retrieved": float(any(occurs_in(gold, shown) for gold in golds)),
        "answer_retrieved": float(occurs_in(answer, shown)),
        "observation_tokens": float(len(dialogue.token_ids) - first - written),
    }
