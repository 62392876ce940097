"""Speed and agreement of our grader against plain math-verify, on the same seeded answers.

    python lab/bench/grading.py --data-dir data/math --out lab/bench/results/grading.json

Plain math-verify is called as its manual shows, one pair after the other in the main thread of one
process, with its own time-outs; that process is killed and started anew after 30 s on a pair. Ours
grades all pairs with `grade_many`. Both start warm. Responses are made from the golds of the data
sets that the folder has; the result counts them:

| kind      | share | the answer in the box                                                  |
|-----------|-------|------------------------------------------------------------------------|
| same      | 45 %  | the gold                                                               |
| notation  | 15 %  | the gold, written otherwise: unreduced, as decimal, x = ..., spaces    |
| wrong     | 31 %  | another row's gold, or a number one off                                |
| malformed | 8.5 % | none, empty, unclosed, in a sentence, several candidates, broken LaTeX |
| hostile   | 0.5 % | towers, factorials, endless sums, nesting, code                        |

The result names pairs by file and row and quotes no data; `--texts FILE` writes the texts too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import multiprocessing
import os
import platform
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))
from lab.bench.common import processor, write
from lab.experiments.graders.self_grading import FILES, Gold, read_golds
from sg_rlhf.tasks.math import grading
from sg_rlhf.tasks.math.answers.normalize import canonical, equal_exactly, normalize, parse_number
from sg_rlhf.tasks.math.grading import Grade, Reason, WorkerPool, grade_many

SHARES = {"same": 0.45, "notation": 0.15, "wrong": 0.31, "malformed": 0.085, "hostile": 0.005}
PLAIN_LIMIT_S = 30.0
HOSTILE = (
    r"9^{9^{9^9}}", r"9^{9^9}", "9" * 100_000, "{" * 10_000 + "5" + "}" * 10_000, "99999999!",
    r"\binom{99999999}{49999999}", r"\prod_{k=1}^{99999999} k", r"\sum_{k=1}^{9999} k^{k!}",
    "__import__('os').system('id')", "\\" * 100_000, "٣٤٥", "1e999999999",
    r"\sqrt{" * 200 + "5" + "}" * 200, r"\frac{1}{" * 200 + "5" + "}" * 200, "9!!!!",
)  # fmt: skip
OPENINGS = (
    "Let's think step by step. ",
    "We first set up the equation $a_1 + 2a_2 = 17$ and solve it for $a_2 = 4$.\n\n",
    "By the AM-GM inequality, $\\frac{p+q}{2} \\ge \\sqrt{pq}$, with equality at $p = q = 3$. ",
    "There are $\\binom{6}{2} = 15$ cases; 11 remain.\n- Case 1: 4 ways.\n- Case 2: 7 ways.\n\n",
    "\\[ \\int_0^1 3t^2\\,dt = 1 \\]\nso the constant is 1, and only the first term is left. ",
    "Suppose not; then $n^2 + n = 56$, hence $n = 7$ or $n = -8$, a contradiction. ",
)
CLOSINGS = (
    "So the answer is $\\boxed{%s}$.",
    "The final answer is: $\\boxed{%s}$",
    "Therefore, we get\n\\[\n\\boxed{%s}\n\\]",
    "Hence $\\boxed{%s}$ is what was asked for.",
    "\\boxed{%s}",
)


@dataclass(frozen=True)
class Pair:
    kind: str
    how: str
    source: Gold
    response: str


@dataclass(frozen=True)
class Plain:
    """Of the plain library: True, False, or None if it was stopped or died, and its seconds."""

    verdict: bool | None
    wall_s: float
    cpu_s: float
    end: str = "answered"


def otherwise(gold: str, rng: random.Random) -> tuple[str, str]:
    """The gold in another notation, and the name of what was done."""
    text = gold.strip().strip("$")
    value = parse_number(text)
    ways = {"dollars": f"${text}$", "spaces": rf"\, {text} \,", "full stop": f"{text}."}
    if "\\frac" in text:
        ways = {"dfrac": text.replace("\\frac", "\\dfrac")}
    if value is not None:
        exact = value[0]
        double = rf"\frac{{{abs(2 * exact.numerator)}}}{{{2 * exact.denominator}}}"
        twice = f"-{double}" if exact < 0 else double
        ways = {"unreduced": twice, "equation": f"x = {text}"}
        if exact.denominator == 1:
            ways |= {"point zero": f"{exact}.0"}
            if abs(exact) >= 1000:
                ways |= {"grouped": f"{exact.numerator:,}"}
        else:
            ways |= {"slash": f"{exact.numerator}/{exact.denominator}"}
            if Fraction(round(float(exact), 4)).limit_denominator(10_000) == exact:
                ways |= {"decimal": f"{float(exact):g}"}
    how = rng.choice(sorted(ways))
    return ways[how], how


def wrong(gold: Gold, same_file: list[Gold], rng: random.Random) -> tuple[str, str]:
    value = parse_number(gold.text)
    if value is not None and rng.random() < 0.5:
        return str(value[0] + rng.choice((-1, 1))), "one off"
    for _ in range(100):
        other = rng.choice(same_file)
        if canonical(other.text) != canonical(gold.text) and other.row != gold.row:
            return other.text.strip().strip("$"), "another gold"
    raise ValueError(f"{gold.file} has one answer only")


def malformed(gold: str, rng: random.Random) -> tuple[str, str]:
    """A whole ending of a response; holds the gold, and deserves nothing."""
    text = gold.strip().strip("$")
    ways = {
        "no box": f"So the answer is ${text}$.",
        "empty box": f"The answer is ${text}$, in the format $\\boxed{{}}$.",
        "unclosed box": f"So the answer is $\\boxed{{{text}",
        "sentence": f"\\boxed{{it is surely {text} I think}}",
        "hedged": f"\\boxed{{{text} \\text{{ or 7654321}}}}",
        "candidates": f"\\boxed{{{text}, 7654321, 7654322}}",
        "false equation": f"\\boxed{{7654321 = {text}}}",
        "broken LaTeX": f"\\boxed{{\\frac{{{text}}} + }}",
    }
    how = rng.choice(sorted(ways))
    return ways[how], how


def make_pairs(golds: list[Gold], count: int, seed: int) -> list[Pair]:
    rng = random.Random(seed)
    kinds = [kind for kind, share in SHARES.items() for _ in range(round(count * share))]
    rng.shuffle(kinds)
    by_file = defaultdict(list)
    for gold in golds:
        by_file[gold.file].append(gold)
    pairs = []
    for kind in kinds:
        gold = rng.choice(golds)
        opening = "".join(rng.choices(OPENINGS, k=rng.randint(1, 4)))
        how = kind
        if kind == "malformed":
            ending, how = malformed(gold.text, rng)
        else:
            answer = gold.text.strip().strip("$")
            if kind == "notation":
                answer, how = otherwise(gold.text, rng)
            elif kind == "wrong":
                answer, how = wrong(gold, by_file[gold.file], rng)
            elif kind == "hostile":
                answer = rng.choice(HOSTILE)
                how = answer[:40]
            ending = rng.choice(CLOSINGS).replace("%s", answer)
        pairs.append(Pair(kind, how, gold, opening + ending))
    return pairs


def plain_child(pipe: Connection) -> None:
    """Grades what comes through the pipe with the plain library until told to stop."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    logging.disable(logging.CRITICAL)
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    verify(parse(r"$\frac{1}{2}$"), parse(r"\boxed{0.5}"))
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        response, gold = task
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            verdict = bool(verify(parse(f"${gold.strip().strip('$')}$"), parse(response)))
            end = "answered"
        except BaseException as error:
            verdict, end = None, f"raised {type(error).__name__}"
        pipe.send(Plain(verdict, time.perf_counter() - wall, time.process_time() - cpu, end))


