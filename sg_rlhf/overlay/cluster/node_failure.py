"""Finds the node or the process whose loss ended a run.

A caller sees at once that an actor is lost; the cluster knows seconds later if a node is gone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ray

from sg_rlhf.overlay.cluster import locations
from sg_rlhf.overlay.reporting import error_report
from sg_rlhf.overlay.reporting.errors import cause_chain

#: Seconds that a cluster may take to notice. Ray asks each node every 3 s and gives up after five
#: missing answers.
NOTICE_SECONDS = 30.0
#: Texts of gloo and NCCL when another rank is lost.
_DISCONNECT_MARKERS = (
    "Connection closed by peer",
    "Connection reset",
    "connection was closed",
    "NCCL error",
)


def diagnose(error: BaseException, run_dir: Path | None) -> str:
    """One line that names the lost node or process, "" for another cause; Ray must be connected."""
    errors = list(cause_chain(error))
    actor = next(
        (e for e in errors if isinstance(e, ray.exceptions.RayActorError) and e.actor_id), None
    )
    if actor is not None and actor.actor_init_failed:
        return ""
    if actor is None and not any(text in str(e) for e in errors for text in _DISCONNECT_MARKERS):
        return ""
    nodes = _nodes_of_run(run_dir)
    deadline = time.monotonic() + NOTICE_SECONDS
    while True:
        dead = {n["NodeManagerAddress"] for n in ray.nodes() if not n["Alive"]} & {*nodes}
        if dead:
            return _lost_nodes(sorted(dead), nodes)
        row = ray._private.state.actors(actor.actor_id) if actor is not None else {}
        if row and row["State"] != "ALIVE":
            return _lost_process(row, "died (killed, or crashed)")
        if time.monotonic() >= deadline:
            return _lost_process(row, "does not answer") if row else ""
        time.sleep(0.5)


def _nodes_of_run(run_dir: Path | None) -> dict[str, Any]:
    """Address -> processes of each node of the run, or its host name alone if none were saved."""
    try:
        row = json.loads((run_dir / locations.FILE).read_text()) if run_dir else {}
    except (OSError, ValueError):
        row = {}
    return row.get(locations.KEY) or {
        node["NodeManagerAddress"]: {"host": node["NodeManagerHostname"]} for node in ray.nodes()
    }


def _lost_nodes(dead: list[str], nodes: dict[str, Any]) -> str:
    lines = locations.format_lines({address: nodes[address] for address in dead})
    return f"machine{'s' if len(lines) > 1 else ''} gone: {', and '.join(lines)}"


def _lost_process(row: dict[str, Any], how: str) -> str:
    process = f"process {row['Pid']} on {row['Address']['IPAddress']}"
    return f"{error_report.role_name(row['ActorClassName'])} ({process}) {how}"
