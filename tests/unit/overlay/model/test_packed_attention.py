"""Packed samples: the values and gradients of each alone, and their bounds worked out once."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from sg_rlhf.config import load_config
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.driver.arguments import UnsupportedHere, check_platform, upstream_arguments
from sg_rlhf.overlay.model import packed_attention
from sg_rlhf.overlay.patches import flash_attn_shim

LAYERS = 3
LENGTHS = (5, 1, 9, 1, 1, 3)
VOCABULARY = 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES = {
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral, a window of 4": MistralConfig(**SHAPE, sliding_window=4),
    "as many key heads": LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows whose bounds were worked out."""
    original, seen = packed_attention.row_from_positions, []

    def count(position_ids: Any) -> Any:
        seen.append(position_ids)
        return original(position_ids)

    monkeypatch.setattr(packed_attention, "row_from_positions", count)
    return seen


def model_of(config: PreTrainedConfig, attention: str, checkpointing: bool = False) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def samples(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (1, n), generator=generator) for n in LENGTHS]


def packed(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    return {"input_ids": torch.cat(texts, dim=1), "position_ids": positions}


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)
    return (logits * weights).sum()


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_are_each_alone(
    family: str, checkpointing: bool, counted: list[Any]
) -> None:
    texts = samples(1)
    alone = model_of(FAMILIES[family], "sdpa")
    expected = torch.cat([alone(text).logits for text in texts], dim=1)
    loss_of(expected).backward()

    model = model_of(FAMILIES[family], packed_attention.VARLEN, checkpointing)
    logits = model(**packed(texts)).logits
    loss_of(logits).backward()

    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient_of(model), gradient_of(alone), rtol=1e-4, atol=1e-5)
    assert len(counted) == 1, f"once for {LAYERS} layers, recomputed or not"


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_gets_its_own_row_after_another_forward(
    reentrant: bool, counted: list[Any]
) -> None:
    texts, others = samples(1), samples(2)[::-1]
    config = FAMILIES["qwen2"]
    model = model_of(config, packed_attention.VARLEN)
    for each in (texts, others):
        loss_of(model(**packed(each)).logits).backward()

    again = model_of(config, packed_attention.VARLEN)
    again.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again.enable_input_require_grads()
    first, second = (loss_of(again(**packed(each)).logits) for each in (texts, others))
    again(**packed(samples(3)[:2]))
    del counted[2:]
    first.backward()
    second.backward()

    torch.testing.assert_close(gradient_of(again), gradient_of(model), rtol=1e-5, atol=1e-6)
    assert len(counted) == 2, "worked out again in the backward pass"


def test_a_row_is_forgotten_with_its_positions() -> None:
    before = len(packed_attention._rows())
    positions = torch.tensor([[0, 1, 0]])
    assert packed_attention.cached_row(positions) is packed_attention.cached_row(positions)
    assert len(packed_attention._rows()) == before + 1
    del positions
    gc.collect()
    assert len(packed_attention._rows()) == before


def test_the_bounds_of_a_row() -> None:
    row = packed_attention.row_from_positions(packed(samples(0))["position_ids"])
    assert row.cu_seq_lens.tolist() == [0, 5, 6, 15, 16, 17, 20]
    assert row.cu_seq_lens.dtype == torch.int32
    assert row.lengths == list(LENGTHS) and row.max_length == 9


@pytest.mark.parametrize(
    "positions",
    [
        [[0, 1, 2, 1, 1]],  # upstream's of a row with padding behind, and in front
        [[1, 1, 0, 1, 2]],
        [[0, 1], [0, 1]],
        [[3, 4, 5]],
    ],
)
def test_a_row_that_is_not_packed_is_refused(positions: list[list[int]]) -> None:
    model = model_of(FAMILIES["llama"], packed_attention.VARLEN)
    ids = torch.tensor(positions, dtype=torch.long)
    with pytest.raises(RuntimeError, match="LlamaAttention gives no packed row.*packing_samples"):
        model(torch.zeros_like(ids), position_ids=ids)


@pytest.mark.parametrize("what", ["softcap", "s_aux", "dropout"])
def test_what_the_kernel_has_not_is_refused(what: str) -> None:
    heads = torch.zeros(1, 2, 3, 8)
    positions = torch.arange(3)[None]
    with pytest.raises(
        RuntimeError, match=f"Module has {what}, which varlen attention does not support"
    ):
        packed_attention.attention(
            torch.nn.Module(), heads, heads, heads, None, position_ids=positions, **{what: 0.5}
        )


@pytest.mark.parametrize("window", [None, 4, 100])
def test_cudas_kernel_takes_our_arguments(window: int | None) -> None:
    """Its shapes and types, forward and backward; the values need a GPU."""
    row = packed_attention.row_from_positions(packed(samples(0))["position_ids"])
    row = row._replace(cu_seq_lens=row.cu_seq_lens.to("meta"))
    new: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    query = torch.empty(sum(LENGTHS), 4, 64, **new)
    key, value = (torch.empty(sum(LENGTHS), 2, 64, **new) for _ in range(2))
    output = packed_attention._attend_on_cuda(query, key, value, row, 0.1, window)
    assert output.shape == query.shape and output.dtype == query.dtype
    output.sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape
    with pytest.raises(RuntimeError, match="packed attention of torch.float32: bfloat16 or"):
        packed_attention._attend_on_cuda(query.float(), key, value, row, None, None)


