"""A rollout through upstream's own classes: the passes before the update, its advantages, the
buffers of the ranks and the loader of the update."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer
from openrlhf.trainer.ray.launcher import BaseModelActor, RayActorGroup

from sg_rlhf.algo.aggregation import aggregate, prompt_token_counts
from sg_rlhf.batching import balance
from sg_rlhf.config import load_config
from sg_rlhf.overlay.controller import rollout_stats
from sg_rlhf.overlay.driver.arguments import upstream_arguments
from sg_rlhf.overlay.learner import micro_batches
from sg_rlhf.overlay.learner.experience_maker import ExperienceMaker
from sg_rlhf.overlay.learner.replay_buffer import BalancedBuffer, UpdateBatching
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.plan.shapes import shape_of
from sg_rlhf.plan.time import sequence_flops
from tests.unit.overlay.learner.test_update import CONFIGS
from tests.unit.overlay.pretend_device import CurrentDevice

RANKS, PROMPTS, GROUP, STEP, MICRO = 2, 4, 4, 8, 2
PAD = 3
BAD = 5
SAMPLES = PROMPTS * GROUP
DYNAMIC = ["train.dynamic_batch_enable=true", "train.max_tokens_per_gpu=128"]


def arguments(*overrides: str) -> Any:
    settings = [
        f"train.batch_size={STEP}", f"train.micro_batch_size={MICRO}",
        f"rollout.batch_size={PROMPTS}", f"rollout.n_samples_per_prompt={GROUP}",
        "rollout.micro_batch_size=4", f"actor.num_gpus_per_node={RANKS}",
        f"ref.num_gpus_per_node={RANKS}", f"vllm.num_engines={RANKS}",
    ]  # fmt: skip
    recipe = [CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml"]
    return upstream_arguments(load_config(recipe, [*settings, *overrides]))


def rollout(longest: int = 0) -> list[Experience]:
    """Samples of one response each as the generator gives them; their first token is their place,
    their lengths are in no order. The first may be longer than all others."""
    lengths = random.Random(0).sample(range(5, 60), SAMPLES)
    lengths[0] = max(lengths[0], longest)
    samples = []
    for place, length in enumerate(lengths):
        sequence = torch.arange(length)[None] + 100
        sequence[0, 0] = place
        samples.append(
            Experience(
                sequences=sequence,
                attention_mask=torch.ones_like(sequence),
                action_mask=(torch.arange(length - 1) >= 2)[None].long(),
                prompts=[f"prompt {place // GROUP}"], labels=[""], images=[None],
                mm_train_inputs=[None],
                rewards=torch.tensor([float(place**2 % 7)]),
                scores=torch.tensor([1.0]),
                response_length=torch.tensor([length - 3]),
                truncated=torch.tensor([False]),
                total_length=torch.tensor([torch.tensor(float(length))]),
                info={"reward": torch.tensor([float(place**2 % 7)])},
            )
        )  # fmt: skip
    return samples


def padded(lengths: Iterable[int]) -> int:
    """Tokens of a micro-batch that is padded to its longest sample."""
    lengths = list(lengths)
    return len(lengths) * max(lengths)


class Maker(ExperienceMaker):
    """With a policy and a reference whose log-probs are told by the tokens alone."""

    def __init__(self, args: Any) -> None:
        kl: Any = SimpleNamespace(value=0.0)
        super().__init__(args, None, None, None, kl, PAD, PhaseTimer())  # type: ignore[arg-type]
        self.passes: list[Any] = []

    def add_scores(self, samples_list: list[Any]) -> None:
        self.passes = samples_list
        for sample in samples_list:
            sample.action_log_probs = -0.01 * sample.sequences[:, 1:].float()
            sample.base_action_log_probs = sample.action_log_probs - 0.1
            sample.kl = torch.zeros_like(sample.action_log_probs)
            sample.info["kl"] = sample.kl.sum(dim=-1)


class Rank:
    """An actor's rank: a replay buffer behind upstream's remote calls."""

    def __init__(self, args: Any) -> None:
        self.strategy = SimpleNamespace(
            args=args,
            is_rank_0=lambda: True,
            ring_attn_group=None,
            accumulated_gradient=STEP // RANKS // MICRO,
            ds_device_mesh={"dp": SimpleNamespace(get_group=lambda: None)},
            all_reduce=lambda data, op: data,
        )
        self.batching = UpdateBatching(self.strategy)
        kind = BalancedBuffer if self.batching.cut_by_controller else NaiveReplayBuffer
        self.buffer = kind(
            MICRO,
            packing_samples=args.ds.packing_samples,
            dynamic_batch=args.train.dynamic_batch_enable,
        )
        self.execute_batch = SimpleNamespace(
            remote=lambda name, data, start, end: BaseModelActor.execute_batch(
                self, name, data, start, end
            )
        )

    def append(self, experience: Any) -> None:
        self.buffer.append(experience)

    def trained(self) -> list[list[int]]:
        """The samples of each micro-batch, in the order in which an update takes them."""
        return [
            [int(item.sequences[0]) for item in micro_batch.samples]
            for micro_batch in self.batching.epoch(self.buffer)
        ]


@pytest.fixture(autouse=True)
def without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CurrentDevice("cpu"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda **_: RANKS)


def ranks_of(args: Any, experiences: list[Any], count: int = RANKS) -> list[Rank]:
    """Upstream's hand-over to the ranks of an actor."""
    ranks = [Rank(args) for _ in range(count)]
    group = SimpleNamespace(_actor_handlers=ranks, duplicate_actors=1)
    RayActorGroup.async_run_method_batch(group, "append", experience=experiences)
    return ranks


