"""Seeds of sampling: one for each request of a run, and the same ones for ever."""

from __future__ import annotations

from sg_rlhf.sampling.request_seeds import LIMIT, SeedKey, request_seed


def test_no_two_requests_of_a_run_share_a_seed() -> None:
    seeds = [
        request_seed(SeedKey(42, purpose, step, prompt), response, turn)
        for purpose in ("rollout", "eval/kk")
        for step in range(12)
        for prompt in range(12)
        for response in range(12)
        for turn in range(3)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < LIMIT for seed in seeds)


def test_a_seed_is_what_it_was_in_the_runs_that_were_published() -> None:
    assert request_seed(SeedKey(42, "rollout", 0, 0), 0) == 4289459534486724766
    assert request_seed(SeedKey(42, "rollout", 1, 11), 1) != request_seed(
        SeedKey(42, "rollout", 11, 1), 1
    )