def test_flash_attn_is_told_where_samples_begin() -> None:
    seen: list[dict[str, Any]] = []

    def record(*_arguments: Any, **kwargs: Any) -> None:
        seen.append(kwargs)

    flash_attention = packed_attention.with_cu_seqlens(record)
    query = torch.zeros(1, 2, 3, 8)
    flash_attention(None, query, query, query, None, position_ids=torch.tensor([[0, 0, 1]]))
    told = seen.pop()
    assert told["cu_seq_lens_q"] is told["cu_seq_lens_k"]
    assert told["cu_seq_lens_q"].tolist() == [0, 1, 3]
    assert told["max_length_q"] == told["max_length_k"] == 2
    assert told["position_ids"] is None, "else it works the bounds out all the same"

    left_alone = [
        (None, torch.tensor([[1, 0, 1]])),
        (torch.ones(1, 3), torch.tensor([[0, 0, 1]])),
        (None, None),
    ]
    for mask, positions in left_alone:
        flash_attention(None, query, query, query, mask, position_ids=positions)
        assert list(seen.pop()) == ["position_ids"]


ARGUMENTS = [
    "actor.model_name_or_path=m", "data.prompt_dataset=d", "reward.remote_url=r.py",
    "vllm.num_engines=1", "algo.advantage.estimator=reinforce",
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ([], "sdpa"),
        (["ds.packing_samples=true"], "varlen"),
        (["ds.packing_samples=true", "ds.attn_implementation=sdpa"], "varlen"),
        (["ds.attn_implementation=varlen"], "sdpa"),
        (["ds.attn_implementation=eager"], "eager"),
        (["ds.attn_implementation=flash_attention_2"], "flash_attention_2"),
        (
            ["ds.packing_samples=true", "ds.attn_implementation=flash_attention_2"],
            "flash_attention_2",
        ),
    ],
)
def test_the_attention_of_a_run(
    flags: list[str], attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = upstream_arguments(load_config(None, [*ARGUMENTS, *flags]))
    assert args.ds.attn_implementation == attention
    assert "flash_attention" not in capsys.readouterr().out, "upstream recommends it"


def test_flash_attn_that_is_asked_for_and_absent_is_refused_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cuda")
    check_platform(upstream_arguments(load_config(None, [*ARGUMENTS, "ds.packing_samples=true"])))
    asked = [*ARGUMENTS, "ds.packing_samples=true", "ds.attn_implementation=flash_attention_2"]
    if flash_attn_shim.installed():
        check_platform(upstream_arguments(load_config(None, asked)))
        return
    with pytest.raises(UnsupportedHere) as error:
        check_platform(upstream_arguments(load_config(None, asked)))
    assert str(error.value) == (
        "ds.attn_implementation=flash_attention_2: flash-attn is not installed; use varlen, "
        "torch's own kernel, or install flash-attn==2.8.3 (docs/dependencies.md)"
    )


UNDER_ZERO_3 = """
import sys
from sg_rlhf.overlay.patches import table as register
register.install()
import deepspeed, torch
from sg_rlhf.overlay.model.log_prob_head import PolicyModel
from openrlhf.utils.deepspeed.deepspeed_utils import get_train_ds_config
from sg_rlhf.overlay.model import packed_attention
from sg_rlhf.tiny import kk_tiny
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method="file://" + sys.argv[1],
                           rank=0, world_size=1)
original, seen = packed_attention.row_from_positions, []
packed_attention.row_from_positions = lambda position_ids: seen.append(1) or original(position_ids)
optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}}
config = get_train_ds_config(False, False, 3, zpg=1, optim_config=optimizer)
config["train_micro_batch_size_per_gpu"] = 1
actor = PolicyModel(kk_tiny.__path__[0], attn_implementation=packed_attention.VARLEN,
              packing_samples=True, ds_config=config)
actor.model = deepspeed.initialize(model=actor.model, config=config)[0]
actor.train()
tokens = torch.randint(10, 200, (3, 9))
mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 4 + [0] * 2, [1] + [0] * 8])
for reentrant in (False, True):
    actor.model.module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    log_probs = actor(tokens, mask[:, 1:], mask)
    with torch.no_grad():  # replaces the row before the first one is recomputed
        actor(tokens.flip(0), mask.flip(0)[:, 1:], mask.flip(0))
    actor.model.backward(log_probs.sum())
    actor.model.step()
    print(actor.model.module.config.num_hidden_layers, len(seen))
    seen.clear()
"""


@pytest.mark.full
def test_deepspeeds_engine_hands_the_same_positions_to_every_layer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", UNDER_ZERO_3, str(tmp_path / "rendezvous")],
        env={**os.environ, "SG_PLATFORM": "cpu", "LOCAL_RANK": "0"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["4 2", "4 2"], "layers, and once for each forward"
