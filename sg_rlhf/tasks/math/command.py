"""The subcommand `python -m sg_rlhf.data math`."""

from __future__ import annotations

import argparse
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import (
    fraction,
    non_negative_int,
    positive_int,
    progress_bar,
)
from sg_rlhf.data_io.command_options import file_entry, generate_options
from sg_rlhf.data_io.dataset_writer import UsageError
from sg_rlhf.data_io.hf_hub import download_from_hub
from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.tasks.data_command import DataCommand, LoadTokenizer, Made, Plan
from sg_rlhf.tasks.math.data import KINDS, MathRow, read_rows, to_records
from sg_rlhf.tasks.math.prompt import PROMPT_VERSION, prompt_of
from sg_rlhf.tasks.math.sets import preparation, published, report
from sg_rlhf.tasks.math.sets.arithmetic import problems as arithmetic_problems
from sg_rlhf.tasks.math.sets.published import EvalSet
from sg_rlhf.tasks.overlap import LEVELS, NGRAM

_HELP = """\
Prepare mathematics problems: a published training set, a file, or generated arithmetic.

Checks every row, reports duplicates, answer types and overlap with the evaluation sets, and writes
JSONL.

examples:
  # the paper's two training sets, downloaded at a pinned commit and checked
  python -m sg_rlhf.data math --out data/math_dsr --source dsr_uniform \\
      --eval-dir data/math_eval --download-eval
  python -m sg_rlhf.data math --out data/math_orz --source orz57k \\
      --eval-dir data/math_eval --drop-overlap

  # no network: a file that is already here
  python -m sg_rlhf.data math --out data/math_dsr --source deepscaler_uniform_train.parquet

  # generated arithmetic for a tiny model
  python -m sg_rlhf.data math --out data/math_tiny --source arithmetic --generate count=2000 seed=0

  # another set on the Hugging Face hub; there is no default commit, so name one
  python -m sg_rlhf.data math --out data/deepscaler --dedup --test-fraction 0.02 \\
      --source hub:agentica-org/DeepScaleR-Preview-Dataset:deepscaler.json --revision COMMIT

sources:
  dsr_uniform  10,000 rows drawn with replacement from DeepScaleR by difficulty; 7,601 problems
  orz57k       Open-Reasoner-Zero's 57k collection
  arithmetic   generated, see --generate
  hub:OWNER/NAME:FILE   a file of a data set on the hub; needs --revision
  FILE         .parquet, .json, .jsonl: rows of the reference runs (prompt, reward_model), of
               DeepScaleR (problem, answer), of Open-Reasoner-Zero (a turn of human and one of
               assistant), or written by this command

keys of --generate (defaults in brackets):
  count         problems to train on                                    [2000]
  test_count    other problems, held out                                [200]
  seed          the same seed gives the same files                      [0]
  max_operands  2, or 3 for chains such as 47 + 85 - 36                 [3]
  max_digits    digits of an operand, 1 to 4                            [2]

DIR then holds train.jsonl and test.jsonl (fields input, answer, datasource, id, problem; answer is
a JSON array of reference answers, any of which is right), with --eval-dir one file for each
evaluation set, and manifest.json (the report, source, options, SHA-256 of each file).
"""


@dataclass(frozen=True)
class Source:
    """Where rows come from: an entry for the manifest, and train and test rows when called for."""

    entry: Mapping[str, Any]
    read: Callable[[], tuple[list[MathRow], list[MathRow]]]


