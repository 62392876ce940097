"""Both error rates of the grader: harmless rewrites and one-change mutations of the data's golds.

    python -m lab.experiments.graders.mutations --data-dir data/math --label before --out FILE

10,000 rewrites, each of which means what the gold means, and 5,000 mutations, each of which does
not. Every mutation is certified: numbers by exact arithmetic, formulas at random rational points
(`certified`), which need nothing of the grader; one that is not certified is drawn anew. Rates are
given by family, beside those of earlier labels in the file. Golds are named by file, row and
position, never quoted; `--texts FILE` writes the texts of the errors.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

from lab.bench.common import write
from lab.experiments.graders import options
from lab.experiments.graders.self_grading import FILES, Gold, read_golds
from sg_rlhf.tasks.math.grading import WorkerPool, grade_many

#: A family gives another text of a gold, or None where it does not apply.
Family = Callable[[str, random.Random], str | None]

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,11})")
_DECIMAL = re.compile(r"-?[0-9]{1,12}\.[0-9]{1,12}")
_FRACTION = re.compile(
    r"(-?)\\d?frac\{([0-9]{1,12})\}\{([0-9]{1,12})\}|(-?)([0-9]{1,9})/([0-9]{1,9})"
)
# Digits that stand for a number: not in a name's index, a base or a command.
_DIGITS = re.compile(r"(?<![_0-9.A-Za-z{,])[0-9]{1,9}(?![0-9.,A-Za-z])|(?<=[{])[0-9]{1,9}(?=\})")
_PROSE = re.compile(r"\\(?:text|mathrm|mbox)|[A-Za-z]{3,}(?<!frac)(?<!sqrt)(?<!left)(?<!right)")


def exact(text: str) -> Fraction | None:
    """The value of an integer, decimal or fraction in plain notation; its own reading of them."""
    text = text.strip().strip("$").strip()
    if _INTEGER.fullmatch(text) or _DECIMAL.fullmatch(text):
        return Fraction(text)
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, top, bottom = match.groups()[:3] if match[2] else match.groups()[3:]
    if not int(bottom):
        return None
    return Fraction(int(top), int(bottom)) * (-1 if sign else 1)


def _latex(value: Fraction, command: str = "\\frac") -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _of_number(rewrite: Callable[[Fraction, random.Random], str | None]) -> Family:
    def family(gold: str, rng: random.Random) -> str | None:
        value = exact(gold)
        return None if value is None else rewrite(value, rng)

    return family


def _times(value: Fraction, rng: random.Random) -> str | None:
    """Unreduced, by a factor of 2 to 9."""
    factor = rng.randint(2, 9)
    sign = "-" if value < 0 else ""
    top, bottom = abs(value.numerator) * factor, value.denominator * factor
    return f"{sign}\\frac{{{top}}}{{{bottom}}}"


def _as_decimal(value: Fraction, rng: random.Random) -> str | None:
    for digits in range(1, 7):
        if (value * 10**digits).denominator == 1:
            sign, scaled = "-" if value < 0 else "", abs(int(value * 10**digits))
            return f"{sign}{scaled // 10**digits}.{scaled % 10**digits:0{digits}d}"
    return None


def _grouped(value: Fraction, rng: random.Random) -> str | None:
    if value.denominator != 1 or abs(value) < 1000:
        return None
    return f"{value.numerator:,}".replace(",", rng.choice((",", "{,}", ",\\!", "\\,")))


def _scientific(value: Fraction, rng: random.Random) -> str | None:
    whole = value.denominator == 1 and value != 0
    zeros = len(str(abs(value.numerator))) - len(str(abs(value.numerator)).rstrip("0"))
    if not whole or not zeros:
        return None
    return f"{value.numerator // 10**zeros} \\times 10^{{{zeros}}}"


def _swap(pattern: str, replacement: str) -> Family:
    compiled = re.compile(pattern)

    def family(gold: str, rng: random.Random) -> str | None:
        text = compiled.sub(replacement, gold)
        return None if text == gold else text

    return family


def _around(before: str, after: str, only_math: bool = True) -> Family:
    def family(gold: str, rng: random.Random) -> str | None:
        if only_math and _PROSE.search(gold):
            return None
        return f"{before}{gold.strip().strip('$')}{after}"

    return family


def _spaced(gold: str, rng: random.Random) -> str | None:
    """Spaces around signs between two operands, where they change nothing."""
    text = re.sub(r"(?<=[0-9A-Za-z})])([+=-])(?=[0-9A-Za-z\\({])", r" \1 ", gold)
    prose = "\\text" in gold or re.search(r"[0-9]e[-+]?[0-9]", gold)
    return None if text == gold or prose else text


def _whole_in(command: str) -> Family:
    def family(gold: str, rng: random.Random) -> str | None:
        value = exact(gold)
        return f"{command}{{{value}}}" if value is not None and value.denominator == 1 else None

    return family


def _assigned(gold: str, rng: random.Random) -> str | None:
    return f"{rng.choice('xyzkn')} = {gold.strip().strip('$')}" if exact(gold) is not None else None


REWRITES: Mapping[str, Family] = {
    "number: unreduced fraction": _of_number(_times),
    "number: as a decimal": _of_number(_as_decimal),
    "number: digits grouped": _of_number(_grouped),
    "number: scientific": _of_number(_scientific),
    "number: x = ...": _assigned,
    "number: ... = x": lambda gold, rng: (
        f"{gold.strip().strip('$')} = x" if exact(gold) is not None else None
    ),
    "layout: dollar signs": _around("$", "$"),
    "layout: round delimiters": _around("\\(", "\\)"),
    "layout: outer braces": _around("{", "}"),
    "layout: thin spaces": _around("\\, ", " \\,"),
    "layout: full stop": _around("", "."),
    "layout: \\displaystyle": _around("\\displaystyle ", ""),
    "layout: \\mathbf": _whole_in("\\mathbf"),
    "layout: \\boldsymbol": _whole_in("\\boldsymbol"),
    "layout: spaces around signs": _spaced,
    "notation: \\dfrac": _swap(r"\\frac(?=\{)", r"\\dfrac"),
    "notation: \\tfrac": _swap(r"\\frac(?=\{)", r"\\tfrac"),
    "notation: \\left( \\right)": lambda gold, rng: (
        gold.replace("(", "\\left(").replace(")", "\\right)")
        if "(" in gold and "\\left" not in gold and gold.count("(") == gold.count(")")
        and not re.search(r"[\[\]\\]text|[\[\]]", gold)
        else None
    ),
    "notation: no \\left \\right": _swap(r"\\(?:left|right)(?=[()\[\]])", ""),
    "notation: \\sqrt{3} as √3": _swap(r"\\sqrt\{([0-9])\}", r"√\1"),
    "notation: π": _swap(r"\\pi(?![A-Za-z])", "π"),
    # Not before a fraction: 1\frac{1}{2} is a mixed number.
    "notation: \\cdot": _swap(r"(?<=[0-9])(?=\\(?:sqrt|pi))", r" \\cdot "),
    "notation: − for -": _swap(r"-", "−"),
    "notation: braces in powers": _swap(r"\^([0-9])(?![0-9])", r"^{\1}"),
}  # fmt: skip


def _step(value: Fraction, rng: random.Random) -> str:
    changed = value + rng.choice((-1, 1))
    return str(changed) if changed.denominator == 1 else _latex(changed)


def _fourth_decimal(value: Fraction, rng: random.Random) -> str | None:
    if abs(value) >= 10:
        return None
    text = f"{float(value):.4f}"
    return f"{text[:-1]}{(int(text[-1]) + rng.choice((3, 7))) % 10}"


def _digit(gold: str, rng: random.Random) -> str | None:
    """One digit of one number of a formula."""
    places = list(_DIGITS.finditer(gold))
    if not places or _PROSE.search(gold):
        return None
    match = rng.choice(places)
    at = rng.randrange(match.start(), match.end())
    digit = rng.choice([d for d in "123456789" if d != gold[at]])
    return gold[:at] + digit + gold[at + 1 :]


def _exchange(pairs: Sequence[tuple[str, str]]) -> Family:
    def family(gold: str, rng: random.Random) -> str | None:
        places = [(m.span(), new) for old, new in pairs for m in re.finditer(old, gold)]
        if not places or _PROSE.search(gold):
            return None
        (start, end), new = rng.choice(places)
        return gold[:start] + new + gold[end:]

    return family


def _element(gold: str, rng: random.Random) -> str | None:
    """One element of a list left out."""
    parts = gold.split(",")
    if len(parts) < 3 or _PROSE.search(gold) or any(exact(part) is None for part in parts):
        return None
    del parts[rng.randrange(len(parts))]
    return ",".join(parts)


def _letter(old: str, new: str) -> tuple[str, str]:
    """A letter that stands alone, for `_exchange`."""
    return rf"(?<![A-Za-z\\]){old}(?![A-Za-z])", new


_OPERAND = r"(?<=[0-9a-z})])"

MUTATIONS: Mapping[str, Family] = {
    "number: one more or less": _of_number(_step),
    "number: other sign": _of_number(lambda v, rng: str(-v) if v.denominator == 1 else None),
    "number: ten times": _of_number(lambda v, rng: str(v * 10) if v.denominator == 1 else None),
    "number: upside down": _of_number(
        lambda v, rng: _latex(1 / v) if v and v.denominator != 1 else None
    ),
    "number: digits exchanged": _of_number(
        lambda v, rng: str(v)[:-2] + str(v)[:-3:-1] if v.denominator == 1 and abs(v) > 9 else None
    ),
    "number: a fourth decimal": _of_number(_fourth_decimal),
    "list: one element less": _element,
    "formula: one digit": _digit,
    "formula: + and -": _exchange([(_OPERAND + r" ?\+", "-"), (_OPERAND + " ?-", "+")]),
    "formula: another letter": _exchange(
        [_letter("x", "y"), _letter("n", "m"), _letter("a", "b"), _letter("r", "s")]
    ),
    "formula: capital for small": _exchange(
        [_letter(c, c.swapcase()) for c in "rRmMaAnNxXkKtTvVpP"]
    ),
    "formula: no root": _exchange([(r"\\sqrt(?=\{)", "")]),
    "formula: a power less": _exchange([(r"\^\{?2\}?", ""), (r"\^\{?3\}?", "^2")]),
    "interval: other end": _exchange([(r"(?<=\d)\]$", ")"), (r"(?<=\d)\)$", "]")]),
}


def certified(gold: str, changed: str, rng: random.Random) -> bool:
    """Whether a mutation is sure to differ from its gold.

    Numbers and lists of numbers: by exact arithmetic. Formulas of numbers, letters, roots and
    powers: both are evaluated at three random points, to 30 digits, and differ at each by more than
    a thousandth. Intervals and relations: by construction, where the gold is nothing else.
    """
    a, b = exact(gold), exact(changed)
    if a is not None and b is not None:
        # Decimals stand for rounded values, so a mutation has to be further away than rounding.
        return abs(a - b) > max(abs(a), abs(b)) / 10_000
    pieces = [[exact(part) for part in text.split(",")] for text in (gold, changed)]
    if all(None not in piece for piece in pieces):
        return set(pieces[0]) != set(pieces[1])
    ends = re.fullmatch(r"[(\[]([^,()\[\]]+),([^,()\[\]]+)([)\]])", gold.strip().strip("$"))
    if ends and changed.strip().strip("$")[:-1] == gold.strip().strip("$")[:-1]:
        # A closed end differs from an open one; a point has no ends, so one side must be closed.
        mixed = {gold.strip().strip("$")[0], ends[3]} != {"(", ")"}
        return mixed and exact(ends[1]) is not None and exact(ends[2]) is not None
    return _differ_at_points(gold, changed, rng)


def _python(text: str) -> str | None:
    r"""A formula of digits, letters, + - * / ^, \frac, \sqrt and \pi, in sympy's notation."""
    text = re.sub(r"\\(?:left|right|,|!|;)|\$", "", text).replace("\\dfrac", "\\frac")
    text = re.sub(r"\\pi(?![A-Za-z])", "π", text)
    text = re.sub(r"\\(?:cdot|times)(?![A-Za-z])", "*", text)
    text = re.sub(r"\s", "", text)
    for _ in range(8):
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"√(\1)", text)
        text = re.sub(r"\^\{([^{}]*)\}", r"^(\1)", text)
    if not re.fullmatch(r"[0-9a-zA-Z+*/^()π√.-]{1,200}", text):
        return None
    text = re.sub(r"(?<=[0-9A-Za-zπ)])(?=[A-Za-zπ√(])|(?<=[A-Za-zπ)])(?=[0-9])", "*", text)
    return text.replace("√", "sqrt").replace("π", "pi").replace("^", "**")


