"""Responses sampled from a small model in plain torch, graded, and the fixed batch of them."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lab.measure.checkpoint import MeasureError, TokenRow, vocabulary
from lab.measure.fixed_batch import BatchRow, FixedBatch, text_of
from sg_rlhf.algo.advantages import group_advantages
from sg_rlhf.common.argument_types import progress_bar
from sg_rlhf.common.text import single_line, truncate
from sg_rlhf.config import local_path
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks import chat, registry
from sg_rlhf.tasks.reward import Completion, RewardFunc, reward_function
from sg_rlhf.tasks.reward_values import reward_fields
from sg_rlhf.tiny.sampling import sample_responses


@dataclass(frozen=True)
class Sampling:
    """How a batch is sampled.

    prompts: the first ones of the file. group: responses to each, G. at_a_time: responses that are
    sampled together, on which the samples depend. advantage_std: see ``group_advantages``.
    """

    prompts: int = 8
    group: int = 8
    temperature: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    at_a_time: int = 64
    advantage_std: str = "sample"


def load_reward(value: str) -> RewardFunc:
    """The reward of ``domain:NAME``, or ``reward_func`` of a file or of ``module:NAME``."""
    if value.startswith(registry.PREFIX):
        try:
            return reward_function(*registry.named_in(value))
        except ValueError as error:
            raise MeasureError(f"--reward {value}: {error}") from None
    path = Path(local_path("--reward", value))
    if path.suffix != ".py" or not path.is_file():
        raise MeasureError(
            f"--reward {value}: no such Python file; expected one, module:NAME, or "
            "domain:NAME such as domain:kk"
        )
    found = runpy.run_path(str(path)).get("reward_func")
    if not callable(found):
        raise MeasureError(f"--reward {value}: {path} has no reward_func(queries, prompts, labels)")
    return found


@dataclass(frozen=True)
class Answer(TokenRow):
    """A response to a row of the data; ``found`` is what the reward says of it, {} without one."""

    found: Mapping[str, Any]


def answers(
    path: Path,
    data: Sequence[Mapping[str, Any]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Sampling,
    reward: RewardFunc | None,
) -> Iterator[Answer]:
    """G responses to each row, one row after another.

    Rows are what ``sg-rlhf data`` writes: ``input``, the prompt as the model gets it or
    messages for its chat template, and ``answer``, the reward's label.

    Raises:
        DataError: a row without them, or one that the reward does not take.
        MeasureError: a prompt that leaves no space for the response.
    """
    rows = [(f"--data {path}: row {number}", row) for number, row in enumerate(data, start=1)]
    prompts = [_prompt(where, row, tokenizer) for where, row in rows]
    labels = [text_of(where, row, "answer") for where, row in rows if reward]
    encoded = [tuple(ids) for ids in chat.encode(prompts, tokenizer)]
    _check_room(path, model, encoded, settings.max_new_tokens)
    ends = _end_ids(model, tokenizer, prompts)
    repeated = [k for k in range(len(prompts)) for _ in range(settings.group)]
    with progress_bar("answering", "responses", len(repeated)) as bar:
        for start in range(0, len(repeated), settings.at_a_time):
            part = repeated[start : start + settings.at_a_time]
            responses = sample_responses(
                model, [encoded[k] for k in part], max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature, seed=settings.seed + start, ends=ends,
            )  # fmt: skip
            bar.update(len(part))
            for k, response in zip(part, responses, strict=True):
                found: Mapping[str, Any] = {}
                if reward is not None:
                    text = tokenizer.decode(response)
                    found = _graded(path, k + 1, reward, prompts[k], labels[k], text)
                yield Answer(encoded[k], tuple(response), found)


def sample_batch(
    path: Path,
    data: Sequence[Mapping[str, Any]],
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Sampling,
    reward: RewardFunc | None,
) -> FixedBatch:
    """The ``answers`` to the first prompts, with group advantages if there is a reward."""
    drawn = list(answers(path, data[: settings.prompts], model, tokenizer, settings, reward))
    rewards: list[float | None] = [None] * len(drawn)
    advantages = list(rewards)
    if reward is not None:
        rewards = [float(answer.found["rewards"]) for answer in drawn]
        groups = torch.tensor(rewards, dtype=torch.float64).view(-1, settings.group)
        advantages = group_advantages(groups, settings.advantage_std).flatten().tolist()
    rows = tuple(
        BatchRow(answer.prompt, answer.response, *figures)
        for answer, *figures in zip(drawn, advantages, rewards, strict=True)
    )
    source = (
        f"{len(drawn) // settings.group} prompts x {settings.group} of {path}, sampled from "
        f"{name}, seed {settings.seed}"
    )
    return FixedBatch(rows, settings.temperature, vocabulary(tokenizer), source)


def _prompt(where: str, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """A row's prompt as text; messages are written with the tokenizer's chat template."""
    messages = row.get("input")
    if not isinstance(messages, list) or not messages:
        return text_of(where, row, "input")
    if not all(isinstance(m, dict) and {"role", "content"} <= {*m} for m in messages):
        raise DataError(f"{where}: input={truncate(messages)}: expected role and content in each")
    if not tokenizer.chat_template:
        raise MeasureError(f"{where}: input is messages, and the model has no chat template")
    return chat.render(tokenizer, messages)


def _check_room(
    path: Path, model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> None:
    """Refuse a prompt that leaves too little of the model's context."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for number, ids in enumerate(prompts, start=1):
        if room is not None and len(ids) + new_tokens > room:
            raise MeasureError(
                f"--data {path}: row {number}: {len(ids)} tokens of prompt and --max-new-tokens "
                f"{new_tokens} exceed the model's context of {room}"
            )


def _graded(
    path: Path, number: int, reward: RewardFunc, prompt: str, label: str, response: str
) -> Mapping[str, Any]:
    """``rewards``, ``scores`` and ``extra_logs`` of one response to a row's prompt."""
    try:
        arguments = Completion(prompt, response, label).reward_arguments()
        return reward_fields(reward(*arguments))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"--data {path}: row {number}: the reward does not take answer={truncate(label)}: "
            f"{single_line(error)}"
        ) from None


def _end_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]
) -> frozenset[int]:
    """Ids that end a response to such prompts; the tokenizer's where the model names none."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    own = {end for end in (ends if isinstance(ends, list) else [ends]) if end is not None}
    return frozenset(own.union(*(chat.stop_token_ids(p, tokenizer) for p in prompts[:1])))
