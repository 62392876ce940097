"""Serve an index from several processes: `python -m sg_rlhf.retrieval.replicas --replicas N ...`.

Ray Serve spreads the requests over N copies of the application of `server`, on one machine or all
over a Ray cluster. The replicas share nothing: each maps the same index (one copy in the page cache
a host), has its own encoder, its own queue and its own result cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from sg_rlhf.common.argument_types import non_negative_float, positive_int, printable_name
from sg_rlhf.retrieval.command import Parser, run
from sg_rlhf.retrieval.search import Retriever
from sg_rlhf.retrieval.server import add_arguments, exposure, limits_of, loader

PROG = "sg_rlhf.retrieval.replicas"
EPILOG = """\
examples:
  python -m sg_rlhf.retrieval.replicas --replicas 8 --gpus-per-replica 1 --index indexes/e5_flat
  python -m sg_rlhf.retrieval.replicas --replicas 4 --index indexes/bm25
  python -m sg_rlhf.retrieval.replicas --replicas 16 --ray-address auto --index /shared/e5_flat

On a cluster (--ray-address) every node with a process listens on --host and --port. Index, corpus
and encoder must have the same path on all nodes. /metrics answers for one process.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    parser = Parser(
        f"python -m {PROG}", "Serve a search index over HTTP from several processes.", EPILOG
    )
    add = parser.add_argument
    add("--replicas", type=positive_int, default=2, metavar="N",
        help="number of server processes (default: 2)")  # fmt: skip
    add("--gpus-per-replica", type=non_negative_float, default=0.0, metavar="N",
        help="GPUs per process; with 0 the encoder runs on the CPU (default: 0)")  # fmt: skip
    add("--cpus-per-replica", type=non_negative_float, default=1.0, metavar="N",
        help="CPUs that Ray reserves per process (default: 1)")  # fmt: skip
    add("--ray-address", type=printable_name, metavar="ADDRESS",
        help="address of a running Ray cluster, `auto` for this machine's "
        "(default: start one)")  # fmt: skip
    add_arguments(parser)
    args = parser.parse_args(argv)
    return run(PROG, lambda: serve(args))


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ValueError: for bad flags, or if the cluster has too little for all replicas.
    """
    limits = limits_of(args)
    limits.check()
    load = loader(args)
    # Here once, so that a bad index is one line now and not a stack of Ray's.
    description = describe(load)

    from sg_rlhf.ray_session import auth_token

    if not args.ray_address:
        auth_token.set_auth_token()  # before Ray is imported
    import ray
    from ray import serve as ray_serve

    from sg_rlhf.ray_session import cluster

    if args.ray_address:
        cluster.join(args.ray_address, "--ray-address", log_to_driver=False)
    else:
        cluster.start(log_to_driver=False)
    # After Ray, which puts a handler of its own in place: one that aborts.
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        _check_room(ray.cluster_resources(), args)
        ray_serve.start(
            proxy_location="EveryNode", http_options={"host": args.host, "port": args.port}
        )

        def build_app() -> Any:
            from sg_rlhf.retrieval.app import create_app

            return create_app(load, limits)

        deployment = ray_serve.deployment(
            ray_serve.ingress(build_app)(),
            name="retriever",
            num_replicas=args.replicas,
            # Each replica has its own queue, which refuses with --busy-status. Ray's queue must
            # not fill before it.
            max_ongoing_requests=limits.max_pending,
            graceful_shutdown_timeout_s=args.shutdown_seconds,
            ray_actor_options={
                "num_cpus": args.cpus_per_replica,
                "num_gpus": args.gpus_per_replica,
            },
        )
        ray_serve.run(deployment.bind())
        print(
            f"serving {description}, {args.replicas} replicas\n"
            f"listening on http://{args.host}:{args.port}{exposure(args.host)}",
            flush=True,
        )
        stop.wait()
        ray_serve.shutdown()
    finally:
        ray.shutdown()


def describe(load: Callable[[], Retriever]) -> str:
    """The description of an index, opened in a process that ends then.

    This process would keep the encoder and the index, on a GPU its memory too.

    Raises:
        ValueError, OSError: it cannot be opened.
    """
    spawned = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=spawned) as process:
            return process.submit(_description, load).result()
    except BrokenProcessPool:
        raise ValueError(
            "the process that opens the index was killed meanwhile; is there enough memory?"
        ) from None


def _description(load: Callable[[], Retriever]) -> str:
    return load().description


def _check_room(resources: dict[str, float], args: argparse.Namespace) -> None:
    for name, flag in (("CPU", "cpus_per_replica"), ("GPU", "gpus_per_replica")):
        needed = args.replicas * getattr(args, flag)
        if needed > resources.get(name, 0):
            raise ValueError(
                f"--replicas {args.replicas}: needs {needed:g} {name}s, Ray has "
                f"{resources.get(name, 0):g}; fewer replicas, or --{flag.replace('_', '-')}"
            )


if __name__ == "__main__":
    sys.exit(main())
