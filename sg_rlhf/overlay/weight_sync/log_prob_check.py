"""After a weight sync: does what samples give a token the probability that what learns gives it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from sg_rlhf.overlay.reporting.errors import SyncError
from sg_rlhf.overlay.rollout.dispatch import Engines, is_engine_failure

#: Sequences whose log-probs are compared. bf16 moves one token in hundreds by up to 1, so that a
#: few short responses would pass or fail by such a token.
CHECKED_SEQUENCES = 16
#: Token ids of a sequence, and of each token but the first whether it is of a response.
CheckBatch = Sequence[tuple[list[int], list[bool]]]


def check(
    policy: Any, engines: Engines, probe: CheckBatch, args: Any, sync: int
) -> dict[str, float]:
    """Compare the log-probs of trainer and engines, who compute them side by side.

    Args:
        policy: upstream's group of its ranks.
        engines: of the run; one that is lost meanwhile is replaced and asked again.
        probe: what they are asked.
        args: upstream's nested namespace with ``sg``.
        sync: its number, for the message.

    Returns:
        ``sync/log_prob_diff_mean`` and ``_max`` over the tokens of all responses and engines.

    Raises:
        SyncError: they differ by more than ``sg.sync_check_tolerance`` on average.
        EngineLost: an engine is lost and cannot be replaced.
    """
    sequences = [ids for ids, _ in probe]
    of_ranks = policy.async_run_method(method_name="prompt_log_probs", sequences=sequences)
    sleeps = args.vllm.enable_sleep
    if sleeps:
        # The engines' weights are awake. Their cache takes what the trainer needed until now.
        ray.get(of_ranks)
        batch_vllm_engine_call(engines.handles, "wake_up", tags=["kv_cache"])
    of_engines = _of_engines(engines, sequences)
    trainer = ray.get(of_ranks)[0]
    differences = []
    for found in of_engines:
        for ours, theirs, (_, is_response) in zip(trainer, found, probe, strict=True):
            difference = (torch.tensor(ours) - torch.tensor(theirs)).abs()
            differences.append(difference[torch.tensor(is_response)])
    if sleeps:
        batch_vllm_engine_call(engines.handles, "sleep")
    all_differences = torch.cat(differences)
    mean, largest = float(all_differences.mean()), float(all_differences.max())
    tolerance = args.sg.sync_check_tolerance
    if not mean <= tolerance:
        raise SyncError(
            f"after weight sync {sync} the rollout engine's log-probs differ from the trainer's by "
            f"{mean:.4f} on average (largest {largest:.4f}, tolerance "
            f"sg.sync_check_tolerance={tolerance}): the policy that samples is not the policy that "
            "learns, or bf16 rounds this model more coarsely than that (a high learning rate): "
            "then raise the tolerance"
        )
    return {"sync/log_prob_diff_mean": mean, "sync/log_prob_diff_max": largest}


def _of_engines(engines: Engines, sequences: list[list[int]]) -> list[list[list[float]]]:
    """What each engine answers, in their order."""
    found: dict[int, list[list[float]]] = {}
    while len(found) < len(engines.handles):
        names = [incarnation.name for incarnation in engines.incarnations]
        asked = {
            number: [engine.prompt_log_probs.remote(ids) for ids in sequences]
            for number, engine in enumerate(engines.handles)
            if number not in found
        }
        lost = []
        for number, references in asked.items():
            try:
                found[number] = ray.get(references)
            except Exception as error:
                if not is_engine_failure(error):
                    raise
                lost.append(number)
        for number in lost:  # which gives it the policy's weights, and the others again
            engines.replace(number, names[number])
    return [found[number] for number in sorted(found)]