class PlainLibrary:
    """The plain library in a child process that can be stopped."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._pipe, child_end = self._context.Pipe()
        self._process = self._context.Process(target=plain_child, args=(child_end,), daemon=True)
        self._process.start()
        child_end.close()
        self._pipe.recv()

    def grade(self, response: str, gold: str) -> Plain:
        start = time.perf_counter()
        self._pipe.send((response, gold))
        end = f"stopped after {PLAIN_LIMIT_S:g} s"
        if self._pipe.poll(PLAIN_LIMIT_S):
            try:
                answered: Plain = self._pipe.recv()
                return answered
            except EOFError:
                end = "process died"
        elapsed = time.perf_counter() - start
        self._process.kill()
        self._process.join()
        self._start()
        return Plain(None, elapsed, elapsed, end)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def cpu_seconds() -> float:
    """Processor seconds so far of this process and of its children, living and ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def ours(pairs: list[Pair], workers: int) -> tuple[list[Grade], dict[str, float]]:
    pool = WorkerPool(workers)
    start = time.perf_counter()
    # Enough for every worker to be up before the clock starts.
    grade_many(
        [(rf"\boxed{{(x+{n})^{{20}}}}", f"(y+{n})^{{20}}") for n in range(4 * workers)], pool
    )
    ready = time.perf_counter()
    cpu = cpu_seconds()
    grades = grade_many([(p.response, p.source.text) for p in pairs], pool)
    wall = time.perf_counter() - ready
    cpu = cpu_seconds() - cpu
    pool.close()
    figures = {
        "wall_seconds": round(wall, 2),
        "answers_per_second": round(len(pairs) / wall, 1),
        "cpu_seconds": round(cpu, 2),
        "start_seconds": round(ready - start, 2),
    }
    return grades, figures