def places(experiences: list[Any]) -> list[int]:
    return [place for e in experiences for place in e.sequences[:, 0].tolist()]


@pytest.mark.parametrize("packed", [True, False])
def test_each_rank_trains_what_it_was_dealt_in_that_order(packed: bool) -> None:
    args = arguments(f"ds.packing_samples={packed}", "data.max_len=128")
    samples = rollout(longest=200)
    lengths = [int(s.total_length) for s in samples]
    scored = Maker(args).score(samples, 3)
    ranks = ranks_of(args, scored.micro_batches)
    steps = balance.optimizer_steps(SAMPLES, STEP, args.train.seed, 3)
    costs = [sequence_flops(shape_of(args.actor.model_name_or_path), n) for n in lengths]
    dealt = balance.variable_size_steps(
        lengths, steps, RANKS, MICRO, costs, max_tokens=MICRO * 128, packed=packed
    )
    sizes = {len(s) for of_step in dealt for hand in of_step for s in hand}
    assert (len(sizes) > 1) is packed
    for r, rank in enumerate(ranks):
        hands = [of_step[r] for of_step in dealt]
        assert rank.trained() == list(itertools.chain(*hands)) == rank.trained()
        assert [micro_batch.is_last for micro_batch in rank.batching.epoch(rank.buffer)] == [
            k == len(hand) for hand in hands for k, _ in enumerate(hand, 1)
        ]
    for of_step, step in zip(dealt, steps, strict=True):
        assert sorted(i for hand in of_step for s in hand for i in s) == sorted(step)
    of = sum if packed else padded
    tokens = [
        [of(lengths[i] for i in samples) for of_step in dealt for samples in of_step[r]]
        for r in range(RANKS)
    ]
    assert scored.idle_fraction == pytest.approx(balance.idle_fraction(tokens))


