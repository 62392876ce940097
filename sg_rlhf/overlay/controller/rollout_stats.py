"""Statistics of a rollout's samples: the ``rollout/`` metrics."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

MIXED_SCRIPTS = "garbled/mixed_script_frac"
#: Scripts that one language writes together, by the first word of a character's Unicode name.
WRITTEN_TOGETHER = (
    {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"},
    {"CJK", "HANGUL"},
    {"CJK", "BOPOMOFO"},
)
#: Letters of any text: Latin ones, Greek ones (formulas), and marks that Unicode calls letters.
IGNORED = {"", "LATIN", "GREEK", "MODIFIER"}


def rollout_stats(experiences: list[Experience], n_samples_per_prompt: int) -> dict[str, float]:
    """Rewards, response lengths, truncation, accuracy and groups without signal.

    ``n_samples_per_prompt`` is 1 if the estimator does not compare the responses to one prompt.
    """
    rewards = torch.cat([e.info["reward"] for e in experiences]).float()
    lengths = torch.cat([e.response_length for e in experiences]).float()
    truncated = torch.cat([e.truncated for e in experiences]).float()
    stats = {
        "rollout/reward_mean": rewards.mean().item(),
        "rollout/reward_std": rewards.std().item() if len(rewards) > 1 else 0.0,
        "rollout/response_length_mean": lengths.mean().item(),
        "rollout/response_length_max": lengths.max().item(),
        "rollout/truncated_rate": truncated.mean().item(),
        "rollout/num_samples": float(len(rewards)),
    }
    correct = [e.info["correct"] for e in experiences if "correct" in e.info]
    if correct:
        stats["rollout/accuracy"] = torch.cat(correct).float().mean().item()
    if n_samples_per_prompt > 1:
        share = frac_reward_zero_std(experiences, n_samples_per_prompt)
        stats["rollout/frac_reward_zero_std"] = share
    return stats


def frac_reward_zero_std(experiences: list[Experience], n_samples_per_prompt: int) -> float:
    """Share of the prompts whose responses have a ``group_reward_std`` of exactly 0."""
    stds = {
        index // n_samples_per_prompt: std
        for e in experiences
        for index, std in zip(e.index, e.info["group_reward_std"].tolist(), strict=True)
    }
    equal: list[bool] = [std == 0.0 for std in stds.values()]
    return sum(equal) / len(equal)


def mixed_script_frac(texts: Iterable[str]) -> float:
    """Share, 0 to 1, of the texts with letters of several scripts, Latin and Greek not counted.

    A model whose weights are damaged, or were synced wrongly, writes letters of many scripts.
    """
    mixed = [_is_mixed(text) for text in texts]
    return sum(mixed) / len(mixed) if mixed else 0.0


def _is_mixed(text: str) -> bool:
    if text.isascii():
        return False
    scripts = {_script(character) for character in set(text)} - IGNORED
    return len(scripts) > 1 and not any(scripts <= group for group in WRITTEN_TOGETHER)


@functools.cache
def _script(character: str) -> str:
    """First word of a letter's Unicode name; "" for other characters."""
    letter = unicodedata.normalize("NFKC", character)[:1]  # full-width and styled letters
    if not unicodedata.category(letter or " ").startswith("L"):
        return ""
    return unicodedata.name(letter, "").split(" ")[0]
