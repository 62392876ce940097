"""What an update logs: means over micro-batches, and memory beside what the plan says."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import replace
from typing import Any

import pytest
import torch
from openrlhf.models import actor as upstream
from transformers import Qwen2Config, Qwen2ForCausalLM

from sg_rlhf.algo.analysis.token_statistics import TokenStatistics
from sg_rlhf.algo.log_probs import fused_log_probs
from sg_rlhf.algo.log_probs.from_logits import log_probs_from_logits
from sg_rlhf.algo.log_probs.fused_log_probs import selected_log_probs
from sg_rlhf.overlay.learner import metrics as update_metrics
from sg_rlhf.overlay.learner.metrics import MicroBatchMetrics, UpdateLog
from sg_rlhf.plan import gpu_memory as gpu
from tests.unit.peak import Peak
from tests.unit.plan.runs import run_of

# -- Means of an update's metrics over micro-batches ---------------------------------------------


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> UpdateLog:
    """Of one rank."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda **_: 1)
    return UpdateLog(None)


def micro_batch(
    means: dict[str, torch.Tensor], tokens: int, samples: int, failed: bool = False
) -> MicroBatchMetrics:
    return MicroBatchMetrics(
        means, {}, 1.0, 1.0, TokenStatistics.zeros(), torch.zeros(2, dtype=torch.float64),
        torch.tensor(failed), tokens, samples,
    )  # fmt: skip


def test_scalars_are_weighted_by_tokens_and_vectors_by_samples(log: UpdateLog) -> None:
    for loss, rewards, tokens in ((1.0, [0.0, 1.0], 10), (4.0, [1.0], 30)):
        values = {"policy_loss": torch.tensor(loss), "reward": torch.tensor(rewards)}
        log.add(micro_batch(values, tokens, len(rewards)))
        log.reduce()
        assert log.progress()["act_loss"] == pytest.approx(loss)
    log.set_latest(actor_lr=0.2)
    result = log.pop_means()
    assert result["policy_loss"] == pytest.approx((10 * 1.0 + 30 * 4.0) / 40)
    assert result["reward"] == pytest.approx(2 / 3) and result["actor_lr"] == 0.2


def test_a_micro_batch_without_tokens_or_that_failed_has_no_part_in_the_means(
    log: UpdateLog,
) -> None:
    nan = torch.tensor(float("nan"))
    log.add(micro_batch({"kl": nan, "reward": torch.tensor([9.0, nan])}, 0, 2))
    log.add(micro_batch({"kl": nan, "reward": torch.tensor([9.0, 9.0])}, 5, 2, failed=True))
    assert log.reduce().failed == [False, True]
    log.add(micro_batch({"kl": torch.tensor(0.5), "reward": torch.ones(2)}, 7, 2))
    log.reduce()
    assert log.pop_means() == {"kl": 0.5, "reward": 1.0}


# -- What a run logs of its memory ---------------------------------------------------------------


class Largest:
    """A strategy of two ranks, the other of which took 1 GiB."""

    def all_reduce(self, data: dict[str, float], op: str) -> dict[str, float]:
        assert op == "max"
        return {key: max(value, 1.0) for key, value in data.items()}


def test_without_cuda_it_is_the_process() -> None:
    update_metrics.reset_memory_peak()
    held = torch.ones(2**28)  # 1 GiB
    ((name, used),) = update_metrics.max_memory_over_ranks(Largest()).items()
    assert name == "memory/peak_rss_gib"
    assert used >= held.nbytes / update_metrics.GIB
    assert used == pytest.approx(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, rel=0.1
    )


def test_with_cuda_it_is_the_allocators_peak_and_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's own numbers are stated here; what is checked is which of them are logged."""
    forgotten: list[Any] = []
    for name, answer in {
        "is_initialized": lambda: True,
        "reset_peak_memory_stats": lambda: forgotten.append(True),
        "max_memory_allocated": lambda: 3 * 2**30,
        "mem_get_info": lambda: (10 * 2**30, 80 * 2**30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    update_metrics.reset_memory_peak()
    assert forgotten
    assert update_metrics.memory_usage() == {
        "memory/peak_allocated_gib": 3.0,
        "memory/device_used_gib": 70.0,
    }


# -- The plan's copies of the logits are those that upstream's forward pass makes ----------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_copies_of_the_logits_are_those_of_upstreams_forward_pass(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "log_probs_from_logits", log_probs_from_logits)
    over_logits = upstream.Actor.forward
    config = Qwen2Config(
        vocab_size=20_000, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).bfloat16()
    model.config.use_cache = False
    policy = upstream.Actor(model)
    policy.temperature, policy.packing_samples = temperature, False
    ids = torch.randint(0, 20_000, (1, 512))

    def copies(grad: bool) -> float:
        with Peak() as peak, contextlib.nullcontext() if grad else torch.no_grad():
            log_probs, _output = over_logits(
                policy,
                ids,
                torch.ones(1, 511),
                attention_mask=torch.ones_like(ids),
                return_output=True,
            )
            if grad:
                log_probs.sum().backward()
        return peak.most / (4 * 20_000 * 512)

    shape = run_of(temperature=temperature, logits="full")
    one = 4.0 * shape.model.vocab_size
    planned = gpu.logits_of_update(shape) / shape.train_pass_tokens / one
    assert copies(grad=True) == pytest.approx(planned, abs=0.1)
    scored = gpu.logits_of_scoring(shape) / shape.rollout_pass_tokens / one
    assert copies(grad=False) == pytest.approx(scored, abs=0.1)


def test_a_fused_head_takes_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a GPU's blocks, in float32: the CPU's matrix products of 16 bits need copies."""
    assert fused_log_probs._ROWS["cuda"] == gpu.FUSED_ROWS
    assert fused_log_probs._CUDA_COLUMNS == gpu.FUSED_COLUMNS
    assert fused_log_probs._CUDA_LOGITS == gpu.FUSED_LOGITS
    monkeypatch.setitem(fused_log_probs._ROWS, "cpu", gpu.FUSED_ROWS)
    columns = fused_log_probs._columns
    monkeypatch.setattr(fused_log_probs, "_columns", lambda _, *rest: columns("cuda", *rest))
    tokens, hidden, vocabulary = 8192, 16, 20_000
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    head = Qwen2ForCausalLM(config).lm_head.weight
    states = torch.randn(tokens, hidden, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with Peak() as peak:
        log_probs, _ = selected_log_probs(states, head, targets, temperature=0.7)
        log_probs.sum().backward()
    run = run_of()
    shape = replace(run.model, hidden_size=hidden, vocab_size=vocabulary)
    run = replace(run, model=shape, train_micro=1, max_len=tokens, logits="fused")
    # The plan's hidden states are in bf16; of the head there is its own gradient beside.
    planned = gpu.logits_of_update(run) + 4 * head.numel() + 4 * hidden * tokens
    assert 0.5 * planned < peak.most < 1.1 * planned
    assert peak.most < 0.2 * 4 * vocabulary * tokens
