"""Question answering with a search engine: the seven sets of Table 2, files and prompts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.questions import EvalError, Question, Source
from sg_rlhf.tasks.search.data import read_questions
from sg_rlhf.tasks.search.prompt import build_prompt

#: Of turns and search results together, as the recipes train (`rollout.max_new_tokens`).
DIALOGUE_TOKENS = 4096

Prompt = Literal["chat", "raw", "short"]
PROMPTS: tuple[Prompt, ...] = get_args(Prompt)

# The search prompt without the sentences that offer a search engine.
_CLOSED_BOOK = (
    "Answer the given question. "
    "You must conduct reasoning inside <think> and </think> first. "
    "Then provide the answer inside <answer> and </answer>, without detailed illustrations. "
    "For example, <answer> Beijing </answer>. "
)


@dataclass(frozen=True)
class QaSet:
    """One published set: FlashRAG's folder `name` and file `split`, and its number of questions."""

    name: str
    title: str
    split: str
    size: int
    family: str
    licence: str
    published: str  # YYYY-MM
    trained: bool = False  # the recipes train on its training split


GENERAL, MULTI_HOP = "general", "multihop"
SETS: tuple[QaSet, ...] = (
    QaSet("nq", "NQ", "test", 3610, GENERAL, "CC-BY-SA-3.0", "2019-08", True),
    QaSet("triviaqa", "TriviaQA", "test", 11313, GENERAL, "Apache-2.0", "2017-05"),
    QaSet("popqa", "PopQA", "test", 14267, GENERAL, "MIT", "2022-12"),
    QaSet("hotpotqa", "HotpotQA", "dev", 7405, MULTI_HOP, "CC-BY-SA-4.0", "2018-09", True),
    QaSet("2wikimultihopqa", "2WikiMultihopQA", "dev", 12576, MULTI_HOP, "Apache-2.0", "2020-11"),
    QaSet("musique", "MuSiQue", "dev", 2417, MULTI_HOP, "CC-BY-4.0", "2021-08"),
    QaSet("bamboogle", "Bamboogle", "test", 125, MULTI_HOP, "MIT", "2022-10"),
)


def find_file(qa_set: QaSet, folder: Path) -> Path | None:
    """The set's file: FlashRAG's `nq/test.jsonl`, or a flat `nq.jsonl` or `nq_500.jsonl`."""
    published = folder / qa_set.name / f"{qa_set.split}.jsonl"
    if published.is_file():
        return published
    flat = re.compile(rf"{qa_set.name}([_-]{qa_set.split})?([_-]?\d+)?\.jsonl")
    found = sorted(path for path in folder.iterdir() if flat.fullmatch(path.name))
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise EvalError(f"--data-dir {folder}: {names} are both {qa_set.title}; leave one there")
    return found[0] if found else None


def expected_names(qa_set: QaSet) -> str:
    """What `find_file` looks for, in words."""
    return f"{qa_set.name}/{qa_set.split}.jsonl or {qa_set.name}_N.jsonl"


def questions(qa_set: QaSet, folder: Path | None) -> tuple[list[Question], list[Source]]:
    """All questions of a set's file; their prompts are still the bare questions."""
    if folder is None:
        raise EvalError(
            "--suite qa needs --data-dir with FlashRAG's files (nq/test.jsonl and so on, "
            "https://huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets)"
        )
    path = find_file(qa_set, folder)
    if path is None:
        raise EvalError(f"--data-dir {folder}: no {expected_names(qa_set)}")
    rows = read_questions(path)
    if len(rows) > qa_set.size:
        raise EvalError(
            f"{path}: {len(rows)} questions, but {qa_set.title}'s {qa_set.split} set has "
            f"{qa_set.size}; expected that set, or a sample of it"
        )
    source = Source(str(path.relative_to(folder)), sha256_of(path), len(rows))
    return [Question(row.id, row.text, list(row.golds), bare=row.text) for row in rows], [source]


def prompt_of(question: str, prompt: Prompt, searches: bool, tokenizer: Any) -> str:
    """The text that a dialogue starts with.

    `chat`: the recipes' prompt in the model's chat template; `raw`: without a template; `short`:
    the bare question.
    """
    if prompt == "short":
        return build_prompt(question, "short")
    text = build_prompt(question, "search_r1" if searches else "short")
    if not searches:
        text = _CLOSED_BOOK + text
    if prompt == "raw":
        return text
    if not tokenizer.chat_template:
        raise EvalError("--prompt chat: the model has no chat template; expected raw or short")
    messages = [{"role": "user", "content": text}]
    return chat.render(tokenizer, messages)
