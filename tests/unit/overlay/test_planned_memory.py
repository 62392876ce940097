"""The plan's copies of the logits are those that upstream's forward pass makes."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from openrlhf.models import actor as upstream
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from sg_rlhf.algo.token_logprobs import log_probs_from_logits, selected_log_probs
from sg_rlhf.plan import gpu_memory as gpu
from tests.unit.plan.runs import run_of


class _Peak(TorchDispatchMode):
    """Bytes of tensors that are alive under it, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if (key := storage._cdata) not in self.alive:
                self.alive[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, key)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self.alive.pop(key)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_copies_of_the_logits_are_those_of_upstreams_forward_pass(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "log_probs_from_logits", log_probs_from_logits)
    # Upstream's own, which the overlay wraps.
    over_logits = inspect.unwrap(upstream.Actor.forward)
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
        with _Peak() as peak, contextlib.nullcontext() if grad else torch.no_grad():
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


def test_a_fused_head_takes_what_the_plan_says() -> None:
    """In float32, where the CPU's matrix products need no copies as its 16-bit ones do."""
    tokens, hidden, vocabulary = 8192, 16, 20_000
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    head = Qwen2ForCausalLM(config).lm_head.weight
    states = torch.randn(tokens, hidden, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with _Peak() as peak:
        log_probs, _ = selected_log_probs(states, head, targets, temperature=0.7)
        log_probs.sum().backward()
    run = run_of()
    shape = replace(run.model, hidden_size=hidden, vocab_size=vocabulary)
    run = replace(run, model=shape, train_micro=1, max_len=tokens, logits="fused")
    # The plan's hidden states are in bf16; of the head there is its own gradient beside.
    planned = gpu.logits_of_update(run) + 4 * head.numel() + 4 * hidden * tokens
    assert 0.5 * planned < peak.most < 1.1 * planned
    assert peak.most < 0.2 * 4 * vocabulary * tokens
