"""The subcommand `python -m sg_rlhf.data math`."""

from __future__ import annotations

import argparse
import hashlib
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf import __version__
from sg_rlhf.common.command_line import (
    add_force,
    add_task,
    file_entry,
    generate_options,
    print_files,
    print_up_to_date,
    progress_bar,
)
from sg_rlhf.common.dataset_folder import (
    UsageError,
    check_writable,
    current_manifest,
    write_dataset,
)
from sg_rlhf.common.hub import download_from_hub
from sg_rlhf.tasks.math.answer_types import TYPES, answer_type
from sg_rlhf.tasks.math.arithmetic import problems as arithmetic_problems
from sg_rlhf.tasks.math.data import (
    DSR_UNIFORM,
    EVAL_SETS,
    KINDS,
    ORZ_57K,
    MathRow,
    Origin,
    hold_out,
    read_eval_set,
    read_rows,
    to_records,
)
from sg_rlhf.tasks.math.download import download, download_eval_set
from sg_rlhf.tasks.math.grading import Reason, grade
from sg_rlhf.tasks.math.overlap import (
    LEVELS,
    MOSTLY,
    NGRAM,
    SetOverlap,
    find_overlap,
    normalise,
)
from sg_rlhf.tasks.math.prompt import PROMPT_VERSION, prompt_of

ORIGINS: Mapping[str, Origin] = {"dsr_uniform": DSR_UNIFORM, "orz57k": ORZ_57K}

_HELP = """\
Mathematics: read a published training set or a file, check every row, report duplicates, answer
types and overlap with the evaluation sets, and write one form of JSONL.

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
  FILE         .parquet, .json or .jsonl: rows of the reference runs (prompt, reward_model), of
               DeepScaleR (problem, answer), of Open-Reasoner-Zero (a turn of human and one of
               assistant), or written by this command

keys of --generate (defaults in brackets):
  count         problems to train on                                    [2000]
  test_count    other problems, held out                                [200]
  seed          the same seed gives the same files                      [0]
  max_operands  2, or 3 for chains such as 47 + 85 - 36                 [3]
  max_digits    digits of an operand, 1 to 4                            [2]

DIR then holds train.jsonl and test.jsonl (fields input, answer, datasource, id, problem; answer is
a JSON array of the gold answers, any of which is right), with --eval-dir one file for each
evaluation set, and manifest.json (the report, source, options, SHA-256 of each file).
"""


@dataclass(frozen=True)
class Source:
    """Where rows come from: an entry for the manifest, and train and test rows when called for."""

    entry: Mapping[str, Any]
    read: Callable[[], tuple[list[MathRow], list[MathRow]]]


@dataclass(frozen=True)
class Prepared:
    """Rows to write, and the facts for the manifest and the report."""

    train: list[MathRow]
    test: list[MathRow]
    facts: dict[str, Any]