def _differ_at_points(gold: str, changed: str, rng: random.Random) -> bool:
    from sympy import E, I, Rational, Symbol, pi, sqrt  # type: ignore[import-untyped]
    from sympy.parsing.sympy_parser import parse_expr  # type: ignore[import-untyped]

    sources = [_python(text) for text in (gold, changed)]
    if None in sources:
        return False
    letters = sorted(set(re.findall(r"\b[A-Za-z]\b", " ".join(map(str, sources)))) - {"e", "i"})
    names: dict[str, Any] = {c: Symbol(c) for c in letters}
    names |= {"sqrt": sqrt, "pi": pi, "e": E, "i": I}
    try:
        a, b = (parse_expr(str(source), local_dict=names, evaluate=True) for source in sources)
        for _ in range(3):
            point = {Symbol(c): Rational(rng.randint(5, 90), rng.randint(7, 40)) for c in letters}
            x, y = (complex(side.subs(point).evalf(30)) for side in (a, b))
            if not abs(x - y) > 1e-3 * max(abs(x), abs(y), 1e-3):
                return False
    except (SyntaxError, TypeError, ValueError, AttributeError, OverflowError):
        return False
    return True


@dataclass(frozen=True)
class Made:
    """One answer that was made of a gold, and what it should come to."""

    family: str
    gold: Gold
    answer: str
    right: bool


