"""Which process of a run is on which machine: in the run directory, and on the terminal."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

from sg_rlhf.common.atomic_io import write_whole

#: In the run directory; the driver has written it.
FILE = "environment.json"
KEY = "placement"
CONTROLLER = "controller"


class ProcessLocation(NamedTuple):
    """Where a process is.

    Attributes:
        address: of its machine, in the cluster's network.
        host: its machine's name.
        process: its id there.
    """

    address: str
    host: str
    process: int


def this_process() -> ProcessLocation:
    """Where this process is."""
    return ProcessLocation(ray.util.get_node_ip_address(), socket.gethostname(), os.getpid())


def query_locations(actors: Mapping[str, Iterable[Any]]) -> dict[str, list[ProcessLocation]]:
    """Where actors are.

    Args:
        actors: what they are to a user -> Ray's handles, in order.

    Raises:
        RayError: one of them is dead.
    """
    asked = {who: [a.__ray_call__.remote(_of_actor) for a in some] for who, some in actors.items()}
    return {who: ray.get(of) for who, of in asked.items() if of}


def _of_actor(_actor: Any) -> ProcessLocation:
    return this_process()


def group_by_node(places: Mapping[str, Sequence[ProcessLocation]]) -> dict[str, dict[str, Any]]:
    """Address -> its host name, and who is there: the number and the process of each.

    Args:
        places: what processes are to a user -> where each of them is, from number 0.
    """
    found: dict[str, dict[str, Any]] = {}
    for who, some in places.items():
        for number, place in enumerate(some):
            machine = found.setdefault(place.address, {"host": place.host})
            machine.setdefault(who, {})[str(number)] = place.process
    return {address: found[address] for address in sorted(found)}


def format_lines(machines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each machine, with who is there.

    Args:
        machines: of :func:`by_machine`.
    """
    said = []
    for address, machine in machines.items():
        names = [
            who if who == CONTROLLER else f"{who} {', '.join(numbers)}"
            for who, numbers in machine.items()
            if who != "host"
        ]
        said.append(f"{address} ({machine['host']}): {'; '.join(names)}")
    return said


def save(machines: Mapping[str, Mapping[str, Any]], run_dir: Path) -> None:
    """Add them to what the run directory says of the run's environment."""
    file = run_dir / FILE
    row = json.loads(file.read_text()) if file.is_file() else {}
    write_whole(file, json.dumps(row | {KEY: machines}, indent=2) + "\n")
