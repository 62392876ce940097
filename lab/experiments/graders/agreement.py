"""Ours beside five other rules, on answers of known value and on responses.

    python -m lab.experiments.graders.agreement --data-dir data/math --out FILE
    python -m lab.experiments.graders.agreement ... --responses NAME=out/math/samples.jsonl

The answers are those of `lab/experiments/graders/mutations.py`, fewer of them: rewrites are right,
mutations wrong.
Responses are lines of JSON with `response` and `gold`, as `samples.jsonl` of an evaluation has
them; nobody says which of them are right, so only agreement with ours is counted. A Markdown table
is written beside the JSON. `--grader-sources` as in `python -m eval.run --suite math`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lab.bench.common import write
from lab.experiments.graders import options
from lab.experiments.graders.mutations import MUTATIONS, REWRITES, make
from lab.experiments.graders.self_grading import FILES, read_golds
from sg_rlhf.tasks.math.grading import WorkerPool, grade_many
from sg_rlhf.tasks.math.reference_graders import GRADERS, ReferenceGraders, find_sources

BATCH = 64
Pair = tuple[str, str | list[str]]


def verdicts(
    pairs: Sequence[Pair], pool: WorkerPool, others: ReferenceGraders
) -> list[dict[str, bool | None]]:
    """Each grader's verdict on each pair."""
    found: list[dict[str, bool | None]] = []
    for start in tqdm(range(0, len(pairs), BATCH), disable=None):
        part = pairs[start : start + BATCH]
        graded = zip(grade_many(part, pool), others.grade(part), strict=True)
        found += [{"ours": ours.correct, **theirs} for ours, theirs in graded]
    return found


def counts(found: Sequence[Mapping[str, bool | None]]) -> dict[str, dict[str, int]]:
    """By grader: accepted, and where it and ours differ."""
    return {
        name: {
            "accepted": sum(bool(v[name]) for v in found),
            "only_ours": sum(bool(v["ours"]) and not v[name] for v in found),
            "only_theirs": sum(bool(v[name]) and not v["ours"] for v in found),
            "no_verdict": sum(v[name] is None for v in found),
        }
        for name in ("ours", *GRADERS)
    }


def markdown(result: Mapping[str, Any]) -> str:
    """One table for each set."""
    lines = ["# Ours beside other rules", "", f"`{result['command']}`, {result['date']}.", ""]
    for name, part in result["sets"].items():
        lines += [f"## {name}: {part['size']:,}", ""]
        lines += [
            "| grader | accepts | only ours | only theirs | no verdict |",
            "|---|---|---|---|---|",
        ]
        for grader, c in part["graders"].items():
            cells = (c["accepted"], c["only_ours"], c["only_theirs"], c["no_verdict"])
            lines.append(f"| {grader} | {' | '.join(map(str, cells))} |")
        lines.append("")
    return "\n".join(lines)


def read_responses(path: Path) -> list[Pair]:
    """Response and gold of each line."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [(row["response"], row["gold"]) for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.graders.agreement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add(parser, "--data-dir", "--out", "--seed", "--date")
    parser.add_argument("--responses", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--grader-sources", type=Path, metavar="D")
    parser.add_argument("--rewrites", type=int, default=1000)
    parser.add_argument("--mutations", type=int, default=1000)
    args = parser.parse_args(argv)
    missing = [name for name in FILES if not (args.data_dir / name).is_file()]
    if missing:
        parser.error(f"{args.data_dir} has no {', '.join(missing)}")
    try:
        sources = find_sources(list(GRADERS), args.grader_sources)
        given = {
            n: read_responses(Path(f)) for n, _, f in (r.partition("=") for r in args.responses)
        }
    except (ValueError, KeyError, OSError) as error:
        parser.error(str(error))
    golds = [gold for name in FILES for gold in read_golds(args.data_dir / name)]
    sets: dict[str, list[Pair]] = {}
    for name, families, count, right in (
        ("rewrites, all right", REWRITES, args.rewrites, True),
        ("mutations, all wrong", MUTATIONS, args.mutations, False),
    ):
        made = make(golds, families, count, right, args.seed)
        sets[name] = [(rf"\boxed{{{m.answer}}}", m.gold.text) for m in made]
    pool, others = WorkerPool(2), ReferenceGraders(sources)
    measured = {
        name: {"size": len(pairs), "graders": counts(verdicts(pairs, pool, others))}
        for name, pairs in {**sets, **given}.items()
    }
    others.close()
    pool.close()
    result = {
        "command": "python -m lab.experiments.graders.agreement --data-dir data/math",
        "date": args.date,
        "seed": args.seed,
        "rules": {name: rule.identity() for name, rule in GRADERS.items()},
        "sets": measured,
    }
    write(result, args.out)
    args.out.with_suffix(".md").write_text(markdown(result).rstrip() + "\n")
    print(args.out.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
