"""The subcommand `python -m sg_rlhf.data search`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common import resources
from sg_rlhf.common.argument_types import (
    fraction,
    non_negative_int,
    path,
    printable_name,
    progress_bar,
)
from sg_rlhf.common.text import format_bytes, format_seconds
from sg_rlhf.data_io.command_options import file_entry, generate_options
from sg_rlhf.data_io.dataset_writer import UsageError
from sg_rlhf.data_io.hf_hub import download_from_hub
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.data_command import DataCommand, LoadTokenizer, Made, Plan
from sg_rlhf.tasks.search.data import (
    NQ_HOTPOTQA,
    NQ_HOTPOTQA_ROWS,
    Question,
    Splits,
    extent,
    join_splits,
    read_questions,
    shuffled,
    split,
    to_records,
)
from sg_rlhf.tasks.search.prompt import PROMPT_VERSION, STYLES, Style, build_prompt
from sg_rlhf.tasks.search.sets import encyclopedia

CORPUS = "corpus.jsonl"
#: The published runs' corpus and encoder: passages, numbers of a vector, bytes of weights.
WIKI_18_ROWS, E5_WIDTH = 21_015_324, 768
#: Bytes per vector of 768 numbers in an index.
INDEX_BYTES = {
    "Flat": 3072, "SQfp16": 1536, "HNSW32": 3344, "IVF16384,SQ8": 776, "IVF16384,PQ96": 104,
}  # fmt: skip
#: Bytes at most: of a record beside prompt and text, twice the text; of a question in memory beside
#: twice its text; of the process. 200,000 questions of 192 bytes with their golds took 847 on the
#: disk and 733 in memory each, in 5 s.
RECORD_BYTES, QUESTION_BYTES, PROCESS_BYTES = 200, 500, 170 * 10**6
ROWS_PER_SECOND = 40_000
#: Text of a question of the published set with its golds: no more than SQuAD's.
NQ_HOTPOTQA_BYTES = 200
SOURCES = "nq_hotpotqa, encyclopedia, or a .parquet or .jsonl file of questions"

_HELP = """\
Prepare questions that are answered with a search engine.

Reads a published training set or files, or generates a small encyclopedia with questions. Checks
every row and writes JSONL.

examples:
  # the published runs' training set from the hub; name the commit, there is no default one
  python -m sg_rlhf.data search --out data/search --source nq_hotpotqa --revision COMMIT

  # no network: files that are already here, with a test set of their own
  python -m sg_rlhf.data search --out data/search --source train.parquet --test-file dev.jsonl

  # generated: a corpus to index and questions about it, for a tiny model
  python -m sg_rlhf.data search --out data/search_tiny --source encyclopedia \\
      --generate people=200 towns=48 seed=0
  python -m sg_rlhf.retrieval.index --corpus data/search_tiny/corpus.jsonl --encoder bm25 \\
      --out data/search_tiny/index

sources:
  nq_hotpotqa   PeterJinGo/nq_hotpotqa_train on the Hugging Face hub; needs --revision
  encyclopedia  generated, see --generate
  FILE ...      .parquet or .jsonl: rows of Search-R1 (question, golden_answers or
                reward_model.ground_truth.target), of FlashRAG (id, question, golden_answers),
                or written by this command

keys of --generate (defaults in brackets):
  people      people in the encyclopedia, 4 questions each        [200]
  towns       towns, 2 questions each                             [48]
  test_share  share of both to hold out, with their questions     [0.25]
  seed        the same seed gives the same files                  [0]

