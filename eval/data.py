"""Reading the questions: from a folder with the original files, or downloaded and checked."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.questions import EvalError, Question
from sg_rlhf.common.dataset_folder import sha256_of
from sg_rlhf.common.pinned_file import Origin, download
from sg_rlhf.tasks.kk.data import read_parquet
from sg_rlhf.tasks.kk.puzzle import Puzzle, generate
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.math.published import (
    EVAL_SETS,
    download_eval_set,
    find_eval_file,
    read_eval_set,
)

KK_SIZES = tuple(range(2, 9))
#: Sizes that the published runs trained on; 2 and 8 are out of distribution.
KK_TRAINED_SIZES = tuple(range(3, 8))
KK_PER_SIZE = 100
#: Seed of the puzzles made for sizes that no file holds.
KK_GENERATED_SEED = 0

#: Logic-RL's held-out puzzles, as the reference runs evaluated on them.
KK_FILE = "test_3to7ppl.parquet"
KK_TEST = Origin(
    "zhyang2226/AR-Lopti",
    "b92ba16c014e39a550bef50bda8a2ea444e458be",
    "data/kk/instruct/merge_34567ppl/test.parquet",
    sha256="3e27d3dbcbc926b45732a68671a3b654d86801457a840feb602ca6759599c6e5",
)


@dataclass(frozen=True)
class Source:
    """Where questions came from.

    Attributes:
        name: file name, or what generated them.
        sha256: of the file, or of the generated questions.
        rows: number of questions taken from it.
    """

    name: str
    sha256: str
    rows: int


def questions_hash(questions: Iterable[Question]) -> str:
    """SHA-256 over ids, prompts and golds: equal iff the same is asked and graded."""
    digest = hashlib.sha256()
    for question in questions:
        row = [question.id, question.prompt, question.gold, question.group]
        digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def math_questions(name: str, folder: Path | None) -> tuple[list[Question], list[Source]]:
    """One of the five mathematics sets.

    Raises:
        ValueError: the file is missing, another one than published, or cannot be downloaded.
    """
    eval_set = EVAL_SETS[name]
    if folder is None:
        folder = cache_folder()
        download_eval_set(eval_set, folder)
    rows = read_eval_set(name, folder)
    path = find_eval_file(eval_set, folder)
    questions = [Question(row.id, prompt_of(row.problem), list(row.golds)) for row in rows]
    return questions, [Source(path.name, sha256_of(path), len(rows))]


def kk_questions(
    prompt: Callable[[str], str], folder: Path | None
) -> tuple[list[Question], list[Source]]:
    """100 puzzles of each size from 2 to 8 people.

    For each size the official file (`people5_num100.jsonl`, in the folder or its `test/`) if it
    is there, else Logic-RL's parquet (3 to 7 people), else puzzles of our own generator.

    Raises:
        ValueError: a file is missing, another one than published, or cannot be downloaded.
    """
    questions: list[Question] = []
    sources: list[Source] = []
    reference: dict[int, list[Puzzle]] | None = None
    for size in KK_SIZES:
        official = _official_file(folder, size)
        if official is not None:
            puzzles = _of_size(read_parquet(official), size, official)
            source = Source(official.name, sha256_of(official), len(puzzles))
        elif size in KK_TRAINED_SIZES:
            if reference is None:
                reference = _reference_puzzles(folder)
            puzzles = reference[size]
            source = Source(KK_FILE, KK_TEST.sha256, len(puzzles))
        else:
            puzzles = generate(size, KK_PER_SIZE, seed=KK_GENERATED_SEED)
            digest = hashlib.sha256(repr(puzzles).encode()).hexdigest()
            source = Source(f"generated people={size} seed={KK_GENERATED_SEED}", digest, 100)
        sources.append(source)
        questions += [
            Question(
                f"kk-{size}ppl-{i:03d}", prompt(puzzle.quiz), puzzle.solution_text_format, str(size)
            )
            for i, puzzle in enumerate(puzzles)
        ]
    return questions, sources


def limited(questions: list[Question], limit: int | None) -> list[Question]:
    """The first `limit` questions, taken from each group in turn so that all groups are there."""
    if limit is None or limit >= len(questions):
        return questions
    rank: dict[str, int] = {}
    turns = []
    for position, question in enumerate(questions):
        turn = rank.get(question.group, 0)
        rank[question.group] = turn + 1
        turns.append((turn, position))
    kept = sorted(position for _, position in sorted(turns)[:limit])
    return [questions[position] for position in kept]


def drawn(questions: list[Question], limit: int | None, seed: int) -> list[Question]:
    """`limit` questions at random, in their order; a larger limit keeps those of a smaller one."""
    order = list(range(len(questions)))
    random.Random(seed).shuffle(order)
    return [questions[position] for position in sorted(order[:limit])]


def cache_folder() -> Path:
    """Where downloaded files stay.

    Raises:
        EvalError: `HF_HUB_OFFLINE` forbids downloads.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise EvalError(
            "HF_HUB_OFFLINE is set, so nothing is downloaded; give --data-dir with the files "
            "(docs/evaluation.md says which)"
        )
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sg_rlhf" / "eval"


def _official_file(folder: Path | None, size: int) -> Path | None:
    if folder is None:
        return None
    name = f"people{size}_num{KK_PER_SIZE}.jsonl"
    found = (path for path in (folder / name, folder / "test" / name) if path.is_file())
    return next(found, None)


def _reference_puzzles(folder: Path | None) -> dict[int, list[Puzzle]]:
    if folder is None:
        folder = cache_folder()
        if not (folder / KK_FILE).is_file():
            download(KK_TEST, folder, KK_FILE)
    candidates = [folder / KK_FILE, folder / Path(KK_TEST.path).name]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise EvalError(
            f"{folder / KK_FILE}: no such file, expected it from {KK_TEST.url}, "
            f"or the official people3_num{KK_PER_SIZE}.jsonl and so on"
        )
    actual = sha256_of(path)
    if actual != KK_TEST.sha256:
        raise EvalError(
            f"{path}: SHA-256 {actual}, expected {KK_TEST.sha256} "
            f"(K&K test puzzles of 3 to 7 people, 500 rows, {KK_TEST.url})"
        )
    puzzles = read_parquet(path)
    return {
        size: _of_size([p for p in puzzles if p.n_people == size], size, path)
        for size in KK_TRAINED_SIZES
    }


def _of_size(puzzles: list[Puzzle], size: int, path: Path) -> list[Puzzle]:
    if len(puzzles) != KK_PER_SIZE or any(puzzle.n_people != size for puzzle in puzzles):
        counts = sorted({puzzle.n_people for puzzle in puzzles})
        raise EvalError(
            f"{path}: {len(puzzles)} puzzles of {counts} people, "
            f"expected {KK_PER_SIZE} of {size} people"
        )
    return puzzles
