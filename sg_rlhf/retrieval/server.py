"""Serve an index over HTTP: `sg-rlhf serve --index DIR`."""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields

import uvicorn

from sg_rlhf.common.argument_types import (
    non_negative_int,
    path,
    port,
    positive_int,
    printable_name,
)
from sg_rlhf.retrieval import command
from sg_rlhf.retrieval.app import create_app
from sg_rlhf.retrieval.limits import Limits
from sg_rlhf.retrieval.search import DenseOptions, Retriever, open_faiss, open_index

PROG = "sg-rlhf serve"
EPILOG = """\
examples:
  sg-rlhf serve --index indexes/bm25
  sg-rlhf serve --faiss-index e5_Flat.index --corpus wiki-18.jsonl \\
      --encoder intfloat/e5-base-v2

  curl -s 127.0.0.1:8000/retrieve -H 'content-type: application/json' \\
      -d '{"queries": ["Who wrote Faust?"], "topk": 3, "return_scores": true}'

There is no login: serve on 127.0.0.1, or on a network that you trust. On SIGTERM the server answers
the accepted requests and ends.
"""
#: Seconds that an unused connection stays open: a rollout step lies between two searches.
KEEP_ALIVE = 75
#: Limits that may be 0.
MAY_BE_0 = ("max_wait_ms", "cache_size")
BUSY = (429, 503)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    args = _parser().parse_args(argv)
    return command.run(PROG, lambda: serve(args))


def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT; ValueError for an index or an address that does not work."""
    limits = Limits(**{field.name: getattr(args, field.name) for field in fields(Limits)})
    # First, since a port that is taken should not cost the minutes of loading.
    listener = _bind(args.host, args.port)
    retriever = _open(args)
    config = uvicorn.Config(
        create_app(retriever, limits),
        ws="none",
        # A client that sends nonsense is answered; a line for each would fill the disk.
        log_level="error",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=args.shutdown_seconds,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    listener.listen(config.backlog)  # from here on the kernel accepts connections
    print(f"serving {retriever.description}\nlistening on http://{shown}:{port}", flush=True)
    # uvicorn shuts down in order, then raises the signal again.
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


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


def _open(args: argparse.Namespace) -> Retriever:
    """The index of the flags."""
    if (args.index is None) == (args.faiss_index is None):
        raise ValueError("expected --index DIR, or --faiss-index FILE with --corpus and --encoder")
    options = DenseOptions(dict(args.search), args.encoder_dtype, args.search_device, args.prompts)
    if args.index is not None:
        return open_index(args.index, args.corpus, args.encoder, args.device, options)
    for flag in ("corpus", "encoder"):
        if getattr(args, flag) is None:
            raise ValueError(f"--faiss-index {args.faiss_index}: needs --{flag} too")
    return open_faiss(
        args.faiss_index, args.corpus, args.encoder, args.max_length, args.device, options
    )


def _parser() -> argparse.ArgumentParser:
    parser = command.parser(PROG, "Serve a search index over HTTP.", EPILOG)
    what = parser.add_argument_group("index").add_argument
    what("--index", type=path, metavar="DIR",
        help="index folder, made by sg-rlhf index")  # fmt: skip
    what("--faiss-index", type=path, metavar="FILE",
        help="faiss file instead of --index, such as Search-R1's e5_Flat.index")  # fmt: skip
    what("--corpus", type=path, metavar="FILE",
        help="corpus; required with --faiss-index (default: where --index says)")  # fmt: skip
    what("--encoder", type=printable_name, metavar="MODEL",
        help="encoder; required with --faiss-index "
        "(default: the one that --index names)")  # fmt: skip
    what("--max-length", type=positive_int, default=256, metavar="N",
        help="tokens per query, with --faiss-index; the rest is not read "
        "(default: 256)")  # fmt: skip
    what("--device", type=printable_name,
        help="device of the encoder: cpu or cuda:N (default: a GPU if there is one)")  # fmt: skip
    what("--encoder-dtype", choices=("auto", "fp16", "bf16", "fp32"), default="auto",
        help="number type of the encoder (default: fp16 on a GPU, fp32 on a CPU)")  # fmt: skip
    what("--prompts", choices=("e5", "none"),
        help="with --faiss-index: prompts of an encoder whose files name none (default: e5 for "
        "E5's ids on the hub and for models without sentence-transformers files)")  # fmt: skip
    what("--search", type=command.setting, nargs="+", default=[], metavar="NAME=N",
        help="efSearch (HNSW) or nprobe (IVF) of the search (default: the index's)")  # fmt: skip
    what("--search-device", type=printable_name, default="cpu", metavar="DEVICE",
        help="device of a flat search: cpu, or cuda:N, which holds all vectors "
        "(default: cpu)")  # fmt: skip
    where = parser.add_argument_group("address").add_argument
    where("--host", type=printable_name, default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1)")  # fmt: skip
    where("--port", type=port, default=8000, metavar="N",
        help="port to listen on; 0: any free one (default: 8000)")  # fmt: skip
    where("--shutdown-seconds", type=positive_int, default=120, metavar="N",
        help="seconds after SIGTERM to answer the accepted requests (default: 120)")  # fmt: skip
    limit = parser.add_argument_group("limits").add_argument
    for field in fields(Limits):
        limit("--" + field.name.replace("_", "-"), default=field.default, metavar="N",
            type=non_negative_int if field.name in MAY_BE_0 else positive_int,
            choices=BUSY if field.name == "busy_status" else None,
            help=f"{field.metadata['help']} (default: %(default)s)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
