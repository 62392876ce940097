"""Puzzles of 7 people: our generator beside the official one, turn by turn, each on one core.

    python lab/bench/kk_generator.py --out lab/bench/results/kk_generator.json

The official generator (arXiv 2410.23123) is downloaded at a pinned commit and checked; ``--given
FOLDER`` names a folder that has its ``lib_kk.py``, for machines without a network. Both draw
puzzles with exactly one solution and word them; chains of thought, which the official one can make
as well, are left out. Each side also solves the other's puzzles, and the solutions must agree.
Seconds are CPU time of the one process, so that a busy machine matters less.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lab.bench.common import at_least, provenance, write
from sg_rlhf.data_io.pinned_download import Origin, download
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.kk.logic import parse_statements, solve
from sg_rlhf.tasks.kk.puzzle import Puzzle, generate

ORIGIN = Origin(
    repository="AlphaPav/mem-kk-logic",
    commit="35385cf80740dab8fa2940a5c4313807ddf8c0c6",
    path="data_prep/lib_kk.py",
    sha256="1fd95b051064524f9ab224850a74d97acab580ce995ad735cc5e00d40710c4f3",
)
FILE = "lib_kk.py"
PEOPLE = 7
#: Exit status where the official generator cannot be had (``run.py``).
SKIPPED = 77


def official_module(given: Path | None, cache: Path) -> Any:
    """The official generator's module.

    Raises:
        DataError: it cannot be had, or is another file than the pinned one.
    """
    path = (given or cache) / FILE
    if path.is_file():
        ORIGIN.check(path)
    elif given:
        raise DataError(f"--given {given}: no {FILE} in it")
    else:
        download(ORIGIN, path.parent, FILE)
    spec = importlib.util.spec_from_file_location("lib_kk", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def official_puzzles(module: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Its puzzles and their texts, as its ``data_gen_kk.py`` asks for them; up to ``count``."""
    drawn = module.KKProblemSampler(seed, n_people=PEOPLE).sample_valid_problems(count)
    return [
        {**problem, **module.KKProblemFormatter(seed + i, problem).format_problem()}
        for i, problem in enumerate(drawn)
    ]


def check(module: Any, theirs: list[dict[str, Any]], ours: list[Puzzle]) -> None:
    """Both solvers find the one solution of every puzzle of the other."""
    for found in theirs:
        assert solve(parse_statements(found["statements"])) == [found["solution"]], found
    for puzzle in ours:
        solutions = [tuple(map(bool, s)) for s in module.find_solution(puzzle.statements)]
        assert solutions == [puzzle.solution], puzzle


def main() -> None:
    """Both by turns, then the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--turns", type=at_least(1), default=7, help="turns of each [7]")
    parser.add_argument(
        "--official", type=at_least(1), default=150, help="its puzzles in a turn [150]"
    )
    parser.add_argument(
        "--ours", type=at_least(1), default=8000, help="our puzzles in a turn [8000]"
    )
    parser.add_argument("--given", type=Path, metavar="FOLDER", help=f"that has {FILE}")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/peers/kk"), metavar="FOLDER", help="of downloads"
    )
    arguments = parser.parse_args()
    try:
        module = official_module(arguments.given, arguments.cache)
    except DataError as error:
        if arguments.given:
            parser.error(str(error))
        print(error)
        sys.exit(SKIPPED)
    speeds: dict[str, list[float]] = {"official": [], "ours": []}
    theirs, ours = official_puzzles(module, 10, 0), generate(PEOPLE, 100, seed=0)
    check(module, theirs, ours[:10])
    for turn in range(arguments.turns):
        started = time.process_time()
        theirs = official_puzzles(module, arguments.official, 1234 + turn)
        between = time.process_time()
        ours = generate(PEOPLE, arguments.ours, seed=turn)
        speeds["official"].append(len(theirs) / (between - started))
        speeds["ours"].append(len(ours) / (time.process_time() - between))
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["official"], strict=True)]
    result = {
        **provenance("lab/bench/kk_generator.py", "numpy"),
        "official_source": ORIGIN.url,
        "people": PEOPLE,
        "puzzles_per_cpu_second": {k: round(statistics.median(v), 1) for k, v in speeds.items()},
        "ratio": round(statistics.median(ratios), 1),
        "ratio_range": [round(min(ratios), 1), round(max(ratios), 1)],
        "turns": arguments.turns,
    }
    write(result, arguments.out)
    print(json.dumps({key: result[key] for key in ("puzzles_per_cpu_second", "ratio")}))


if __name__ == "__main__":
    main()
