"""What does not fit together is one line before anything starts; what is shipped fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.overlay.driver import arguments
from sg_rlhf.overlay.driver.arguments import UsageError, upstream_arguments

CONFIGS = Path(__file__).parents[4] / "configs"
PAPER = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
RECIPES = sorted(
    path
    for task in ("kk", "math", "search")
    for path in (CONFIGS / task).glob("*.yaml")
    if path.stem != "common"
)


ASYNC = "train.async_enable=true vllm.enable_sleep=false"


def parse(*overrides: str, recipe: Path = PAPER) -> Any:
    return upstream_arguments(load_config(recipe, overrides))


@pytest.mark.parametrize(
    "more",
    [
        "sg.correction=icepop",
        "sg.uncorrected=keep",
        "sg.max_staleness=0",
        "sg.correction=tis rollout.vllm_generate_batch_size=128",
        "sg.correction=tis vllm.num_engines=3",  # they have accelerators of their own
        "sg.correction=tis train.partial_rollout_enable=true sg.stale=drop",
    ],
)
def test_an_asynchronous_run(more: str) -> None:
    assert parse(*ASYNC.split(), *more.split()).train.async_enable


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_shipped_recipe_divides_evenly(recipe: Path) -> None:
    args = parse(recipe=recipe)
    samples = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    steps = samples // args.train.batch_size
    assert steps >= 1 and steps * args.train.batch_size == samples
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    for size, part in ((samples, args.rollout), (args.train.batch_size, args.train)):
        assert size % (part.micro_batch_size * ranks) == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("rollout.batch_size=66", "= 66 * 8 = 528: not divisible by train.batch_size=256"),
        ("train.batch_size=512 rollout.batch_size=32", "not divisible by train.batch_size=512"),
        ("train.micro_batch_size=3", "not divisible by train.micro_batch_size=3 times the 8 data-"),
        ("rollout.micro_batch_size=24", "rollout.micro_batch_size=24 times the 8 data-parallel"),
        ("rollout.vllm_generate_batch_size=32", "=32: expected rollout.batch_size=64 or"),
        ("rollout.vllm_generate_batch_size=128", "set train.async_enable=true, or leave it unset"),
        ("rollout.micro_batch_size=0", "rollout.micro_batch_size=0: expected 1 or more"),
        ("train.dynamic_batch_enable=true train.batch_size=4", "=4: not divisible by the 8 data-"),
        (
            "train.dynamic_batch_enable=true algo.advantage.estimator=gae ds.zero_stage=2",
            "ds.zero_stage=2: the critic would learn from the last micro-batch of each step alone",
        ),
        ("ds.ring_attn_size=3", "not divisible by ds.ring_attn_size * ds.tensor_parallel_size = 3"),
        ("train.async_enable=true", "vllm.enable_sleep=true: not with train.async_enable=true"),
        ("train.partial_rollout_enable=true", "expected train.async_enable=true, or false"),
        (f"{ASYNC}", "no correction is on: set sg.correction=tis"),
        (f"{ASYNC} sg.correction=tis actor.policy_loss_type=gspo", "with a loss that takes it"),
        (f"{ASYNC} sg.correction=tis sg.stale=drop", "sg.stale=drop: without train.partial_"),
        (
            f"{ASYNC} sg.correction=tis train.partial_rollout_enable=true "
            "train.full_determinism_enable=true",
            "train.partial_rollout_enable=true: not with train.full_determinism_enable=true",
        ),
        (f"{ASYNC} train.async_queue_size=0", "train.async_queue_size=0: expected 1 or more"),
        (
            f"{ASYNC} sg.correction=tis rollout.vllm_generate_batch_size=192",
            "up to 3 rollouts of rollout.batch_size=64, of which the last is 2 weight syncs old",
        ),
        (
            f"{ASYNC} sg.correction=tis rollout.vllm_generate_batch_size=112",  # 48 may be left
            "up to 3 rollouts of rollout.batch_size=64, of which the last is 2 weight syncs old",
        ),
        ("vllm.num_engines=null", "vllm.num_engines: not set: expected 1 or more"),
        ("vllm.num_engines=0", "vllm.num_engines=0: expected 1 or more"),
        ("algo.advantage.estimator=gae reward.remote_url=null", "reward.remote_url: not set"),
        ("actor.num_gpus_per_node=4 vllm.num_engines=4", "actor.num_gpus_per_node=4, ref.num_gpus"),
        (
            "algo.advantage.estimator=gae critic.num_gpus_per_node=16",
            "critic.num_nodes * critic.num_gpus_per_node = 16: more than the actor's 8",
        ),
        ("vllm.num_engines=4", "vllm.tensor_parallel_size = 4: must be equal with"),
        (
            "train.colocate_all=false vllm.enable_sleep=false ref.num_gpus_per_node=3",
            "times the 3 data-parallel ranks of ref",
        ),
        (
            "algo.advantage.estimator=gae train.colocate_critic_reward=true "
            "critic.num_gpus_per_node=4",
            "critic.num_gpus_per_node=4, reward.num_gpus_per_node=8: must be equal",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(overrides: str, words: str) -> None:
    with pytest.raises((UsageError, ConfigError)) as refusal:
        parse(*overrides.split())
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_whatever_upstream_trips_over_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def trip(_args: Any) -> None:
        raise TypeError("'>' not supported between instances of 'NoneType' and 'int'")

    monkeypatch.setattr(arguments, "validate_args", trip)
    with pytest.raises(UsageError, match="missing or null: TypeError: '>' not supported"):
        parse()


def test_what_fits_is_taken() -> None:
    smaller = ("actor.num_gpus_per_node=4", "vllm.num_engines=4")
    assert parse(*smaller, "ref.num_gpus_per_node=4").ref.num_gpus_per_node == 4
    assert parse(*smaller, "algo.kl.init_coef=0").ref.num_gpus_per_node == 8
    assert parse("vllm.num_engines=2", "vllm.tensor_parallel_size=4").vllm.num_engines == 2
    dynamic = parse("train.dynamic_batch_enable=true", "train.micro_batch_size=3")
    assert dynamic.train.batch_size % (3 * dynamic.actor.num_gpus_per_node)  # static ones refuse it
    # One rank runs a smaller last batch of a rollout as well.
    tiny = CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"
    found = parse("rollout.micro_batch_size=24", recipe=tiny)
    assert found.rollout.batch_size * found.rollout.n_samples_per_prompt % 24
