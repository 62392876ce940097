"""What the data command makes of mathematics problems."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import positive_int
from sg_rlhf.data_io.dataset_writer import Records, UsageError
from sg_rlhf.data_io.records import ProgressCallback
from sg_rlhf.tasks.data_source import (
    BuildPlan,
    DataFiles,
    DataSource,
    Generator,
    LoadTokenizer,
    Options,
)
from sg_rlhf.tasks.math.data import KINDS, MathRow, read_rows, to_records
from sg_rlhf.tasks.math.prompt import PROMPT_VERSION, prompt_of
from sg_rlhf.tasks.math.sets import arithmetic, preparation, published
from sg_rlhf.tasks.math.sets.published import EvalSet
from sg_rlhf.tasks.overlap import LEVELS, MOSTLY, NGRAM

_HELP = """\
Prepare mathematics problems: a published training set, a file, or generated arithmetic.

Checks every row, reports duplicates, answer types and overlap with the evaluation sets, and writes
JSONL.

examples:
  # the paper's two training sets, downloaded at a pinned commit and checked
  sg-rlhf data math --out data/math_dsr --source dsr_uniform \\
      --eval-dir data/math_eval --download-eval
  sg-rlhf data math --out data/math_orz --source orz57k \\
      --eval-dir data/math_eval --drop-overlap

  # no network: a file that is already here
  sg-rlhf data math --out data/math_dsr --source deepscaler_uniform_train.parquet

  # generated arithmetic for a tiny model
  sg-rlhf data math --out data/math_tiny --source arithmetic --generate count=2000 seed=0

  # another set on the Hugging Face hub; there is no default commit, so name one
  sg-rlhf data math --out data/deepscaler --dedup --test-fraction 0.02 \\
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


def plan(options: Options, _load_tokenizer: LoadTokenizer) -> BuildPlan[MathRow]:
    """Rows that cannot be graded go; overlap with the evaluation sets is reported."""
    folder: Path | None = options["eval_dir"]
    if folder is None:
        for flag in ("download_eval", "drop_overlap"):
            if options[flag]:
                raise UsageError(f"--{flag.replace('_', '-')} needs --eval-dir DIR")
    asked = {} if folder is None else _asked_sets(folder, options["download_eval"])

    def make(train: list[MathRow], test: list[MathRow] | None) -> DataFiles:
        if folder is not None and options["download_eval"]:
            for eval_set in asked.values():
                published.download_eval_set(eval_set, folder)
        eval_sets = {name: published.read_eval_set(name, folder or Path()) for name in asked}
        train, held_out, facts = preparation.prepare(train, test, eval_sets, options)
        sets = {"train": train, "test": held_out, **eval_sets}
        files = {f"{name}.jsonl": to_records(rows) for name, rows in sets.items()}
        return DataFiles(files, facts)

    request = {
        "prompt": {
            "version": PROMPT_VERSION,
            "sha256": hashlib.sha256(prompt_of("").encode()).hexdigest(),
        },
        "options": {name: options[name] for name in ("dedup", "drop_overlap", "ngram")},
        "eval_sets": {
            name: eval_set.sha256 or eval_set.origin.url for name, eval_set in asked.items()
        },
    }
    return BuildPlan(request, make)


def _asked_sets(folder: Path, download: str | None) -> dict[str, EvalSet]:
    """The paper's sets, and the others whose files are there or wanted."""
    if download == "all":
        return published.all_eval_sets()
    more = {
        name: eval_set
        for name, eval_set in published.MORE_EVAL_SETS.items()
        if published.find_eval_file(eval_set, folder)
    }
    return {**published.EVAL_SETS, **more}


def read(path: Path, source: str | None, on_row: ProgressCallback) -> list[MathRow]:
    """The rows of a file; those without an answer have no golds."""
    # DSR's file names its rows' source itself.
    name = None if source == "dsr_uniform" else source
    return read_rows(path, source=name, allow_empty=True, on_row=on_row)


