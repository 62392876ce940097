"""The ranks' port: free, and none that the kernel gives to somebody else meanwhile."""

from __future__ import annotations

import inspect
import socket
from types import SimpleNamespace
from typing import Any

import openrlhf.trainer.ray.ppo_actor as upstream
import pytest
import ray
import torch
from openrlhf.trainer.ray.launcher import BaseDistributedActor

from sg_rlhf.overlay.learner.update import SGActorPPOTrainer
from sg_rlhf.overlay.patches import free_port as ports
from sg_rlhf.overlay.rollout.engine import SGRolloutActor


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


def test_the_weight_sync_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    signature = inspect.signature(SGRolloutActor.init_process_group)

    def remote(*given: Any, **named: Any) -> None:
        told.append(signature.bind(None, *given, **named).args[1:])

    join = SimpleNamespace(remote=remote)
    trainer: Any = SGActorPPOTrainer.__new__(SGActorPPOTrainer)
    vllm = SimpleNamespace(num_engines=2, tensor_parallel_size=2, sync_with_ray=False)
    trainer.strategy = SimpleNamespace(args=SimpleNamespace(vllm=vllm))
    trainer.vllm_engines = [SimpleNamespace(init_process_group=join)] * 2
    monkeypatch.setattr(ray, "get", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(upstream, "stateless_init_process_group", lambda *given: given)
    trainer._init_vllm_sync_group("nccl")
    address, port, rank, size, _ = trainer._model_update_group
    assert (rank, size) == (0, 5)
    assert ports.FIRST <= port < int(ports.RANGE.read_text().split()[0])
    assert told == [(address, port, first, 5, "openrlhf", "nccl", False) for first in (1, 3)]
