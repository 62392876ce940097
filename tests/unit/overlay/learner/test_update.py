"""The policy's trainer around upstream's update, with a policy of one table for a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.config import load_config
from sg_rlhf.overlay.driver.arguments import upstream_arguments
from sg_rlhf.overlay.learner import gradient_checks, micro_batches
from sg_rlhf.overlay.learner.update import SGActorPPOTrainer
from sg_rlhf.overlay.reporting.errors import NonFiniteError, SyncError
from sg_rlhf.run_dir.timing_keys import OF_THE_RANK
from tests.unit.overlay.pretend_device import DEVICE, CurrentDevice, PretendDevice, Waits

CONFIGS = Path(__file__).parents[4] / "configs"
ALGORITHMS = sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.yaml"))
VOCABULARY, RESPONSES, MICRO_BATCH = 11, 8, 2


class Table(torch.nn.Module):
    """A policy whose next token depends on the present one alone, with upstream's signature."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.table = table.to(device).requires_grad_()
        #: Of each dynamic micro-batch: whether DeepSpeed was told that a step ends with it.
        self.boundaries: list[bool] = []
        self.model = SimpleNamespace(  # the engine
            module=SimpleNamespace(named_parameters=lambda: [("table", self.table)]),
            global_steps=0,
            was_step_applied=lambda: True,
            set_gradient_accumulation_boundary=self.boundaries.append,
        )

    def forward(
        self, sequences: Any, action_mask: Any, *, return_entropy: bool = False, **_: Any
    ) -> Any:
        log_softmax = self.table[sequences[:, :-1]].log_softmax(-1)
        log_probs = log_softmax.gather(-1, sequences[:, 1:, None])[..., 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1) if return_entropy else None
        return log_probs * action_mask, SimpleNamespace(entropy=entropy)


class Optimizer:
    """DeepSpeed's gradient norm: -1 stands for one that is not finite."""

    def get_grad_norm_direct(self, gradients: list[torch.Tensor], _params: Any) -> torch.Tensor:
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        return torch.where(norm.isfinite(), norm, -1.0)

    def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> torch.Tensor:
        return self.get_grad_norm_direct([param.grad for param in params], params)


class Strategy:
    """What upstream's trainer asks of its strategy: one rank, plain gradient descent."""

    ring_attn_group = None

    def __init__(self, args: Any) -> None:
        self.args = args
        dynamic = args.train.dynamic_batch_enable
        self.accumulated_gradient = 1 if dynamic else RESPONSES // MICRO_BATCH
        self.ds_device_mesh = {"dp": SimpleNamespace(get_group=lambda: None)}
        self.backwards, self.grad_norm = 0, 0.0

    def is_rank_0(self) -> bool:
        return True

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        return data

    def backward(self, loss: torch.Tensor, *_: Any) -> None:
        self.backwards += 1
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, optimizer: Any, actor: Table, _scheduler: Any, name: str) -> None:
        if self.backwards % self.accumulated_gradient:
            return
        gradient = actor.table.grad
        assert gradient is not None
        if self.args.train.dynamic_batch_enable:
            assert len(actor.boundaries) == self.backwards
            assert actor.boundaries[-1] and sum(actor.boundaries) == actor.model.global_steps + 1
        self.grad_norm = float(optimizer.get_grad_norm_direct([gradient], [actor.table]))
        with torch.no_grad():
            actor.table -= 0.1 * gradient
        actor.table.grad = None
        actor.model.global_steps += 1

    def get_grad_norm(self, actor: Table) -> float:
        return self.grad_norm


def arguments(algorithm: str, *overrides: str) -> Any:
    recipes = [
        CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml",
        CONFIGS / "algorithms" / f"{algorithm}.yaml",
    ]
    settings = [
        f"train.batch_size={RESPONSES}", f"train.micro_batch_size={MICRO_BATCH}",
        f"rollout.batch_size={RESPONSES}", "rollout.n_samples_per_prompt=1",
        "rollout.micro_batch_size=1",
        "algo.dynamic_filtering_enable=false", "algo.advantage.estimator=reinforce",
    ]  # fmt: skip
    return upstream_arguments(load_config(recipes, [*settings, *overrides]))