class MathData(DataCommand):
    """Reads a published set or a file, or generates arithmetic."""

    description = _HELP

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        files = ", ".join(e.file for e in published.EVAL_SETS.values())
        more = ", ".join(e.file for e in published.MORE_EVAL_SETS.values())
        add(
            "--source",
            required=True,
            metavar="SOURCE",
            help="what to read: see sources above (required)",
        )
        add("--revision", metavar="COMMIT", help="commit of a hub source, 40 hex digits")
        add(
            "--generate",
            nargs="*",
            metavar="KEY=VALUE",
            help="settings of --source arithmetic (keys above)",
        )
        add(
            "--eval-dir",
            metavar="DIR",
            type=Path,
            help=f"folder with evaluation sets: the paper's ({files}) and any of {more}. The "
            "overlap with them is reported, and they are written as JSONL too (default: none)",
        )
        add(
            "--download-eval",
            nargs="?",
            const="paper",
            choices=("paper", "all"),
            help="download the files that --eval-dir lacks: the paper's sets, or all sets of "
            "`python -m eval.run --list` (default: none; without a value: paper)",
        )
        add(
            "--ngram",
            type=positive_int,
            default=NGRAM,
            metavar="N",
            help=f"length of the word sequences that are compared, in words (default: {NGRAM})",
        )
        add(
            "--drop-overlap",
            nargs="?",
            const="mostly",
            choices=LEVELS,
            help="drop training problems that share with a problem of --eval-dir the whole text "
            "(exact), at least half of its word sequences (mostly), or one sequence (any) "
            "(default: drop none; without a value: mostly)",
        )
        add("--dedup", action="store_true", help="keep only the first row of each problem")
        add(
            "--test-fraction",
            type=fraction,
            metavar="F",
            help="share of the problems to hold out (default: 0)",
        )
        add(
            "--seed",
            type=non_negative_int,
            metavar="N",
            help="seed that chooses the held-out problems (default: 0)",
        )

    def plan(self, args: argparse.Namespace, _load_tokenizer: LoadTokenizer) -> Plan:
        _check(args)
        source = _source(args)
        request = {
            "prompt": {
                "version": PROMPT_VERSION,
                "sha256": hashlib.sha256(prompt_of("").encode()).hexdigest(),
            },
            "source": dict(source.entry),
            "options": {
                "dedup": args.dedup,
                "drop_overlap": args.drop_overlap,
                "ngram": args.ngram,
                "test_fraction": args.test_fraction or 0.0,
                "seed": args.seed or 0,
            },
            "eval_sets": {name: e.sha256 for name, e in _asked_sets(args).items()},
        }
        return Plan(request, lambda: _make(args, source))

    def report(self, manifest: Mapping[str, Any]) -> Iterable[str]:
        return report.lines(manifest)

    def next_step(self, out: Path, manifest: Mapping[str, Any]) -> str:
        return report.next_step(out, manifest)


COMMAND = MathData()


def _make(args: argparse.Namespace, source: Source) -> Made:
    eval_sets = _eval_sets(args)
    prepared = preparation.prepare(
        *source.read(),
        eval_sets,
        ngram=args.ngram,
        drop_overlap=args.drop_overlap,
        dedup=args.dedup,
        test_fraction=args.test_fraction,
        seed=args.seed or 0,
    )
    files = {"train.jsonl": to_records(prepared.train), "test.jsonl": to_records(prepared.test)}
    files |= {f"{name}.jsonl": to_records(rows) for name, rows in eval_sets.items()}
    return Made(files, prepared.facts)


def _check(args: argparse.Namespace) -> None:
    if args.eval_dir is None:
        for option, given in (
            ("--download-eval", args.download_eval),
            ("--drop-overlap", args.drop_overlap),
        ):
            if given:
                raise UsageError(f"{option} needs --eval-dir DIR")
    if args.seed is not None and not args.test_fraction:
        raise UsageError("--seed needs --test-fraction (of --generate, seed is a key)")


def _source(args: argparse.Namespace) -> Source:
    name: str = args.source
    if args.generate is not None and name != "arithmetic":
        raise UsageError("--generate belongs to --source arithmetic")
    if args.revision is not None and not name.startswith("hub:"):
        raise UsageError("--revision belongs to --source hub:OWNER/NAME:FILE")
    if name == "arithmetic":
        if args.test_fraction is not None:
            raise UsageError("--test-fraction: --generate has the key test_count instead")
        options = parse_generate(args.generate or [])
        return Source({"kind": "generated", **options}, lambda: _generate(options))
    if name in published.ORIGINS:
        return _pinned(name, published.ORIGINS[name])
    if name.startswith("hub:"):
        return _hub(name, args.revision, args.skip_room_check)
    path = Path(name)
    sources = ", ".join((*published.ORIGINS, "arithmetic"))
    expected = f"{KINDS} or one of the sources {sources}, hub:OWNER/NAME:FILE"
    entry = {"kind": "file", **file_entry(path, expected)}
    return Source(entry, lambda: (_read(path), []))


