"""The subcommand `python -m sg_rlhf.data kk`."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import (
    fraction,
    non_negative_int,
    progress_bar,
)
from sg_rlhf.data_io.command_options import file_entry, generate_options
from sg_rlhf.data_io.dataset_writer import UsageError
from sg_rlhf.tasks.data_command import DataCommand, LoadTokenizer, Made, Plan
from sg_rlhf.tasks.kk.data import (
    FILES,
    Splits,
    check_splits,
    generate_splits,
    read_parquet,
    shuffled,
    split,
    to_records,
)
from sg_rlhf.tasks.kk.prompt import PROMPT_VERSION, build_chat_prompt, build_prompt
from sg_rlhf.tasks.kk.puzzle import MAX_PEOPLE, MIN_PEOPLE, Puzzle

# The largest puzzles that the tiny model was pretrained on; larger ones are for a real model.
TINY_MODEL_PEOPLE = 3

_HELP = """\
Generate Knights & Knaves puzzles, or convert files in Logic-RL's format.

Checks every row: the statements must have exactly one solution, the given one.

examples:
  # the sizes of the published runs: 900 train and 100 test puzzles for each of 3 to 7 people
  python -m sg_rlhf.data kk --out data/kk --generate people=3-7 per_size=900 seed=0

  # a small set; 2 people have only 184 different puzzles, so let them return with other names
  python -m sg_rlhf.data kk --out data/kk_tiny --generate people=2-3 per_size=2000 distinct=names

  # Logic-RL's own files (each row of the second must be absent from the first)
  python -m sg_rlhf.data kk --out data/kk --parquet train.parquet --test-parquet test.parquet

  # several files, 10 % of each size held out
  python -m sg_rlhf.data kk --out data/kk --parquet 3ppl.parquet 4ppl.parquet --test-fraction 0.1

keys of --generate (defaults in brackets):
  people         numbers of people: 3, 2-3, or 2,4,6          [3-7]
  per_size       train puzzles per number of people           [900]
  test_per_size  test puzzles per number of people            [100]
  seed           the same seed gives the same files           [0]
  max_depth      nesting of a claim; official data have 2     [2]
  width          maximum parts of an "and" or "or"            [2]
  distinct       structure: no puzzle twice, whatever the names
                 names: a train puzzle may return with other names
                 (test puzzles never do)                      [structure]

DIR then holds train.jsonl and test.jsonl (fields input, answer, datasource, quiz, n_people, names,
statements, solution) and manifest.json (counts, source, seed, SHA-256 of each file).
"""


class KnightsData(DataCommand):
    """Generates puzzles, or converts Logic-RL's files."""

    description = _HELP

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--generate", nargs="*", metavar="KEY=VALUE", help="generate puzzles (keys above)")
        add(
            "--parquet",
            nargs="+",
            metavar="FILE",
            type=Path,
            help="files to convert: Logic-RL .parquet or K&K .jsonl",
        )
        add(
            "--test-parquet",
            nargs="+",
            metavar="FILE",
            type=Path,
            help="files of test puzzles, with --parquet (default: hold out --test-fraction)",
        )
        add(
            "--test-fraction",
            type=fraction,
            metavar="F",
            help="share of each size to hold out, without --test-parquet (default: 0.1)",
        )
        add(
            "--seed",
            type=non_negative_int,
            metavar="N",
            help="seed that chooses the held-out rows (default: 0)",
        )
        add(
            "--chat-template",
            metavar="MODEL",
            help="model, hub id or folder, whose chat template the prompts get (default: "
            "Logic-RL's ChatML text, for Qwen2.5)",
        )
        add(
            "--no-system-role",
            action="store_true",
            help="put the instructions into the user turn (default: only where the template has no "
            "system message)",
        )

    def plan(self, args: argparse.Namespace, load_tokenizer: LoadTokenizer) -> Plan:
        prompt = _prompt(args, load_tokenizer)
        source, build = _source(args)
        request = {
            "prompt": {
                "version": PROMPT_VERSION,
                "chat_template": args.chat_template,
                # Catches a template that changed under the same name.
                "sha256": hashlib.sha256(prompt("").encode()).hexdigest(),
            },
            "source": source,
        }
        return Plan(request, lambda: _made(build(), prompt))

    def report(self, manifest: Mapping[str, Any]) -> Iterator[str]:
        train, test = manifest["counts"]["train"], manifest["counts"]["test"]
        yield "Knights & Knaves\n  people    train     test"
        for size in sorted({*train, *test}, key=int):
            yield f"  {size:>6} {train.get(size, 0):>8} {test.get(size, 0):>8}"
        yield f"  {'all':>6} {sum(train.values()):>8} {sum(test.values()):>8}"
        yield "  puzzles in both splits                0  (by who says what, and by quiz text)"
        yield f"  duplicates dropped                 {manifest['duplicates_dropped']:>4}"
        yield (
            f"  test statements found in train     {manifest['test_structures_in_train']:>4}"
            "  (with other names or wording)"
        )

    def next_step(self, out: Path, manifest: Mapping[str, Any]) -> str:
        sizes = (int(size) for counts in manifest["counts"].values() for size in counts)
        tiny = max(sizes, default=0) <= TINY_MODEL_PEOPLE
        recipe = "grpo_sg_tiny_cpu.yaml" if tiny else "grpo_sg_qwen2.5-3b-instruct.yaml"
        return (
            f"python -m sg_rlhf.train --config configs/kk/{recipe} "
            f"data.prompt_dataset={out / 'train.jsonl'} eval.dataset={out / 'test.jsonl'}"
        )


