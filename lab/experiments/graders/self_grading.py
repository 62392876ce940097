"""Grade each gold answer of the mathematics data sets against itself, and write a report.

    python -m lab.experiments.graders.self_grading --data-dir data/math --out FILE

Three graders: ours, its slow path alone (math-verify in the worker pool, without the comparison of
texts and numbers), and the plain library, called as its manual shows. Golds are named by file, row
and position, never quoted: the report holds none of the data.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

from tqdm import tqdm

from lab.experiments.graders import options
from sg_rlhf.tasks.math.answers.normalize import normalize
from sg_rlhf.tasks.math.data import read_rows
from sg_rlhf.tasks.math.grading import WorkerPool, compare, grade_many

# File name, and the share of its golds that must grade correct against themselves.
FILES = {
    "olympiad_bench_eval.parquet": 0.999,
    "minerva_eval.parquet": 0.999,
    "math_eval.parquet": 0.999,
    "amc_eval.parquet": 0.999,
    "aime_eval.parquet": 0.999,
    "aime25.jsonl": 1.0,
    "aime26.jsonl": 1.0,
    "hmmt25.jsonl": 1.0,
    "amc23.jsonl": 1.0,
    "imo_answerbench.csv": 1.0,
    "dsr_uniform_train.parquet": 0.995,
}


@dataclass(frozen=True)
class Gold:
    file: str
    row: int
    position: int
    text: str


@dataclass
class Result:
    """One file: how many golds each grader calls right, and the others' places by reason."""

    rows: int
    golds: int
    ours: int
    slow: int
    plain: int
    ours_not: list[tuple[Gold, str]] = field(default_factory=list)
    slow_not: list[tuple[Gold, str]] = field(default_factory=list)
    plain_not: list[tuple[Gold, str]] = field(default_factory=list)


def read_golds(path: Path) -> list[Gold]:
    """Every gold of every row of a file; numbers as the text that the data command writes."""
    if path.suffix != ".parquet":
        rows = read_rows(path)
        return [
            Gold(path.name, row, position, text)
            for row, found in enumerate(rows)
            for position, text in enumerate(found.golds)
        ]
    from pyarrow import parquet

    golds = []
    for row, cell in enumerate(parquet.read_table(path)["reward_model"].to_pylist()):
        truth = cell["ground_truth"]
        for position, text in enumerate(truth if isinstance(truth, list) else [truth]):
            golds.append(Gold(path.name, row, position, str(text)))
    return golds


@cache
def plain_math_verify(text: str) -> bool:
    """The library's own verdict on a boxed gold, as its manual shows the call."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    return verify(
        parse(f"${text.strip().strip('$')}$"), parse(f"The answer is $\\boxed{{{text}}}$.")
    )


def grade_file(golds: list[Gold], pool: WorkerPool) -> Result:
    responses = [(f"The answer is $\\boxed{{{gold.text}}}$.", gold.text) for gold in golds]
    ours = grade_many(responses, pool)
    texts = {gold.text: None for gold in golds}
    verdicts = {text: pool.submit(compare, normalize(text), (normalize(text),)) for text in texts}
    slow = {
        text: verdict.result() for text, verdict in tqdm(verdicts.items(), "slow path", leave=False)
    }
    plain = {text: plain_math_verify(text) for text in tqdm(texts, "plain library", leave=False)}
    result = Result(
        rows=len({gold.row for gold in golds}),
        golds=len(golds),
        ours=sum(grade.correct for grade in ours),
        slow=sum(slow[gold.text] == "correct" for gold in golds),
        plain=sum(plain[gold.text] for gold in golds),
    )
    for gold, grade in zip(golds, ours, strict=True):
        if not grade.correct:
            result.ours_not.append((gold, grade.reason))
        if slow[gold.text] != "correct":
            result.slow_not.append((gold, slow[gold.text]))
        if not plain[gold.text]:
            result.plain_not.append((gold, "not verified"))
    return result


def places(entries: list[tuple[Gold, str]]) -> list[str]:
    """Lines `reason (n): row 3, row 17 (2nd gold), ...`."""
    lines = []
    for reason, count in sorted(Counter(reason for _, reason in entries).items()):
        where = [
            f"{gold.row}" + (f"/{gold.position + 1}" if gold.position else "")
            for gold, other in entries
            if other == reason
        ]
        lines.append(f"  - {reason} ({count}): {', '.join(where)}")
    return lines


def report(results: dict[str, Result], date: str) -> str:
    lines = [
        "# Each gold answer, boxed, against itself",
        "",
        "`python -m lab.experiments.graders.self_grading --data-dir DIR --out FILE`; "
        f"{date}, math-verify {metadata.version('math-verify')}, "
        f"sympy {metadata.version('sympy')}, Python {platform.python_version()}.",
        "",
        "`grade` is the grader. The two columns after it say how much of it is owed to comparing "
        "texts: math-verify in the worker pool without that, and the plain library "
        "(`verify(parse(gold), parse(response))`).",
        "",
        "| file | rows | golds | `grade` | required | slow path alone | plain math-verify |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        shares = [f"{n} ({n / r.golds:.2%})" for n in (r.ours, r.slow, r.plain)]
        lines.append(
            f"| {name} | {r.rows} | {r.golds} | {shares[0]} | {FILES[name]:.1%} | "
            f"{shares[1]} | {shares[2]} |"
        )
    lines += ["", "Rows count from 0; `12/2` is the second gold of row 12.", ""]
    for title, entries in (
        ("Not correct against themselves", "ours_not"),
        ("Not verified by the slow path alone", "slow_not"),
        ("Not verified by plain math-verify", "plain_not"),
    ):
        lines += [f"## {title}", ""]
        listed = {name: getattr(r, entries) for name, r in results.items() if getattr(r, entries)}
        for name, golds in listed.items():
            lines += [f"- {name}", *places(golds)]
        lines += [] if listed else ["None."]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add(parser, "--data-dir", "--out", "--workers", "--date")
    args = parser.parse_args()
    missing = [name for name in FILES if not (args.data_dir / name).is_file()]
    if missing:
        parser.error(f"{args.data_dir} has no {', '.join(missing)}")
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    pool = WorkerPool(args.workers)
    results = {}
    for name in tqdm(FILES, "files"):
        results[name] = grade_file(read_golds(args.data_dir / name), pool)
    pool.close()
    args.out.write_text(report(results, args.date))
    failed = [name for name, r in results.items() if r.ours < FILES[name] * r.golds]
    if failed:
        sys.exit(f"below the required share: {', '.join(failed)}; see {args.out}")


if __name__ == "__main__":
    main()
