"""Ours and five other rules on published responses of models, each disagreement with a verdict.

    python -m lab.experiments.graders.responses
    python -m lab.experiments.graders.real --data-dir data/math --out FILE

A response is right where its last box holds a right answer (`real_verdicts.tsv` says which of those
that the rules differ on are), and wrong without a box, which the prompt asks for. Listed are the
answers on which ours and AR-Lopti's, Qwen's or math-verify's rule differ, and those that the two
comparisons of texts (hendrycks, verl) accept and ours does not; what only these two reject needs no
verdict. One that is not judged is listed as `unjudged`, and ends in status 1 with `--strict`, as
does a wrong answer that ours accepts. A Markdown table is written beside the JSON.

Golds are named by set and row, not quoted; `--texts FILE` writes the list with them. `--others
FILE` keeps the other rules' verdicts, which take some minutes, for the next time.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lab.bench.common import write
from lab.experiments.graders import options, responses
from lab.experiments.graders.outside_cases import cell, short
from lab.experiments.graders.responses import FILES, Response
from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.math.grading import WorkerPool, grade_many
from sg_rlhf.tasks.math.reference_graders import GRADERS as OTHERS
from sg_rlhf.tasks.math.reference_graders import ReferenceGraders, find_sources

VERDICTS = Path(__file__).with_name("real_verdicts.tsv")
OURS = "ours"
GRADERS = (OURS, *OTHERS)
#: Rules that compare texts, whose rejections say nothing of value.
TEXTS = ("hendrycks", "verl")
BATCH = 256
UNJUDGED = "unjudged"
Verdicts = Mapping[str, bool | None]


@dataclass(frozen=True)
class Judged:
    """Whether an answer is right, and why the rules differ on it."""

    right: bool
    why: str


def key(golds: Sequence[str], answer: str) -> str:
    """Ten hex digits that name an answer and its golds."""
    return hashlib.sha256("\0".join((*golds, answer)).encode()).hexdigest()[:10]


def read_verdicts(path: Path = VERDICTS) -> dict[str, Judged]:
    """Key of an answer -> its verdict.

    Raises:
        ValueError: a row has another verdict, or a key stands there twice.
    """
    found: dict[str, Judged] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            if row["verdict"] not in ("right", "wrong") or row["key"] in found:
                raise ValueError(f"{path}: {row['key']}: twice, or verdict {row['verdict']!r}")
            found[row["key"]] = Judged(row["verdict"] == "right", row["why"])
    return found


def differ(verdicts: Verdicts) -> bool:
    """Whether the rules differ in a way that a person has to judge."""
    ours = bool(verdicts[OURS])
    if any(bool(verdicts[name]) is not ours for name in OTHERS if name not in TEXTS):
        return True
    return not ours and any(verdicts[name] for name in TEXTS)


def others_verdicts(
    found: Sequence[Response], sources: Mapping[str, Sequence[Path]]
) -> list[dict[str, bool | None]]:
    """Of each response each other rule's verdict."""
    others = ReferenceGraders(sources)
    verdicts: list[dict[str, bool | None]] = []
    for start in tqdm(range(0, len(found), BATCH), disable=None):
        part = found[start : start + BATCH]
        verdicts += others.grade([(one.text, list(one.golds)) for one in part])
    others.close()
    return verdicts