COMMAND = KnightsData()


def _made(splits: Splits, prompt: Callable[[str], str]) -> Made:
    if not splits.train and not splits.test:
        raise UsageError("nothing to write: both per_size and test_per_size are 0")
    for name, puzzles in (("train", splits.train), ("test", splits.test)):
        if not puzzles:
            print(f"warning: the {name} split is empty", file=sys.stderr)
    facts = {
        "counts": {"train": _per_size(splits.train), "test": _per_size(splits.test)},
        "duplicates_dropped": splits.duplicates,
        "test_structures_in_train": splits.shared_structures,
    }
    files = {
        "train.jsonl": to_records(shuffled(splits.train), prompt),
        "test.jsonl": to_records(shuffled(splits.test), prompt),
    }
    return Made(files, facts)


def _prompt(args: argparse.Namespace, load_tokenizer: LoadTokenizer) -> Callable[[str], str]:
    if args.chat_template is None:
        if args.no_system_role:
            raise UsageError("--no-system-role needs --chat-template MODEL")
        return build_prompt
    tokenizer = load_tokenizer(args.chat_template)
    system_role = False if args.no_system_role else None
    return lambda quiz: build_chat_prompt(quiz, tokenizer, system_role=system_role)


def _source(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], Splits]]:
    """What the data is made from, for the manifest, and the function that makes it."""
    if (args.generate is None) == (args.parquet is None):
        raise UsageError("give one of --generate KEY=VALUE ... and --parquet FILE ...")
    held_out = {
        "--test-parquet": args.test_parquet,
        "--test-fraction": args.test_fraction,
        "--seed": args.seed,
    }
    given = [option for option, value in held_out.items() if value is not None]
    if args.generate is not None:
        if given:
            raise UsageError(
                f"{given[0]} belongs to --parquet; --generate has the keys test_per_size and seed"
            )
        options = parse_generate(args.generate)
        return {"kind": "generated", **options}, lambda: _generate(options)
    if args.test_parquet is not None and len(given) > 1:
        raise UsageError(f"{given[1]} and --test-parquet exclude each other")
    parts = {"train": args.parquet, "test": args.test_parquet or []}
    source: dict[str, Any] = {
        "kind": "files",
        **{part: [file_entry(path, FILES) for path in paths] for part, paths in parts.items()},
    }
    if args.test_parquet is not None:
        return source, lambda: check_splits(_read(args.parquet), _read(args.test_parquet))
    fraction = 0.1 if args.test_fraction is None else args.test_fraction
    seed = args.seed or 0
    source |= {"test_fraction": fraction, "seed": seed}
    return source, lambda: split(_read(args.parquet), fraction, seed)


def parse_generate(tokens: Sequence[str]) -> dict[str, Any]:
    """The keys of `--generate`, with defaults; `people` becomes a sorted list of sizes.

    Raises:
        UsageError: an unknown key, a key given twice, or a bad value.
    """
    defaults = {
        "people": list(range(3, 8)),
        "per_size": 900,
        "test_per_size": 100,
        "seed": 0,
        "max_depth": 2,
        "width": 2,
        "distinct": "structure",
    }
    return generate_options(tokens, defaults, {"people": parse_people})


def parse_people(text: str) -> list[int]:
    """Numbers of people as a sorted list: "3", "2-3", "2,4,6" or a mix of them.

    Raises:
        UsageError: anything else, or a number outside 2 to 12.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            break
        first, last = int(low), int(high or low)
        if not MIN_PEOPLE <= first <= last <= MAX_PEOPLE:
            break
        sizes.update(range(first, last + 1))
    else:
        return sorted(sizes)
    raise UsageError(
        f"--generate people={text}: expected numbers from {MIN_PEOPLE} to {MAX_PEOPLE} "
        "such as 3, 2-3 or 2,4,6"
    )


def _generate(options: Mapping[str, Any]) -> Splits:
    total = len(options["people"]) * (options["per_size"] + options["test_per_size"])
    keys = ("per_size", "test_per_size", "seed", "max_depth", "width", "distinct")
    with progress_bar("generating", "puzzles", max(total, 0)) as bar:
        chosen = {key: options[key] for key in keys}
        return generate_splits(options["people"], **chosen, on_puzzle=bar.update)


def _read(paths: Sequence[Path]) -> list[Puzzle]:
    puzzles: list[Puzzle] = []
    for path in paths:
        with progress_bar(f"checking {path.name}", "puzzles") as bar:
            puzzles += read_parquet(path, on_row=bar.update)
    return puzzles


def _per_size(puzzles: Iterable[Puzzle]) -> dict[str, int]:
    counts = Counter(puzzle.n_people for puzzle in puzzles)
    return {str(n_people): counts[n_people] for n_people in sorted(counts)}
