"""Which samples a rollout leaves in the run's log, and what each of their rows says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from sg_rlhf.overlay.controller import sample_log
from sg_rlhf.overlay.controller.sample_log import SampleLog


class Letters:
    """A tokenizer: token 1 is "a", 2 is "b", and so on."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(96 + t) for t in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {"a": 1, "b": 2, "z": 26}  # with ids in between that no token has


def experience(place: int, reward: float, tokens: list[int], mask: list[bool]) -> Any:
    """One sample; the mask is of the tokens after the first."""
    sequences = torch.tensor([tokens])
    log_probs = torch.arange(float(len(mask)))[None] / -8
    return SimpleNamespace(
        sequences=sequences, attention_mask=torch.ones_like(sequences),
        action_mask=torch.tensor([mask]), action_log_probs=None, rollout_log_probs=log_probs,
        advantages=torch.full((1, len(mask)), reward), info={"reward": torch.tensor([reward])},
        prompts=[f"prompt {place // 4}"], labels=["label"], index=[place],
    )  # fmt: skip


def log_of(count: int, together: int) -> SampleLog:
    sg = SimpleNamespace(samples_per_step=count, samples_per_prompt=together)
    args = SimpleNamespace(
        sg=sg,
        rollout=SimpleNamespace(n_samples_per_prompt=4),
        data=SimpleNamespace(max_len=100),
    )
    return SampleLog(args, Letters())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((32, 8, 4, 2), [0, 1, 16, 17]),
        ((32, 8, 4, 1), [0, 8, 16, 24]),
        ((32, 8, 8, 8), list(range(8))),
        ((32, 8, 5, 2), [0, 1, 8, 9, 16]),
        ((8, 1, 4, 2), [0, 2, 4, 6]),
        ((4, 4, 9, 2), [0, 1, 2, 3]),
        ((32, 8, 16, 2), [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]),
        ((32, 8, 0, 2), []),
    ],
)
def test_some_responses_of_some_prompts_are_kept(
    arguments: tuple[int, int, int, int], expected: list[int]
) -> None:
    assert sample_log.choose_samples(*arguments) == expected


def test_sampled_ids_behind_the_tokenizers_last_one_are_counted() -> None:
    """Those of a prompt or of an environment are not counted."""
    log = log_of(1, 1)
    sampled = experience(0, 1.0, [99, 1, 27, 98, 26], [True, True, False, True])
    assert log.frac_tokens_without_text([sampled]) == pytest.approx(1 / 3)
    assert log.frac_tokens_without_text([sampled, sampled]) == pytest.approx(1 / 3)
    assert log.frac_tokens_without_text([experience(0, 1.0, [9, 1], [True])]) == 0.0
    assert log.frac_tokens_without_text([experience(0, 1.0, [9, 1], [False])]) == 0.0


def test_a_row_has_what_engine_update_and_environment_did(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(2, 2)
    places = [(k, float(k % 3), [9, 1, 2], [True, True]) for k in range(8)]
    # Out of order, as balanced micro-batches are; and one with an environment's text in between.
    places[1] = (1, 1.0, [9, 1, 5, 6, 2], [True, False, False, True])
    log.collect([experience(*place) for place in reversed(places)], None)
    first, second = log.rows
    assert first["prompt"] == "prompt 0" and first["tokens"] == ["a", "b"]
    assert first["group_rewards"] == second["group_rewards"] == [0.0, 1.0, 2.0, 0.0]
    assert first["engine_log_probs"] == [0.0, -0.125] and "environment" not in first
    assert second["tokens"] == ["a", "b"] and second["engine_log_probs"] == [0.0, -0.375]
    assert second["environment"] == [(1, "ef")] and second["dialogue"] == "aefb"

    asked: list[Any] = []

    def ranks(method_name: str, indices: list[int]) -> Any:
        asked.append((method_name, indices))
        of_first = {"log_probs": [-0.5, -1.0], "update_log_probs": [-0.5, -1.0]}
        of_second = {"log_probs": [-0.5, -1.0], "update_log_probs": [-0.25, -1.0]}
        return [[of_first | {"entropies": [0.123456, 0.5]}, None], [None, of_second]]

    monkeypatch.setattr(ray, "get", lambda value: value)
    log.add_update_values(SimpleNamespace(async_run_method=ranks))
    assert asked == [("token_values", [0, 1])]
    assert first["log_probs"] == [-0.5, -1.0] and "update_log_probs" not in first
    assert first["entropies"] == [0.12346, 0.5]
    assert second["update_log_probs"] == [-0.25, -1.0] and "entropies" not in second


@pytest.mark.parametrize(("samples", "decoded"), [(3, 3), (512, sample_log.DECODED)])
def test_a_bounded_number_of_responses_is_decoded(samples: int, decoded: int) -> None:
    rollout = [experience(k, 1.0, [9, 1, 1 + k % 8], [False, True]) for k in range(samples)]
    found = log_of(4, 2).some_responses(rollout)
    assert len(found) == decoded and set(found) <= set("abcdefgh")
