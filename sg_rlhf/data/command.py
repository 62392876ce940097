"""Make the JSONL files that a training run reads: `python -m sg_rlhf.data DOMAIN --out DIR ...`.

Every domain writes `train.jsonl`, `test.jsonl` and `manifest.json` (see `common.dataset_folder`).
Bad input is one line on stderr and exit status 2, and DIR stays as it was.

The subcommands are the domains of `sg_rlhf.tasks.registry`, each with its `Domain.data`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sg_rlhf import __version__
from sg_rlhf.common import resources
from sg_rlhf.common.argument_types import path
from sg_rlhf.common.atomic_io import real_path
from sg_rlhf.common.environment import as_typed
from sg_rlhf.data_io import model_folder
from sg_rlhf.data_io.command_options import print_files
from sg_rlhf.data_io.dataset_writer import check_writable, current_manifest, write_dataset
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.data_command import DataCommand
from sg_rlhf.tasks.domain import Domain, load

PROG = "python -m sg_rlhf.data"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (0, or 2 for bad input)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        domains = registry.domains()
        asked = next((word for word in arguments if not word.startswith("-")), "")
        if ":" in asked:
            domains[asked] = registry.find(asked)
        # A domain's options are read when it is asked for: the list of all costs no import.
        part = domains[asked].data if asked in domains else None
        if part is None and asked in domains:
            raise ValueError(f"{asked}: this domain has no data command (Domain.data)")
        command = None if part is None else load(part)
        args = _parser(domains, asked, command).parse_args(arguments)
        assert command is not None  # argparse refuses another first word
        make(domains[asked].name, command, args)
    except (ValueError, OSError) as error:
        print(f"sg_rlhf.data: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def make(task: str, command: DataCommand, args: argparse.Namespace) -> None:
    """Read or generate a domain's data and write it, unless it is there already.

    Raises:
        ValueError: bad arguments or data; the message is one line for the user.
    """
    out: Path = real_path(args.out, "--out")
    plan = command.plan(args, _load_tokenizer)
    request = {"task": task, "version": __version__, **plan.request}
    manifest = current_manifest(out, request)
    if manifest is not None:
        print(f"{out} is up to date: same request, same inputs, files unchanged")
    else:
        check_writable(out, args.force)
        if plan.needs is not None:
            needs = plan.needs()
            if needs.lines:
                resources.print_requirements(needs.lines, out)
            if not args.skip_room_check:
                resources.check_requirements("--out", out, "the data set", needs)
        made = plan.make()
        manifest = write_dataset(out, made.files, request, made.facts)
        for line in command.report(manifest):
            print(line)
        print_files(out, manifest)
    step = command.next_step(out, manifest)
    if step is not None:
        print(f"Next: {as_typed(step)}")


def _load_tokenizer(model: str) -> Any:
    # Takes seconds to import, and only chat templates need it.
    from transformers import AutoTokenizer

    if Path(model).is_dir() and (named := model_folder.code_of(Path(model))):
        raise ValueError(
            f"--chat-template {model}: {named[0]} names code of the model ({named[1]}), which this "
            "command does not run"
        )
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all others of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def _parser(domains: dict[str, Domain], asked: str, command: DataCommand | None) -> _Parser:
    parser = _Parser(
        prog=PROG,
        description="Generate, convert and check the data sets that training reads.",
        epilog=f"`{PROG} DOMAIN --help` shows a domain's options with examples.",
        allow_abbrev=False,
    )
    tasks = parser.add_subparsers(dest="task", required=True, metavar="DOMAIN")
    for name, domain in domains.items():
        if domain.data is None:
            continue
        sub = tasks.add_parser(
            name,
            help=domain.title,
            description=command.description if command is not None and name == asked else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument("--out", required=True, metavar="DIR", type=path, help="folder to write")
        if command is not None and name == asked:
            command.add_options(sub)
        sub.add_argument(
            "--force", action="store_true", help="replace our files in a folder that is not empty"
        )
        sub.add_argument(
            resources.SKIP,
            action="store_true",
            help="download or write what disk or memory may not hold",
        )
    return parser
