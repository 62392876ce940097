"""The log-prob checks of a rollout and of a weight sync: engines and trainer must agree.

Both compute the log-probs of the same sequences with the weights they have now. A weight that was
not updated, or that was loaded in a wrong layout, changes the engine's log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
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
#: A rollout's mismatch stops the run from this many tolerances on. Rounding may grow over a long
#: run and only warns; engines with other weights were 5 tolerances off (zeroed ones, tiny model).
STOP_AT = 4


def check(
    policy: Any, engines: EnginePool, batch: CheckBatch, args: Any, sync: int
) -> dict[str, float]:
    """Compare the log-probs of trainer and engines; they compute them at the same time.

    Args:
        policy: upstream's actor group of the policy's ranks.
        engines: the run's engines; one that is lost meanwhile is replaced, and its log-probs are
            requested again.
        batch: the sequences to compare.
        args: upstream's nested namespace with ``sg``.
        sync: number of the weight sync, for the message.

    Returns:
        ``sync/log_prob_diff_mean`` and ``sync/log_prob_diff_max``: mean and maximum of
        abs(trainer's - engine's log-prob) over the response tokens of all engines, in nats.

    Raises:
        SyncError: the mean is above ``sg.sync_check_tolerance``.
        EngineLost: an engine is lost and cannot be replaced.
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
    if not mean <= tolerance:
        raise SyncError(
            f"after weight sync {sync} the rollout engine's log-probs differ from the trainer's by "
            f"{mean:.4f} on average (largest {largest:.4f}, tolerance "
            f"sg.sync_check_tolerance={tolerance}): the engine has other weights than the "
            "trainer, or bf16 rounds this model that coarsely (a high learning rate); in the "
            "latter case raise the tolerance"
        )
    return {"sync/log_prob_diff_mean": mean, "sync/log_prob_diff_max": largest}


def check_rollout(metrics: Mapping[str, Any], args: Any, rollout: int) -> None:
    """Compare the log-probs that the engine sampled a rollout by with the trainer's.

    :func:`check` runs before the engine sleeps, and after some syncs only. Weights that a sleep
    damages, and those that an engine has at the start of a run, show here.

    Above ``sg.sync_check_tolerance`` it warns, above :data:`STOP_AT` times that it stops the run.
    Nothing is checked where the two policies differ by intent: samples of older weights
    (``sg.max_staleness`` above 0), and truncated sampling (``rollout.top_p`` below 1). A run with a
    correction (``algo.advantage.is_correction_level``) expects a mismatch: it is only warned.

    Args:
        metrics: of the rollout's update.
        args: upstream's nested namespace with ``sg``.
        rollout: number of the rollout, for the message.

    Raises:
        SyncError: the mean is above :data:`STOP_AT` times the tolerance.
    """
    if MISMATCH not in metrics:  # sg.engine_log_probs=false
        return
    mean, tolerance = metrics[MISMATCH], args.sg.sync_check_tolerance
    is_stale = args.train.async_enable and args.sg.max_staleness > 0
    # Another check watches for NaN (sg.on_nonfinite).
    if is_stale or args.rollout.top_p < 1.0 or not mean > tolerance:
        return
    message = (
        f"in rollout {rollout} the rollout engine's log-probs differ from the trainer's by "
        f"{mean:.4f} on average ({MISMATCH}, tolerance sg.sync_check_tolerance={tolerance}): the "
        "engine has other weights than the trainer"
    )
    if args.algo.advantage.is_correction_level == "off" and mean > STOP_AT * tolerance:
        raise SyncError(
            f"{message}, or rounding is that coarse; in the latter case raise the tolerance"
        )
    activity.show_message(activity.CONTROLLER, f"warning: {message}")


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
