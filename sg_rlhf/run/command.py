"""Train a domain on this machine: make its data, train, and write the report.

The GPUs choose the recipe: the paper's where its model fits, a reduced one on smaller machines, and
without a GPU a tiny model that learns within minutes. `arithmetic` trains a pretrained model of
135 M parameters on every machine, and makes its folder first. The same command resumes the run.
Further options and key=value go to `sg-rlhf train`: --allow-changed KEY, actor.adam.lr=1e-4.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sg_rlhf.common.argument_types import OneLineParser, parse_int
from sg_rlhf.common.environment import as_typed
from sg_rlhf.config import ConfigError, builtin_recipes
from sg_rlhf.run.choice import RECIPES, Choice, ChoiceError, Request, choose
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.search.retriever import retriever_process

EXAMPLES = """\
examples:
  the recipe for this machine
    sg-rlhf run kk
  GRPO on a pretrained language model, without a GPU in 10 to 20 minutes
    sg-rlhf run arithmetic
  another algorithm and learning rate
    sg-rlhf run kk --algorithm lopti actor.adam.lr=1e-4
  see what two nodes of eight GPUs would run
    sg-rlhf run math --hardware 2x8x80gb --dry-run
  data of your own (sg-rlhf data math --help)
    sg-rlhf data math --source problems.jsonl --test-fraction 0.02 --out data/mine
    sg-rlhf run math data.prompt_dataset=data/mine/train.jsonl \\
        eval.dataset=data/mine/test.jsonl 'sg.eval_sets=[]'

environment variables, which the options override
  SG_HARDWARE, SG_CONFIG, SG_RUN_DIR   as --hardware, --config, --run-dir
  SG_HOST_MEMORY_GIB=N                 host memory, where a limit of the cluster is not seen
  SG_PORT=PORT                         search: the port of the retriever that it starts [8000]
"""


#: The remedy where the retriever does not start.
_OTHER_RETRIEVER = "; SG_PORT chooses another port, sg.search.url=URL a running retriever"


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what goes to the training command."""
    parser = OneLineParser(
        prog="sg-rlhf run", description=__doc__, epilog=EXAMPLES, allow_abbrev=False
    )
    parser.add_argument("domain", choices=list(RECIPES), help=", ".join(RECIPES))
    parser.add_argument("--config", metavar="FILE", help="a recipe instead of the machine's")
    parser.add_argument(
        "--algorithm", metavar="NAME", type=_algorithm,
        help="of `sg-rlhf recipes` (default: grpo_sg_outside, on a CPU grpo_sg with U = 1.2; for "
        "arithmetic grpo; or what --config has)",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", metavar="NAME",
        help="instead of what is detected: cpu, 4x40gb, 8xh200, 2x8x80gb (nodes x GPUs), 1x24gb",
    )  # fmt: skip
    parser.add_argument(
        "--run-dir", metavar="DIR", help="folder of the run (default: runs/<domain>_<recipe>)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what `sg-rlhf train` would run; run nothing"
    )
    parser.add_argument("--data-only", action="store_true", help="make the data, and end")
    return parser.parse_known_args(argv)


def _algorithm(name: str) -> str:
    try:
        return builtin_recipes.algorithm(name).partition(":")[2]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def request_of(arguments: argparse.Namespace, rest: Sequence[str]) -> Request:
    """The options, and the environment where they say nothing."""
    variables = os.environ
    return Request(
        domain=arguments.domain,
        config=arguments.config or variables.get("SG_CONFIG", ""),
        algorithm=arguments.algorithm or "",
        hardware=arguments.hardware or variables.get("SG_HARDWARE", ""),
        run_dir=arguments.run_dir or variables.get("SG_RUN_DIR", ""),
        overrides=[word for word in rest if "=" in word and not word.startswith("-")],
        variables=variables,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: the training's; 2 for wrong usage or a machine on which nothing fits."""
    arguments, rest = parse_arguments(sys.argv[1:] if argv is None else argv)
    request = request_of(arguments, rest)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        chosen = choose(request)
        for line in chosen.remarks:
            print(line, flush=True)
        return _run(request, chosen, rest, dry=arguments.dry_run, data_only=arguments.data_only)
    except (ChoiceError, ConfigError) as error:
        print(f"error: {as_typed(str(error))}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:  # it has said why
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _terminated(_signum: int, _frame: Any) -> NoReturn:
    raise SystemExit(143)


def _run(
    request: Request, chosen: Choice, rest: Sequence[str], *, dry: bool, data_only: bool
) -> int:
    with contextlib.ExitStack() as stack:
        port = _port(request) if chosen.retriever else 0
        if chosen.retriever and not (dry or data_only):
            _check_port(port)
        for arguments in (chosen.model, chosen.data):
            if arguments and not dry:
                # This command trains by itself.
                _command("data", *arguments, *([] if data_only else ["--no-next"]))
        if data_only:
            return 0
        overrides = chosen.model_overrides
        if chosen.retriever:
            overrides.append(f"sg.search.url=http://127.0.0.1:{port}/retrieve")
            if not dry:
                _start_retriever(chosen.folder, port, stack)
        # Not imported for --help and --data-only: it takes seconds.
        from sg_rlhf import train

        words = [*builtin_recipes.words(chosen.parts), "--run-dir", chosen.run_dir]
        words += ["--dry-run"] * dry
        status = train.main([*words, *overrides, *rest], summarise=False)
    signal.signal(signal.SIGTERM, _terminated)  # the training has set its own
    if status or dry:
        return status
    _command("summary", chosen.run_dir)
    _command("report", chosen.run_dir)
    other = f"--run-dir {chosen.run_dir}_lr1e-4 actor.adam.lr=1e-4"
    if chosen.model:  # 1e-4 is too much for a pretrained model
        other = f"--run-dir {chosen.run_dir}_lr3e-6 actor.adam.lr=3e-6"
    again = f"sg-rlhf run {request.domain} {other}"
    print(f"next: another setting, in a directory of its own:\n  {as_typed(again)}")
    return 0


def _command(name: str, *arguments: str) -> None:
    """Run another command in a process of its own: its libraries stay out of the trainer's.

    Raises:
        CalledProcessError: it failed.
    """
    subprocess.run([sys.executable, "-m", "sg_rlhf", name, *arguments], check=True)


def _port(request: Request) -> int:
    given = request.variables.get("SG_PORT") or "8000"
    port = parse_int(given)
    if not 1 <= port <= 65535:
        raise ChoiceError(f"SG_PORT={given}: expected a port, 1 to 65535")
    return port


def _check_port(port: int) -> None:
    """Before the data are made: the retriever itself starts after them."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ChoiceError(f"SG_PORT={port}: {error.strerror}{_OTHER_RETRIEVER}") from None


def _start_retriever(folder: Path, port: int, stack: contextlib.ExitStack) -> None:
    """Serve the corpus of a folder until the stack ends; an index is built first if none is there.

    Raises:
        ChoiceError: it did not start.
    """
    index = folder / "index"
    if not index.is_dir():
        corpus = ["--corpus", str(folder / "corpus.jsonl"), "--encoder", "bm25"]
        _command("index", *corpus, "--out", str(index))
    # Not in the run directory: another run may be there, which training refuses later.
    log = folder / f"retriever_{port}.log"
    print(f"waiting for the retriever on port {port} (log: {log})", flush=True)
    try:
        stack.enter_context(retriever_process.serve(index, port, log))
    except EvalError as error:
        raise ChoiceError(f"{error}{_OTHER_RETRIEVER}") from None
