"""A fixed batch sampled from a checkpoint: groups of responses, graded by the domain's reward."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sg_rlhf.algo.advantages import group_advantages
from sg_rlhf.common.text import single_line, truncate
from sg_rlhf.config import local_path
from sg_rlhf.data_io.records import DataError
from sg_rlhf.measure.checkpoint import MeasureError, pad_id, vocabulary
from sg_rlhf.measure.fixed_batch import BatchRow, FixedBatch
from sg_rlhf.measure.rollouts import left_pad
from sg_rlhf.tasks import chat, registry
from sg_rlhf.tasks.reward import reward_named
from sg_rlhf.tasks.reward_values import reward_fields

#: Responses that are sampled at a time. The samples depend on it, so it is no option.
ROWS = 64

RewardFunc = Callable[[list[str], list[str], list[str]], Mapping[str, Any]]


@dataclass(frozen=True)
class Sampling:
    """How a batch is sampled.

    prompts: the first ones of the file. group: responses to each, G. advantage_std: see
    ``group_advantages``.
    """

    prompts: int = 8
    group: int = 8
    temperature: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0
    advantage_std: str = "sample"


def load_reward(value: str) -> RewardFunc:
    """The reward function of ``domain:NAME``, or ``reward_func`` of a file or of ``module:NAME``.

    Raises:
        MeasureError: no such domain or file, or no ``reward_func`` in it.
    """
    value = registry.OLD_VALUES.get(value, value)
    if value.startswith(registry.PREFIX):
        try:
            return reward_named(value)
        except ValueError as error:
            raise MeasureError(f"--reward {value}: {error}") from None
    path = Path(local_path("--reward", value))
    if path.suffix != ".py" or not path.is_file():
        raise MeasureError(
            f"--reward {value}: no such Python file; expected one, module:NAME, or "
            "domain:NAME such as domain:kk"
        )
    spec = importlib.util.spec_from_file_location("reward_func", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, "reward_func", None)
    if not callable(found):
        raise MeasureError(f"--reward {value}: {path} has no reward_func(queries, prompts, labels)")
    return found


def sample_batch(
    path: Path,
    data: Sequence[Mapping[str, Any]],
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Sampling,
    reward: RewardFunc | None,
    on_rows: Callable[[int], object] = lambda n: None,
) -> FixedBatch:
    """G responses to each of the first prompts, with group advantages if there is a reward.

    Rows are what ``python -m sg_rlhf.data`` writes: ``input``, the prompt as the model gets it, and
    ``answer``, the reward's label.

    Raises:
        DataError: a row without them, or one that the reward does not take.
        MeasureError: a prompt that leaves no space for the response.
    """
    chosen = data[: settings.prompts]
    prompts = [text_of(path, number, row, "input") for number, row in enumerate(chosen, start=1)]
    encoded = [tuple(ids) for ids in chat.encode(prompts, tokenizer)]
    check_room(path, model, encoded, settings.max_new_tokens)
    repeated = [ids for ids in encoded for _ in range(settings.group)]
    stops = end_ids(model, tokenizer, prompts)
    responses = _generate(model, stops, repeated, settings, on_rows)
    rewards: list[float | None] = [None] * len(responses)
    advantages = list(rewards)
    if reward is not None:
        labels = [
            text_of(path, number, row, "answer") for number, row in enumerate(chosen, start=1)
        ]
        found = []
        for i, response in enumerate(responses):
            k = i // settings.group
            text = tokenizer.decode(response)
            found.append(float(graded(path, k + 1, reward, prompts[k], labels[k], text)["rewards"]))
        groups = torch.tensor(found, dtype=torch.float64).view(-1, settings.group)
        advantages = group_advantages(groups, settings.advantage_std).flatten().tolist()
        rewards = list(found)
    rows = tuple(
        BatchRow(*parts) for parts in zip(repeated, responses, advantages, rewards, strict=True)
    )
    source = (
        f"{len(chosen)} prompts x {settings.group} of {path}, sampled from {name}, "
        f"seed {settings.seed}"
    )
    return FixedBatch(rows, settings.temperature, vocabulary(tokenizer), source)


def text_of(path: Path, number: int, row: Mapping[str, Any], key: str) -> str:
    """The text ``row[key]``; the row's number counts from 1.

    Raises:
        DataError: it is missing, empty or no text.
    """
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"--data {path}: row {number}: {key}={truncate(value)}: expected a text (rows have "
            "prompt and response, or input and answer as sg_rlhf.data writes them)"
        )
    return value


def check_room(
    path: Path, model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int
) -> None:
    """Refuse a prompt that leaves too little of the model's context.

    Raises:
        MeasureError: naming its row.
    """
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for number, ids in enumerate(prompts, start=1):
        if room is not None and len(ids) + new_tokens > room:
            raise MeasureError(
                f"--data {path}: row {number}: {len(ids)} tokens of prompt and --max-new-tokens "
                f"{new_tokens} exceed the model's context of {room}"
            )


def graded(
    path: Path, number: int, reward: RewardFunc, prompt: str, label: str, response: str
) -> Mapping[str, Any]:
    """``rewards``, ``scores`` and ``extra_logs`` of one response to the prompt of row ``number``.

    Raises:
        DataError: the reward function does not take the label, or returns something else.
    """
    try:
        return reward_fields(reward([prompt + response], [prompt], [label]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"--data {path}: row {number}: the reward does not take answer={truncate(label)}: "
            f"{single_line(error)}"
        ) from None


@torch.no_grad()
def _generate(
    model: PreTrainedModel,
    stops: frozenset[int],
    prompts: Sequence[tuple[int, ...]],
    settings: Sampling,
    on_rows: Callable[[int], object],
) -> list[tuple[int, ...]]:
    """Responses, with their end token if it came in time; keeps the caller's random state."""
    # A new configuration: the model's own may have a repetition penalty, a top-k or a top-p.
    config = GenerationConfig(
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=sorted(stops) or None,
        pad_token_id=pad_id(model),
    )
    devices = [model.device] if model.device.type == "cuda" else []
    responses: list[tuple[int, ...]] = []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(settings.seed)
        for start in range(0, len(prompts), ROWS):
            part = prompts[start : start + ROWS]
            ids, mask = left_pad(part, pad_id(model))
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=config,
            )
            responses += [_up_to_end(row, stops) for row in output[:, ids.shape[1] :].tolist()]
            on_rows(len(part))
    return responses


def end_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]
) -> frozenset[int]:
    """Ids that end a response to such prompts; the tokenizer's where the model names none."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    own = {end for end in (ends if isinstance(ends, list) else [ends]) if end is not None}
    return frozenset(own.union(*(chat.turn_end_ids(p, tokenizer) for p in prompts[:1])))


def _up_to_end(ids: list[int], stops: frozenset[int]) -> tuple[int, ...]:
    lengths = [i for i, token in enumerate(ids, start=1) if token in stops]
    return tuple(ids[: min(lengths, default=len(ids))])
