"""The parts of a rollout add up, whatever a row holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.run_dir.timing_keys import (
    PARTS,
    SUBSECTIONS,
    TOTAL,
    exclusive_seconds,
    longest_response,
)

KEYS = [
    f"timing/{n}" for n in (*PARTS, TOTAL, *(n for names in SUBSECTIONS.values() for n in names))
]


@given(st.dictionaries(st.sampled_from(KEYS), st.one_of(st.none(), st.floats(), st.just("x"))))
def test_no_row_gives_a_negative_part_or_more_than_its_phases(row: dict[str, object]) -> None:
    parts = exclusive_seconds(row)
    assert all(seconds >= 0 for seconds in parts.values())
    for part, inner in SUBSECTIONS.items():
        if parts and isinstance(row.get(f"timing/{part}"), float):
            total = parts[part] + sum(parts[name] for name in inner)
            assert total == pytest.approx(row[f"timing/{part}"]) or total == 0


def test_a_row_of_an_earlier_version_is_read() -> None:
    """Upstream's four phases, with their sum as the step."""
    row = {"generation": 40.0, "make_experience": 8.0, "ppo_train": 30.0, "broadcast": 3.0}
    parts = exclusive_seconds({f"timing/{k}": v for k, v in {**row, TOTAL: 82.0}.items()})
    assert {k: v for k, v in parts.items() if v} == {**row, "other": 1.0}
    assert exclusive_seconds({f"timing/{k}": v for k, v in row.items()}) == {}


@pytest.mark.parametrize(
    ("finished", "seconds"),
    [
        ([], 0.0),
        ([5.0], 0.0),  # one prompt is no longer than the others
        ([1.0, 4.0], 3.0),
        ([30.0, *range(1, 10)], 21.0),  # nine of ten, in any order
        ([*range(1, 19), 40.0, 50.0], 32.0),
    ],
)
def test_the_longest_response_is_waited_for_from_nine_tenths_on(
    finished: list[float], seconds: float
) -> None:
    assert longest_response(finished) == seconds