def explain(pair: Pair, grade: Grade, plain: Plain) -> str:
    """Why the two verdicts on a pair differ; "unexplained" if no rule of ours says so."""
    gold = pair.source.text
    if plain.verdict is None:
        return f"the library gives no verdict: {plain.end}"
    if grade.correct:
        if canonical(grade.extracted or "") == canonical(gold):
            return "the gold's own text, which the library cannot read or finds more beside"
        if equal_exactly(grade.extracted or "", gold):
            return "the same exact number, in a notation that the library reads otherwise"
        return "the library reads more than the box, or the gold differently in dollar signs"
    if grade.reason in (Reason.NO_BOX, Reason.EMPTY_BOX):
        return "no complete box, or nothing in it: the library takes an answer from elsewhere"
    if grade.reason is Reason.AMBIGUOUS:
        return "several answers in one box: the library takes one of them"
    if grade.reason is Reason.UNPARSEABLE:
        return "the box is no expression: the library takes a part of it"
    if grade.reason is Reason.UNREADABLE_GOLD:
        return "the gold cannot be read whole: the library takes a part of it"
    if grade.reason in (Reason.TIMEOUT, Reason.CRASH):
        return "no verdict of ours within the limit"
    if grade.reason in (Reason.TOO_LONG, Reason.TOO_COMPLEX, Reason.CODE_LIKE):
        return "refused by us unread: too large, or code"
    answer = grade.extracted or ""
    if " or " in answer:
        return "the box has the gold or another value: the library takes one of them"
    if parse_number(answer) and parse_number(gold):
        return "two exact numbers that differ: the library rounds them"
    return "unexplained"