def result_of(
    found: Sequence[Response], verdicts: Sequence[Verdicts], judged: Mapping[str, Judged]
) -> dict[str, Any]:
    """Counts by benchmark and rule, agreement in pairs, and every disagreement once."""
    listed: dict[str, dict[str, Any]] = {}
    right_keys = set()
    sets: dict[str, Any] = defaultdict(lambda: {"responses": 0, "boxed": 0, "accepted": Counter()})
    errors = {name: Counter[str]() for name in GRADERS}
    for response, by_rule in zip(found, verdicts, strict=True):
        answer = last_box(response.text)
        part = sets[response.benchmark]
        part["responses"] += 1
        part["boxed"] += bool(answer)
        part["accepted"].update(name for name in GRADERS if by_rule[name])
        right = False
        if answer:
            name = key(response.golds, answer)
            verdict = judged.get(name)
            right = bool(by_rule[OURS]) if verdict is None else verdict.right
            if right:
                right_keys.add(name)
            if differ(by_rule):
                entry = listed.setdefault(
                    name,
                    {
                        "key": name,
                        "at": f"{response.benchmark} {response.id.split('/')[0]}",
                        "golds": list(response.golds),
                        "answer": short(answer),
                        "responses": 0,
                        "accept": [n for n in GRADERS if by_rule[n]],
                        "verdict": UNJUDGED if verdict is None else ("right" if right else "wrong"),
                        "why": "" if verdict is None else verdict.why,
                    },
                )
                entry["responses"] += 1
        for grader in GRADERS:
            accepted = bool(by_rule[grader])
            errors[grader]["accepts_wrong"] += accepted and not right
            errors[grader]["accepts_without_box"] += accepted and not answer
            errors[grader]["rejects_right"] += right and not accepted
            errors[grader]["no_verdict"] += by_rule[grader] is None
    pairs = {
        f"{a} {b}": sum(bool(v[a]) is bool(v[b]) for v in verdicts)
        for a, b in combinations(GRADERS, 2)
    }
    return {
        "responses": len(found),
        "sets": {name: {**part, "accepted": dict(part["accepted"])} for name, part in sets.items()},
        "errors": {name: dict(counts) for name, counts in errors.items()},
        "pairs": pairs,
        "disagreements": sorted(listed.values(), key=lambda one: (one["at"], one["answer"])),
        "right": sorted(right_keys),
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Counts, pairs, and the disagreements."""
    total = result["responses"]
    listed = result["disagreements"]
    wrong = [one for one in listed if (OURS in one["accept"]) is not (one["verdict"] == "right")]
    lines = [
        "# Ours beside other rules on published responses",
        "",
        f"{total:,} responses of {len({p.model for p in FILES})} models; the rules differ on "
        f"{len(listed)} different answers, and ours is wrong on {len(wrong)} of these.",
        f"`{result['command']}`, {result['date']}.",
        "",
        f"| set | responses | with a box | {' | '.join(GRADERS)} |",
        "|---" * (3 + len(GRADERS)) + "|",
    ]
    for name, part in result["sets"].items():
        counts = [part["responses"], part["boxed"], *(part["accepted"].get(g, 0) for g in GRADERS)]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    lines += ["", "Accepted by each. Of all responses, judged alike (%):", ""]
    lines += [f"| | {' | '.join(OTHERS)} |", "|---" * (1 + len(OTHERS)) + "|"]
    for a in GRADERS[:-1]:
        shares = [result["pairs"].get(f"{a} {b}") for b in OTHERS]
        cells = ["" if count is None else f"{100 * count / total:.1f}" for count in shares]
        lines.append(f"| {a} | {' | '.join(cells)} |")
    lines += [
        "",
        "| grader | accepts a wrong answer | accepts one without a box | rejects a right one |",
        "|---|---|---|---|",
    ]
    for name, e in result["errors"].items():
        boxed = e["accepts_wrong"] - e["accepts_without_box"]
        lines.append(f"| {name} | {boxed} | {e['accepts_without_box']} | {e['rejects_right']} |")
    lines += [
        "",
        "Right and wrong are this table's verdicts; where no two rules that compare values differ, "
        "their common one.",
        "",
        "| at | answer | responses | accepted by | the answer is | why |",
        "|---|---|---|---|---|---|",
    ]
    for one in listed:
        cells = [one["at"], cell(one["answer"]), str(one["responses"])]
        cells += [", ".join(one["accept"]) or "none", one["verdict"], one["why"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 with `--strict` for what must not be; 2 with one line for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.graders.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    responses.add_options(parser)
    options.add(parser, "--data-dir", "--out", "--date")
    parser.add_argument("--grader-sources", type=Path, metavar="D")
    parser.add_argument("--others", type=Path, metavar="FILE", help="their verdicts, kept")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="write the golds here, too")
    parser.add_argument("--strict", action="store_true", help="status 1 for unjudged or accepted")
    args = parser.parse_args(argv)
    try:
        found = responses.read(responses.fetch(args.cache, dict(args.given)), args.data_dir)
        sources = find_sources(list(OTHERS), args.grader_sources)
        judged = read_verdicts()
    except (ValueError, OSError) as error:  # DataError is one
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.others is not None and args.others.is_file():
        theirs = json.loads(args.others.read_text())
    else:
        theirs = others_verdicts(found, sources)
        if args.others is not None:
            args.others.write_text(json.dumps(theirs))
    pool = WorkerPool(2)
    ours = grade_many([(one.text, list(one.golds)) for one in found], pool)
    pool.close()
    verdicts = [{OURS: g.correct, **t} for g, t in zip(ours, theirs, strict=True)]
    versions = {name: metadata.version(name) for name in ("math-verify", "sympy")}
    result = {
        "command": "python -m lab.experiments.graders.real --data-dir data/math --out OUT",
        "date": args.date,
        "versions": {**versions, "python": platform.python_version()},
        "rules": {name: rule.identity() for name, rule in OTHERS.items()},
        "sources": sorted({f"{p.origin.repository}@{p.origin.commit}" for p in FILES}),
        "reasons": dict(Counter(str(g.reason) for g in ours)),
        **result_of(found, verdicts, judged),
    }
    listed = result["disagreements"]
    if args.texts:
        args.texts.write_text(json.dumps(listed, indent=1, ensure_ascii=False) + "\n")
    for one in listed:
        del one["golds"]
    write(result, args.out)
    args.out.with_suffix(".md").write_text(markdown(result))
    counts = Counter(one["verdict"] for one in listed)
    print(f"{args.out}: {len(listed)} different answers, {dict(counts)}")
    e = result["errors"][OURS]
    print(f"ours accepts {e['accepts_wrong']} wrong and rejects {e['rejects_right']} right ones")
    return 1 if args.strict and (counts[UNJUDGED] or e["accepts_wrong"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
