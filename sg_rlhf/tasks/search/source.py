"""What the data command makes of questions that are answered with a search engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sg_rlhf.data_io.dataset_writer import Records, UsageError
from sg_rlhf.tasks.data_source import (
    BuildPlan,
    DataFiles,
    DataSource,
    Generator,
    HubFile,
    LoadTokenizer,
    Options,
    data_files,
)
from sg_rlhf.tasks.search.data import (
    EXPECTED,
    NQ_HOTPOTQA,
    Question,
    read_questions,
    split,
    to_records,
)
from sg_rlhf.tasks.search.prompt import PROMPT_VERSION, STYLES, Style
from sg_rlhf.tasks.search.sets import encyclopedia

CORPUS = "corpus.jsonl"

_HELP = """\
Prepare questions that are answered with a search engine.

Reads a published training set or files, or generates a small encyclopedia with questions. Checks
every row and writes JSONL.

examples:
  # the published runs' training set from the hub; name the commit, there is no default one
  sg-rlhf data search --out data/search --source nq_hotpotqa --revision COMMIT

  # no network: files that are already here, with a test set of their own
  sg-rlhf data search --out data/search --source train.parquet --test-file dev.jsonl

  # generated: a corpus to index and questions about it, for a tiny model
  sg-rlhf data search --out data/search_tiny --source encyclopedia \\
      --generate people=200 towns=48 seed=0
  sg-rlhf index --corpus data/search_tiny/corpus.jsonl --encoder bm25 \\
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


def plan(options: Options, _load_tokenizer: LoadTokenizer) -> BuildPlan[Question]:
    """Duplicates are dropped, and train questions that are in the test set."""
    style: Style = options["prompt"] or ("short" if options["generated"] else "search_r1")

    def make(train: list[Question], test: list[Question] | None) -> DataFiles:
        kept, held_out, dropped = split(train, test, options["test_fraction"], options["seed"])
        if not kept:
            raise UsageError("no question is left to train on; nothing was written")
        return data_files(
            kept,
            held_out,
            lambda questions: to_records(questions, style),
            lambda question: question.source,
            dropped,
            order="search order",
        )

    return BuildPlan({"prompt": {"version": PROMPT_VERSION, "style": style}}, make)


def generate(**options: Any) -> tuple[list[Question], list[Question], Mapping[str, Records]]:
    """An encyclopedia with questions about it; see `--help` for the options."""
    made = encyclopedia.build(**options)
    train, test = ([p.question for p in problems] for problems in (made.train, made.test))
    return train, test, {CORPUS: made.corpus}


def next_step(out: Path, _manifest: Mapping[str, Any]) -> str:
    """An index of the generated corpus, or training with one of Wikipedia."""
    if (out / CORPUS).is_file():
        return f"sg-rlhf index --corpus {out / CORPUS} --encoder bm25 --out {out / 'index'}"
    return (
        "sg-rlhf train --config configs/search/grpo_sg_outside_qwen2.5-3b.yaml "
        f"data.prompt_dataset={out / 'train.jsonl'} eval.dataset={out / 'test.jsonl'}"
    )


DATA = DataSource(
    description=_HELP,
    files=f"a .parquet or .jsonl file with {EXPECTED}",
    plan=plan,
    read=lambda path, source, on_row: read_questions(path, source, on_row),
    generator=Generator(
        "encyclopedia", {"people": 200, "towns": 48, "test_share": 0.25, "seed": 0}, generate
    ),
    published=lambda: {"nq_hotpotqa": HubFile(NQ_HOTPOTQA, "train.parquet")},
    test_fraction=0.02,
    flags={
        "--prompt": {
            "choices": STYLES,
            "help": "prompt: Search-R1's instructions, or the question alone (default: search_r1; "
            "encyclopedia: short)",
        },
    },
    next_step=next_step,
)
