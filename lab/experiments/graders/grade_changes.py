"""Golds with a harmless change, which must be graded right, and with a real one, which must not.

    python -m lab.experiments.graders.grade_changes --data-dir data/math --out FILE

Every gold that is more than a number gets each change that it has room for, from a seed. The result
counts what was graded right, and quotes no data; `--texts FILE` writes the surprises.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lab.bench.common import provenance, write
from lab.experiments.graders import options
from lab.experiments.graders.self_grading import FILES, read_golds
from sg_rlhf.tasks.math.grading import grade_many

_PLAIN = re.compile(r"-?[0-9,.]+")
_LETTER = re.compile(r"(?<![\\A-Za-z{])[A-Za-z](?![A-Za-z])")
# Letters whose case says nothing: of 1e5, of a unit or a time of day in words, and of a constant c
# that an integration leaves, which is as often C.
_CASELESS = re.compile(
    r"(?<=[0-9])[eE](?=[-+]?[0-9])|\\(?:text|mbox)\{[^}]*\}|[cC](?=[_ ]|e\^|\)|x\^)"
)
#: Changes that keep the meaning; the others do not, but for the few that a person must look at.
HARMLESS = ("braces", "dollars", "left and right", "sides swapped", "all on one side")


def changes(gold: str, chance: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, changed text) of a gold."""
    yield "braces", f"{{{gold}}}"
    yield "dollars", f"$ {gold} $"
    if "(" in gold:
        yield "left and right", gold.replace("(", r"\left(").replace(")", r"\right)")
    inner = gold.strip("$")
    if inner.count("=") == 1 and "\\" not in inner and "$" not in inner:
        left, right = inner.split("=")
        yield "sides swapped", f"{right}={left}"
        yield "all on one side", f"{left}-({right})=0"
    if digits := [match.start() for match in re.finditer("[0-9]", gold)]:
        at = chance.choice(digits)
        other = (int(gold[at]) + chance.randint(1, 8)) % 10
        yield "another digit", f"{gold[:at]}{other}{gold[at + 1 :]}"
    if "+" in gold:
        yield "another sign", gold.replace("+", "-", 1)
    caseless = {at for match in _CASELESS.finditer(gold) for at in range(*match.span())}
    if letters := [m.start() for m in _LETTER.finditer(gold) if m.start() not in caseless]:
        at = chance.choice(letters)
        yield "another case", f"{gold[:at]}{gold[at].swapcase()}{gold[at + 1 :]}"


def more_than_a_number(golds: Iterable[str]) -> list[str]:
    """The different golds that are more than a number, sorted."""
    texts = {gold.strip() for gold in golds}
    return sorted(gold for gold in texts if gold and not _PLAIN.fullmatch(gold))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.graders.grade_changes", description=__doc__.split("\n")[0]
    )
    options.add(parser, "--data-dir", "--out", "--seed")
    parser.add_argument("--texts", type=Path, help="what was graded against its kind, JSON")
    args = parser.parse_args()
    files = [args.data_dir / name for name in FILES if (args.data_dir / name).is_file()]
    golds = more_than_a_number(gold.text for file in files for gold in read_golds(file))
    chance = random.Random(args.seed)
    tried = [(kind, text, gold) for gold in golds for kind, text in changes(gold, chance)]
    grades = grade_many([(f"\\boxed{{{text}}}", gold) for _, text, gold in tried])
    counts: dict[str, dict[str, int]] = {}
    surprises = []
    for (kind, text, gold), grade in zip(tried, grades, strict=True):
        row = counts.setdefault(kind, {"tried": 0, "right": 0})
        row["tried"] += 1
        row["right"] += grade.correct
        if grade.correct != (kind in HARMLESS):
            surprises.append({"kind": kind, "answer": text, "gold": gold, "why": str(grade.reason)})
    for kind, row in counts.items():
        print(f"{kind:16} {row['tried']:6} tried {row['right']:6} right")
    result = {
        **provenance("lab/experiments/graders/grade_changes.py", "math-verify", "sympy"),
        "kinds": counts,
    }
    result["command"] = "python -m lab.experiments.graders.grade_changes --data-dir DATA --out OUT"
    write(result, args.out)
    if args.texts:
        args.texts.write_text(json.dumps(surprises, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