def generate(
    count: int, test_count: int, seed: int, **shape: int
) -> tuple[list[MathRow], list[MathRow], Mapping[str, Records]]:
    """Arithmetic; see `--help` for the options."""

    def draw(number: int, held_out: bool) -> list[MathRow]:
        name = "arithmetic-test" if held_out else "arithmetic"
        made = arithmetic.generate(number, seed, held_out=held_out, **shape)
        return [
            MathRow(f"{name}-{number}", problem.text, (problem.gold,), "arithmetic")
            for number, problem in enumerate(made, start=1)
        ]

    return draw(count, False), draw(test_count, True), {}


def report(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Repeated problems, and the overlap with the evaluation sets."""
    repeated = manifest["duplicates"]
    yield (
        f"  {'different problems':<46}{repeated['different_problems']:>8}"
        f"  (by normalised text; {repeated['different_texts']} different texts)"
    )
    different = repeated["problems_with_different_golds"]
    yield f"  {'with different reference answers':<46}{different:>8}"
    n = manifest["options"]["ngram"]
    if not manifest["overlap"]:
        yield "  overlap with the evaluation sets was not looked for (--eval-dir)"
        return
    yield (
        f"  problems of an evaluation set that the training data has: the same text, {MOSTLY:.0%} "
        f"or more of its\n  {n}-word sequences, or one of them (often only a phrase)"
    )
    yield f"    {'set':<18}{'problems':>9}{'same':>7}{MOSTLY:>7.0%}+{'some':>6}   nearest"
    for name, entry in manifest["overlap"].items():
        nearest = "".join(
            f"{e['test_id']} ~ {e['train_id']} {e['share']:.2f}: {' '.join(e['test'].split())[:50]}"
            for e in entry["examples"][:1]
        )
        yield (
            f"    {name:<18}{entry['problems']:>9}{entry['exact']:>7}{entry['mostly']:>8}"
            f"{entry['some']:>6}   {nearest or '-'}"
        )


def next_step(out: Path, manifest: Mapping[str, Any]) -> str:
    """Training with the recipe of the source."""
    source, rows = manifest["source"], manifest["files"]
    data = "orz" if source.get("name") == "orz57k" else "dsr"
    recipe = f"grpo_sg_outside_{data}_qwen2.5-7b.yaml"
    if source["kind"] == "generated":
        recipe = "grpo_sg_tiny_cpu.yaml"
    held_out = [n for n in ("math500.jsonl", "test.jsonl") if n in rows and rows[n]["rows"]]
    test = f" eval.dataset={out / held_out[0]}" if held_out else ""
    if source["kind"] != "generated":  # the recipe has evaluation sets of its own
        own = all(rows.get(f"{name}.jsonl", {}).get("rows") for name in ("math500", "amc", "aime"))
        test = "" if own and out == Path(f"data/math_{data}") else f"{test} 'sg.eval_sets=[]'"
    return (
        f"sg-rlhf train --config configs/math/{recipe} "
        f"data.prompt_dataset={out / 'train.jsonl'}{test}"
    )


DATA = DataSource(
    description=_HELP,
    files=KINDS,
    plan=plan,
    read=read,
    generator=Generator(
        "arithmetic",
        {"count": 2000, "test_count": 200, "seed": 0, "max_operands": 3, "max_digits": 2},
        generate,
    ),
    published=lambda: published.ORIGINS,
    flags={
        "--eval-dir": {
            "metavar": "DIR",
            "type": Path,
            "help": "folder with evaluation sets, under the names that `--download-eval` gives "
            "them. The overlap with them is reported, and they are written as JSONL too (default: "
            "none)",
        },
        "--download-eval": {
            "nargs": "?",
            "const": "paper",
            "choices": ("paper", "all"),
            "help": "download the files that --eval-dir lacks: the paper's sets, or all sets of "
            "`sg-rlhf eval --list` (default: none; without a value: paper)",
        },
        "--ngram": {
            "type": positive_int,
            "default": NGRAM,
            "metavar": "N",
            "help": f"length of the word sequences that are compared, in words (default: {NGRAM})",
        },
        "--drop-overlap": {
            "nargs": "?",
            "const": "mostly",
            "choices": LEVELS,
            "help": "drop training problems that share with a problem of --eval-dir the whole text "
            "(exact), at least half of its word sequences (mostly), or one sequence (any) "
            "(default: drop none; without a value: mostly)",
        },
        "--dedup": {"action": "store_true", "help": "keep only the first row of each problem"},
    },
    report=report,
    next_step=next_step,
)