def rollout(actor: Table, **info: torch.Tensor) -> list[Experience]:
    """Responses of different lengths, off the policy, on the CPU as upstream keeps them."""
    info = {micro_batches.SAMPLE_INDEX: torch.arange(RESPONSES)} | info
    generator = torch.Generator().manual_seed(1)
    experiences = []
    for index in range(RESPONSES):
        length = 5 + 2 * index
        sequence = torch.randint(VOCABULARY, (1, length), generator=generator)
        mask = (torch.arange(length - 1) >= 2).unsqueeze(0)
        with torch.no_grad():
            log_probs, _ = actor(sequence.to(actor.table.device), mask.to(actor.table.device))
        log_probs = log_probs.cpu()
        old, base, sampled = (
            log_probs + scale * torch.randn(log_probs.shape, generator=generator)
            for scale in (0.3, 0.2, 0.01)
        )
        experiences.append(
            Experience(
                sequences=sequence,
                attention_mask=torch.ones_like(sequence),
                action_mask=mask,
                action_log_probs=old,
                base_action_log_probs=base,
                rollout_log_probs=old + sampled - log_probs,
                advantages=torch.full_like(log_probs, 1.0 if index % 2 else -0.7),
                rewards=torch.zeros(1),
                total_length=torch.tensor([length]),
                response_length=torch.tensor([length - 3]),
                info={name: values[index : index + 1] for name, values in info.items()},
            )
        )
    return experiences


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed of a single rank; a reduction takes tensors of its own device alone."""

    def all_reduce(tensor: Any, *_: Any, **__: Any) -> None:
        assert tensor.device.type == str(torch.cuda.current_device())

    monkeypatch.setattr(torch.cuda, "current_device", lambda: CurrentDevice("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for name, function in {
        "all_reduce": all_reduce, "barrier": lambda *_: None,
        "get_rank": lambda *_: 0, "get_world_size": lambda **_: 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.distributed, name, function)


def policy_trainer(
    strategy: Strategy, actor: Table, optimizer: Optimizer | None = None
) -> SGActorPPOTrainer:
    """The trainer of one rank."""
    # Its optimizer is none of DeepSpeed's.
    with mock.patch.object(gradient_checks, "UpdateWatch", return_value=None):
        return SGActorPPOTrainer(
            strategy, actor, ema_model=None, actor_optim=optimizer or Optimizer(),
            actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.1]),
            micro_train_batch_size=MICRO_BATCH,
        )  # fmt: skip


def trained(
    args: Any,
    *,
    actor: Table | None = None,
    engines: list[Any] | None = None,
    change: Callable[[int, Experience], None] = lambda _index, _sample: None,
    **info: torch.Tensor,
) -> tuple[dict[str, Any], torch.Tensor]:
    """What ``ppo_train`` returns and the table after it; the samples may be changed before."""
    actor = actor or Table("cpu")
    trainer = policy_trainer(Strategy(args), actor)
    trainer.vllm_engines = engines
    for index, experience in enumerate(rollout(actor, **info)):
        change(index, experience)
        trainer.replay_buffer.append(experience)
    torch.manual_seed(0)  # upstream shuffles them where it is let
    status = trainer.ppo_train(args.algo.kl.init_coef)
    return status, actor.table.detach().cpu()


@pytest.mark.parametrize(
    ("name", "correction"),
    [*((name, "off") for name in ALGORITHMS), ("grpo_sg", "token"), ("grpo_sg", "seq")],
)
def test_no_operation_mixes_devices(
    monkeypatch: pytest.MonkeyPatch, name: str, correction: str
) -> None:
    """The whole update with log-probs, statistics and rows, on a device that is not the CPU."""
    args = arguments(
        name,
        f"algo.advantage.is_correction_level='{correction}'",
        *(["sg.weighting.entropy=2.5"] if name == "stapo" else []),
    )
    expected, table = trained(args)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CurrentDevice(DEVICE.type))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with PretendDevice():
        found, moved = trained(args, actor=Table(DEVICE))
    assert torch.equal(moved, table)
    for status in (expected, found):
        status.pop("memory/peak_rss_gib")  # this process's, which only grows
        seconds = [status.pop(f"timing/{part}") for part in OF_THE_RANK]
        assert seconds[0] == 0 and min(seconds[1:]) > 0
    assert found == expected and len(found["sg_optimizer_steps"]) > 0


@pytest.mark.parametrize("name", ["grpo_sg", "grpo"])
def test_no_micro_batch_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An update of 2 micro-batches reads the device as often as one of 8; so does its reduction."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CurrentDevice(DEVICE.type))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reductions: list[Any] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *a, **_: reductions.append(a))
    found = []
    for size in (4, 1):
        monkeypatch.setattr(f"{__name__}.MICRO_BATCH", size)
        args = arguments(name, "actor.entropy_coef=0.0")
        with PretendDevice():
            actor, before = Table(DEVICE), Waits.count
            trained(args, actor=actor)
        found.append((Waits.count - before, len(reductions)))
        reductions.clear()
    few, many = found
    assert many == few


def test_a_reward_kl_is_no_loss_term() -> None:
    """Upstream then reports a number per response under the loss term's name."""
    kl = torch.rand(RESPONSES, generator=torch.Generator().manual_seed(2))
    status, _ = trained(arguments("grpo", "algo.kl.use_loss=false"), kl=kl)
    (row,) = status["sg_optimizer_steps"]
    assert "kl" not in row and {"policy_loss", "entropy_loss"} <= row.keys()
    assert status["kl"] == pytest.approx(float(kl.mean()))


