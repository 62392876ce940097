"""The three ways in which published Knights & Knaves numbers were graded.

- `official`: K&K's own prompt, which asks for a "CONCLUSION:"; right if every "Name is a knight" or
  "Name is a knave" of the gold occurs in the conclusion, without "if" and without "(n+1)".
- `logic_rl`: Logic-RL's prompt, whose `<think>` is open; right if the tags come once and in order
  and the first role word after each name is right.
- `paper`: Logic-RL's prompt; right if the training reward is +3.

Sources: mem-kk-logic `dataset/kk.py` and `prompt.py` (MIT, arXiv 2410.23123); Logic-RL `eval_kk/`
(arXiv 2502.14768). Written from what that code computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.kk.grading import parse_answer_key, score
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.suite import BatchGrader, one_by_one

# The official zero-shot prompt that asks for reasoning. It is used raw, as the official runner
# does with open models; the response continues the last sentence.
OFFICIAL_INSTRUCTION = """\
Your task is to solve a logical reasoning problem. You are given set of statements from which \
you must logically deduce the identity of a set of characters.

You must infer the identity of each character. First, explain your reasoning. At the end of your \
answer, you must clearly state the identity of each character by following the format:

CONCLUSION:
(1) ...
(2) ...
(3) ...
"""

# Looked for in this order; the first that is followed by any text counts.
_CONCLUSIONS = ("CONCLUSION:", "Conclusion:", "conclusion:")
# What a model writes after its conclusion, and which the harness cuts off.
_FINISHED = ("### Reason", "Let's think step by step again", "let's go back and check", "###")

_ROLE = re.compile(r"\b(knight|knave)\b", re.IGNORECASE)
_TAGS = ("</think>", "<answer>", "</answer>")


def official_prompt(quiz: str) -> str:
    """The official prompt: instruction, question, and the start of an answer that reasons."""
    return f"{OFFICIAL_INSTRUCTION}\n\n### Question: {quiz}\n### Answer: Let's think step by step"


def grade_official(response: str, solution_text_format: str) -> Grade:
    """The official harness: substrings of the conclusion.

    Its quirks are kept: the text between the first and the second "CONCLUSION:" counts; "if"
    anywhere in it, as in "life", is a refusal; a statement and its opposite together are right.
    """
    key = parse_answer_key(solution_text_format)
    response = response.split("### Question")[0]
    text = _conclusion(response)
    if text is None:
        # Without the word, a complete numbered list makes the whole response the conclusion.
        if not all(f"({i})" in response for i in range(1, len(key) + 1)):
            return _verdict(False, None, "no_conclusion")
        text = response
    for phrase in _FINISHED:
        text = text.split(phrase)[0]
    if f"({len(key) + 1})" in text:
        return _verdict(False, text, "beyond_list")
    if "if" in text:
        return _verdict(False, text, "contains_if")
    right = all(f"{name} is a {role}" in text for name, role in key.items())
    return _verdict(right, text, "correct" if right else "wrong")


def grade_logic_rl(response: str, solution_text_format: str) -> Grade:
    """Logic-RL's harness: the tags once and in order, then the first role word after each name.

    "is not a knight" reads as knight, and any words may stand between.
    """
    key = parse_answer_key(solution_text_format)
    positions = [response.find(tag) for tag in _TAGS]
    if any(response.count(tag) != 1 for tag in _TAGS) or positions != sorted(positions):
        return _verdict(False, None, "bad_format")
    answer = response[positions[1] + len(_TAGS[1]) : positions[2]].strip()
    if not answer:
        return _verdict(False, None, "bad_format")
    roles = {}
    for name in key:
        role = _role_after(name, answer)
        if role is None:
            return _verdict(False, None, "unparseable")
        roles[name] = role
    right = roles == key
    return _verdict(right, answer, "correct" if right else "wrong")


def grade_paper(response: str, solution_text_format: str) -> Grade:
    """The training reward's own grader: right is a reward of +3; beside it the strict reading."""
    strict = score(response, solution_text_format, reading="strict").correct
    return replace(score(response, solution_text_format), others={"strict": strict})


def _verdict(correct: bool, extracted: str | None, reason: str) -> Grade:
    return Grade(float(correct), correct, reason, extracted, format_ok=extracted is not None)


def _role_after(name: str, answer: str) -> str | None:
    """The first "knight" or "knave" that follows the name on one line, in the first such line."""
    # The harness's `\bName\b.*?\b(knight|knave)\b`, in a time that is linear in the answer: where
    # the first mention on a line has no role behind it, the later ones have none either.
    mention = re.compile(rf"\b{re.escape(name)}\b", re.IGNORECASE)
    for line in answer.split("\n"):
        found = mention.search(line)
        role = _ROLE.search(line, found.end()) if found else None
        if role is not None:
            return role.group(1).lower()
    return None


def _conclusion(response: str) -> str | None:
    for word in _CONCLUSIONS:
        parts = response.split(word)
        if len(parts) > 1 and parts[1]:
            return parts[1]
    return None


PROMPTS: Mapping[str, Callable[[str], str]] = {
    "official": official_prompt,
    "logic_rl": build_prompt,
    "paper": build_prompt,
}
GRADERS: Mapping[str, BatchGrader] = {
    "official": one_by_one(grade_official),
    "logic_rl": one_by_one(grade_logic_rl),
    "paper": one_by_one(grade_paper),
}
