"""Make the JSONL files that a training run reads: `sg-rlhf data DOMAIN --out DIR ...`.

Every domain writes `train.jsonl`, `test.jsonl` and `manifest.json` (`sg_rlhf.data_io`). Bad input
is one line on stderr with exit status 2, and DIR is unchanged.

The subcommands are the domains of `sg_rlhf.tasks.registry` that have a `Domain.data`, and `model`
(`sg_rlhf.data.pretrained`).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sg_rlhf import __version__
from sg_rlhf.common import resources
from sg_rlhf.common.argument_types import fraction, non_negative_int, path, printable_name
from sg_rlhf.common.atomic_io import real_path
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.text import OneLineParser, single_line
from sg_rlhf.data import pretrained
from sg_rlhf.data.sources import find_source
from sg_rlhf.data_io import model_folder
from sg_rlhf.data_io.dataset_writer import (
    MANIFEST,
    check_writable,
    current_manifest,
    write_dataset,
)
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.data_source import DataSource
from sg_rlhf.tasks.domain import Domain, load

PROG = "sg-rlhf data"
#: Makes a model's folder instead of a data set.
MODEL = "model"


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
        data = None if part is None else load(part)
        args = _parser(domains, name, data).parse_args(arguments)
        if args.task == MODEL:
            pretrained.run(args)
            return 0
        assert data is not None  # argparse refuses any other first word
        make(domains[name], data, args)
    except BrokenPipeError:  # what reads the output has ended; `sg-rlhf` ends quietly
        raise
    except (ValueError, OSError) as error:
        print(f"sg-rlhf data: {single_line(error)}", file=sys.stderr)
        return 2
    return 0


def make(domain: Domain, data: DataSource[Any], args: argparse.Namespace) -> None:
    """Read or generate a domain's data and write it, unless it is up to date.

    Raises:
        ValueError: bad arguments or data; the message is one line.
    """
    out: Path = real_path(args.out, "--out")
    source = find_source(data, args)
    options = {name: getattr(args, name) for name in map(_name, data.flags)}
    options |= {
        "test_fraction": source.test_fraction,
        "seed": args.seed or 0,
        "generated": source.entry["kind"] == "generated",
    }
    plan = data.plan(options, functools.cache(_load_tokenizer))
    request = {"task": domain.name, "version": __version__, **plan.request}
    request["source"] = dict(source.entry)
    manifest = current_manifest(out, request)
    if manifest is not None:
        print(f"{out} is up to date: same request, same inputs, files unchanged")
    else:
        check_writable(out, args.force)
        train, test, further = source.read()
        made = plan.make(train, test)
        manifest = write_dataset(out, {**made.files, **further}, request, made.facts)
        print("\n".join([domain.title, *_report(made.facts)]))
        for line in data.report(manifest) if data.report is not None else ():
            print(line)
        for name, entry in manifest["files"].items():
            print(f"  {out / name}  {entry['rows']} rows  sha256 {entry['sha256'][:12]}")
        print(f"  {out / MANIFEST}")
    if data.next_step is not None and not args.no_next:
        print(f"Next: {as_typed(data.next_step(out, manifest))}")


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _report(facts: Mapping[str, Any]) -> Iterator[str]:
    """The numbers among the facts, rows per split and group as a table."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and {*value} == {"train", "test"}:
            groups = sorted({*value["train"], *value["test"]}, key=lambda g: (len(g), g))
            width = max(map(len, (*groups, "all")), default=0)
            yield f"  {'':<{width}} {'train':>8} {'test':>8}"
            for group in groups:
                numbers = (value[split].get(group, 0) for split in ("train", "test"))
                yield f"  {group:<{width}} {' '.join(f'{n:>8}' for n in numbers)}"
            totals = (sum(value[split].values()) for split in ("train", "test"))
            yield f"  {'all':<{width}} {' '.join(f'{n:>8}' for n in totals)}"
        elif isinstance(value, Mapping) and all(isinstance(n, int) for n in value.values()):
            yield from (f"  {k.replace('_', ' '):<46}{n:>8}" for k, n in value.items())
        elif isinstance(value, int):
            yield f"  {name.replace('_', ' '):<46}{value:>8}"


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
    domains: dict[str, Domain], selected: str, data: DataSource[Any] | None
) -> OneLineParser:
    parser = OneLineParser(
        prog=PROG,
        description="Generate, convert and check the data sets that training reads; get a model.",
        epilog=f"`{PROG} DOMAIN --help` shows the options of a domain, with examples.",
        allow_abbrev=False,
    )
    tasks = parser.add_subparsers(dest="task", required=True, metavar="DOMAIN")
    for name, domain in domains.items():
        if domain.data is None:
            continue
        chosen = data if name == selected else None
        sub = tasks.add_parser(
            name,
            help=domain.title,
            description=None if chosen is None else chosen.description,
            allow_abbrev=False,
        )
        sub.add_argument(
            "--out", required=True, metavar="DIR", type=path,
            help="folder for the data set (required)",
        )  # fmt: skip
        if chosen is not None:
            add_options(sub, chosen)
        sub.add_argument(
            "--force", action="store_true",
            help="write although the folder is not empty (default: refuse)",
        )  # fmt: skip
        sub.add_argument(
            "--no-next", action="store_true",
            help="do not print the command that trains on the data (default: print it)",
        )  # fmt: skip
        sub.add_argument(
            resources.SKIP, action="store_true",
            help="download although the disk may be too small (default: refuse)",
        )  # fmt: skip
    pretrained.add_options(
        tasks.add_parser(
            MODEL,
            help="a small pretrained model that trains on a CPU",
            description=pretrained.HELP,
            allow_abbrev=False,
        )
    )
    return parser


def add_options(parser: argparse.ArgumentParser, data: DataSource[Any]) -> None:
    """The flags of a domain's subcommand, but for those that every one has."""
    add = parser.add_argument
    if data.read is not None:
        add(
            "--source", "--parquet", nargs="+", metavar="SOURCE", type=printable_name,
            help="what to read: files, or a source named above",
        )  # fmt: skip
        add(
            "--test-file", "--test-parquet", nargs="+", metavar="FILE", type=path,
            help="files of test rows (default: hold out --test-fraction)",
        )  # fmt: skip
        add(
            "--test-fraction", type=fraction, metavar="F",
            help=f"share of the rows to hold out (default: {data.test_fraction:g})",
        )  # fmt: skip
        add(
            "--seed", type=non_negative_int, metavar="N",
            help="seed that chooses the held-out rows (default: 0)",
        )  # fmt: skip
        add("--revision", metavar="COMMIT", help="commit of a source on the hub, 40 hex digits")
    else:
        parser.set_defaults(source=(), test_file=None, test_fraction=None, seed=None, revision=None)
    if data.generator is not None:
        add(
            "--generate", nargs="*", metavar="KEY=VALUE",
            help=f"generate rows (--source {data.generator.name}; keys above)",
        )  # fmt: skip
    else:
        parser.set_defaults(generate=None)
    for flag, keywords in data.flags.items():
        add(flag, **keywords)
