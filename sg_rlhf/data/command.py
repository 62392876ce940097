"""Make the JSONL files that a training run reads: `python -m sg_rlhf.data TASK --out DIR ...`.

Every task writes `train.jsonl`, `test.jsonl` and `manifest.json` (see `tasks.dataset_folder`). Bad
input is one line on stderr and exit status 2, and DIR stays as it was.

A new task is a module with `add_parser(tasks)` that sets `run(args, load_tokenizer)`, and its name
in `TASKS`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from sg_rlhf.tasks.kk import command as kk
from sg_rlhf.tasks.math import command as math
from sg_rlhf.tasks.search import command as search

TASKS = (kk, math, search)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    args = _parser().parse_args(argv)
    try:
        args.run(args, _load_tokenizer)
    except (ValueError, OSError) as error:
        print(f"sg_rlhf.data: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _load_tokenizer(model: str) -> Any:
    # Takes seconds to import, and only chat templates need it.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all others of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m sg_rlhf.data",
        description="Generate, convert and check the data sets that training reads.",
        epilog="`python -m sg_rlhf.data TASK --help` shows a task's options with examples.",
        allow_abbrev=False,
    )
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for task in TASKS:
        task.add_parser(tasks)
    return parser