def test_the_passes_before_the_update_are_filled_and_balanced() -> None:
    """To 4 samples of the longest length, 240 tokens, on one rank too."""
    for ranks in (RANKS, 1):
        counts = [f"{key}={ranks}" for key in (
            "actor.num_gpus_per_node", "ref.num_gpus_per_node", "vllm.num_engines",
        )]  # fmt: skip
        maker = Maker(arguments("data.max_len=60", "sg.share_prompts=false", *counts))
        maker.score(rollout(), 0)
        tokens = [int(e.attention_mask.sum()) for e in maker.passes]
        own = len(tokens) // ranks
        assert max(tokens) <= 240
        assert own == -(-sum(tokens) // 240 // ranks)
        by_rank = [list(map(float, tokens[r * own : (r + 1) * own])) for r in range(ranks)]
        assert balance.idle_fraction(by_rank) < 0.2


def test_one_rank_fills_its_micro_batches_unless_it_shares_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda **_: 1)
    one = ["actor.num_gpus_per_node=1", "ref.num_gpus_per_node=1", "vllm.num_engines=1"]
    for shares, most in ((False, 100), (True, None)):
        args = arguments(*one, "ds.attn_implementation=varlen", f"sg.share_prompts={shares}")
        args.data.max_len = 50
        (rank,) = ranks_of(args, Maker(args).score(rollout(), 0).micro_batches, 1)
        sizes = [len(samples) for samples in rank.trained()]
        lengths = [int(s.total_length) for s in rollout()]
        if most is None:
            assert sizes == [MICRO] * (SAMPLES // MICRO)
        else:
            tokens = [sum(lengths[i] for i in samples) for samples in rank.trained()]
            assert max(tokens) <= most and len(sizes) < SAMPLES // MICRO


def by_place(ranks: list[Rank]) -> dict[int, Any]:
    items = [item for rank in ranks for item in rank.buffer.items]
    assert len(items) == SAMPLES
    return {int(item.sequences[0]): item for item in items}


def test_what_a_sample_is_trained_on_does_not_depend_on_the_dealing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Advantages are of whole groups of prompts; no field loses or gains a token."""
    trained = {}
    for way in ("balanced", "upstream"):
        if way == "upstream":
            monkeypatch.setattr(micro_batches, "balances_micro_batches", lambda _args: False)
            monkeypatch.setattr(micro_batches, "training_micro_batches", lambda given, *_: given)
        args = arguments()
        trained[way] = by_place(ranks_of(args, Maker(args).score(rollout(), 0).micro_batches))
    lengths = [int(s.total_length) for s in rollout()]
    for place, ours in trained["balanced"].items():
        theirs = trained["upstream"][place]
        assert len(ours.sequences) == lengths[place] == len(ours.advantages) + 1
        for field in (
            "sequences", "attention_mask", "action_mask", "action_log_probs",
            "base_action_log_probs", "advantages", "returns", "rewards", "scores",
            "response_length", "truncated", "total_length",
        ):  # fmt: skip
            assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
        assert (ours.prompts, ours.labels) == (theirs.prompts, theirs.labels)
        assert ours.info.keys() == theirs.info.keys()
        assert {"kl", "reward", "return", "group_reward_std"} <= ours.info.keys()
        for key, value in ours.info.items():
            assert torch.equal(value, theirs.info[key]), key
    advantages = [trained["balanced"][i].advantages[-1] for i in range(SAMPLES)]
    for group in torch.stack(advantages).view(PROMPTS, GROUP):
        assert abs(float(group.mean())) < 1e-6


EIGHT = 8  # responses of a prompt; the mean of four equal rewards is exact


def advantages_of(rewards: list[float], estimator: str, *settings: str) -> tuple[Any, list[Any]]:
    """The advantages of two groups of eight responses [SAMPLES], and the experience."""
    samples = rollout()
    for sample, reward in zip(samples, rewards, strict=True):
        sample.rewards = torch.tensor([reward])
        sample.info = {"reward": sample.rewards}
    groups = [f"rollout.n_samples_per_prompt={EIGHT}", f"rollout.batch_size={SAMPLES // EIGHT}"]
    maker = Maker(arguments(f"algo.advantage.estimator={estimator}", *groups, *settings))
    experiences = maker.score(samples, 0).micro_batches
    found = torch.zeros(SAMPLES)
    for e in experiences:
        for index, row_T, mask_T in zip(e.index, e.advantages, e.action_mask.bool(), strict=True):
            assert len(set(row_T[mask_T].tolist())) == 1
            found[index] = row_T[mask_T][0]
    return found, experiences


ESTIMATORS = [
    "group_norm", "dr_grpo", "rloo", "reinforce_baseline", "flash_reinforce", "reinforce",
]  # fmt: skip


@pytest.mark.parametrize("settings", [[], ["reward.stop_properly_penalty_coef=0.5"]])
@pytest.mark.parametrize("reward", [0.9, 0.1, 3.33, 3333.33])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_train_nothing(estimator: str, reward: float, settings: list[str]) -> None:
    found, experiences = advantages_of([reward] * SAMPLES, estimator, *settings)
    assert not found.any()
    stats = rollout_stats.rollout_stats(experiences, EIGHT)
    assert stats["rollout/frac_reward_zero_std"] == 1.0
    assert stats["rollout/reward_mean"] == pytest.approx(reward)
    assert not any(e.info["group_reward_std"].any() for e in experiences)


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo"])
def test_groups_with_a_signal_are_those_that_are_counted(estimator: str) -> None:
    found, experiences = advantages_of([0.9] * (EIGHT - 1) + [0.0] + [3.33] * EIGHT, estimator)
    with_signal, equal = found.view(-1, EIGHT)
    assert with_signal.all() and not equal.any()
    assert rollout_stats.frac_reward_zero_std(experiences, EIGHT) == 0.5
    if estimator == "group_norm":
        assert with_signal.tolist() == pytest.approx([0.35355] * 7 + [-2.47487], abs=1e-4)


def test_a_resumed_run_forms_the_same_batches_and_the_next_rollout_others() -> None:
    args = arguments()
    found = []
    for number in (5, 5, 6):
        experiences = Maker(args).score(rollout(), number).micro_batches
        found.append([r.trained() for r in ranks_of(args, experiences)])
    assert found[0] == found[1] != found[2]


def test_dynamic_batches_get_their_optimizer_steps_from_the_same_draw() -> None:
    """Upstream cuts a rank's samples of a step into micro-batches by tokens."""
    args = arguments(*DYNAMIC)
    maker = Maker(args)
    scored = maker.score(rollout(), 3)
    assert sorted(places(maker.passes)) == list(range(SAMPLES)) and scored.idle_fraction is None
    ranks = ranks_of(args, scored.micro_batches)
    steps = balance.optimizer_steps(SAMPLES, STEP, args.train.seed, 3)
    own = STEP // RANKS
    tokens = []
    for k, step in enumerate(steps):
        hands = [rank.buffer.items[k * own : (k + 1) * own] for rank in ranks]
        assert sorted(int(i.sequences[0]) for hand in hands for i in hand) == sorted(step)
        tokens.append([sum(int(i.total_length) for i in hand) for hand in hands])
    assert all(max(of_ranks) - min(of_ranks) < 10 for of_ranks in tokens)

    micro_batches_of_rank = ranks[0].batching.epoch(ranks[0].buffer)
    assert {m.step for m in micro_batches_of_rank} == set(range(len(steps)))
    first = [item for m in micro_batches_of_rank if m.step == 0 for item in m.samples]
    ids = sorted(int(item.sequences[0]) for item in first)
    assert ids == sorted(int(item.sequences[0]) for item in ranks[0].buffer.items[:own])


@pytest.mark.parametrize(
    "way", [[], DYNAMIC], ids=["balanced", "balanced dynamic"],
)  # fmt: skip
def test_the_mean_over_prompts_of_all_ranks_is_that_of_the_optimizer_step(
    way: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and optimizer steps have some of a prompt's responses each; one response is empty."""
    args = arguments("actor.loss_agg_mode=prompt-mean", *way)
    samples = rollout()
    samples[BAD].action_mask = torch.zeros_like(samples[BAD].action_mask)
    ranks = ranks_of(args, Maker(args).score(samples, 0).micro_batches)
    alone: list[list[Any]] = []

    def epoch(r: int, others: list[Any]) -> Any:
        """A rank's epoch, with the tensors that the other rank adds to its own; keeps its own."""
        alone.append([])

        def all_reduce(data: Any, *_: Any, **__: Any) -> None:
            alone[-1].append(data.clone())
            if others and data.is_floating_point():
                data += others[len(alone[-1]) - 1]

        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
        torch.manual_seed(r)
        return ranks[r].batching.epoch(ranks[r].buffer)

    for r in range(RANKS):
        epoch(r, [])
    epochs = [epoch(r, alone[1 - r]) for r in range(RANKS)]
    numbers = {m.step for epoch in epochs for m in epoch}
    assert len(numbers) == 2
    for number in numbers:
        parts = [(rank, m) for rank, e in zip(ranks, epochs, strict=True) for m in e]
        parts = [(rank, m) for rank, m in parts if m.step == number]
        items = [item for _, m in parts for item in m.samples]
        loss_BT, mask_BT = loss_and_mask(items)
        prompts = torch.tensor([int(item.sequences[0]) // GROUP for item in items])
        counts = prompt_token_counts(mask_BT, prompts)
        whole = aggregate(loss_BT, mask_BT, "prompt-mean", prompt_tokens=counts)
        total = sum(
            m.denominators.mean(*loss_and_mask(m.samples)) / rank.batching.accumulation
            for rank, m in parts
        )
        torch.testing.assert_close(total / RANKS, whole)
        assert (whole - aggregate(loss_BT, mask_BT)).abs() > 1e-4


def loss_and_mask(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss for each token that its sample and position determine, and the mask, both [B, T]."""
    pad = torch.nn.utils.rnn.pad_sequence
    mask_BT = pad([item.action_mask for item in items], batch_first=True)
    position_T = torch.arange(mask_BT.shape[1])
    place_B = torch.tensor([float(item.sequences[0]) for item in items])
    return torch.sin(place_B[:, None] + 0.1 * position_T), mask_BT


def test_a_reference_on_half_of_the_ranks_has_two_hands_of_each() -> None:
    """Upstream cuts one list of micro-batches for every model: here of four ranks, and of two."""
    args = arguments(
        "ds.packing_samples=false", "rollout.micro_batch_size=1", "actor.num_gpus_per_node=4",
        "vllm.num_engines=4", "train.colocate_all=false",
    )  # fmt: skip
    samples = rollout()
    order = [place for (place,) in micro_batches.scoring_micro_batches(samples, args)]
    by_length = sorted(range(SAMPLES), key=lambda i: -int(samples[i].total_length))
    for count in (4, 2):
        hands = [order[i : i + SAMPLES // count] for i in range(0, SAMPLES, SAMPLES // count)]
        for at_once in zip(*hands, strict=True):
            found = sorted(by_length.index(place) for place in at_once)
            assert found[-1] - found[0] < 4, "neighbours by length"


def test_a_field_without_a_value_for_every_sample_is_named() -> None:
    (whole,) = micro_batches.concat(rollout(), [list(range(4))], PAD)
    whole.info["odd"] = torch.zeros(3)
    with pytest.raises(ValueError, match="info odd has 3 values for 4 samples"):
        micro_batches.unbatch(whole)
