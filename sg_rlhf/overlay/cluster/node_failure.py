"""What a cluster says of a failure: which machine is gone, or which process.

Whoever waits for an actor hears at once that the connection to it is gone, and so do ranks that
wait for each other. Only some seconds later the cluster knows that a whole machine is.
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

#: How long a cluster may take to notice. Ray asks each machine every 3 s, and gives up after five
#: answers that did not come.
NOTICE_SECONDS = 30.0
#: How gloo and NCCL say that another rank is gone.
_DISCONNECT_MARKERS = (
    "Connection closed by peer",
    "Connection reset",
    "connection was closed",
    "NCCL error",
)


def diagnose(error: BaseException, run_dir: Path | None, seconds: float = NOTICE_SECONDS) -> str:
    """Who is lost, in one line; "" where an error is about something else.

    Args:
        error: that ended the run, whose cluster is still connected.
        run_dir: whose ``environment.json`` has who was where.
        seconds: how long the cluster may take to notice.
    """
    errors = list(cause_chain(error))
    actor = next(
        (e for e in errors if isinstance(e, ray.exceptions.RayActorError) and e.actor_id), None
    )
    if actor is not None and actor.actor_init_failed:
        return ""
    if actor is None and not any(text in str(e) for e in errors for text in _DISCONNECT_MARKERS):
        return ""
    machines = _machines(run_dir)
    deadline = time.monotonic() + seconds
    while True:
        dead = {n["NodeManagerAddress"] for n in ray.nodes() if not n["Alive"]} & {*machines}
        if dead:
            return _gone(sorted(dead), machines)
        row = ray._private.state.actors(actor.actor_id) if actor is not None else {}
        if row and row["State"] != "ALIVE":
            return _died(row, "died (killed, or crashed)")
        if time.monotonic() >= deadline:
            return _died(row, "does not answer") if row else ""
        time.sleep(0.5)


def _machines(run_dir: Path | None) -> dict[str, Any]:
    """Address of each machine of the run -> who is there."""
    try:
        row = json.loads((run_dir / locations.FILE).read_text()) if run_dir else {}
    except (OSError, ValueError):
        row = {}
    return row.get(locations.KEY) or {
        node["NodeManagerAddress"]: {"host": node["NodeManagerHostname"]} for node in ray.nodes()
    }


def _gone(dead: list[str], machines: dict[str, Any]) -> str:
    said = locations.format_lines({address: machines[address] for address in dead})
    return f"machine{'s' if len(said) > 1 else ''} gone: {', and '.join(said)}"


def _died(row: dict[str, Any], how: str) -> str:
    where = f"process {row['Pid']} on {row['Address']['IPAddress']}"
    return f"{error_report.role_name(row['ActorClassName'])} ({where}) {how}"