DIR then holds train.jsonl and test.jsonl (fields input, answer, datasource, id, question; answer is
a JSON array of reference answers, any of which is right), corpus.jsonl if it was generated, and
manifest.json (counts, source, SHA-256 of each file).
"""


@dataclass(frozen=True)
class Source:
    """Where questions come from.

    Attributes:
        entry: for the manifest.
        make: makes them, and the corpus where it is generated.
        extent: how many there are at most, and the bytes of their text.
    """

    entry: Mapping[str, Any]
    make: Callable[[], tuple[Splits, list[dict[str, str]]]]
    extent: Callable[[], tuple[int, int]]


class SearchData(DataCommand):
    """Reads files of questions, or generates a small encyclopedia."""

    description = _HELP

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "--source",
            type=printable_name,
            required=True,
            nargs="+",
            metavar="SOURCE",
            help="what to read: see sources above (required)",
        )
        add("--revision", metavar="COMMIT", help="commit of nq_hotpotqa, 40 hex digits")
        add(
            "--test-file",
            nargs="+",
            metavar="FILE",
            type=path,
            help="files of test questions (default: hold out --test-fraction)",
        )
        add(
            "--test-fraction",
            type=fraction,
            metavar="F",
            help="share of the questions to hold out, without --test-file (default: 0.02)",
        )
        add(
            "--seed",
            type=non_negative_int,
            metavar="N",
            help="seed that chooses the held-out questions (default: 0)",
        )
        add(
            "--generate",
            nargs="*",
            metavar="KEY=VALUE",
            help="settings of the encyclopedia (keys above)",
        )
        add(
            "--prompt",
            choices=STYLES,
            help="prompt: Search-R1's instructions, or the question alone (default: search_r1; "
            "encyclopedia: short)",
        )

    def plan(self, args: argparse.Namespace, _load_tokenizer: LoadTokenizer) -> Plan:
        generated = args.source == ["encyclopedia"]
        style: Style = args.prompt or ("short" if generated else "search_r1")
        source = _encyclopedia(args) if generated else _files(args, style)
        request = {
            "prompt": {"version": PROMPT_VERSION, "style": style},
            "source": source.entry,
        }

        def make() -> Made:
            splits, corpus = source.make()
            if not splits.train:
                sources = " ".join(args.source)
                raise DataError(f"--source {sources}: no question is left to train on")
            return _made(splits, corpus, style)

        return Plan(request, make, lambda: _needs(*source.extent(), style))

    def report(self, manifest: Mapping[str, Any]) -> Iterator[str]:
        train, test = manifest["counts"]["train"], manifest["counts"]["test"]
        width = max(len(name) for name in ("source", *train, *test))
        yield f"Search questions\n  {'source':<{width}}    train     test"
        for name in sorted({*train, *test}):
            yield f"  {name:<{width}} {train.get(name, 0):>8} {test.get(name, 0):>8}"
        yield f"  {'all':<{width}} {sum(train.values()):>8} {sum(test.values()):>8}"
        yield "  questions in both splits           0"
        yield (
            f"  duplicates dropped                 {manifest['duplicates_dropped']}"
            f"  ({manifest['duplicates_with_other_golds']} of them with other gold answers)"
        )
        yield (
            "  train questions dropped because they are in the test set  "
            f"{manifest['train_questions_found_in_test_dropped']}"
        )

    def next_step(self, out: Path, _manifest: Mapping[str, Any]) -> str:
        if (out / CORPUS).is_file():
            # A generated corpus is small; the index command says what it takes.
            return (
                f"python -m sg_rlhf.retrieval.index --corpus {out / CORPUS} --encoder bm25 "
                f"--out {out / 'index'}"
            )
        return (
            "python -m sg_rlhf.train --config configs/search/grpo_sg_qwen2.5-3b.yaml "
            f"data.prompt_dataset={out / 'train.jsonl'} eval.dataset={out / 'test.jsonl'}\n"
            + "\n".join(_wiki_18(out))
        )


COMMAND = SearchData()


def _wiki_18(out: Path) -> Iterator[str]:
    """Disk that an index of the recipe's corpus takes, by faiss factory string."""
    disk = resources.free_disk(out)
    yield (
        f"Its retriever searches wiki-18 ({WIKI_18_ROWS:,} passages, E5's {E5_WIDTH} numbers); an "
        f"index of it, where {format_bytes(disk)} of disk are free:"
    )
    yield "  --factory         disk to build  disk after  fits here"
    for factory, per_vector in INDEX_BYTES.items():
        after = WIKI_18_ROWS * per_vector
        # While it is built, its float32 vectors are there too.
        build = after + WIKI_18_ROWS * 4 * E5_WIDTH
        fits = "yes" if build <= disk else "no"
        yield f"  {factory:<15} {format_bytes(build):>15} {format_bytes(after):>11}  {fits}"


def _made(splits: Splits, corpus: list[dict[str, str]], style: Style) -> Made:
    facts = {
        "counts": {"train": _by_source(splits.train), "test": _by_source(splits.test)},
        "duplicates_dropped": splits.duplicates,
        "duplicates_with_other_golds": splits.conflicts,
        "train_questions_found_in_test_dropped": splits.overlap,
    }
    files: dict[str, Iterable[Mapping[str, Any]]] = {
        "train.jsonl": to_records(shuffled(splits.train), style),
        "test.jsonl": to_records(shuffled(splits.test), style),
    }
    if corpus:
        files[CORPUS] = corpus
    return Made(files, facts)


def parse_generate(tokens: Sequence[str]) -> dict[str, Any]:
    """The keys of `--generate`, with defaults.

    Raises:
        UsageError: an unknown key, a key given twice, or a bad value.
    """
    defaults = {"people": 200, "towns": 48, "test_share": 0.25, "seed": 0}
    return generate_options(tokens, defaults)


