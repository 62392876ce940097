"""The controller's part of a weight sync: deadlines, restarted engines, and the log-prob check."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import ray
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from ray.actor import ActorHandle

from sg_rlhf.overlay.reporting.errors import SyncError
from sg_rlhf.overlay.rollout.engine_pool import START_TIMEOUT, EnginePool
from sg_rlhf.overlay.weight_sync import log_prob_check, sender


class EngineSync:
    """Sends the policy's weights to the engines of a run."""

    def __init__(
        self, args: Namespace, policy: RayActorGroup, handles: Sequence[ActorHandle]
    ) -> None:
        self._args, self._policy = args, policy
        self._deadline = math.inf
        if handles:  # asked before any sync: a rank runs its calls in order
            deadlines = policy.async_run_method(method_name="sync_deadline")
            self._deadline = sender.GRACE_SECONDS + max(ray.get(deadlines))
        self.version = 0
        self.pool = EnginePool(handles, args.sg.engine_restarts, self._rejoin)

    def send(self) -> None:
        """Send the weights; the engines' KV cache stays asleep. Raises EngineLost, SyncError."""
        self.pool.check()
        if self._args.vllm.enable_sleep:
            woken = [engine.wake_up.remote(tags=["weights"]) for engine in self.pool.handles]
            self._wait(woken, "an engine did not wake up for it")
        self._broadcast()

    def sequences_to_check(self) -> int:
        """How many sequences the latest sync is checked with: most after the first rollout.

        A few check the others, where the samples do not show other weights.
        """
        if self.version == 1:
            return log_prob_check.CHECKED_SEQUENCES
        return log_prob_check.PROBE_SEQUENCES if log_prob_check.is_stale(self._args) else 0

    def check(self, batch: log_prob_check.CheckBatch, sequences: int) -> dict[str, float]:
        """Compare log-probs of engines and trainer; metrics ``sync/...``."""
        is_probe = sequences < log_prob_check.CHECKED_SEQUENCES
        return log_prob_check.check(
            self._policy,
            self.pool,
            batch[:: max(1, len(batch) // sequences)][:sequences] if is_probe else batch,
            self._args,
            self.version,
            log_prob_check.STOP_AT if is_probe else 1.0,
        )

    def _rejoin(self) -> None:
        """Rebuild the weight-sync group after a restart, and send the weights to all engines."""
        joined = self._policy.async_run_method(method_name="join_engines")
        self._wait(joined, "the engines were not connected to the trainer again", START_TIMEOUT)
        self._broadcast()

    def _broadcast(self) -> None:
        is_async, partial = (
            self._args.train.async_enable,
            self._args.train.partial_rollout_enable,
        )
        if partial:
            batch_vllm_engine_call(self.pool.handles, "pause_generation")
        sent = self._policy.async_run_method(method_name="broadcast_to_vllm")
        self._wait(sent, "a rank of the policy did not finish it")
        if is_async:
            batch_vllm_engine_call(self.pool.handles, "set_weight_version", self.version)
        if partial:
            batch_vllm_engine_call(self.pool.handles, "resume_generation")

    def _wait(self, references: list[Any], failure: str, timeout: float = math.inf) -> None:
        seconds = min(self._deadline, timeout)
        try:
            ray.get(references, timeout=None if seconds == math.inf else seconds)
        except ray.exceptions.GetTimeoutError:
            raise SyncError(f"weight sync: {failure} within {seconds:g} s (logs/)") from None
