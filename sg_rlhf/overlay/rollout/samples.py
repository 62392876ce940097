"""A response as an engine returns it, as an ``Experience``, and the samples of a whole rollout."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.common.text import truncate
from sg_rlhf.overlay.reporting.errors import RewardError

#: Characters of a sample in an error message.
_MAX_CHARACTERS = 600
#: A row of the data loader: sources, prompts, labels, images, each of one prompt.
PromptRow = tuple[list[str], list[str], list[str], list[object]]


class Response(TypedDict):
    """The fields of a response that an executor returns, with the engine's weight versions.

    Attributes:
        observation_tokens: token ids [L] of the prompt and the response.
        action_ranges: (start, end) of each of the model's turns in them.
        rollout_log_probs: [L], the engine's, 0 outside the model's turns; None for none.
        reward: None if a reward model gives it.
        scores: for dynamic filtering; None for none.
    """

    prompt: str
    label: str
    observation_tokens: list[int]
    action_ranges: list[tuple[int, int]]
    rollout_log_probs: list[float] | None
    truncated: bool
    reward: float | None
    scores: float | None
    extra_logs: NotRequired[dict[str, float]]
    weight_versions: NotRequired[list[list[int]]]


def reward_error(response: Response, why: str, text: str) -> RewardError:
    """The error of a reward that cannot be used: one line with the cause and the sample."""
    return RewardError(
        f"the reward function failed on a rollout ({why}); label {truncate(response['label'])}; "
        f"prompt {truncate(response['prompt'])}; the sample ends: {text[-_MAX_CHARACTERS:]!r}"
    )


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled: temperature 0 is greedy; no ``max_new_tokens`` is what is left."""

    n_samples_per_prompt: int
    temperature: float
    top_p: float
    max_new_tokens: int | None
    max_len: int

    @classmethod
    def of_rollouts(cls, args: Namespace) -> Sampling:
        """The settings of a run's rollouts."""
        return cls(
            args.rollout.n_samples_per_prompt,
            args.rollout.temperature,
            args.rollout.top_p,
            args.rollout.max_new_tokens,
            args.data.max_len,
        )


@dataclass(frozen=True)
class RolloutSamples:
    """The samples of a rollout, one response each in the order of the prompts, or none.

    ``pass_rate``: share of prompts in % that passed dynamic filtering; None without it.
    """

    samples: list[Experience]
    pass_rate: float | None
    prompts_drawn: int
    is_epoch_over: bool


def to_experience(response: Response, max_len: int) -> Experience:
    """A response as an experience of one sample, with ``weight_runs``.

    Other than upstream, the response length counts the model's tokens alone, without an
    environment's text in between. A response also counts as truncated if an environment's text
    fills the context.
    """
    token_ids = response["observation_tokens"]
    n_tokens = min(len(token_ids), max_len)
    mask_L = torch.zeros(len(token_ids), dtype=torch.long)
    for start, end in response["action_ranges"]:
        mask_L[start:end] = 1
    last_action = max((end for _, end in response["action_ranges"]), default=0)
    is_full = last_action < len(token_ids) and len(token_ids) >= max_len
    # Position t is about token t + 1.
    mask_BT = mask_L[1:max_len].unsqueeze(0)
    log_probs_BT = None
    if response["rollout_log_probs"] is not None:
        log_probs_BT = torch.tensor(response["rollout_log_probs"][1:max_len]).unsqueeze(0)
    reward, score = response["reward"], response["scores"]
    numbers = {"reward": reward, "score": score, **(response.get("extra_logs") or {})}
    sample = Experience(
        sequences=torch.tensor(token_ids[:max_len], dtype=torch.long).unsqueeze(0),
        attention_mask=torch.ones(1, n_tokens, dtype=torch.long),
        action_mask=mask_BT,
        rollout_log_probs=log_probs_BT,
        prompts=[response["prompt"]],
        labels=[response["label"]],
        images=[None],
        mm_train_inputs=[None],
        rewards=None if reward is None else torch.tensor([reward]),
        scores=None if score is None else torch.tensor([score]),
        response_length=mask_BT.sum(dim=-1),
        truncated=torch.tensor([response["truncated"] or is_full]),
        total_length=torch.tensor([float(n_tokens)]),
        info={
            "response_clip_ratio": torch.tensor([n_tokens >= max_len]),
            **{name: torch.tensor([x]) for name, x in numbers.items() if x is not None},
        },
    )
    sample.weight_runs = response.get("weight_versions")
    return sample
