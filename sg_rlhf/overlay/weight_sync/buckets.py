"""The layout of a weight sync's buckets, and their checksum.

A bucket is one flat buffer of int64 words. It has the bytes of its tensors, each at a multiple of
:data:`ALIGNMENT`, with zeros in between. Its last word is the sum of all words before, mod 2**64,
which does not depend on their order, so every device computes the same. It does not show exchanged
words, or changes that cancel; the log-prob check (:mod:`.log_prob_check`) does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 16  #: bytes; at least the size of any dtype, and a multiple of a word
WORD = 8  #: bytes


class TensorSpec(NamedTuple):
    """Name in the checkpoint, dtype and full shape of one tensor of the policy."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSlot(NamedTuple):
    """A tensor and the offset of its first byte in a bucket."""

    tensor: TensorSpec
    start: int

    @property
    def end(self) -> int:
        """Offset of the byte after its last."""
        return self.start + self.tensor.nbytes


class Bucket(NamedTuple):
    """The tensors that are sent in one message."""

    slots: tuple[TensorSlot, ...]

    @property
    def data_words(self) -> int:
        """Words that hold the tensors."""
        return math.ceil(self.slots[-1].end / WORD)

    @property
    def words(self) -> int:
        """Words of the whole buffer, with the checksum."""
        return self.data_words + 1


def split(tensors: Iterable[TensorSpec], max_bytes: int) -> list[Bucket]:
    """Distribute tensors over buckets, in their order, so that a layer's tensors stay together."""
    buckets: list[Bucket] = []
    slots: list[TensorSlot] = []
    for tensor in tensors:
        start = _aligned(slots[-1].end) if slots else 0
        if slots and start + tensor.nbytes > max_bytes:
            buckets.append(Bucket(tuple(slots)))
            slots, start = [], 0
        slots.append(TensorSlot(tensor, start))
    return [*buckets, Bucket(tuple(slots))] if slots else buckets


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def pack(bucket: Bucket, tensors: Iterable[torch.Tensor], buffer: torch.Tensor) -> None:
    """Write tensors and their checksum into an int64 buffer; ValueError for another shape."""
    data = buffer[: bucket.data_words].view(torch.uint8)
    end = 0
    for slot, tensor in zip(bucket.slots, tensors, strict=True):
        actual = TensorSpec(slot.tensor.name, tensor.dtype, tuple(tensor.shape))
        if actual != slot.tensor:
            raise ValueError(f"expected {slot.tensor}, found {actual}")
        data[end : slot.start].zero_()
        data[slot.start : slot.end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        end = slot.end
    data[end:].zero_()
    buffer[bucket.data_words] = buffer[: bucket.data_words].sum()


def unpack(bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of each slot, as views of the buffer."""
    data = buffer.view(torch.uint8)
    return [
        (tensor.name, data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        for tensor, start in bucket.slots
    ]


def is_intact(bucket: Bucket, buffer: torch.Tensor) -> bool:
    """Whether the checksum of a buffer is that of its words; waits for the device."""
    return bool(buffer[: bucket.data_words].sum() == buffer[bucket.data_words])


def metadata(bucket: Bucket) -> list[tuple[str, str, tuple[int, ...], int]]:
    """A bucket as plain values: name, dtype, shape and offset of each tensor."""
    return [
        (tensor.name, str(tensor.dtype).removeprefix("torch."), tensor.shape, start)
        for tensor, start in bucket.slots
    ]


def from_metadata(values: Iterable[Sequence[object]]) -> Bucket:
    """The bucket of :func:`metadata`."""
    slots = []
    for name, dtype, shape, start in values:
        assert isinstance(name, str) and isinstance(dtype, str) and isinstance(start, int)
        assert isinstance(shape, (tuple, list))
        slots.append(TensorSlot(TensorSpec(name, getattr(torch, dtype), tuple(shape)), start))
    return Bucket(tuple(slots))
