"""What the data command makes of Knights & Knaves puzzles."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import json_object, progress_bar
from sg_rlhf.data_io.dataset_writer import Records, UsageError
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.data_source import (
    BuildPlan,
    DataFiles,
    DataSource,
    Generator,
    LoadTokenizer,
    Options,
    data_files,
)
from sg_rlhf.tasks.kk.data import (
    FILES,
    generate_splits,
    read_puzzles,
    split,
    to_records,
)
from sg_rlhf.tasks.kk.logic import MAX_PEOPLE, MIN_PEOPLE
from sg_rlhf.tasks.kk.prompt import PROMPT_VERSION, build_chat_prompt, build_prompt
from sg_rlhf.tasks.kk.puzzle import Puzzle

# The largest puzzles that the tiny model was pretrained on; larger ones are for a real model.
TINY_MODEL_PEOPLE = 3

_HELP = """\
Generate Knights & Knaves puzzles, or convert files in Logic-RL's format.

Checks every row: the statements must have exactly one solution, the given one.

examples:
  # the sizes of the published runs: 900 train and 100 test puzzles for each of 3 to 7 people
  sg-rlhf data kk --out data/kk --generate people=3-7 per_size=900 seed=0

  # a small set; 2 people have only 184 different puzzles, so let them return with other names
  sg-rlhf data kk --out data/kk_tiny --generate people=2-3 per_size=2000 distinct=names

  # Logic-RL's own files (each row of the second must be absent from the first)
  sg-rlhf data kk --out data/kk --source train.parquet --test-file test.parquet

  # several files, 10 % of each size held out
  sg-rlhf data kk --out data/kk --source 3ppl.parquet 4ppl.parquet --test-fraction 0.1

sources:
  puzzles  generated, see --generate (the default with it)
  FILE ... Logic-RL .parquet or K&K .jsonl

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


def plan(options: Options, load_tokenizer: LoadTokenizer) -> BuildPlan[Puzzle]:
    """Duplicates are dropped, and a test puzzle that is also in train is refused."""
    prompt = _prompt(options, load_tokenizer)

    def make(train: list[Puzzle], test: list[Puzzle] | None) -> DataFiles:
        kept, held_out, counts = split(train, test, options["test_fraction"], options["seed"])
        if not kept and not held_out:
            raise UsageError("nothing to write: both per_size and test_per_size are 0")
        for name, puzzles in (("train", kept), ("test", held_out)):
            if not puzzles:
                print(f"warning: the {name} split is empty", file=sys.stderr)
        return data_files(
            kept,
            held_out,
            lambda puzzles: to_records(puzzles, prompt),
            lambda puzzle: puzzle.n_people,
            counts,
            order="kk order",
        )

    described = {
        "version": PROMPT_VERSION,
        "chat_template": options["chat_template"],
        **({"chat_template_kwargs": given} if (given := options["chat_template_kwargs"]) else {}),
        # Catches a template that changed under the same name.
        "sha256": hashlib.sha256(prompt("").encode()).hexdigest(),
    }
    return BuildPlan({"prompt": described}, make)


def next_step(out: Path, manifest: Mapping[str, Any]) -> str:
    """Training with a recipe whose model knows puzzles of these sizes and reads their form."""
    model = manifest["prompt"]["chat_template"]
    sizes = (int(size) for counts in manifest["counts"].values() for size in counts)
    tiny = max(sizes, default=0) <= TINY_MODEL_PEOPLE
    own = tiny and model is None
    recipe = "grpo_sg_tiny_cpu.yaml" if own else "grpo_sg_outside_qwen2.5-3b-instruct.yaml"
    of_model = "" if model is None else f"actor.model_name_or_path={shlex.quote(model)} "
    return (
        f"sg-rlhf train --config configs/kk/{recipe} "
        f"{of_model}data.prompt_dataset={out / 'train.jsonl'} eval.dataset={out / 'test.jsonl'}"
    )


def _prompt(options: Options, load_tokenizer: LoadTokenizer) -> Callable[[str], str]:
    if options["chat_template"] is None:
        if options["chat_template_kwargs"]:
            raise UsageError("--chat-template-kwargs: needs --chat-template MODEL")
        return build_prompt
    tokenizer = load_tokenizer(options["chat_template"])
    if given := options["chat_template_kwargs"]:
        try:
            apply = chat.template_with(tokenizer, chat.check_template_kwargs(given))
        except ValueError as error:
            raise UsageError(f"--chat-template-kwargs: {error}") from None
        tokenizer.apply_chat_template = apply
    return lambda quiz: build_chat_prompt(quiz, tokenizer)


def parse_people(text: str) -> list[int]:
    """Numbers of people (2 to 12) as a sorted list: "3", "2-3", "2,4,6" or a mix of them."""
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


def generate(
    people: list[int], **options: Any
) -> tuple[list[Puzzle], list[Puzzle], Mapping[str, Records]]:
    """Generated puzzles; see `--help` for the options."""
    total = len(people) * (options["per_size"] + options["test_per_size"])
    with progress_bar("generating", "puzzles", max(total, 0)) as bar:
        train, test = generate_splits(people, **options, on_puzzle=bar.update)
    return train, test, {}


DATA = DataSource(
    description=_HELP,
    files=FILES,
    plan=plan,
    read=lambda path, _source, on_row: read_puzzles(path, on_row),
    generator=Generator(
        "puzzles",
        {
            "people": list(range(3, 8)),
            "per_size": 900,
            "test_per_size": 100,
            "seed": 0,
            "max_depth": 2,
            "width": 2,
            "distinct": "structure",
        },
        generate,
        {"people": parse_people},
    ),
    test_fraction=0.1,
    flags={
        "--chat-template": {
            "metavar": "MODEL",
            "help": "model, hub id or folder, whose chat template the prompts get (default: "
            "Logic-RL's ChatML text, for Qwen2.5)",
        },
        "--chat-template-kwargs": {
            "metavar": "JSON",
            "type": json_object,
            "default": {},
            "help": "arguments of the template, such as '{\"enable_thinking\": false}' (default: "
            "none)",
        },
    },
    next_step=next_step,
)
