"""Prompts as text and the model that reads them: whose chat form, where a turn ends, one BOS.

OpenRLHF and `eval` hand a model a prompt with its control tokens written out. Nothing else would
notice another model's form, a base model that writes on behind its turn, or two BOS tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: Arguments of `apply_chat_template` that the commands set themselves.
_OWN_ARGUMENTS = ("conversation", "tokenize", "add_generation_prompt", "chat_template")


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation in the model's chat template, up to where the model writes."""
    return str(
        tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)
    )


class ChatFormat(NamedTuple):
    """How a family of models writes a conversation.

    Attributes:
        start: text that begins a turn, or a part of it.
        end: the token that ends the model's turn.
        is_token: the start is a control token in every tokenizer of the family.
    """

    name: str
    start: str
    end: str
    is_token: bool = True


FORMATS = (
    ChatFormat("ChatML (Qwen)", "<|im_start|>", "<|im_end|>"),
    ChatFormat("Llama 3", "<|start_header_id|>", "<|eot_id|>"),
    # Plain text before v0.3; and its end of turn is its end of text.
    ChatFormat("Mistral", "[INST]", "</s>", is_token=False),
)


def detect_format(prompt: str) -> ChatFormat | None:
    """The form that a prompt ends in; None for plain text."""
    found = max(FORMATS, key=lambda form: prompt.rfind(form.start))
    return found if found.start in prompt else None


def supports(prompt: str, tokenizer: Any) -> bool:
    """Whether the control tokens of a prompt are tokens to the model, and not plain text."""
    form = detect_format(prompt)
    return form is None or not form.is_token or _token_id(form.start, tokenizer) is not None


def check_format(prompt: str, tokenizer: Any) -> None:
    """Refuse a prompt whose control tokens are plain text to the model, with a `ValueError`."""
    form = detect_format(prompt)
    if form is not None and not supports(prompt, tokenizer):
        raise ValueError(
            f"the prompts are written in {form.name}'s form, and the model's tokenizer has no "
            f"token {form.start}: write them through the model's own chat template: rows of "
            "messages with data.apply_chat_template=true; for Knights & Knaves, "
            "`sg-rlhf data kk --chat-template MODEL`"
        )


def check_template_kwargs(value: Any) -> dict[str, Any]:
    """Arguments for a chat template, such as `{"enable_thinking": False}`; else a `ValueError`."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("expected names and values, such as {enable_thinking: false}")
    for name in _OWN_ARGUMENTS:
        if name in value:
            raise ValueError(f"{name} is set by the command; expected variables of the template")
    return dict(value)


def template_with(tokenizer: Any, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The tokenizer's `apply_chat_template` with further arguments, all of which it must read."""
    template = str(tokenizer.chat_template or "")
    for name in arguments:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(f"{name}: the model's chat template does not read it; leave it out")
    return functools.partial(tokenizer.apply_chat_template, **arguments)


def stop_token_ids(prompt: str, tokenizer: Any) -> tuple[int, ...]:
    """The token that ends a response to a prompt in chat form, as vLLM's `stop_token_ids`.

    A base model's own end is that of a text (Qwen2.5: `<|endoftext|>`), so that it would write on
    behind `<|im_end|>` and play the user too. Empty for a plain prompt.
    """
    form = detect_format(prompt)
    found = None if form is None else _token_id(form.end, tokenizer)
    return () if found is None else (found,)


def with_bos(prompts: Sequence[str], tokenizer: Any) -> list[str]:
    """The prompts with their BOS written out: OpenRLHF encodes without adding special tokens."""
    if not adds_bos(tokenizer):
        return list(prompts)
    bos = tokenizer.bos_token
    return [prompt if prompt.startswith(bos) else f"{bos}{prompt}" for prompt in prompts]


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a BOS in front of a text by itself (Llama, Mistral; not Qwen)."""
    if tokenizer.bos_token is None:
        return False
    return bool(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])


def encode(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of prompts, as the tokenizer encodes texts, but with one BOS at most."""
    if not prompts:
        return []
    if adds_bos(tokenizer):
        encoded = tokenizer(with_bos(prompts, tokenizer), add_special_tokens=False)
    else:
        encoded = tokenizer(list(prompts))
    return [list(ids) for ids in encoded["input_ids"]]


def _token_id(token: str, tokenizer: Any) -> int | None:
    """The id of a control token; None where the text is several tokens, or unknown."""
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or (found == tokenizer.unk_token_id and token != tokenizer.unk_token):
        return None
    return int(found)