def make(
    golds: Sequence[Gold], families: Mapping[str, Family], count: int, right: bool, seed: int
) -> list[Made]:
    """`count` different answers, the families in turn as far as each has more to give.

    Raises:
        ValueError: the golds do not give that many.
    """
    rng = random.Random(f"{seed} {right}")
    applies: dict[str, list[Gold]] = {name: [] for name in families}
    for gold in {gold.text: gold for gold in golds}.values():
        # Towers take all memory before they are compared.
        if len(gold.text) <= 200 and not re.search(r"\^\{?[0-9]{3}", gold.text):
            for name, family in families.items():
                if family(gold.text, rng) is not None:
                    applies[name].append(gold)
    for listed in applies.values():
        rng.shuffle(listed)
    made: dict[tuple[str, str], Made] = {}
    rounds = 0
    while len(made) < count:
        rounds += 1
        if rounds > 20 * count or not any(applies.values()):
            raise ValueError(f"{len(made)} of {count} could be made of {len(golds)} golds")
        for name, listed in applies.items():
            if not listed or len(made) == count:
                continue
            gold = listed.pop()
            answer = families[name](gold.text, rng)
            if answer is None or (gold.text, answer) in made:
                continue
            if right or certified(gold.text, answer, rng):
                made[gold.text, answer] = Made(name, gold, answer, right)
    return list(made.values())