def _pinned(name: str, origin: Origin) -> Source:
    def read() -> tuple[list[MathRow], list[MathRow]]:
        with tempfile.TemporaryDirectory() as folder:
            path = download(
                origin, Path(folder), Path(origin.path).name, by_hand="give it as --source FILE"
            )
            # DSR's file names its rows' source itself.
            return _read(path, None if name == "dsr_uniform" else name), []

    checksum = {"sha256": origin.sha256} if origin.sha256 else {"git_blob": origin.git_blob}
    return Source({"kind": "published", "name": name, "url": origin.url, **checksum}, read)


def _hub(name: str, revision: str | None, skip_room_check: bool) -> Source:
    parts = re.fullmatch(r"hub:([\w.-]+/[\w.-]+):(.+)", name)
    if parts is None:
        raise UsageError(f"--source {name}: expected hub:OWNER/NAME:FILE")
    repository, file = parts.groups()
    if revision is None:
        raise UsageError(
            f"--source {name}: needs --revision COMMIT, 40 hex digits: we have pinned no commit of "
            f"it, and a branch can move (https://huggingface.co/datasets/{repository}/commits/main)"
        )
    entry = {"kind": "hub", "repository": repository, "file": file, "revision": revision}
    short = repository.rpartition("/")[2]

    def read() -> tuple[list[MathRow], list[MathRow]]:
        path = download_from_hub(repository, file, revision, skip_room_check=skip_room_check)
        return _read(path, short), []

    return Source(entry, read)


def parse_generate(tokens: Sequence[str]) -> dict[str, int]:
    """The keys of `--generate`, with defaults.

    Raises:
        UsageError: an unknown key, a key given twice, or a bad value.
    """
    defaults = {"count": 2000, "test_count": 200, "seed": 0, "max_operands": 3, "max_digits": 2}
    return generate_options(tokens, defaults)


def _generate(options: Mapping[str, int]) -> tuple[list[MathRow], list[MathRow]]:
    shape = {key: options[key] for key in ("max_operands", "max_digits")}

    def draw(count: int, held_out: bool) -> list[MathRow]:
        name = "arithmetic-test" if held_out else "arithmetic"
        made = arithmetic_problems(count, options["seed"], held_out=held_out, **shape)
        return [
            MathRow(f"{name}-{number}", problem, (gold,), "arithmetic")
            for number, (problem, gold) in enumerate(made, start=1)
        ]

    return draw(options["count"], False), draw(options["test_count"], True)


def _read(path: Path, source: str | None = None) -> list[MathRow]:
    with progress_bar(f"reading {path.name}", "rows") as bar:
        return read_rows(path, source=source, allow_empty=True, on_row=bar.update)


def _asked_sets(args: argparse.Namespace) -> dict[str, EvalSet]:
    """The paper's sets, and the others whose files are there or wanted."""
    if args.eval_dir is None:
        return {}
    if args.download_eval == "all":
        return published.all_eval_sets()
    more = {
        name: eval_set
        for name, eval_set in published.MORE_EVAL_SETS.items()
        if published.is_there(eval_set, args.eval_dir)
    }
    return {**published.EVAL_SETS, **more}


def _eval_sets(args: argparse.Namespace) -> dict[str, list[MathRow]]:
    asked = _asked_sets(args)
    if args.download_eval:
        for eval_set in asked.values():
            published.download_eval_set(eval_set, args.eval_dir)
    return {name: published.read_eval_set(name, args.eval_dir) for name in asked}
