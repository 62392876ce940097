"""The passes without logits: upstream's log-probs, entropies and gradients, by another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from openrlhf.models import Actor
from transformers import AutoConfig, AutoModelForCausalLM

from sg_rlhf.config.derived.log_probs import FUSED_FAMILIES
from sg_rlhf.overlay.model.log_prob_head import PolicyModel

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def upstreams(actor: Any, *args: Any, **kwargs: Any) -> Any:
    return Actor.forward(actor, *args, **kwargs)


def model_folder(folder: Path, family: str, **more: Any) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | more)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return str(folder)


def actor_of(folder: str, **more: Any) -> Any:
    return PolicyModel(folder, attn_implementation="sdpa", temperature=0.7, **more).float()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Two prompts on the left-padded side, responses of 5 and 3 tokens, and padding behind."""
    torch.manual_seed(1)
    attention = torch.ones(2, 12, dtype=torch.long)
    attention[0, :3] = 0
    attention[1, -2:] = 0
    action = torch.zeros(2, 6, dtype=torch.bool)
    action[0, 1:] = True
    action[1, 1:4] = True
    return {
        "sequences": torch.randint(0, VOCABULARY, (2, 12)),
        "action_mask": action,
        "attention_mask": attention,
    }


def results(actor: Any, forward: Any, batch: dict[str, torch.Tensor], coefficient: float) -> Any:
    """(log-probs, entropies of the responses, gradients by name)."""
    actor.zero_grad()
    log_probs, output = forward(actor, **batch, return_output=True, return_entropy=True)
    mask = batch["action_mask"]
    entropy = output.entropy[:, -mask.shape[1] :]
    weights = torch.linspace(-1, 1, mask.numel()).view(mask.shape)
    loss = (weights * log_probs).sum()
    if coefficient:
        loss = loss + coefficient * (entropy * mask).sum()
    loss.backward()
    return log_probs, entropy * mask, {n: p.grad for n, p in actor.named_parameters()}


FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {"tie_word_embeddings": True, "logit_scale": 0.3},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "granite": {"logits_scaling": 3.0},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {"pad_token_id": 0},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_upstreams(
    tmp_path: Path, batch: dict[str, torch.Tensor], family: str, coefficient: float
) -> None:
    actor = actor_of(model_folder(tmp_path, family, **FAMILIES[family]))
    with torch.no_grad():
        alone = actor(**batch)
    ours = results(actor, PolicyModel.forward, batch, coefficient)
    assert torch.equal(alone, ours[0])
    theirs = results(actor, upstreams, batch, coefficient)
    assert torch.allclose(ours[0], theirs[0], atol=2e-6, rtol=0)
    assert torch.allclose(ours[1], theirs[1], atol=2e-6, rtol=0)
    assert ours[2].keys() == theirs[2].keys()
    for name, gradient in ours[2].items():
        assert torch.allclose(gradient, theirs[2][name], atol=2e-5, rtol=1e-4), name


def test_all_positions_where_no_response_is_named(
    tmp_path: Path, batch: dict[str, torch.Tensor]
) -> None:
    actor = actor_of(model_folder(tmp_path, "qwen2"))
    del batch["action_mask"]
    with torch.no_grad():
        ours = actor(**batch, return_logprobs=True)
        theirs = upstreams(actor, **batch, return_logprobs=True)
    assert ours.shape == (2, 11) and torch.allclose(ours, theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("left_out", [[0], [0, 1]])
def test_a_response_that_is_left_out_has_no_gradient(
    tmp_path: Path, batch: dict[str, torch.Tensor], left_out: list[int]
) -> None:
    """Every token masked, of a sample or of all: the passes are made and give zeros for it."""
    actor = actor_of(model_folder(tmp_path, "qwen2"))
    batch["action_mask"][left_out] = False
    ours = results(actor, PolicyModel.forward, batch, 0.3)
    theirs = results(actor, upstreams, batch, 0.3)
    assert not ours[0][left_out].any()
    for name, gradient in ours[2].items():
        assert torch.allclose(gradient, theirs[2][name], atol=2e-5, rtol=1e-4), name
        assert bool(gradient.any()) is (len(left_out) == 1), name


def test_logits_are_never_made(tmp_path: Path, batch: dict[str, torch.Tensor]) -> None:
    actor = actor_of(model_folder(tmp_path, "qwen2"))
    heads: list[torch.Size] = []
    head = actor.model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, output: heads.append(output.shape))
    _, output = actor(**batch, return_output=True)
    assert heads == [(2, 12, 1)] and output["logits"] is None
    upstreams(actor, **batch)
    assert heads[1:] == [(2, 12, VOCABULARY)]


def test_a_head_that_was_asked_gives_logits_to_whoever_asks_for_them(
    tmp_path: Path, batch: dict[str, torch.Tensor]
) -> None:
    actor = actor_of(model_folder(tmp_path, "qwen2"))
    actor(**batch)
    output = actor(batch["sequences"], attention_mask=batch["attention_mask"], return_output=True)
    assert output["logits"].shape == (2, 12, VOCABULARY)
    generated = actor.model.generate(batch["sequences"][:1], max_new_tokens=2, do_sample=False)
    assert generated.shape[1] > 12


def test_lora_and_checkpointing(tmp_path: Path, batch: dict[str, torch.Tensor]) -> None:
    folder = model_folder(tmp_path, "qwen2", tie_word_embeddings=True)
    actor = actor_of(folder, lora_rank=4, target_modules="all-linear")
    actor.gradient_checkpointing_enable()
    actor.train()
    ours = results(actor, PolicyModel.forward, batch, 0.1)
    theirs = results(actor, upstreams, batch, 0.1)
    trained = [name for name, gradient in ours[2].items() if gradient is not None]
    assert trained and all("lora" in name for name in trained)
    for name in trained:
        assert torch.allclose(ours[2][name], theirs[2][name], atol=2e-5, rtol=1e-4), name


def test_a_family_that_is_not_in_the_table_keeps_upstreams_path(
    tmp_path: Path, batch: dict[str, torch.Tensor]
) -> None:
    more = {"logit_scale": 0.1, "eos_token_id": 1, "pad_token_id": 0}
    actor = actor_of(model_folder(tmp_path, "cohere", **more))
    with torch.no_grad():
        assert torch.equal(actor(**batch), upstreams(actor, **batch))
    assert actor.log_prob_head is None


@pytest.mark.parametrize("family", ["cohere2", "gemma3_text", "granite"])
def test_a_models_own_change_of_logits_is_off_in_a_pass_alone(
    tmp_path: Path, batch: dict[str, torch.Tensor], family: str
) -> None:
    folder = model_folder(tmp_path, family, **FAMILIES[family])
    actor = actor_of(folder, lora_rank=4, target_modules="all-linear")
    with torch.no_grad():
        logits = actor.model(batch["sequences"]).logits
        log_probs = actor(**batch)
        assert torch.allclose(log_probs, upstreams(actor, **batch), atol=2e-6, rtol=0)
        assert torch.equal(actor.model(batch["sequences"]).logits, logits)


def test_a_head_replaced_after_loading_is_noticed(
    tmp_path: Path, batch: dict[str, torch.Tensor]
) -> None:
    actor = actor_of(model_folder(tmp_path, "qwen2"))
    actor(**batch)
    actor.model.set_output_embeddings(torch.nn.Linear(32, VOCABULARY, bias=False))
    with pytest.raises(RuntimeError, match=r"actor\.fused_logprobs=false"):
        actor(**batch)


def test_every_family_has_a_test() -> None:
    assert set(FAMILIES) == set(FUSED_FAMILIES)