def rates(made: Sequence[Made], pool: WorkerPool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """By family, how many were graded otherwise than they should; and those."""
    table: dict[str, Any] = defaultdict(lambda: {"made": 0, "errors": 0})
    errors = []
    grades = grade_many([(rf"\boxed{{{m.answer}}}", m.gold.text) for m in made], pool)
    for one, grade in zip(made, grades, strict=True):
        entry = table[one.family]
        entry["made"] += 1
        if grade.correct is not one.right:
            entry["errors"] += 1
            place = f"{one.gold.file} {one.gold.row}/{one.gold.position + 1}"
            errors.append(
                {"family": one.family, "at": place, "reason": str(grade.reason)}
                | {"gold": one.gold.text, "answer": one.answer}
            )
    return dict(table), errors


def markdown(result: Mapping[str, Any]) -> str:
    labels = list(result["runs"])
    last = result["runs"][labels[-1]]
    counts = {kind: last[kind]["errors"] for kind in ("mutations", "rewrites")}
    lines = [
        "# Rewrites and mutations of the golds",
        "",
        f"{counts['mutations']} of {last['mutations']['made']:,} mutations accepted, "
        f"{counts['rewrites']} of {last['rewrites']['made']:,} rewrites rejected ({labels[-1]}). "
        f"`python -m lab.experiments.graders.mutations --data-dir data/math --label {labels[-1]}`, "
        f"{last['date']}.",
        "",
    ]
    for kind, error in (("mutations", "accepted"), ("rewrites", "rejected")):
        lines += [f"## {kind.capitalize()}", ""]
        heads = ["family", "made", *(f"{error}, {label}" for label in labels)]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for family, entry in last[kind]["families"].items():
            then = [result["runs"][label][kind]["families"].get(family) for label in labels]
            cells = [str(e["errors"]) if e else "" for e in then]
            lines.append(f"| {family} | {entry['made']} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add(parser, "--data-dir", "--out", "--seed", "--workers", "--date")
    parser.add_argument("--label", default="now", help="name of this run's column [now]")
    parser.add_argument("--rewrites", type=int, default=10_000)
    parser.add_argument("--mutations", type=int, default=5_000)
    parser.add_argument("--texts", type=Path, help="write the errors with their texts here")
    args = parser.parse_args()
    files = [args.data_dir / name for name in FILES if (args.data_dir / name).is_file()]
    if not files:
        parser.error(f"{args.data_dir} has none of {', '.join(FILES)}")
    golds = [gold for file in files for gold in read_golds(file)]
    entry: dict[str, Any] = {"date": args.date, "seed": args.seed}
    entry["versions"] = {name: metadata.version(name) for name in ("math-verify", "sympy")}
    pool = WorkerPool(args.workers)
    texts = []
    wanted = (("rewrites", REWRITES, args.rewrites), ("mutations", MUTATIONS, args.mutations))
    for kind, families, count in wanted:
        try:
            made = make(golds, families, count, kind == "rewrites", args.seed)
        except ValueError as error:
            parser.error(f"{kind}: {error}")
        table, errors = rates(made, pool)
        ordered = {name: table[name] for name in families if name in table}
        places = [{k: e[k] for k in ("family", "at", "reason")} for e in errors]
        entry[kind] = {"made": len(made), "errors": len(errors), "families": ordered}
        entry[kind]["places"] = places
        texts += [{"kind": kind, **error} for error in errors]
        print(f"{kind}: {len(errors)} of {len(made)} graded otherwise than they should")
    pool.close()
    runs = json.loads(args.out.read_text())["runs"] if args.out.is_file() else {}
    runs.pop(args.label, None)
    result = {"runs": {**runs, args.label: entry}}
    write(result, args.out)
    args.out.with_suffix(".md").write_text(markdown(result).rstrip() + "\n")
    if args.texts:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in texts]
        args.texts.write_text("".join(lines))


if __name__ == "__main__":
    main()
