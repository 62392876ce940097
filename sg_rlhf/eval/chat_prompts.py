"""`--chat-template` and `--system-prompt`: raw prompts as the user's turn of a conversation.

A local engine gets the text that the model's own chat template makes. A server gets the messages
through its chat endpoint and applies its template itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from sg_rlhf.tasks import chat
from sg_rlhf.tasks.questions import EvalError, Question, one_line
from sg_rlhf.tasks.suite import Benchmark


def messages(prompt: str, system_prompt: str | None) -> list[dict[str, str]]:
    """A conversation that ends in the user's turn."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return [*system, {"role": "user", "content": prompt}]


def refuse_chats(benchmarks: Sequence[Benchmark]) -> None:
    """Refuse prompts that are a conversation already."""
    for benchmark in benchmarks:
        questions = benchmark.questions
        if any(question.messages for question in questions):
            raise EvalError(
                f"--chat-template: the questions of {benchmark.name} are messages, which are "
                "written with the model's template already; leave the option out"
            )
        formats = (chat.detect_format(question.prompt) for question in questions)
        found = next(filter(None, formats), None)
        if found is not None:
            raise EvalError(
                f"--chat-template: the prompts of {benchmark.name} are a conversation already "
                f"({found.name}); select benchmarks with raw prompts by --only"
            )


def with_template(
    benchmarks: Sequence[Benchmark], tokenizer: Any, system_prompt: str | None
) -> list[Benchmark]:
    """The benchmarks, with prompts in the model's chat template."""
    if tokenizer.chat_template is None:
        raise EvalError(
            "--chat-template: the model's tokenizer has none; leave the option out for raw prompts"
        )

    def rewritten(question: Question) -> Question:
        try:
            prompt = chat.render(tokenizer, messages(question.prompt, system_prompt))
        except (TemplateError, ValueError) as error:
            raise EvalError(f"--chat-template: {one_line(error)}") from None
        # The comparison with training data is of the bare problem.
        return replace(question, prompt=prompt, bare=question.problem)

    return [replace(b, questions=[rewritten(q) for q in b.questions]) for b in benchmarks]