def test_the_kl_to_the_engine_needs_no_reference() -> None:
    """Its gradient is k3's: engine and trainer differ, and the advantages are 0."""

    def without_advantages(_index: int, sample: Experience) -> None:
        sample.advantages = torch.zeros_like(sample.advantages)

    settings = ["algo.kl.init_coef=0.0"]
    still, plain = trained(arguments("grpo", *settings), change=without_advantages)
    status, pulled = trained(
        arguments("grpo", *settings, "sg.kl_to_engine=0.5"), change=without_advantages
    )
    assert "engine_kl" not in still and status["engine_kl"] > 0.0
    assert not torch.equal(pulled, plain)


def test_the_update_takes_the_samples_as_they_were_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    forward = Table.forward

    def seen(self: Table, sequences: Any, *args: Any, **kwargs: Any) -> Any:
        widths.append(sequences.shape[1])
        return forward(self, sequences, *args, **kwargs)

    monkeypatch.setattr(Table, "forward", seen)
    in_order = [7, 11, 15, 19]  # the longer of each two
    trained(arguments("grpo_sg"))
    assert widths[-4:] == in_order


def test_dynamic_micro_batches_have_the_rows_of_static_ones() -> None:
    (static,) = trained(arguments("grpo_sg"))[0]["sg_optimizer_steps"]
    longest = 5 + 2 * (RESPONSES - 1)
    dynamic = ["train.dynamic_batch_enable=true", f"train.max_tokens_per_gpu={2 * longest}"]
    status, _ = trained(arguments("grpo_sg", *dynamic))
    (row,) = status["sg_optimizer_steps"]
    assert 1 < row["micro_batches"] != static["micro_batches"]
    for name in ("policy_loss", "kl", "entropy_loss", "actor_grad_norm"):
        assert row[name] == pytest.approx(static[name], rel=1e-5), name


