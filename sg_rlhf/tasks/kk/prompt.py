"""The Knights & Knaves prompt of Logic-RL, byte for byte, and the same content for other models."""

from __future__ import annotations

from typing import Any

# Changes whenever the text of a prompt does; written to every data set's manifest.
PROMPT_VERSION = "logic-rl-1"

# The missing space in "and<answer>" and the double space before "Now" are the reference's own.
SYSTEM = (
    "You are a helpful assistant. The assistant first thinks about the reasoning process in "
    "the mind and then provides the user with the answer. The reasoning process and answer "
    "are enclosed within <think> </think> and<answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think><answer> answer here </answer>.  Now the user "
    "asks you to solve a logical reasoning problem. After thinking, when you finally reach a "
    "conclusion, clearly state the identity of each character within <answer> </answer> "
    "tags. i.e., <answer> (1) Zoey is a knight\n"
    "(2) ... </answer>.\n"
)
# The prompt opens the reasoning itself: it counts as the response's one `<think>`.
THINK = "<think>"


def build_prompt(quiz: str) -> str:
    """The prompt of the reference runs: ChatML written out, to be used raw (no chat template)."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n{quiz}\n<|im_end|>\n"
        f"<|im_start|>assistant\n{THINK}"
    )


def chat_messages(quiz: str, *, system_role: bool = True) -> list[dict[str, str]]:
    """The same content as chat messages.

    Args:
        system_role: False puts the instructions into the user's message, for chat templates that
            refuse a system message.
    """
    if not system_role:
        return [{"role": "user", "content": f"{SYSTEM}\n{quiz}\n"}]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{quiz}\n"}]


def build_chat_prompt(quiz: str, tokenizer: Any, *, system_role: bool | None = None) -> str:
    """The same content through the model's own chat template, ending in `<think>`.

    With a plain ChatML template the result equals `build_prompt(quiz)`.

    Args:
        tokenizer: anything with Hugging Face's `apply_chat_template(messages, tokenize=...,
            add_generation_prompt=...)`.
        system_role: whether the instructions are a system message; None: where the template has
            one, else they are a part of the user's.
    """
    text = None
    if system_role is not False:
        text = _through_template(quiz, tokenizer, refusal=system_role is None)
    if text is None:
        text = _applied(chat_messages(quiz, system_role=False), tokenizer)
    # Templates of reasoning models open the tag themselves.
    stripped = text.rstrip()
    return stripped if stripped.endswith(THINK) else f"{text}{THINK}"


def _applied(messages: list[dict[str, str]], tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _through_template(quiz: str, tokenizer: Any, *, refusal: bool) -> str | None:
    """With a system message; None where the template refuses it or leaves it out.

    Args:
        refusal: whether it may refuse.
    """
    from jinja2 import TemplateError

    try:
        text = _applied(chat_messages(quiz), tokenizer)
    except TemplateError:
        if not refusal:
            raise
        return None
    # Some templates trim what they are given.
    return text if SYSTEM.strip() in text or not refusal else None
