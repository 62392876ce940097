"""Runs of (start, version) of a response, and the ages of its tokens."""

from __future__ import annotations

from sg_rlhf.run_dir import weight_versions


def test_tokens_between_two_syncs_are_the_earlier_weights() -> None:
    runs: list[list[int]] = []
    for tokens, version in ((0, 3), (5, 4), (5, 5), (9, 6)):  # no token between the syncs 4 and 5
        weight_versions.append_version(runs, tokens, version)
    assert runs == [[0, 3], [5, 5], [9, 6]]
    assert weight_versions.oldest_version(runs) == 3
    assert weight_versions.tokens_by_version(runs, 11) == {3: 5, 5: 4, 6: 2}
    assert weight_versions.tokens_by_version(runs, 9) == {3: 5, 5: 4}, (
        "cut off where another begins"
    )


def test_a_sync_before_the_first_token_leaves_no_trace() -> None:
    runs: list[list[int]] = []
    weight_versions.append_version(runs, 0, 1)
    weight_versions.append_version(runs, 0, 2)
    weight_versions.append_version(runs, 4, 2)  # a dialogue's next turn, by the same weights
    assert runs == [[0, 2]]


def test_staleness_of_a_rollout() -> None:
    found = weight_versions.staleness([([[0, 4], [6, 5]], 8), ([[0, 5]], 2)], 5, 2)
    assert found == {
        "async/staleness_mean": 0.6,
        "async/staleness_max": 1.0,
        "async/staleness_share_0": 0.4,
        "async/staleness_share_1": 0.6,
        "async/staleness_share_2": 0.0,
    }
