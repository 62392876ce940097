"""Samples of a rollout: those in ``samples.jsonl``, and those that check the weight sync."""

from __future__ import annotations

import functools
import itertools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import RayActorGroup
from transformers import PreTrainedTokenizerBase

from sg_rlhf.overlay.weight_sync.log_prob_check import CHECKED_SEQUENCES, CheckBatch

#: Responses of a rollout that are decoded for its share of garbled ones.
DECODED = 64
#: Of the table that trackers show.
TABLE_COLUMNS = ("global_step", "prompt", "response", "reward", "advantage")


class SampleLog:
    """Keeps a few samples of each rollout; ``check_batch`` has those for the log-prob check."""

    def __init__(self, args: Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
        self._args, self._tokenizer = args, tokenizer
        self.rows: list[dict[str, Any]] = []
        self.check_batch: CheckBatch = []
        #: Of each row, the sample's index in the rollout.
        self._indices: list[int] = []

    def collect(self, experiences: list[Experience], version_runs: list[Any] | None) -> None:
        """Keep samples of a rollout; ``version_runs`` is None in a synchronous run."""
        self.rows, self._indices = [], []
        samples = [(e, i) for e in experiences for i in range(len(e.sequences))]
        samples.sort(key=lambda sample: sample[0].index[sample[1]])  # by prompts, not by lengths
        size = self._args.rollout.n_samples_per_prompt
        rewards = [float(e.info["reward"][i]) for e, i in samples]
        sg = self._args.sg
        for k in choose_samples(len(samples), size, sg.samples_per_step, sg.samples_per_prompt):
            experience, i = samples[k]
            group = slice(k - k % size, k - k % size + size)
            row = self._row(experience, i, version_runs)
            self.rows.append(row | {"group_rewards": rewards[group]})
            self._indices.append(int(experience.index[i]))
        # vLLM refuses a sequence that fills its context: it could not sample a token after it.
        usable = [
            (e, i)
            for e, i in samples
            if int(e.attention_mask[i].sum()) < self._args.data.max_len and e.action_mask[i].any()
        ]
        check_batch = []
        for e, i in _evenly_spaced(usable, CHECKED_SEQUENCES):
            valid = e.attention_mask[i].bool()
            is_response = e.action_mask[i].bool()[valid[1:]]
            check_batch.append((e.sequences[i][valid].tolist(), is_response.tolist()))
        self.check_batch = check_batch

    def example(self, experiences: list[Experience]) -> list[Any]:
        """[text of prompt and response, reward] of one sample, for upstream's loggers."""
        first = experiences[0]
        text = self._tokenizer.decode(first.sequences[0], skip_special_tokens=True)
        return [text, first.info["reward"][0].item()]

    def some_responses(self, experiences: list[Experience]) -> list[str]:
        """The model's text of up to :data:`DECODED` samples, without special tokens."""
        samples = [(e, i) for e in experiences for i in range(len(e.sequences))]
        return [
            self._tokenizer.decode(
                e.sequences[i][1:][e.action_mask[i].bool()].tolist(), skip_special_tokens=True
            )
            for e, i in _evenly_spaced(samples, DECODED)
        ]

    @functools.cached_property
    def _last_id(self) -> int:
        # A processor of images has a tokenizer inside.
        tokenizer = getattr(self._tokenizer, "tokenizer", self._tokenizer)
        return int(max(tokenizer.get_vocab().values()))

    def frac_tokens_without_text(self, experiences: list[Experience]) -> float:
        """Share of ids behind the tokenizer's last one, which a padded embedding can sample."""
        ids = [e.sequences[:, 1:][e.action_mask.bool()] for e in experiences]
        tokens = sum(map(len, ids))
        return sum(int((i > self._last_id).sum()) for i in ids) / tokens if tokens else 0.0

    def add_update_values(self, policy: RayActorGroup) -> None:
        """Add the values of each token that the update computed."""
        if not self.rows:
            return
        per_rank = ray.get(
            policy.async_run_method(method_name="token_values", indices=self._indices)
        )
        for row, results in zip(self.rows, zip(*per_rank, strict=True), strict=True):
            values: dict[str, list[float]] = next((r for r in results if r is not None), {})
            for name, per_token in values.items():
                if row.get(name) is None:
                    row[name] = _rounded(per_token)
            if row.get("update_log_probs") == row["log_probs"]:
                del row["update_log_probs"]
            row["log_probs"] = row["log_probs"] or []

    def _row(self, e: Experience, i: int, version_runs: list[Any] | None) -> dict[str, Any]:
        mask = e.action_mask[i].bool()
        tokens = e.sequences[i][1:][mask].tolist()
        dialogue = self._dialogue(e, i)
        old, engine = (
            None if values is None else _rounded(values[i][mask].tolist())
            for values in (e.action_log_probs, e.rollout_log_probs)
        )
        runs = version_runs[e.index[i]] if version_runs is not None else None
        row = {
            "prompt": e.prompts[i],
            "label": e.labels[i],
            "response": self._tokenizer.decode(tokens, skip_special_tokens=False),
            **({"dialogue": dialogue} if dialogue else {}),
            "reward": float(e.info["reward"][i]),
            "correct": float(e.info["correct"][i]) if "correct" in e.info else None,
            "advantage": float(e.advantages[i][mask][0]) if bool(mask.any()) else 0.0,
            "tokens": [self._tokenizer.decode([t]) for t in tokens],
            **({"weight_versions": runs} if runs else {}),
            "log_probs": old,
            **({"engine_log_probs": engine} if engine is not None else {}),
        }
        if dialogue:
            row["environment"] = self._environment(e.sequences[i][1:], e.action_mask[i].bool())
        return row

    def _environment(self, tokens: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, str]]:
        """Texts that an environment wrote: (number of the model's tokens before it, text)."""
        positions = torch.where(mask)[0].tolist()  # of the model's tokens
        return [
            (k + 1, self._tokenizer.decode(tokens[a + 1 : b].tolist(), skip_special_tokens=False))
            for k, (a, b) in enumerate(itertools.pairwise(positions))
            if b > a + 1
        ]

    def _dialogue(self, e: Experience, i: int) -> str:
        """The response with the environment's text between its turns; "" if there is none."""
        actions = torch.where(e.action_mask[i].bool())[0]
        if not len(actions) or int(actions[-1] - actions[0]) + 1 == len(actions):
            return ""
        tokens = e.sequences[i][1:][actions[0] : actions[-1] + 1]
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


def table_rows(global_step: int, samples: list[dict[str, Any]]) -> list[list[Any]]:
    """Rows of ``TABLE_COLUMNS``; ``response`` is the whole dialogue if there is one."""
    return [
        [global_step, row["prompt"], row.get("dialogue") or row["response"], row["reward"],
         row["advantage"]]
        for row in samples
    ]  # fmt: skip


def choose_samples(samples: int, group: int, count: int, per_prompt: int) -> list[int]:
    """Choose the samples of a rollout to keep: the first responses to evenly spaced prompts."""
    per_prompt = max(1, min(group, max(per_prompt, -(-count * group // max(1, samples)))))
    firsts = _evenly_spaced(range(0, samples, group), -(-count // per_prompt))
    indices = [first + k for first in firsts for k in range(per_prompt) if first + k < samples]
    return indices[:count]


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 5) for value in values]


def _evenly_spaced(samples: Sequence[Experience], count: int) -> list[Any]:
    """Up to ``count`` samples at equal distances: neighbours answer the same prompt."""
    count = min(count, len(samples))
    return [samples[k * len(samples) // count] for k in range(count)]
