"""Make the JSONL files that a training run reads: `python -m sg_rlhf.data DOMAIN --out DIR ...`.

Every domain writes `train.jsonl`, `test.jsonl` and `manifest.json` (`sg_rlhf.data_io`). Bad input
is one line on stderr with exit status 2, and DIR is unchanged.

The subcommands are the domains of `sg_rlhf.tasks.registry` that have a `Domain.data`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sg_rlhf import __version__
from sg_rlhf.common import resources
from sg_rlhf.common.argument_types import path
from sg_rlhf.common.atomic_io import real_path
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.text import OneLineParser, single_line
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
        name = next((word for word in arguments if not word.startswith("-")), "")
        if ":" in name:
            domains[name] = registry.find(name)
        # Only the named domain is imported, so that --help is fast.
        part = domains[name].data if name in domains else None
        if part is None and name in domains:
            raise ValueError(f"{name}: this domain has no data command (Domain.data)")
        command = None if part is None else load(part)
        args = _parser(domains, name, command).parse_args(arguments)
        assert command is not None  # argparse refuses any other first word
        make(domains[name].name, command, args)
    except (ValueError, OSError) as error:
        print(f"sg_rlhf.data: {single_line(error)}", file=sys.stderr)
        return 2
    return 0


def make(task: str, command: DataCommand, args: argparse.Namespace) -> None:
    """Read or generate a domain's data and write it, unless it is up to date.

    Raises:
        ValueError: bad arguments or data; the message is one line.
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
    # Imported here: it takes seconds, and only chat templates need it.
    from transformers import AutoTokenizer

    if Path(model).is_dir() and (code := model_folder.code_of(Path(model))):
        raise ValueError(
            f"--chat-template {model}: {code[0]} names code of the model ({code[1]}), which this "
            "command does not run"
        )
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


def _parser(
    domains: dict[str, Domain], selected: str, command: DataCommand | None
) -> OneLineParser:
    parser = OneLineParser(
        prog=PROG,
        description="Generate, convert and check the data sets that training reads.",
        epilog=f"`{PROG} DOMAIN --help` shows the options of a domain, with examples.",
        allow_abbrev=False,
    )
    tasks = parser.add_subparsers(dest="task", required=True, metavar="DOMAIN")
    for name, domain in domains.items():
        if domain.data is None:
            continue
        sub = tasks.add_parser(
            name,
            help=domain.title,
            description=command.description if command is not None and name == selected else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.add_argument(
            "--out",
            required=True,
            metavar="DIR",
            type=path,
            help="folder for the data set (required)",
        )
        if command is not None and name == selected:
            command.add_options(sub)
        sub.add_argument(
            "--force",
            action="store_true",
            help="write although the folder is not empty (default: refuse)",
        )
        sub.add_argument(
            resources.SKIP,
            action="store_true",
            help="start although disk or memory may be too small (default: refuse)",
        )
    return parser