@pytest.mark.parametrize("entropy_coef", [0.0, 0.5])
@pytest.mark.parametrize("algorithm", ["grpo_sg", "cispo"])
def test_the_mean_over_prompts_gives_each_prompt_its_share_of_every_term(
    algorithm: str, entropy_coef: float
) -> None:
    """Rows of equal prompts have the mean over tokens; other prompts move policy, KL, entropy."""
    settings = [f"actor.entropy_coef={entropy_coef}", "algo.kl.init_coef=0.3"]
    rows, tables = {}, {}
    mean = "actor.loss_agg_mode=prompt-mean"
    for name, extra, prompts in (
        ("tokens", [], 1), ("one prompt", [mean], 1), ("prompts", [mean], RESPONSES),
        ("responses", ["actor.loss_agg_mode=seq-mean-token-mean"], 1),
    ):  # fmt: skip
        args = arguments(algorithm, *settings, *extra)
        place = torch.arange(RESPONSES) if prompts > 1 else torch.zeros(RESPONSES)
        status, tables[name] = trained(args, **{micro_batches.SAMPLE_INDEX: place})
        (rows[name],) = status["sg_optimizer_steps"]
        assert micro_batches.SAMPLE_INDEX not in status
    for term in ("policy_loss", "kl", "entropy_loss"):
        assert rows["one prompt"][term] == pytest.approx(rows["tokens"][term], rel=1e-5), term
        assert rows["prompts"][term] != pytest.approx(rows["tokens"][term], rel=1e-3), term
    torch.testing.assert_close(tables["one prompt"], tables["tokens"])
    # With one response per prompt it is the mean over responses; upstream's KL is over tokens.
    by_response = rows["responses"]["policy_loss"]
    assert rows["prompts"]["policy_loss"] == pytest.approx(by_response, rel=1e-5)


def test_a_rollouts_figures_are_those_of_all_its_tokens() -> None:
    """Lopti's two optimizer steps have different numbers of tokens, so means of means differ."""
    status, _ = trained(arguments("lopti"))
    rows = status["sg_optimizer_steps"]
    tokens = [row["sg/n_tokens"] for row in rows]
    assert len(set(tokens)) == 2
    assert status["sg/n_tokens"] == sum(tokens)
    means = [row["sg/w_one_minus_p_mean"] for row in rows]
    whole = sum(n * mean for n, mean in zip(tokens, means, strict=True)) / sum(tokens)
    assert status["sg/w_one_minus_p_mean"] == pytest.approx(whole)
    assert whole != pytest.approx(sum(means) / 2)


def numbers(status: dict[str, Any]) -> dict[str, float]:
    """Of an update and its optimizer steps, without times and memory."""
    found = {k: float(v) for k, v in status.items() if not isinstance(v, list)}
    for i, row in enumerate(status["sg_optimizer_steps"]):
        found |= {f"{i}/{k}": v for k, v in row.items() if isinstance(v, (int, float))}
    return {k: v for k, v in found.items() if not k.startswith(("timing/", "memory/"))}


@pytest.mark.parametrize("algorithm", ["grpo", "grpo_sg", "gspo", "tr_grpo"])
@pytest.mark.parametrize(
    "field", ["action_log_probs", "base_action_log_probs", "rollout_log_probs"]
)
def test_a_nan_where_no_token_is_trained_reaches_neither_metrics_nor_weights(
    algorithm: str, field: str
) -> None:
    def damage(_index: int, sample: Experience) -> None:
        values = getattr(sample, field)
        setattr(sample, field, values.masked_fill(sample.action_mask == 0, torch.nan))

    args = arguments(algorithm, "algo.advantage.is_correction_level=token")
    expected, table = trained(args)
    found, moved = trained(args, change=damage)
    assert torch.equal(moved, table)
    assert numbers(found) == numbers(expected)
    assert {"kl", "logprobs_diff"} <= found.keys()


@pytest.mark.parametrize("algorithm", ["grpo", "grpo_sg", "gspo"])
def test_a_micro_batch_of_responses_without_a_token_leaves_the_figures_finite(
    algorithm: str,
) -> None:
    def empty(index: int, sample: Experience) -> None:
        if index < MICRO_BATCH:
            sample.action_mask = torch.zeros_like(sample.action_mask)

    status, table = trained(arguments(algorithm), change=empty)
    assert all(math.isfinite(value) for value in numbers(status).values())
    assert bool(table.isfinite().all())
    assert status["sg/n_tokens"] == sum(2 + 2 * i for i in range(MICRO_BATCH, RESPONSES))
    (row,) = status["sg_optimizer_steps"]
    assert status["kl"] == pytest.approx(row["kl"]) and row["kl"] > 0


