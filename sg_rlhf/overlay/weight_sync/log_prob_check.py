"""The log-prob checks of a rollout and of a weight sync: engines and trainer must agree.

A weight that was not updated, or was loaded in a wrong layout, changes the engine's log-probs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting.errors import SyncError
from sg_rlhf.overlay.rollout.engine_pool import EnginePool, is_engine_failure

#: Sequences whose log-probs are compared. In bf16 one token in hundreds moves by up to 1: with a
#: few short responses such a token alone would decide the check.
CHECKED_SEQUENCES = 16
#: Per sequence: its token ids, and for each token but the first whether it is a response token.
CheckBatch = Sequence[tuple[list[int], list[bool]]]
#: Metric of a rollout: mean of abs(trainer's - engine's log-prob) of its tokens.
MISMATCH = "sg/mismatch_abs_mean"
#: Sequences of the check after each sync of a run whose samples show nothing (:func:`is_stale`).
PROBE_SEQUENCES = 2
#: A rollout's mismatch stops the run from this many tolerances on. Rounding may grow over a long
#: run and only warns; engines with other weights were 5 tolerances off (zeroed ones, tiny model).
STOP_AT = 4
#: A mean mismatch in nats that stops every run: neither rounding nor a few updates give as much.
ABSOLUTE_LIMIT = 1.0


def is_stale(args: Namespace) -> bool:
    """Whether a run trains on samples of older weights."""
    return bool(args.train.async_enable and args.sg.max_staleness > 0)


def check(
    policy: RayActorGroup,
    engines: EnginePool,
    batch: CheckBatch,
    args: Namespace,
    sync: int,
    tolerances: float = 1.0,
) -> dict[str, float]:
    """Compare the log-probs of trainer and engines, which compute at the same time.

    Returns mean and maximum (``sync/log_prob_diff_mean``, ``..._max``) of abs(trainer's - engine's
    log-prob) over the response tokens of all engines, in nats. Raises SyncError if the mean is
    above ``tolerances`` times ``sg.sync_check_tolerance``, or EngineLost.
    """
    sequences = [ids for ids, _ in batch]
    trainer_refs = policy.async_run_method(method_name="prompt_log_probs", sequences=sequences)
    sleeps = args.vllm.enable_sleep
    if sleeps:
        # The engines' weights are awake. Their cache takes the memory that the trainer used.
        ray.get(trainer_refs)
        batch_vllm_engine_call(engines.handles, "wake_up", tags=["kv_cache"])
    per_engine = _engine_log_probs(engines, sequences)
    trainer_log_probs = ray.get(trainer_refs)[0]
    differences = []
    for engine_log_probs in per_engine:
        for ours, theirs, (_, is_response) in zip(
            trainer_log_probs, engine_log_probs, batch, strict=True
        ):
            difference = (torch.tensor(ours) - torch.tensor(theirs)).abs()
            differences.append(difference[torch.tensor(is_response)])
    if sleeps:
        batch_vllm_engine_call(engines.handles, "sleep")
    all_differences = torch.cat(differences)
    mean, largest = float(all_differences.mean()), float(all_differences.max())
    tolerance = args.sg.sync_check_tolerance
    if not mean <= tolerances * tolerance:
        raise SyncError(
            f"after weight sync {sync} the rollout engine's log-probs differ from the trainer's by "
            f"{mean:.4f} on average (largest {largest:.4f}, tolerance "
            f"sg.sync_check_tolerance={tolerance}): the engine has other weights than the "
            "trainer, or bf16 rounds this model that coarsely (a high learning rate); in the "
            "latter case raise the tolerance"
        )
    return {"sync/log_prob_diff_mean": mean, "sync/log_prob_diff_max": largest}


def stop_limit(args: Namespace) -> float:
    """The mean mismatch of samples, in nats, that stops a run.

    Samples of older weights (``sg.max_staleness``) and a correction
    (``algo.advantage.is_correction_level``) expect a mismatch: there it is :data:`ABSOLUTE_LIMIT`.
    """
    if is_stale(args) or args.algo.advantage.is_correction_level != "off":
        return ABSOLUTE_LIMIT
    return min(ABSOLUTE_LIMIT, STOP_AT * float(args.sg.sync_check_tolerance))


def check_samples(mean: float, args: Namespace, step: int) -> None:
    """Compare the log-probs that the engine sampled by with the trainer's, before an update.

    Finds weights that a sleep damages, or that an engine has at the start of a run. Raises
    SyncError for a mean above :func:`stop_limit`. A NaN passes (``sg.on_nonfinite``).
    """
    limit = stop_limit(args)
    if mean > limit:
        raise SyncError(
            f"before optimizer step {step} the rollout engine's log-probs of its samples differ "
            f"from the trainer's by {mean:.4f} on average (limit {limit:.4g}, tolerance "
            f"sg.sync_check_tolerance={args.sg.sync_check_tolerance}): the engine has other "
            "weights than the trainer; nothing was trained on them; if rounding is that coarse, "
            "raise the tolerance"
        )


def warn_of_mismatch(metrics: Mapping[str, Any], args: Namespace, rollout: int) -> None:
    """Warn of a mismatch above ``sg.sync_check_tolerance``, unless older weights explain it."""
    mean, tolerance = metrics.get(MISMATCH, 0.0), args.sg.sync_check_tolerance
    if mean > tolerance and not is_stale(args):
        message = (
            f"warning: in rollout {rollout} the rollout engine's log-probs differ from the "
            f"trainer's by {mean:.4f} on average ({MISMATCH}, tolerance "
            f"sg.sync_check_tolerance={tolerance}): the engine has other weights than the trainer, "
            "or rounding is that coarse"
        )
        activity.show_message(activity.CONTROLLER, message)


def _engine_log_probs(engines: EnginePool, sequences: list[list[int]]) -> list[list[list[float]]]:
    """Per engine, in their order: the log-probs of each sequence."""
    results: dict[int, list[list[float]]] = {}
    while len(results) < len(engines.handles):
        names = [instance.name for instance in engines.instances]
        pending = {
            index: [engine.prompt_log_probs.remote(ids) for ids in sequences]
            for index, engine in enumerate(engines.handles)
            if index not in results
        }
        lost = []
        for index, references in pending.items():
            try:
                results[index] = ray.get(references)
            except Exception as error:
                if not is_engine_failure(error):
                    raise
                lost.append(index)
        for index in lost:
            # Gives the new engine the policy's weights; the loop requests its log-probs again.
            engines.replace(index, names[index])
    return [results[index] for index in sorted(results)]
