"""The CPU platform: what it changes, and that it stays away from a CUDA process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.model import rotary


def in_process(code: str, name: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"PATH": "", "SG_PLATFORM": name, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_cuda_calls_mean_the_cpu() -> None:
    code = """
from sg_rlhf.overlay.patches import table
table.install()
import torch
device = torch.cuda.current_device()
torch.cuda.set_device(0); torch.cuda.empty_cache(); torch.cuda.synchronize()
torch.cuda.current_stream()
zero = torch.zeros(1, device=device)
print(torch.zeros(1).to(device).device, torch.device(f"cuda:{device}"), zero.device)
"""
    assert in_process(code, "cpu").strip() == "cpu cuda:0 cpu"


@pytest.mark.full
def test_bf16_attention_is_computed_in_float32_without_bf16_units() -> None:
    code = """
from sg_rlhf.overlay.patches import table
from sg_rlhf.overlay.cpu import platform
platform.has_bf16_units = lambda: False
table.install()
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, attn_implementation="sdpa",
)
model = Qwen2ForCausalLM(config)
exact = torch.nn.functional.scaled_dot_product_attention
seen = []
def record(query, key, value, **kwargs):
    seen.append({x.dtype for x in (query, key, value)})
    return exact(query, key, value, **kwargs)
torch.nn.functional.scaled_dot_product_attention = record
tokens = torch.randint(32, (2, 7))
mask = torch.ones_like(tokens)
mask[0, :3] = 0
wanted = model(tokens, attention_mask=mask).logits
logits = model.bfloat16()(tokens, attention_mask=mask).logits
logits.float().sum().backward()
print(seen == [{torch.float32}, {torch.float32}], logits.dtype,
      (logits.float() - wanted)[mask.bool()].abs().max().item() < 0.02,
      model.model.layers[0].self_attn.q_proj.weight.grad.dtype)
"""
    assert in_process(code, "cpu").split() == ["True", "torch.bfloat16", "True", "torch.bfloat16"]


def test_packed_samples_get_the_log_probs_and_gradients_of_padded_ones(tmp_path: Path) -> None:
    code = f"""
from sg_rlhf.overlay.patches import table
from sg_rlhf.overlay.model.packed_attention import VARLEN
table.install()
import torch
from openrlhf.models.actor import Actor
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
Qwen2ForCausalLM(Qwen2Config(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)).save_pretrained({str(tmp_path)!r})
tokens = torch.randint(32, (3, 9))
mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 4 + [0] * 2, [1] + [0] * 8])
seen = []
for packed, attention in ((False, "sdpa"), (True, VARLEN)):
    actor = Actor({str(tmp_path)!r}, attn_implementation=attention, packing_samples=packed)
    actor.model.float()
    log_probs, output = actor(
        tokens, mask[:, 1:], mask, return_output=True, return_entropy=True
    )
    pairs = mask[:, :-1] * mask[:, 1:]
    (log_probs * pairs).sum().backward()
    gradient = torch.cat([x.grad.flatten() for x in actor.model.parameters()])
    seen.append((log_probs * pairs, output.entropy * pairs, gradient))
print([torch.allclose(a, b, atol=1e-5) for a, b in zip(*seen)], seen[0][2].abs().max() > 0.1)
"""
    assert in_process(code, "cpu").splitlines()[-1] == "[True, True, True] tensor(True)"


def test_nothing_changes_with_cuda() -> None:
    code = """
import torch
before = (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.empty_cache)
from sg_rlhf.overlay.patches import table
table.install()
print(before == (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.empty_cache))
"""
    assert in_process(code, "cuda").strip() == "True"


def test_settings_that_need_cuda_are_named() -> None:
    values = {key: allowed[0] for key, allowed in platform.REQUIRED_SETTINGS.items()}
    values["ds.packing_samples"] = False
    assert platform.unsupported_settings(values.__getitem__) == []
    # Upstream asks for flash_attention_2 whenever samples are packed.
    values |= {"ds.attn_implementation": "flash_attention_2", "ds.packing_samples": True}
    assert platform.unsupported_settings(values.__getitem__) == []
    values |= {"ds.packing_samples": False, "vllm.enable_sleep": True}
    problems = platform.unsupported_settings(values.__getitem__)
    assert problems == [
        "ds.attn_implementation=flash_attention_2: without CUDA use sdpa or eager",
        "vllm.enable_sleep=True: without CUDA use false",
    ]


def test_rotary_buffers_come_back_in_float32() -> None:
    config = Qwen2Config(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    exact = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert not torch.equal(model.model.rotary_emb.inv_freq.float(), exact)
    assert rotary.restore(model) == 1
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16
    assert rotary.restore(model) == 0
