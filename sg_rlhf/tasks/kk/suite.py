"""`--suite kk`: Knights & Knaves under the three harnesses (Tables 3, 7 and 8)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.contamination import ContaminationRecord
from sg_rlhf.tasks.kk import harnesses
from sg_rlhf.tasks.kk.data import find_duplicates, read_puzzles
from sg_rlhf.tasks.kk.paper import SIZES, TRAINED_SIZES, beside_the_paper
from sg_rlhf.tasks.kk.prompt import build_chat_prompt, build_prompt
from sg_rlhf.tasks.kk.puzzle import Puzzle, generate
from sg_rlhf.tasks.questions import EvalError, Question, Source, cache_folder, check_online
from sg_rlhf.tasks.suite import Benchmark, Prepared, Sampling, Setup, Suite, prepare_questions

PER_SIZE = 100
#: Seed of the puzzles made for sizes that no file holds.
GENERATED_SEED = 0

#: Logic-RL's held-out puzzles, as the reference runs evaluated on them.
FILE = "test_3to7ppl.parquet"
TEST = Origin(
    "zhyang2226/AR-Lopti",
    "b92ba16c014e39a550bef50bda8a2ea444e458be",
    "data/kk/instruct/merge_34567ppl/test.parquet",
    sha256="3e27d3dbcbc926b45732a68671a3b654d86801457a840feb602ca6759599c6e5",
)


#: Of the official puzzles; the generated ones are nowhere to be read.
EXPOSURE = ContaminationRecord(
    "2024-10",
    note="models remember puzzles that they are fine-tuned on (arXiv 2410.23123); the overlap "
    "with the training data says whether these are among them",
)


def _benchmark(name: str, family: str, title: str, settings: Sampling, harness: str) -> Benchmark:
    return Benchmark(
        name=name,
        family=family,
        title=title,
        size=PER_SIZE * len(SIZES),
        settings=settings,
        load=lambda folder: questions(harnesses.PROMPTS[harness], folder),
        grade=harnesses.GRADERS[harness],
        licence="CC-BY-NC-SA-4.0; generated sizes are ours",
        exposure=EXPOSURE,
        headline_groups=tuple(str(size) for size in TRAINED_SIZES),
    )


def prepare(setup: Setup) -> Prepared:
    """Read the questions. A model without ChatML gets Logic-RL's prompt in its own template."""
    prepared = prepare_questions(setup)
    if setup.regrade or setup.tokenizer is None:
        return prepared
    tokenizer = setup.tokenizer()
    if chat.supports(build_prompt(""), tokenizer):
        return prepared
    asked = [_with_chat_template(tokenizer, benchmark) for benchmark in setup.benchmarks]
    return prepare_questions(replace(setup, benchmarks=asked))


def _with_chat_template(tokenizer: Any, benchmark: Benchmark) -> Benchmark:
    if harnesses.PROMPTS[benchmark.family] is not build_prompt:
        return benchmark  # plain text for every model

    def load(folder: Path | None) -> tuple[list[Question], list[Source]]:
        return questions(lambda quiz: build_chat_prompt(quiz, tokenizer), folder)

    if tokenizer.chat_template is None:
        raise EvalError(
            f"--only {benchmark.name}: the prompt is a chat, and the model's tokenizer has neither "
            "ChatML nor a chat template; --only official asks in plain text"
        )
    return replace(benchmark, load=load)


SUITE = Suite(
    "kk",
    "Knights & Knaves (Tables 3, 7, 8)",
    (
        _benchmark(
            "official", "official", "K&K official harness, greedy",
            Sampling(temperature=0.0, max_tokens=2048), "official",
        ),
        _benchmark(
            "logic_rl", "logic_rl", "Logic-RL harness, T=1",
            Sampling(temperature=1.0, max_tokens=8192), "logic_rl",
        ),
        _benchmark(
            "paper_greedy", "paper", "reward +3, greedy",
            Sampling(temperature=0.0, max_tokens=4096), "paper",
        ),
        _benchmark(
            "paper_t1", "paper", "reward +3, T=1",
            Sampling(temperature=1.0, max_tokens=4096), "paper",
        ),
    ),
    prepare=prepare,
    training_field="quiz",
    beside_the_paper=beside_the_paper,
)  # fmt: skip


def questions(
    prompt: Callable[[str], str], folder: Path | None
) -> tuple[list[Question], list[Source]]:
    """100 puzzles of each size from 2 to 8 people.

    For each size the official file (`people5_num100.jsonl`, in the folder or its `test/`) if it
    is there, else Logic-RL's parquet (3 to 7 people), else puzzles of our own generator.
    """
    found: list[Question] = []
    sources: list[Source] = []
    reference: dict[int, list[Puzzle]] | None = None
    for size in SIZES:
        official = _official_file(folder, size)
        if official is not None:
            puzzles = _of_size(read_puzzles(official), size, official)
            source = Source(official.name, sha256_of(official), len(puzzles))
        elif size in TRAINED_SIZES:
            if reference is None:
                reference = _reference_puzzles(folder)
            puzzles = reference[size]
            source = Source(FILE, TEST.sha256, len(puzzles))
        else:
            puzzles = generate(size, PER_SIZE, seed=GENERATED_SEED)
            digest = hashlib.sha256(repr(puzzles).encode()).hexdigest()
            source = Source(f"generated people={size} seed={GENERATED_SEED}", digest, 100)
        sources.append(source)
        found += [
            Question(
                f"kk-{size}ppl-{i:03d}",
                prompt(puzzle.quiz),
                puzzle.solution_text_format,
                str(size),
                puzzle.quiz,
            )
            for i, puzzle in enumerate(puzzles)
        ]
    return found, sources


def _official_file(folder: Path | None, size: int) -> Path | None:
    if folder is None:
        return None
    name = f"people{size}_num{PER_SIZE}.jsonl"
    found = (path for path in (folder / name, folder / "test" / name) if path.is_file())
    return next(found, None)


def _reference_puzzles(folder: Path | None) -> dict[int, list[Puzzle]]:
    if folder is None:
        folder = cache_folder()
        if not (folder / FILE).is_file():
            check_online(folder / FILE)
            download(TEST, folder, FILE)
    candidates = [folder / FILE, folder / Path(TEST.path).name]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise EvalError(
            f"{folder / FILE}: no such file, expected it from {TEST.url}, "
            f"or the official people3_num{PER_SIZE}.jsonl and so on"
        )
    TEST.check(path)
    puzzles = read_puzzles(path)
    return {
        size: _of_size([p for p in puzzles if p.n_people == size], size, path)
        for size in TRAINED_SIZES
    }


def _of_size(puzzles: list[Puzzle], size: int, path: Path) -> list[Puzzle]:
    if len(puzzles) != PER_SIZE or any(puzzle.n_people != size for puzzle in puzzles):
        counts = sorted({puzzle.n_people for puzzle in puzzles})
        raise EvalError(
            f"{path}: {len(puzzles)} puzzles of {counts} people, "
            f"expected {PER_SIZE} of {size} people"
        )
    repeated = find_duplicates(puzzles)
    if repeated:
        row, first = repeated[0]
        raise EvalError(
            f"{path}: {len(repeated)} of the {PER_SIZE} puzzles of {size} people are repeated, "
            f"the first is puzzle {row + 1}, which is puzzle {first + 1} again; expected none"
        )
    return puzzles
