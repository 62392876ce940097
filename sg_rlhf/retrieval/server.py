"""Serve an index over HTTP: `python -m sg_rlhf.retrieval.server --index DIR`.

One process. For several GPUs or hosts see `replicas`, which takes the same flags.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial

import uvicorn

from sg_rlhf.common.argument_types import (
    non_negative_int,
    path,
    port,
    positive_int,
    printable_name,
)  # fmt: skip
from sg_rlhf.retrieval.app import create_app
from sg_rlhf.retrieval.command import Parser, run, setting, threads
from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.search import DenseOptions, Retriever, open_faiss, open_index

PROG = "sg_rlhf.retrieval.server"
EPILOG = """\
examples:
  python -m sg_rlhf.retrieval.server --index indexes/bm25
  python -m sg_rlhf.retrieval.server --faiss-index e5_Flat.index --corpus wiki-18.jsonl \\
      --encoder intfloat/e5-base-v2

  curl -s 127.0.0.1:8000/retrieve -H 'content-type: application/json' \\
      -d '{"queries": ["Who wrote Faust?"], "topk": 3, "return_scores": true}'

There is no login: serve on 127.0.0.1, or on a network that you trust. On SIGTERM the server answers
the accepted requests and ends.
"""
#: Seconds that an unused connection stays open: a rollout step lies between two searches.
KEEP_ALIVE = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    parser = Parser(f"python -m {PROG}", "Serve a search index over HTTP.", EPILOG)
    add_arguments(parser)
    args = parser.parse_args(argv)
    return run(PROG, lambda: serve(args))


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ValueError, OSError: the index cannot be opened, or the address is taken.
    """
    limits = limits_of(args)
    limits.check()
    # First, since a port that is taken should not cost the minutes of loading.
    listener = _bind(args.host, args.port)
    retriever = loader(args)()
    config = uvicorn.Config(
        create_app(lambda: retriever, limits),
        ws="none",
        # A client that sends nonsense is answered; a line for each would fill the disk.
        log_level="error",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=args.shutdown_seconds,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server = _Server(config)
    server.announcement = (
        f"serving {retriever.description}\nlistening on http://{shown}:{port}{exposure(host)}"
    )
    # uvicorn shuts down in order, then raises the signal again.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """Prints `announcement` once it listens."""

    announcement: str

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            print(self.announcement, flush=True)


def exposure(host: str) -> str:
    """A remark for an address that other machines may reach, "" for the loopback."""
    with contextlib.suppress(OSError, UnicodeError):
        # A name may begin like the loopback's, so its address is checked.
        found = socket.getaddrinfo(host, None)
        if all(ipaddress.ip_address(address[4][0]).is_loopback for address in found):
            return ""
    return "  (not the loopback: anyone who reaches it may search)"


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, ValueError) as error:
        listener.close()
        # A name that is none has a reason in words: of the resolver, or of its encoding.
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--host {host} --port {port}: {reason}") from None
    return listener


def loader(args: argparse.Namespace) -> Callable[[], Retriever]:
    """A function that opens the index of the flags; it can be sent to another process.

    Raises:
        ValueError: for flags that do not go together.
    """
    if (args.index is None) == (args.faiss_index is None):
        raise ValueError("expected --index DIR, or --faiss-index FILE with --corpus and --encoder")
    options = DenseOptions(
        dict(args.search), args.encoder_dtype, args.search_threads, args.search_device
    )
    if args.index is not None:
        return partial(
            open_index, args.index.resolve(), args.corpus, args.encoder, args.device,
            verify=args.verify, options=options,
        )  # fmt: skip
    if args.verify:
        raise ValueError(f"--verify: --faiss-index {args.faiss_index} has no hashes to check")
    for flag in ("corpus", "encoder"):
        if getattr(args, flag) is None:
            raise ValueError(f"--faiss-index {args.faiss_index}: needs --{flag} too")
    return partial(
        open_faiss, args.faiss_index.resolve(), args.corpus.resolve(), args.encoder,
        args.max_length, args.device, options,
    )  # fmt: skip


