"""Wait until a Ray cluster is whole: ``python -m sg_rlhf.launch.await_nodes --nodes 2``.

For job files that start Ray on several machines: fails within minutes if one of them does not come.
A run that joins a cluster waits by itself until there are enough GPUs (``sg.cluster_wait``).
"""

from __future__ import annotations

import os
import sys
import time

from sg_rlhf.common.argument_types import OneLineParser, positive_float, positive_int


def await_nodes(address: str, nodes: int, seconds: float, pause: float = 2.0) -> list[str]:
    """Wait for ``nodes`` machines at a Ray cluster that this one belongs to.

    Args:
        address: of its head, ``HOST:PORT``.
        nodes: machines, the head among them.
        seconds: how long at most.
        pause: seconds between two looks.

    Returns:
        Their host names.

    Raises:
        TimeoutError: they are not there in time; the message names those that are.
    """
    import ray

    from sg_rlhf.ray_session import cluster

    deadline = time.monotonic() + seconds
    there: list[str] = []
    problem = ""
    while time.monotonic() < deadline:
        try:
            if not ray.is_initialized():
                cluster.join(address, logging_level="error", log_to_driver=False)
            there = sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"])
            if len(there) >= nodes:
                return there
        except cluster.ClusterError as error:
            problem = f"; {error}"
        time.sleep(pause)
    found = ", ".join(there) or "none"
    raise TimeoutError(
        f"Ray at {address}: {len(there)} of {nodes} machines after {seconds:.0f} s: "
        f"{found}{problem}"
    )


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 when the machines are not there in time, 2 for wrong usage."""
    parser = OneLineParser(prog="python -m sg_rlhf.launch.await_nodes", description=__doc__)
    parser.add_argument(
        "--nodes", type=positive_int, required=True, help="machines, the head among them"
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=300.0,
        help="how long at most (default: %(default)g)",
    )
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_ADDRESS"),
        metavar="HOST:PORT",
        help="of the head (default: RAY_ADDRESS)",
    )
    arguments = parser.parse_args(argv)
    if not arguments.address:
        parser.error("--address: not given, and RAY_ADDRESS is not set")
    try:
        there = await_nodes(arguments.address, arguments.nodes, arguments.seconds)
    except TimeoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Ray at {arguments.address}: {len(there)} machines: {', '.join(there)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