class SkippingStrategy(Strategy):
    """As DeepSpeed: a step whose gradient is not finite is counted, and changes nothing."""

    def optimizer_step(self, optimizer: Any, actor: Table, scheduler: Any, name: str) -> None:
        if self.backwards % self.accumulated_gradient:
            return
        assert actor.table.grad is not None
        applied = bool(actor.table.grad.isfinite().all())
        actor.model.was_step_applied = lambda: applied
        if applied:
            super().optimizer_step(optimizer, actor, scheduler, name)
        else:
            actor.table.grad = None
            actor.model.global_steps += 1


def test_a_loss_that_is_not_finite_skips_its_step_and_names_its_prompts() -> None:
    args = arguments("grpo_sg", "sg.on_nonfinite=skip", "train.max_epochs=4")
    actor = Table("cpu")
    before = actor.table.detach().clone()
    trainer = policy_trainer(SkippingStrategy(args), actor)
    rates: list[int] = []
    trainer.actor_scheduler.step = lambda: rates.append(1)
    for index, experience in enumerate(rollout(actor)):
        if index == RESPONSES - 1:
            experience.advantages[0, -1] = torch.nan
        trainer.replay_buffer.append(experience)
    status = trainer.ppo_train(args.algo.kl.init_coef)
    assert torch.equal(actor.table, before) and status["sg_optimizer_steps"] == []
    first, *_, last = status["sg_nonfinite"]
    assert first["cause"] == "the policy loss" and " 1 advantages" in first["message"]
    assert first["prompts"] == [RESPONSES - 1] and last["in_a_row"] == 4
    assert "3 optimizer steps in a row were skipped before it" in status["sg_stop"]
    assert len(rates) == 4


def test_a_loss_that_is_not_finite_names_its_tensor_and_its_optimizer_step() -> None:
    def damage(index: int, sample: Experience) -> None:
        if index == RESPONSES - 1:
            sample.advantages[0, -1] = torch.nan

    with pytest.raises(NonFiniteError, match=r"before optimizer step 1: .* 1 advantages"):
        trained(arguments("grpo_sg"), change=damage)


def test_lopti_without_any_token_is_refused_as_another_update_is() -> None:
    """Neither of its passes has one. With sg.on_nonfinite=skip the step is skipped and counted."""

    def mask(_index: int, sample: Experience) -> None:
        sample.action_mask = torch.zeros_like(sample.action_mask)

    with pytest.raises(NonFiniteError, match="no token of the optimizer step takes part in it"):
        trained(arguments("lopti"), change=mask)


@pytest.mark.parametrize("algorithm", ["grpo_sg", "lopti", "grpo"])
@pytest.mark.parametrize("correction", ["off", "tis"])
def test_nothing_is_trained_on_samples_of_other_weights(algorithm: str, correction: str) -> None:
    """An engine with garbled weights gives other log-probs than the trainer."""

    def garble(_index: int, sample: Experience) -> None:
        sample.rollout_log_probs = sample.rollout_log_probs - 18.8

    overrides = [] if correction == "off" else ["sg.correction=tis"]
    actor = Table("cpu")
    before = actor.table.detach().clone()
    with pytest.raises(SyncError, match=r"before optimizer step 1 .* by 18\..* on average"):
        trained(arguments(algorithm, *overrides), actor=actor, engines=[], change=garble)
    assert torch.equal(actor.table, before) and actor.model.global_steps == 0
    trained(arguments(algorithm, *overrides), actor=actor, change=garble)  # no engines
    assert actor.model.global_steps > 0


def test_the_mean_weight_of_stare_is_that_of_the_tokens_it_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which tokens are rare is decided over the whole rollout, for their mean weight too."""
    args = arguments(
        "stare", "sg.weighting.target_entropy=99", "sg.weighting.raised=3",
        "sg.weighting.normalize=batch_mean",
    )  # fmt: skip
    status, table = trained(args)
    assert status["sg/weight_mean"] == pytest.approx(1.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CurrentDevice(DEVICE.type))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with PretendDevice():
        assert torch.equal(trained(args, actor=Table(DEVICE))[1], table)
