"""The Knights & Knaves prompt of Logic-RL, byte for byte, and the same content for other models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sg_rlhf.tasks import chat

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


def build_chat_prompt(quiz: str, tokenizer: Any) -> str:
    """The same content through the model's own chat template, ending in `<think>`.

    The instructions are a system message, or a part of the user's where the template has none. With
    a plain ChatML template the result equals `build_prompt(quiz)`.
    """
    from jinja2 import TemplateError

    user = f"{quiz}\n"
    try:
        text = _applied(tokenizer, {"system": SYSTEM, "user": user})
    except TemplateError:
        text = ""
    # Some templates leave a system message out, and some trim what they are given.
    if SYSTEM.strip() not in text:
        text = _applied(tokenizer, {"user": f"{SYSTEM}\n{user}"})
    # Templates of reasoning models open the tag themselves, or write empty reasoning.
    return re.sub(r"(<think>\s*(</think>\s*)?)?\Z", "", text, count=1) + THINK


def _applied(tokenizer: Any, content: Mapping[str, str]) -> str:
    messages = [{"role": role, "content": text} for role, text in content.items()]
    return chat.render(tokenizer, messages)
