"""The buckets of a weight sync and their tensors, and the check of log-probs after it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from sg_rlhf.config import load_config
from sg_rlhf.overlay.model.log_prob_head import PolicyModel
from sg_rlhf.overlay.reporting.errors import SyncError
from sg_rlhf.overlay.weight_sync import buckets as wb
from sg_rlhf.overlay.weight_sync.log_prob_check import (
    MISMATCH,
    check_samples,
    warn_of_mismatch,
)
from sg_rlhf.overlay.weight_sync.tensors import engine_tensors
from tests.unit.overlay.model.test_log_prob_head import VOCABULARY, actor_of, model_folder

# -- The buckets of a weight sync and their tensors ----------------------------------------------


# -- The layout of a weight sync's buckets, and what their checksum shows ------------------------


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8]
SHAPES = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=12).map(
    lambda found: [wb.TensorSpec(f"t{i}", *each) for i, each in enumerate(found)]
)


def numbers(tensor: wb.TensorSpec, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * 50).to(tensor.dtype)


def packed(tensors: list[wb.TensorSpec]) -> tuple[wb.Bucket, torch.Tensor]:
    (bucket,) = wb.split(tensors, 2**40)
    buffer = torch.full((bucket.words,), -1)  # whatever was there
    wb.pack(bucket, [numbers(t, i) for i, t in enumerate(tensors)], buffer)
    return bucket, buffer


@settings(deadline=None)
@given(TENSORS, st.integers(1, 200_000))
def test_every_tensor_arrives_once_and_in_order(tensors: list[wb.TensorSpec], most: int) -> None:
    sent = {t.name: numbers(t, i) for i, t in enumerate(tensors)}
    found = []
    for bucket in wb.split(tensors, most):
        assert bucket.slots[-1].end <= most or len(bucket.slots) == 1
        for one, other in zip(bucket.slots, bucket.slots[1:], strict=False):
            assert one.end <= other.start < one.end + wb.ALIGNMENT
        assert all(slot.start % wb.ALIGNMENT == 0 for slot in bucket.slots)
        buffer = torch.full((bucket.words,), 7)
        wb.pack(bucket, [sent[slot.tensor.name] for slot in bucket.slots], buffer)
        arrived = wb.from_metadata(wb.metadata(bucket))
        assert arrived == bucket
        assert wb.is_intact(arrived, buffer)
        found += wb.unpack(arrived, buffer)
    assert [name for name, _ in found] == list(sent)
    assert all(torch.equal(tensor, sent[name]) for name, tensor in found)


def test_tensors_are_packed_from_any_layout_in_memory() -> None:
    tensor = wb.TensorSpec("turned", torch.float32, (3, 5))
    (bucket,) = wb.split([tensor], 2**20)
    buffer = torch.empty(bucket.words, dtype=torch.int64)
    turned = numbers(wb.TensorSpec("", torch.float32, (5, 3))).t()
    wb.pack(bucket, [turned], buffer)
    assert torch.equal(wb.unpack(bucket, buffer)[0][1], turned)


def test_no_tensors_need_no_bucket() -> None:
    assert wb.split([], 2**20) == []


def test_a_tensor_of_another_shape_than_planned_is_refused() -> None:
    (bucket,) = wb.split([wb.TensorSpec("w", torch.float32, (2, 3))], 2**20)
    with pytest.raises(ValueError, match=r"expected TensorSpec\(name='w'"):
        wb.pack(bucket, [torch.zeros(3, 2)], torch.empty(bucket.words, dtype=torch.int64))


THREE = [wb.TensorSpec(name, torch.bfloat16, (100, 100)) for name in "abc"]


@given(st.integers(0, 3 * 20_000 - 1), st.integers(0, 7))
@settings(deadline=None, max_examples=200)
def test_a_flipped_bit_is_noticed(byte: int, bit: int) -> None:
    bucket, buffer = packed(THREE)
    assert wb.is_intact(bucket, buffer)
    buffer.view(torch.uint8)[byte] ^= 1 << bit
    assert not wb.is_intact(bucket, buffer)


def test_a_damaged_checksum_is_noticed_too() -> None:
    bucket, buffer = packed(THREE)
    buffer[-1] += 1
    assert not wb.is_intact(bucket, buffer)


# -- What a weight sync sends: a checkpoint's names, adapters merged into their layers -----------


def plain_state(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def test_a_plain_model_as_it_is(tmp_path: Path) -> None:
    model = actor_of(model_folder(tmp_path, "qwen2")).model
    found = engine_tensors(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert all(found[name].materialize() is not None for name in found)
    assert all(
        torch.equal(found[name].materialize(), data) for name, data in plain_state(model).items()
    )


def test_frozen_parameters_are_left_out_where_asked(tmp_path: Path) -> None:
    model = actor_of(model_folder(tmp_path, "qwen2")).model
    model.model.embed_tokens.weight.requires_grad_(False)
    assert "model.embed_tokens.weight" in engine_tensors(model)
    assert "model.embed_tokens.weight" not in engine_tensors(model, without_frozen=True)


@pytest.mark.parametrize("size", [16, 24], ids=["square stacks", "other stacks"])
def test_experts_are_sent_as_a_checkpoint_has_them(tmp_path: Path, size: int) -> None:
    """transformers 5 stacks them while it loads a checkpoint."""
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size}
    model = actor_of(model_folder(tmp_path / "start", "qwen3_moe", **more)).model
    sources = engine_tensors(model)
    for number in range(2):
        for parameter in model.parameters():
            parameter.data += 1.0
        sent = {name: source.materialize() for name, source in sources.items()}
        assert all(source.shape == sent[name].shape for name, source in sources.items())
        model.save_pretrained(tmp_path / str(number))
        saved = load_file(tmp_path / str(number) / "model.safetensors")
        assert sent.keys() == saved.keys()
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in sent
        assert all(torch.equal(sent[name], saved[name]) for name in sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "embed_tokens"]])
def test_adapters_are_merged_as_peft_merges_them(
    tmp_path: Path, dtype: torch.dtype, targets: Any
) -> None:
    folder = model_folder(tmp_path, "qwen2", attention_bias=True)
    actor = actor_of(folder, lora_rank=4, lora_alpha=8, target_modules=targets)
    model = actor.model.to(dtype)
    adapters = [m for m in model.modules() if isinstance(m, LoraLayer)]
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # B is zero at the start: nothing to merge
            torch.nn.init.normal_(parameter, std=0.3)
    sources = engine_tensors(model)
    merged = {name: source.materialize().clone() for name, source in sources.items()}
    before = {name: source.parameters[0].clone() for name, source in sources.items()}
    assert all(source.parameters[0].shape == merged[n].shape for n, source in sources.items())
    expected = plain_state(model.merge_and_unload())
    assert list(merged) == list(expected)
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    changed = [name for name in merged if not torch.equal(merged[name], before[name])]
    assert len(changed) == len(adapters) > 0
    assert all(source.parameters for source in sources.values())


# -- The log-prob checks: the trainer's log-probs of fixed sequences, and those of a rollout -----


LENGTHS = (3, 12, 7, 2, 12)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_sequences_of_all_lengths_have_the_models_own_log_probs_at_temperature_1(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_rank: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    folder = model_folder(tmp_path, "qwen2", tie_word_embeddings=True)
    rank = policy_rank
    rank.actor = PolicyModel(folder, attn_implementation="sdpa", temperature=0.7).float()
    rank.strategy = SimpleNamespace(
        args=SimpleNamespace(rollout=SimpleNamespace(micro_batch_size=size)), ring_attn_group=None
    )
    sequences = [torch.randint(0, VOCABULARY, (n,)).tolist() for n in LENGTHS]
    released = []
    rank.actor.model.empty_partition_cache = lambda: released.append(True)
    found = rank.prompt_log_probs(sequences)
    assert released, "under ZeRO-3 the parameters would stay gathered"
    for tokens, log_probs in zip(sequences, found, strict=True):
        ids = torch.tensor([tokens])
        expected = torch.log_softmax(rank.actor.model(ids).logits[0, :-1].float(), dim=-1)
        expected = expected.gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-5)
    assert rank.actor.temperature == 0.7 and rank.actor.training


def arguments(
    correction: str = "off", asynchronous: bool = False, staleness: int = 1
) -> SimpleNamespace:
    """Upstream's arguments of a run with the default tolerance."""
    tolerance = load_config(None, []).sg.sync_check_tolerance
    return SimpleNamespace(
        sg=SimpleNamespace(sync_check_tolerance=tolerance, max_staleness=staleness),
        train=SimpleNamespace(async_enable=asynchronous),
        algo=SimpleNamespace(advantage=SimpleNamespace(is_correction_level=correction)),
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_samples_from_other_weights_stop_the_run(asynchronous: bool) -> None:
    """Also the first rollout: no sync precedes it. Zeroed weights differed by 0.25."""
    args = arguments(asynchronous=asynchronous, staleness=0)
    with pytest.raises(SyncError, match=r"before optimizer step 1 .* by 0.2500 on av") as raised:
        check_samples(0.25, args, step=1)
    assert "\n" not in str(raised.value) and "nothing was trained" in str(raised.value)


@pytest.mark.parametrize("mean", [0.0135, math.nan], ids=["random 0.5B in bf16 on an H100", "NaN"])
def test_rounding_does_not_stop_a_run(mean: float) -> None:
    check_samples(mean, arguments(), step=1)


@pytest.mark.parametrize(
    "args",
    [arguments(asynchronous=True), arguments(correction="token")],
    ids=["older weights", "correction"],
)
def test_policies_that_differ_by_intent_have_an_absolute_limit(args: SimpleNamespace) -> None:
    check_samples(0.9, args, step=1)
    with pytest.raises(SyncError, match=r"by 1.2000 on average"):
        check_samples(1.2, args, step=1)


@pytest.mark.parametrize(
    ("args", "metrics", "warns"),
    [
        (arguments(), {MISMATCH: 0.1}, True),
        (arguments(correction="token"), {MISMATCH: 0.25}, True),
        (arguments(), {MISMATCH: 0.0135}, False),
        (arguments(), {}, False),
        (arguments(asynchronous=True), {MISMATCH: 0.25}, False),
    ],
)
def test_a_small_mismatch_gets_a_warning(
    args: SimpleNamespace, metrics: dict[str, float], warns: bool, capsys: Any
) -> None:
    warn_of_mismatch(metrics, args, rollout=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("warning: in rollout 3 ") for line in lines] == [True] * warns