def add_parser(tasks: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand `math` with its options; its `run` is `args.run`."""
    parser = add_task(tasks, "math", "mathematics with a final answer in a box", _HELP)
    add = parser.add_argument
    add("--source", required=True, metavar="SOURCE", help="what to read; sources above")
    add("--revision", metavar="COMMIT", help="commit of a hub source, 40 hex digits")
    add("--generate", nargs="*", metavar="KEY=VALUE", help="for --source arithmetic; keys above")
    add(
        "--eval-dir",
        metavar="DIR",
        type=Path,
        help=f"folder with the evaluation sets ({', '.join(e.file for e in EVAL_SETS.values())}): "
        "report the overlap and write them as JSONL too",
    )
    add("--download-eval", action="store_true", help="get what is missing in --eval-dir")
    add("--ngram", type=int, default=NGRAM, help=f"words of a common run [{NGRAM}]")
    add(
        "--drop-overlap",
        nargs="?",
        const="mostly",
        choices=LEVELS,
        help="drop training problems that have the same text as a problem of --eval-dir (exact), "
        "or at least half of its runs of words (mostly; the default), or a single run (any)",
    )
    add("--dedup", action="store_true", help="keep the first row of each problem")
    add("--test-fraction", type=float, help="share of the problems to hold out [0]")
    add("--seed", type=int, help="seed of the held-out problems [0]")
    add_force(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, load_tokenizer: Callable[[str], Any]) -> None:
    """Read or make the rows, check them and write the data set.

    Args:
        load_tokenizer: not used: the reference prompt has no chat template.

    Raises:
        ValueError: bad arguments or data; the message is one line for the user.
    """
    out: Path = args.out.resolve()
    _check(args)
    source = _source(args)
    request = {
        "task": "math",
        "version": __version__,
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
        "eval_sets": {name: e.sha256 for name, e in EVAL_SETS.items()} if args.eval_dir else {},
    }
    if (manifest := current_manifest(out, request)) is not None:
        print_up_to_date(out)
        _print_next(out, manifest)
        return
    check_writable(out, args.force)
    eval_sets = _eval_sets(args)
    prepared = _prepare(args, *source.read(), eval_sets)
    files = {"train.jsonl": to_records(prepared.train), "test.jsonl": to_records(prepared.test)}
    files |= {f"{name}.jsonl": to_records(rows) for name, rows in eval_sets.items()}
    _print_report(out, write_dataset(out, files, request, prepared.facts))


def _check(args: argparse.Namespace) -> None:
    if args.eval_dir is None:
        for option, given in (
            ("--download-eval", args.download_eval),
            ("--drop-overlap", args.drop_overlap),
        ):
            if given:
                raise UsageError(f"{option} needs --eval-dir DIR")
    if args.ngram < 1:
        raise UsageError(f"--ngram {args.ngram}: expected at least 1")
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
    if name in ORIGINS:
        return _published(name, ORIGINS[name])
    if name.startswith("hub:"):
        return _hub(name, args.revision)
    path = Path(name)
    sources = ", ".join((*ORIGINS, "arithmetic"))
    expected = f"{KINDS} or one of the sources {sources}, hub:OWNER/NAME:FILE"
    entry = {"kind": "file", **file_entry(path, expected)}
    return Source(entry, lambda: (_read(path), []))


def _published(name: str, origin: Origin) -> Source:
    def read() -> tuple[list[MathRow], list[MathRow]]:
        with tempfile.TemporaryDirectory() as folder:
            path = download(origin, Path(folder), Path(origin.path).name)
            # DSR's file names its rows' source itself.
            return _read(path, None if name == "dsr_uniform" else name), []

    checksum = {"sha256": origin.sha256} if origin.sha256 else {"git_blob": origin.git_blob}
    return Source({"kind": "published", "name": name, "url": origin.url, **checksum}, read)


def _hub(name: str, revision: str | None) -> Source:
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
    return Source(entry, lambda: (_read(download_from_hub(repository, file, revision), short), []))


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


def _eval_sets(args: argparse.Namespace) -> dict[str, list[MathRow]]:
    if args.eval_dir is None:
        return {}
    if args.download_eval:
        for eval_set in EVAL_SETS.values():
            download_eval_set(eval_set, args.eval_dir)
    return {name: read_eval_set(name, args.eval_dir) for name in EVAL_SETS}


def _prepare(
    args: argparse.Namespace,
    train: list[MathRow],
    test: list[MathRow],
    eval_sets: Mapping[str, Sequence[MathRow]],
) -> Prepared:
    with_gold = [row for row in train if row.golds]
    refused = _refused_golds(with_gold)
    answered = [row for row in with_gold if row.golds not in refused]
    overlap = _overlap(args, [*answered, *test], eval_sets)
    kept = answered
    if args.drop_overlap:
        leaked = {key for found in overlap for key in found.train_keys[args.drop_overlap]}
        kept = [row for row in answered if normalise(row.problem) not in leaked]
        test = [row for row in test if normalise(row.problem) not in leaked]
    unique = _first_of_each(kept) if args.dedup else kept
    if args.test_fraction is not None:
        unique_train, test = hold_out(unique, args.test_fraction, args.seed or 0, normalise)
    else:
        unique_train = unique
    if not unique_train:
        raise UsageError(f"no training row is left of {len(train)}; nothing was written")
    facts = {
        "counts": {
            "read": len(train),
            "without_answer_dropped": len(train) - len(with_gold),
            "ungradable_dropped": len(with_gold) - len(answered),
            "overlap_dropped": len(answered) - len(kept),
            "duplicates_dropped": len(kept) - len(unique),
            "train": len(unique_train),
            "test": len(test),
        },
        "ungradable": [
            {"golds": list(golds), "reason": str(reason)} for golds, reason in refused.items()
        ],
        "duplicates": _duplicates(answered),
        "answer_types": _answer_types([*unique_train, *test]),
        "overlap": {found.name: found.facts() for found in overlap},
    }
    return Prepared(unique_train, test, facts)


def _refused_golds(rows: Sequence[MathRow]) -> dict[tuple[str, ...], Reason]:
    """Golds that earn nothing even as the answer itself: no response could solve such a row."""
    distinct = dict.fromkeys(row.golds for row in rows)
    refused = {}
    with progress_bar("grading the golds", "rows", len(distinct)) as bar:
        for golds in distinct:
            grades = [grade(f"\\boxed{{{gold}}}", golds) for gold in golds]
            if not any(result.correct for result in grades):
                refused[golds] = grades[0].reason
            bar.update()
    return refused


def _overlap(
    args: argparse.Namespace,
    rows: Sequence[MathRow],
    eval_sets: Mapping[str, Sequence[MathRow]],
) -> list[SetOverlap]:
    if not eval_sets:
        return []
    with progress_bar("comparing with the evaluation sets", "rows", len(rows)) as bar:
        return find_overlap(rows, eval_sets, n=args.ngram, on_row=bar.update)


def _first_of_each(rows: Sequence[MathRow]) -> list[MathRow]:
    first: dict[str, MathRow] = {}
    for row in rows:
        first.setdefault(normalise(row.problem), row)
    return list(first.values())


def _duplicates(rows: Sequence[MathRow]) -> dict[str, Any]:
    """How often problems repeat, and which ones come with different golds."""
    golds: dict[str, dict[tuple[str, ...], str]] = defaultdict(dict)
    for row in rows:
        golds[normalise(row.problem)].setdefault(row.golds, row.id)
    differing = [list(found.items()) for found in golds.values() if len(found) > 1]
    return {
        "different_texts": len({row.problem for row in rows}),
        "different_problems": len(golds),
        "problems_with_different_golds": len(differing),
        "examples": [[{"id": i, "golds": list(g)} for g, i in found] for found in differing[:5]],
    }


def _answer_types(rows: Sequence[MathRow]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for row in rows:
        # Further golds are other ways to write the first.
        name = answer_type(row.golds[0])
        counts[name] += 1
        examples.setdefault(name, row.golds[0])
    return {
        name: {"rows": counts[name], "example": examples[name]} for name in TYPES if name in counts
    }


def _print_report(out: Path, manifest: Mapping[str, Any]) -> None:
    counts, duplicates = manifest["counts"], manifest["duplicates"]
    written = counts["train"] + counts["test"]
    print("Mathematics")
    for label, value, note in (
        ("rows read", counts["read"], ""),
        ("without an answer, dropped", counts["without_answer_dropped"], ""),
        (
            "with a gold that the grader refuses, dropped",
            counts["ungradable_dropped"],
            "see manifest",
        ),
        (
            "different problems",
            duplicates["different_problems"],
            f"by normalised text; {duplicates['different_texts']} different texts",
        ),
        ("with golds that differ", duplicates["problems_with_different_golds"], "see manifest"),
        ("in an evaluation set, dropped", counts["overlap_dropped"], ""),
        ("duplicates dropped", counts["duplicates_dropped"], ""),
        ("train", counts["train"], ""),
        ("test", counts["test"], ""),
    ):
        print(f"  {label:<46}{value:>8}{f'  ({note})' if note and value else ''}")
    print("  answers")
    for name, entry in manifest["answer_types"].items():
        share = entry["rows"] / written
        print(f"    {name:<44}{entry['rows']:>8} {share:>7.1%}  e.g. {_cut(entry['example'], 40)}")
    _print_overlap(manifest)
    print_files(out, manifest)
    _print_next(out, manifest)


def _print_overlap(manifest: Mapping[str, Any]) -> None:
    n = manifest["options"]["ngram"]
    if not manifest["overlap"]:
        print("  overlap with the evaluation sets was not looked for (--eval-dir)")
        return
    print(
        f"  problems of an evaluation set that the training data has: with the same text, with "
        f"{MOSTLY:.0%} or\n  more of its runs of {n} words, with some run (often only a phrase); "
        f"under {n} words: same text only"
    )
    print(
        f"    {'set':<14}{'problems':>9}{'same':>7}{MOSTLY:>7.0%}+{'some':>6}{f'under {n}':>10}"
        "   nearest, with the share of its runs"
    )
    for name, entry in manifest["overlap"].items():
        best = entry["examples"][:1]
        nearest = "".join(
            f"{e['test_id']} ~ {e['train_id']} {e['share']:.2f}: {_cut(e['test'], 50)}"
            for e in best
        )
        print(
            f"    {name:<14}{entry['problems']:>9}{entry['exact']:>7}{entry['mostly']:>8}"
            f"{entry['some']:>6}{entry['too_short_for_ngrams']:>10}   {nearest or '-'}"
        )


def _cut(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _print_next(out: Path, manifest: Mapping[str, Any]) -> None:
    source = manifest["source"]
    if source["kind"] == "generated":
        recipe = "grpo_sg_tiny_cpu.yaml"
    else:
        data = "orz" if source.get("name") == "orz57k" else "dsr"
        recipe = f"grpo_sg_{data}_qwen2.5-7b.yaml"
    held_out = [name for name in ("math500.jsonl", "test.jsonl") if _rows(manifest, name)]
    test = f" eval.dataset={out / held_out[0]}" if held_out else ""
    print(
        f"Next: python -m sg_rlhf.train --config configs/math/{recipe} "
        f"data.prompt_dataset={out / 'train.jsonl'}{test}"
    )


def _rows(manifest: Mapping[str, Any], name: str) -> int:
    return int(manifest["files"].get(name, {"rows": 0})["rows"])
