"""What benchmarks measure with: bytes by allocation, and the exponent of growth."""

from __future__ import annotations

import pytest
import torch

from bench.common import exponent, peak_bytes

MIB = 2**20


def tensor(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_bytes_at_one_time_and_not_in_all() -> None:
    def one_after_the_other() -> None:
        for mib in (3, 2, 1):
            tensor(mib)

    def together() -> None:
        first = tensor(3)
        second = tensor(2)
        del first
        third = tensor(1)
        del second, third

    assert peak_bytes(one_after_the_other) == pytest.approx(3 * MIB, rel=0.01)
    assert peak_bytes(together) == pytest.approx(5 * MIB, rel=0.01)


def test_what_was_there_before_does_not_count() -> None:
    before = tensor(8)
    assert peak_bytes(lambda: before.add_(1)) < MIB


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power(power: float) -> None:
    sizes = [1, 10, 20, 80]
    seconds = [5.0, *(0.3 * size**power for size in sizes[1:])]  # the smallest is not looked at
    assert exponent(sizes, seconds) == pytest.approx(power)