def _encyclopedia(args: argparse.Namespace) -> Source:
    given = {
        "--revision": args.revision,
        "--test-file": args.test_file,
        "--test-fraction": args.test_fraction,
        "--seed": args.seed,
    }
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{option} does not go with --source encyclopedia; "
                "--generate has the keys test_share and seed"
            )
    options = parse_generate(args.generate or ())

    def make() -> tuple[Splits, list[dict[str, str]]]:
        try:
            made = encyclopedia.build(**options)
        except ValueError as error:
            raise UsageError(f"--generate {error}") from None
        train = [problem.question for problem in made.train]
        return Splits(train, [problem.question for problem in made.test]), made.corpus

    people = min(options["people"], encyclopedia.MAX_PEOPLE)
    rows = 4 * people + 2 * min(options["towns"], encyclopedia.MAX_TOWNS)
    return Source({"kind": "encyclopedia", **options}, make, lambda: (rows, 200 * rows))


def _needs(rows: int, text_bytes: int, style: Style) -> resources.Requirements:
    """What so many questions take when they are read and written."""
    disk = rows * (len(build_prompt("", style)) + RECORD_BYTES) + 2 * text_bytes
    memory = PROCESS_BYTES + rows * QUESTION_BYTES + 2 * text_bytes
    lines: tuple[str, ...] = ()
    if rows >= resources.MANY:
        lines = (
            f"Search questions: about {rows:,}",
            f"  disk    {format_bytes(disk)}",
            f"  memory  {format_bytes(memory)}",
            f"  time    about {format_seconds(rows / ROWS_PER_SECOND)}",
        )
    return resources.Requirements(disk, memory, lines)


def _files(args: argparse.Namespace, style: Style) -> Source:
    if args.generate is not None:
        raise UsageError("--generate belongs to --source encyclopedia")
    named = {"nq_hotpotqa", "encyclopedia"} & set(args.source)
    if named and len(args.source) > 1:
        raise UsageError(f"--source {' '.join(args.source)}: {min(named)} cannot be mixed")
    if args.test_file is not None:
        for option, value in (("--test-fraction", args.test_fraction), ("--seed", args.seed)):
            if value is not None:
                raise UsageError(f"{option} and --test-file exclude each other")
    entry: dict[str, Any] = {"kind": "files"}
    if named:
        if args.revision is None:
            raise UsageError(
                "--source nq_hotpotqa needs --revision COMMIT (40 hex digits; "
                f"https://huggingface.co/datasets/{NQ_HOTPOTQA}/commits/main)"
            )

        def check_room() -> None:
            needs = _needs(NQ_HOTPOTQA_ROWS, NQ_HOTPOTQA_ROWS * NQ_HOTPOTQA_BYTES, style)
            if not args.skip_room_check:
                resources.check_requirements("--out", args.out, "the data set", needs)

        skip = args.skip_room_check
        paths = [
            download_from_hub(
                NQ_HOTPOTQA, "train.parquet", args.revision, before=check_room, skip_room_check=skip
            )
        ]
        entry |= {"kind": "hub", "repository": NQ_HOTPOTQA, "revision": args.revision}
    elif args.revision is not None:
        raise UsageError("--revision belongs to --source nq_hotpotqa")
    else:
        paths = [Path(name) for name in args.source]
    entry["train"] = [file_entry(file, SOURCES) for file in paths]
    if args.test_file is not None:
        entry["test"] = [file_entry(file, SOURCES) for file in args.test_file]
        every = [*paths, *args.test_file]
        return Source(
            entry,
            lambda: (join_splits(_read(paths), _read(args.test_file)), []),
            lambda: _extent(every),
        )
    fraction = 0.02 if args.test_fraction is None else args.test_fraction
    seed = args.seed or 0
    entry |= {"test_fraction": fraction, "seed": seed}
    return Source(entry, lambda: (split(_read(paths), fraction, seed), []), lambda: _extent(paths))


def _extent(paths: Sequence[Path]) -> tuple[int, int]:
    rows, sizes = zip(*(extent(path) for path in paths), strict=True)
    return sum(rows), sum(sizes)


def _read(paths: Sequence[Path]) -> list[Question]:
    questions: list[Question] = []
    for file in paths:
        with progress_bar(f"checking {file.name}", "questions") as bar:
            questions += read_questions(file, on_row=bar.update)
    return questions


def _by_source(questions: Iterable[Question]) -> dict[str, int]:
    return dict(sorted(Counter(question.source for question in questions).items()))
