"""The ranks' port: free, and none that the kernel gives to somebody else meanwhile."""

from __future__ import annotations

import socket

import pytest
from openrlhf.trainer.ray.launcher import BaseDistributedActor

from sg_rlhf.overlay import ports


def test_it_is_free_and_below_the_kernels_range() -> None:
    first = int(ports.RANGE.read_text().split()[0])
    chosen = {ports.free_port() for _ in range(20)}
    assert len(chosen) > 10 and all(ports.FIRST <= port < first for port in chosen)
    with socket.socket() as sock:
        sock.bind(("", chosen.pop()))


def test_upstreams_actors_use_it() -> None:
    actor = BaseDistributedActor.__new__(BaseDistributedActor)
    assert ports.FIRST <= actor._get_free_port() < int(ports.RANGE.read_text().split()[0])


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", ports.free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", port)
        assert ports.free_port(first_of_kernel=port + 1) != port


def test_a_kernel_that_hands_out_all_of_them() -> None:
    assert ports.free_port(first_of_kernel=1024) > 0
