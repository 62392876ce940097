"""Each alert: the rows that raise it, and near ones that do not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.run_dir import alerts

Rows = list[dict[str, Any]]


def rows(key: str, *values: float) -> Rows:
    return [{key: value} for value in values]


def names(found: Rows) -> set[str]:
    return {alert.name for alert in alerts.check(found)}


RAISED = [
    ("entropy_collapse", "entropy_loss", [1.0] * 5 + [0.04] * 5, [1.0] * 5 + [0.06] * 5),
    ("length_limit", "rollout/truncated_rate", [0.31] * 5, [0.29] * 5),
    ("flat_reward", "rollout/frac_reward_zero_std", [0.95] * 5, [0.85] * 5),
    ("gradient_spike", "actor_grad_norm_max", [1.0] * 10 + [5.1], [1.0] * 10 + [4.9]),
    ("engine_mismatch", "sg/mismatch_kl_k3", [1e-4] * 5 + [2e-3] * 5, [1e-3] * 5 + [2e-3] * 5),
    ("garbled_text", "garbled/mixed_script_frac", [0.0] * 5 + [0.3] * 5, [0.2] * 5 + [0.3] * 5),
]


@pytest.mark.parametrize(("name", "key", "raises", "does_not"), RAISED)
def test_the_rule_has_its_limit(
    name: str, key: str, raises: list[float], does_not: list[float]
) -> None:
    assert names(rows(key, *raises)) == {name}
    assert names(rows(key, *does_not)) == set()


@pytest.mark.parametrize(("name", "key", "raises", "_"), RAISED)
def test_a_few_rows_raise_nothing(name: str, key: str, raises: list[float], _: Any) -> None:
    assert 0.0 < raises[-1] != 1.0  # that may be an alert of the first row
    assert names(rows(key, *raises[-4:])) == set()


def test_every_rule_is_tested() -> None:
    of_the_first_row = {"nothing_learned", "tokens_without_text"}
    assert {name for name, *_ in RAISED} == {*alerts.RULES} - of_the_first_row


def test_sampled_tokens_without_text_are_an_alert_of_their_row() -> None:
    key = "rollout/frac_tokens_without_text"
    assert names(rows(key, 1e-4)) == {"tokens_without_text"}
    assert names(rows(key, 1e-4, 0.0)) == names([{}]) == set()


FLAT = "nothing was learned: no group had different rewards"
LIMIT = "100 % of the responses reached the token limit"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("flat", "truncated", "message"),
    [
        (1.0, 1.0, f"{FLAT}; {LIMIT}"),
        (1.0, 0.0, FLAT),
        (1.0, 0.5, f"{FLAT}; 50 % of the responses reached the token limit"),
        (0.9, 1.0, LIMIT),
        (0.9, 0.9, None),
    ],
)
def test_a_run_without_a_signal_says_so_from_its_first_rollout(
    flat: float, truncated: float, message: str | None, count: int
) -> None:
    row = {"rollout/frac_reward_zero_std": flat, "rollout/truncated_rate": truncated}
    assert alerts.nothing_learned([row] * count) == message
    assert (alerts.nothing_learned([row] * count) is None) is (
        "nothing_learned" not in names([row] * count)
    )
    signal = {"rollout/frac_reward_zero_std": 0.5, "rollout/truncated_rate": 0.9}
    assert alerts.nothing_learned([row, signal]) is None


def test_missing_and_infinite_values_are_left_out() -> None:
    found = rows("rollout/truncated_rate", float("nan"), 0.5, float("inf"), 0.5, 0.5)
    assert names(found) == set()
    assert names([*found, {}, *rows("rollout/truncated_rate", 0.5, 0.5)]) == {"length_limit"}


def test_an_alert_begins_once_and_ends() -> None:
    values = [0.0] * 3 + [0.5] * 5 + [0.0] * 5
    seen, begun = [], []
    before: dict[str, float] = {}
    for last in range(1, len(values) + 1):
        found = alerts.check(rows("rollout/truncated_rate", *values[:last]))
        begun += alerts.begun(before, found)
        before = alerts.metrics(found)
        seen.append(before["alerts/length_limit"])
    assert len(begun) == 1 and "50 %" not in begun[0].message and "40%" in begun[0].message
    assert seen == [0] * 6 + [1] * 3 + [0] * 4


def test_a_learning_run_raises_none(tmp_path: Path) -> None:
    """The rows of the quick start's run, as far as the rules read them."""
    file = Path(__file__).parent / "quick_start_metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == 20
    assert all(names(found[:last]) == set() for last in range(1, 21))


@pytest.mark.parametrize("seed", range(10))
def test_a_run_of_any_length_keeps_a_fixed_number_of_rows_and_finds_the_same_alerts(
    seed: int,
) -> None:
    draw = random.Random(seed)
    found: Rows = []
    kept: list[alerts.Row] = []
    raised: set[str] = set()
    for number in range(400):
        row: dict[str, Any] = {"global_step": number}
        for key in alerts.KEYS:
            value = math.nan if draw.random() < 0.1 else draw.random() ** 8
            row |= {key: value} if draw.random() < 0.8 else {}
        found.append(row)
        active = alerts.check(found)
        raised |= {alert.name for alert in active}
        assert alerts.check([*kept, row]) == active
        kept = alerts.needed([*kept, row | alerts.metrics(active)])
        assert alerts.begun(kept[-1], active) == []
        assert len(kept) <= len(alerts.KEYS) * (alerts.WINDOW + alerts.NORMS + 1) + 1
        assert all("global_step" not in kept_row for kept_row in kept)
    assert len(raised) >= 2


def test_a_group_with_a_signal_is_remembered_for_the_whole_run() -> None:
    kept: list[alerts.Row] = []
    for number in range(100):
        row = {"rollout/frac_reward_zero_std": 0.5 if number == 50 else 1.0}
        active = [alert.name for alert in alerts.check([*kept, row])]
        assert ("nothing_learned" in active) == (number < 50)
        kept = alerts.needed([*kept, row])