def limits_of(args: argparse.Namespace) -> Limits:
    """The limits that the flags ask for."""
    return Limits(
        max_queries=args.max_queries,
        max_query_chars=args.max_query_chars,
        max_topk=args.max_topk,
        default_topk=args.topk,
        max_batch=args.max_batch,
        max_wait_ms=args.max_wait_ms,
        max_pending=args.max_pending,
        cache_size=args.cache_size,
        cache_mb=args.cache_mb,
        max_body_mb=args.max_body_mb,
        busy_status=args.busy_status,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `server` and `replicas`."""
    limits = Limits()
    what = parser.add_argument_group("index").add_argument
    what(
        "--index",
        type=path,
        metavar="DIR",
        help="index folder, made by python -m sg_rlhf.retrieval.index",
    )
    what("--faiss-index", type=path, metavar="FILE",
        help="faiss file instead of --index, such as Search-R1's e5_Flat.index")  # fmt: skip
    what("--corpus", type=path, metavar="FILE",
        help="corpus; required with --faiss-index (default: where --index says)")  # fmt: skip
    what(
        "--encoder",
        type=printable_name,
        metavar="MODEL",
        help="encoder; required with --faiss-index (default: the one that --index names)",
    )
    what(
        "--max-length",
        type=positive_int,
        default=256,
        metavar="N",
        help="tokens per query, with --faiss-index; the rest is not read (default: 256)",
    )
    what("--verify", action="store_true",
        help="first check every byte of index and corpus, about 1 s per GB and core (default: "
        "check all sizes and small files)")  # fmt: skip
    what("--device", type=printable_name,
        help="device of the encoder: cpu or cuda:N (default: a GPU if there is one)")  # fmt: skip
    what("--encoder-dtype", choices=("auto", "fp16", "bf16", "fp32"), default="auto",
        help="number type of the encoder (default: fp16 on a GPU, fp32 on a CPU)")  # fmt: skip
    what("--search", type=setting, nargs="+", default=[], metavar="NAME=N",
        help="efSearch (HNSW) or nprobe (IVF) of the search (default: the index's)")  # fmt: skip
    what("--search-threads", type=threads, metavar="N",
        help="threads of the encoder and of a dense search (default: one per core)")  # fmt: skip
    what(
        "--search-device",
        type=printable_name,
        default="cpu",
        metavar="DEVICE",
        help="device of a flat search: cpu, or cuda:N, which holds all vectors (default: cpu)",
    )
    where = parser.add_argument_group("address").add_argument
    where("--host", type=printable_name, default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1)")  # fmt: skip
    where("--port", type=port, default=8000, metavar="N",
        help="port to listen on; 0: any free one (default: 8000)")  # fmt: skip
    where("--shutdown-seconds", type=positive_int, default=120, metavar="N",
        help="seconds after SIGTERM to answer the accepted requests (default: 120)")  # fmt: skip
    limit = parser.add_argument_group("limits of a request").add_argument
    limit("--topk", type=positive_int, default=limits.default_topk, metavar="N",
        help="passages per query if the request has no topk (default: %(default)s)")  # fmt: skip
    limit("--max-topk", type=positive_int, default=limits.max_topk, metavar="N",
        help="maximum topk of a request, else status 422 (default: %(default)s)")  # fmt: skip
    limit("--max-queries", type=positive_int, default=limits.max_queries, metavar="N",
        help="maximum queries per request, else status 422 (default: %(default)s)")  # fmt: skip
    limit("--max-query-chars", type=positive_int, default=limits.max_query_chars, metavar="N",
        help="characters per query; the rest is cut off (default: %(default)s)")  # fmt: skip
    limit("--max-body-mb", type=positive_int, default=limits.max_body_mb, metavar="N",
        help="maximum MiB of a request, else status 413 (default: %(default)s)")  # fmt: skip
    speed = parser.add_argument_group("batching").add_argument
    speed("--max-batch", type=positive_int, default=limits.max_batch, metavar="N",
        help="maximum queries that are searched together (default: %(default)s)")  # fmt: skip
    speed("--max-wait-ms", type=non_negative_int, default=int(limits.max_wait_ms), metavar="N",
        help="ms that a query waits for others, or a tenth of the last search if that is longer "
        "(default: %(default)s)")  # fmt: skip
    speed("--max-pending", type=positive_int, default=limits.max_pending, metavar="N",
        help="maximum queries in the queue; more are refused (default: %(default)s)")  # fmt: skip
    speed("--busy-status", type=non_negative_int, choices=(429, 503), default=limits.busy_status,
        help="status of a refused request; 503 for clients that retry only after 5xx (default: "
        "%(default)s)")  # fmt: skip
    speed("--cache-size", type=non_negative_int, default=limits.cache_size, metavar="N",
        help="maximum answers in the cache; 0: no cache (default: %(default)s)")  # fmt: skip
    speed("--cache-mb", type=non_negative_int, default=limits.cache_mb, metavar="N",
        help="maximum MiB of the cache; 0: no cache (default: %(default)s)")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