def compare(pairs: list[Pair], grades: list[Grade], plain: list[Plain]) -> dict[str, Any]:
    """Agreement, and every disagreement with its explanation."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for index, (pair, grade, other) in enumerate(zip(pairs, grades, plain, strict=True)):
        if grade.correct != other.verdict:
            groups[explain(pair, grade, other)].append(
                {
                    "pair": index,
                    "kind": pair.kind,
                    "how": pair.how,
                    "file": pair.source.file,
                    "row": pair.source.row,
                    "ours": grade.reason,
                    "plain": other.verdict,
                }
            )
    differing = sum(len(group) for group in groups.values())
    return {
        "agree": len(pairs) - differing,
        "disagree": differing,
        "unexplained": len(groups.get("unexplained", [])),
        "explanations": {
            why: {"count": len(group), "pairs": group} for why, group in sorted(groups.items())
        },
    }


def by_kind(pairs: list[Pair], grades: list[Grade], plain: list[Plain]) -> dict[str, Any]:
    """For each kind of answer: verdicts that its making calls for, outcomes, and seconds."""
    table = {}
    for kind in SHARES:
        indices = [i for i, pair in enumerate(pairs) if pair.kind == kind]
        due = kind in ("same", "notation")
        table[kind] = {
            "pairs": len(indices),
            "as_made_ours": sum(grades[i].correct == due for i in indices),
            "as_made_plain": sum(plain[i].verdict is due for i in indices),
            "outcomes_ours": dict(Counter(grades[i].reason for i in indices)),
            "ends_plain": dict(Counter(plain[i].end for i in indices)),
            "plain_wall_seconds": round(sum(plain[i].wall_s for i in indices), 2),
            "plain_cpu_seconds": round(sum(plain[i].cpu_s for i in indices), 2),
            "plain_slowest_seconds": round(max((plain[i].wall_s for i in indices), default=0), 2),
        }
    return table


def fast_against_slow(pairs: list[Pair], grades: list[Grade], workers: int) -> dict[str, Any]:
    """Each distinct pair of texts that was decided without math-verify, also by math-verify."""
    pool = WorkerPool(workers)
    decided: dict[tuple[str, str], bool] = {}
    for pair, grade in zip(pairs, grades, strict=True):
        verdict = equal_exactly(grade.extracted, pair.source.text) if grade.extracted else None
        if verdict is not None and grade.reason in (Reason.CORRECT, Reason.WRONG):
            decided[normalize(grade.extracted or ""), normalize(pair.source.text)] = verdict
    waiting = [(texts, pool.submit(grading.compare, texts[0], (texts[1],))) for texts in decided]
    differ: Counter[str] = Counter()
    for texts, call in tqdm(waiting, "fast path against slow"):
        slow = call.result()
        if (slow == Reason.CORRECT) != decided[texts]:
            numbers = all(parse_number(text) is not None for text in texts)
            way = "equal" if decided[texts] else "unequal"
            differ[f"{'numbers' if numbers else 'texts'} {way}, slow path says {slow}"] += 1
    pool.close()
    return {"decided_by_fast_path": len(decided), "slow_path_differs": dict(differ)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the sets' files")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    parser.add_argument("--pairs", type=int, default=10_000, help="number of pairs (10000)")
    parser.add_argument("--workers", type=int, default=2, help="grading processes (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--note", default="", help="what else ran on the machine, for the result")
    parser.add_argument("--texts", type=Path, help="write disagreements with their texts here")
    args = parser.parse_args()
    files = [name for name in FILES if (args.data_dir / name).is_file()]
    if not files:
        parser.error(f"{args.data_dir} has none of {', '.join(FILES)}")
    golds = [gold for name in files for gold in read_golds(args.data_dir / name)]
    pairs = make_pairs(golds, args.pairs, args.seed)
    load_before = round(os.getloadavg()[0], 2)

    grades, figures = ours(pairs, args.workers)
    benign = [pair for pair in pairs if pair.kind != "hostile"]
    _, benign_figures = ours(benign, args.workers)
    fast = fast_against_slow(pairs, grades, args.workers)
    library = PlainLibrary()
    plain = [
        library.grade(pair.response, pair.source.text) for pair in tqdm(pairs, "plain library")
    ]
    library.close()

    def plain_figures(results: list[Plain]) -> dict[str, float]:
        wall = sum(result.wall_s for result in results)
        return {
            "wall_seconds": round(wall, 2),
            "answers_per_second": round(len(results) / wall, 1),
            "cpu_seconds": round(sum(result.cpu_s for result in results), 2),
        }

    harmless = [r for pair, r in zip(pairs, plain, strict=True) if pair.kind != "hostile"]
    all_plain, benign_plain = plain_figures(plain), plain_figures(harmless)

    def times_faster(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
        return {
            f"{clock}_speedup": round(theirs[f"{clock}_seconds"] / ours[f"{clock}_seconds"], 1)
            for clock in ("wall", "cpu")
        }

    result: dict[str, Any] = {
        "date": args.date,
        "note": args.note,
        "machine": {"cpu": processor(), "cores": os.cpu_count(), "load_before": load_before},
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("math-verify", "sympy")},
        },
        "golds": dict(Counter(gold.file for gold in golds)),
        "pairs": len(pairs),
        "seed": args.seed,
        "workers": args.workers,
        "all": {
            "ours": figures,
            "plain": all_plain,
            **times_faster(figures, all_plain),
        },
        "without_hostile": {
            "pairs": len(benign),
            "ours": benign_figures,
            "plain": benign_plain,
            **times_faster(benign_figures, benign_plain),
        },
        "by_kind": by_kind(pairs, grades, plain),
        "fast_path_against_slow_path": fast,
        "agreement": compare(pairs, grades, plain),
    }
    write(result, args.out)
    if args.texts:
        with args.texts.open("w") as file:
            for pair, grade, other in zip(pairs, grades, plain, strict=True):
                if grade.correct != other.verdict:
                    row: dict[str, Any] = {
                        "gold": pair.source.text,
                        "response": pair.response[-300:],
                    }
                    row |= {"why": explain(pair, grade, other), "plain": other.verdict}
                    file.write(json.dumps({**row, "ours": asdict(grade)}) + "\n")
    every, harmless_only = result["all"], result["without_hostile"]
    print(
        f"{every['wall_speedup']}x plain math-verify ({every['cpu_speedup']}x in processor time), "
        f"{harmless_only['wall_speedup']}x ({harmless_only['cpu_speedup']}x) without hostile ones; "
        f"{result['agreement']['disagree']} disagreements, "
        f"{result['agreement']['unexplained']} unexplained: {args.out}"
    )


if __name__ == "__main__":
    main()
