"""The layout of a weight sync's buckets, and what their checksum shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sg_rlhf.overlay.weight_sync import buckets as wb

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
