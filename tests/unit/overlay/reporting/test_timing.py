"""Every second of a rollout belongs to one part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.run_dir.timing_keys import EXTRA, OF_THE_RANK, PARTS, SUBSECTIONS, exclusive_seconds


class Hand:
    """A clock's hand, moved by the test."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


NAMES = (*PARTS[:-1], *EXTRA, *(n for part in PARTS for n in SUBSECTIONS.get(part, ())))
TIMED = [name for name in NAMES if name not in OF_THE_RANK]


@given(
    st.lists(
        st.tuples(st.floats(0, 1e3), st.sampled_from(["open", "close"]),
                  st.sampled_from(TIMED)),
        max_size=40,
    )
)  # fmt: skip
def test_no_second_is_lost_or_counted_twice(events: list[tuple[float, str, str]]) -> None:
    hand = Hand()
    clock, blocks = PhaseTimer(hand), []
    for seconds, what, name in events:
        hand.at += seconds
        if what == "open":
            blocks.append(clock.section(name))
            blocks[-1].__enter__()
        elif what == "close" and blocks:
            blocks.pop().__exit__(None, None, None)
    row = clock.pop_row()
    whole = row["timing/step_total"] + sum(row[f"timing/{name}"] for name in EXTRA)
    assert whole == pytest.approx(hand.at - 100.0)
    # The report reads the same seconds out of the row.
    parts = exclusive_seconds(row)
    assert sum(parts.values()) == pytest.approx(row["timing/step_total"])


def test_a_part_inside_another_is_counted_once() -> None:
    hand = Hand()
    clock = PhaseTimer(hand)
    with clock.section("make_experience"):
        hand.at += 1
        with clock.section("old_log_probs"):
            hand.at += 2
    with clock.section("broadcast"):
        hand.at += 4
        with clock.section("evaluation"):  # of a run that resumes
            hand.at += 8
    hand.at += 16
    row = clock.pop_row()
    assert row["timing/make_experience"] == 3 and row["timing/old_log_probs"] == 2
    assert row["timing/broadcast"] == 4 and row["timing/evaluation"] == 8
    assert row["timing/other"] == 16 and row["timing/step_total"] == 23
    parts = exclusive_seconds(row)
    assert parts["make_experience"] == 1 and parts["old_log_probs"] == 2


def test_a_row_begins_where_the_last_one_ended_inside_a_block_too() -> None:
    hand = Hand()
    clock = PhaseTimer(hand)
    with clock.section("logging"):
        hand.at += 1
        clock.pop_row()
        hand.at += 2
    assert clock.pop_row()["timing/logging"] == 2

    def fail() -> None:
        with clock.section("ppo_train"):
            hand.at += 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    hand.at += 4
    row = clock.pop_row()
    assert row["timing/ppo_train"] == 3 and row["timing/other"] == 4


def test_the_part_that_is_under_way_is_told_and_the_one_that_fails_stays() -> None:
    told: list[str] = []
    clock = PhaseTimer(on_change=told.append)
    with clock.section("generation"), clock.section("engines_wake"):
        pass
    assert told == ["generation", "engines_wake", "generation", "other"]
    with pytest.raises(RuntimeError), clock.section("ppo_train"), clock.section("logging"):
        raise RuntimeError("a rank died")
    assert told[4:] == ["ppo_train", "logging"]


def test_what_is_known_afterwards_is_moved() -> None:
    hand = Hand()
    clock = PhaseTimer(hand)
    with clock.section("generation"):
        hand.at += 10
    clock.reassign(3, "generation", "longest_response")
    row = clock.pop_row()
    assert row["timing/generation"] == 10 and row["timing/longest_response"] == 3
    assert exclusive_seconds(row)["generation"] == 7
