"""The controller's work before the first rollout: placement, plan, and checks of a checkpoint."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.trainer.ray.launcher import RayActorGroup
from ray.actor import ActorHandle

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.overlay.cluster import locations
from sg_rlhf.overlay.reporting import terminal
from sg_rlhf.overlay.reporting.errors import RunStopped
from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY
from sg_rlhf.overlay.settings import rollout_plan
from sg_rlhf.run_dir import jsonl_log


def prepare_run_dir(
    run_dir: Path,
    resumed_at: int,
    plan: rollout_plan.Plan,
    processes: dict[str, Any],
    remarks: Sequence[str] = (),
) -> None:
    """Write placement and plan, and drop log rows after ``resumed_at`` rollouts."""
    nodes = locations.group_by_node(
        {
            locations.CONTROLLER: [locations.this_process()],
            **locations.query_locations(processes),
        }
    )
    facts = locations.engine_facts(processes.get("rollout engine", []))
    locations.save(nodes, run_dir, facts)
    # A run that starts over repeats the evaluation before its first rollout, too.
    jsonl_log.drop_after(run_dir, resumed_at or -1)
    write_plan(run_dir, plan, nodes, remarks)


def processes(
    policy: RayActorGroup,
    reference: RayActorGroup,
    reward: RayActorGroup,
    engines: list[ActorHandle],
) -> dict[str, list[Any]]:
    """Ray actors of a run by role."""
    groups = {"policy rank": policy, "reference rank": reference, "reward rank": reward}
    ranks = {role: g._actor_handlers for role, g in groups.items() if g is not None}
    return {**ranks, "rollout engine": engines}


def write_plan(
    run_dir: Path,
    plan: rollout_plan.Plan,
    nodes: dict[str, dict[str, Any]],
    more: Sequence[str] = (),
) -> None:
    """Write the number of rollouts and remarks for the terminal."""
    remarks = [*([plan.remark()] if plan.remark() else []), *more]
    if len(nodes) > 1:
        remarks += locations.format_lines(nodes)
    write_whole(
        run_dir / terminal.PLAN, json.dumps({"rollouts": plan.rollouts, "remarks": remarks})
    )
    for remark in remarks:
        print(remark)  # with sg.verbose no progress bar shows the plan


def rate_remarks(args: Namespace, rates: tuple[float, float, float], steps: int) -> list[str]:
    """What the recipe's schedule does to a resumed run's learning rate; often nothing."""
    before, now, base = rates
    remarks = []
    if not math.isclose(before, now, rel_tol=1e-6):
        remarks.append(
            f"learning rate: {before:g} at the checkpoint, {now:g} from here on: "
            f"actor.lr_scheduler={args.actor.lr_scheduler} now ends after {steps} optimizer steps"
        )
    wanted = args.actor.adam.lr
    if args.actor.optim == "adam" and not math.isclose(wanted, base, rel_tol=1e-6):
        remarks.append(
            f"learning rate: actor.adam.lr={wanted:g} is not used: a resumed run keeps {base:g}; "
            "for another rate start another run from the checkpoint's model"
        )
    return remarks


def check_resumable(args: Namespace, states: dict[str, Any]) -> None:
    """Raise RunStopped for settings under which a checkpoint would not be continued exactly."""
    if states["global_step"] and args.train.enable_ema:
        raise RunStopped(
            "train.enable_ema=true: upstream's checkpoints do not contain the moving average, "
            "so a resumed run would lose it; set it to false"
        )
    if not args.train.async_enable and states.get(BUFFER_KEY, {}).get("batches"):
        raise RunStopped(
            "train.async_enable=false: the checkpoint contains samples that are not trained "
            "yet and would be lost; set it to true"
        )
