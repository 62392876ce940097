"""How weights lie in the buckets of a weight sync, and the sums that tell a damaged bucket.

A bucket is one flat buffer of int64 words: the tensors' bytes, each from a multiple of
:data:`ALIGNMENT` on, zeros up to a whole row of :data:`ROW` words, then the sums of every row and
of every column of that table of words, mod 2**64. The receiver forms the sums of what arrived and
compares. Integer sums do not depend on their order, so every device finds the same.

One changed word changes its row's sum, two exchanged words the sums of two rows or of two columns:
no change of up to three words, of whatever size, stays unseen, as a change that leaves all sums as
they were has two changed words or none in each row and column, four at least. The rows whose sums
differ say which tensors to name. Two sums over memory cost less than one of multiplied words, and
the sums themselves 1/1024 of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 16  #: bytes; no type of number is larger, and words are eight
ROW = 1024  #: words
WORD = 8  #: bytes


class Tensor(NamedTuple):
    """One tensor of the policy: its name in the checkpoint's form, its type and full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSlot(NamedTuple):
    """A tensor's place in a bucket: its first byte."""

    tensor: Tensor
    start: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.start + self.tensor.nbytes


class Bucket(NamedTuple):
    """The tensors of one message."""

    slots: tuple[TensorSlot, ...]

    @property
    def rows(self) -> int:
        """Rows of words that hold the tensors."""
        return math.ceil(self.slots[-1].end / (ROW * WORD))

    @property
    def words(self) -> int:
        """Words of the whole buffer, its sums included."""
        return self.rows * ROW + self.rows + ROW


def split(tensors: Iterable[Tensor], most_bytes: int) -> list[Bucket]:
    """The tensors in buckets, in their order: a layer's stay together, as engines load them.

    Args:
        most_bytes: of a bucket's tensors; a larger tensor has a bucket of its own.

    Returns:
        As many as needed; none for no tensors.
    """
    buckets: list[Bucket] = []
    slots: list[TensorSlot] = []
    for tensor in tensors:
        start = _aligned(slots[-1].end) if slots else 0
        if slots and start + tensor.nbytes > most_bytes:
            buckets.append(Bucket(tuple(slots)))
            slots, start = [], 0
        slots.append(TensorSlot(tensor, start))
    return [*buckets, Bucket(tuple(slots))] if slots else buckets


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def pack(bucket: Bucket, tensors: Iterable[torch.Tensor], buffer: torch.Tensor) -> None:
    """Write the tensors and their sums into a buffer.

    Args:
        tensors: of the bucket's slots, in order, with their shapes and types, on any device.
        buffer: int64, ``bucket.words`` of them; whatever is in it is written over.
    """
    data = buffer[: bucket.rows * ROW].view(torch.uint8)
    end = 0
    for slot, tensor in zip(bucket.slots, tensors, strict=True):
        found = Tensor(slot.tensor.name, tensor.dtype, tuple(tensor.shape))
        if found != slot.tensor:
            raise ValueError(f"expected {slot.tensor}, found {found}")
        data[end : slot.start].zero_()
        data[slot.start : slot.end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        end = slot.end
    data[end:].zero_()
    buffer[bucket.rows * ROW : bucket.words] = _sums(bucket, buffer)


def unpack(bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors in a buffer, as views of it."""
    data = buffer.view(torch.uint8)
    return [
        (tensor.name, data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        for tensor, start in bucket.slots
    ]


def corrupted_tensors(bucket: Bucket, buffer: torch.Tensor) -> list[str] | None:
    """What a buffer's sums say.

    Returns:
        None if the buffer is as it was packed; else the names of the tensors in the rows whose sum
        is another, or all names where only sums of columns are: words exchanged within a row.
    """
    sums = buffer[bucket.rows * ROW : bucket.words]
    unlike = _sums(bucket, buffer) != sums
    if not bool(unlike.any()):
        return None
    rows = unlike[: bucket.rows].nonzero().flatten().tolist() or range(bucket.rows)
    return [
        slot.tensor.name
        for slot in bucket.slots
        if any(slot.start < (row + 1) * ROW * WORD and row * ROW * WORD < slot.end for row in rows)
    ]


def _sums(bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
    table = buffer[: bucket.rows * ROW].view(bucket.rows, ROW)
    return torch.cat([table.sum(1), table.sum(0)])


def metadata(bucket: Bucket) -> list[tuple[str, str, tuple[int, ...], int]]:
    """A bucket as plain values: name, type, shape and first byte of each tensor."""
    return [
        (tensor.name, str(tensor.dtype).removeprefix("torch."), tensor.shape, start)
        for tensor, start in bucket.slots
    ]


def from_wire(values: Iterable[Sequence[object]]) -> Bucket:
    """The bucket of :func:`to_wire`."""
    slots = []
    for name, dtype, shape, start in values:
        assert isinstance(name, str) and isinstance(dtype, str) and isinstance(start, int)
        assert isinstance(shape, (tuple, list))
        slots.append(TensorSlot(Tensor(name, getattr(torch, dtype), tuple(shape)), start))
    return Bucket(tuple(slots))
