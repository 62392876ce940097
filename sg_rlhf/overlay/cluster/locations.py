"""The node of each process of a run: saved in the run directory, shown on the terminal."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

from sg_rlhf.common.atomic_io import write_whole

#: In the run directory. The driver creates it, :func:`save` adds ``KEY``.
FILE = "environment.json"
KEY = "placement"
ENGINE_KEY = "engine"
CONTROLLER = "controller"
#: Seconds that an engine has to say what it runs with.
FACTS_SECONDS = 60.0


class ProcessLocation(NamedTuple):
    """The node of a process."""

    address: str
    host: str
    process: int


def this_process() -> ProcessLocation:
    """The location of this process."""
    return ProcessLocation(ray.util.get_node_ip_address(), socket.gethostname(), os.getpid())


def query_locations(actors: Mapping[str, Iterable[Any]]) -> dict[str, list[ProcessLocation]]:
    """Role -> location of each of its actors, by rank; raises RayError if an actor is dead."""
    pending = {
        role: [actor.__ray_call__.remote(_of_actor) for actor in handles]
        for role, handles in actors.items()
    }
    return {role: ray.get(refs) for role, refs in pending.items() if refs}


def _of_actor(_actor: object) -> ProcessLocation:
    return this_process()


def group_by_node(
    locations: Mapping[str, Sequence[ProcessLocation]],
) -> dict[str, dict[str, Any]]:
    """Address -> {"host": name, role: {rank: process id}}, sorted by address."""
    nodes: dict[str, dict[str, Any]] = {}
    for role, ranks in locations.items():
        for rank, location in enumerate(ranks):
            node = nodes.setdefault(location.address, {"host": location.host})
            node.setdefault(role, {})[str(rank)] = location.process
    return {address: nodes[address] for address in sorted(nodes)}


def format_lines(nodes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line per node with its processes."""
    lines = []
    for address, node in nodes.items():
        processes = [
            role if role == CONTROLLER else f"{role} {', '.join(ranks)}"
            for role, ranks in node.items()
            if role != "host"
        ]
        lines.append(f"{address} ({node['host']}): {'; '.join(processes)}")
    return lines


def engine_facts(engines: Sequence[Any]) -> dict[str, Any]:
    """What the first engine runs with; nothing without engines, or if it does not answer."""
    if not engines:
        return {}
    try:
        return {ENGINE_KEY: ray.get(engines[0].engine_facts.remote(), timeout=FACTS_SECONDS)}
    except ray.exceptions.RayError:  # the next call that needs the engine says why
        return {}


def save(
    nodes: Mapping[str, Mapping[str, Any]], run_dir: Path, facts: Mapping[str, Any] | None = None
) -> None:
    """Add the results of :func:`group_by_node` and :func:`engine_facts` to ``environment.json``."""
    file = run_dir / FILE
    row = json.loads(file.read_text()) if file.is_file() else {}
    write_whole(file, json.dumps(row | {KEY: nodes, **(facts or {})}, indent=2) + "\n")
