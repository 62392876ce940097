"""The tables of results, and paired differences."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import binomtest

from sg_rlhf.eval.scores import metrics, paired, results, tables
from sg_rlhf.eval.scores.report import show
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.kk.paper import KK
from sg_rlhf.tasks.math.paper import MATH
from sg_rlhf.tasks.suite import Benchmark

# -- The report: the paper's rows as printed, ours beside them, nothing filled in ----------------


ENVIRONMENT = {"date": "2026-01-02T03:04:05Z", "versions": {"torch": "1"}, "commit": "a" * 40}


def stored(benchmark: Benchmark, n_questions: int, correct: float) -> list[dict]:
    """`correct` of the questions right, in every sample but the first."""
    rows = []
    for number in range(n_questions):
        for sample in range(benchmark.settings.n):
            right = number < correct * n_questions and (sample > 0 or benchmark.settings.n == 1)
            rows.append(
                {
                    "benchmark": benchmark.name,
                    "id": f"q{number:03d}",
                    "group": str(2 + number % 7) if benchmark.headline_groups else "",
                    "sample": sample,
                    "correct": right,
                    "extracted": "1",
                    "finish_reason": "stop",
                    "tokens": 5,
                }
            )
    return rows


def report(suite_name: str, only: list[str], n_questions: int | None = None) -> dict:
    suite = SUITES[suite_name]
    benchmarks = suite.select(only)
    rows: list[dict] = []
    described = {}
    for benchmark in benchmarks:
        count = n_questions or benchmark.size
        rows += stored(benchmark, count, 0.5)
        described[benchmark.name] = {
            "title": benchmark.title,
            "settings": benchmark.settings.as_dict(),
            "n_questions": count,
            "full_size": benchmark.size,
            "context_cuts": {"questions": 0, "shortest_max_tokens": None, "prompts_too_long": 0},
        }
    request = {
        "suite": suite_name,
        "model": {"name": "m|x", "revision": None, "fingerprint": "f" * 64},
        "engine": "vllm",
        "dtype": "float32",
        "context": 1024,
        "seed": 3,
        "limit": n_questions,
        "benchmarks": described,
    }
    return results.build(suite, benchmarks, request, rows, ENVIRONMENT)[0]


def table_of(found: dict, suite_name: str) -> str:
    return "\n\n".join(tables.markdown(found, [], SUITES[suite_name]))


def our_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if "this run" in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_a_whole_mathematics_run_has_the_papers_average():
    found = report("math", [])
    # odd sizes: half of 675 is 338 right
    expected = [338 / 675, 0.5, 0.5, 42 / 83 * 15 / 16, 15 / 30, 15 / 30 * 15 / 16]
    cells = [f"**{100 * value:.2f}**" for value in [*expected, sum(expected) / 6]]
    text = table_of(found, "math")
    assert our_rows(text) == [["`m\\|x`", "this run", *cells]]
    assert found["average"]["value"] == pytest.approx(sum(expected) / 6)
    assert "Limited" not in text


def test_what_was_not_run_stays_empty_and_there_is_no_average():
    found = report("math", ["aime"])
    text = table_of(found, "math")
    assert our_rows(text)[0][2:] == ["–", "–", "–", "–", "**50.00**", "**46.88**", "–"]
    assert found["average"] is None


def test_a_limited_run_says_so():
    text = table_of(report("math", ["aime"], 5), "math")
    assert "**Limited run, not comparable with the paper:** questions of aime 5 of 30." in text


def test_every_row_of_the_paper_is_there_and_marked():
    text = table_of(report("math", ["aime"]), "math")
    paper = [line for line in text.splitlines() if "*paper*, Table 1 |" in line]
    assert len(paper) == len(MATH) == 5
    numbers = "38.48 | 32.35 | 79.40 | 46.84 | 43.33 | 18.13 | 43.09"
    assert f"| DSR + GRPO-SG | *paper*, Table 1 | {numbers} |" in paper
    text = table_of(report("kk", ["official"], 70), "kk")
    for table, rows in KK.items():
        assert text.count(f"*paper*, {table}") == len(rows)


@pytest.mark.parametrize("values", MATH.values(), ids=MATH)
def test_the_papers_averages_are_means_of_its_six_columns(values):
    assert sum(values[:6]) / 6 == pytest.approx(values[6], abs=0.011)


def test_the_papers_puzzle_averages_are_means_of_five_sizes():
    for rows in KK.values():
        for values in rows.values():
            assert sum(values[:5]) / 5 == pytest.approx(values[5], abs=0.0101)


def test_puzzles_are_averaged_over_sizes_3_to_7():
    suite = SUITES["kk"]
    benchmark = suite.select(["paper_t1"])[0]
    rows = stored(benchmark, 70, 0.0)
    for row in rows:
        row["correct"] = row["group"] in ("2", "3", "8")
    found = metrics.scores(benchmark, rows, seed=0)
    assert found["accuracy"].value == pytest.approx(1 / 5)
    assert found["accuracy/2"].value == found["accuracy/8"].value == 1.0
    assert list(found) == ["accuracy", *(f"accuracy/{n}" for n in range(2, 9))]


def test_the_terminal_has_the_scores_without_the_papers_and_says_where_the_files_are(tmp_path):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    tables.write(report("math", ["aime"], 5), [], SUITES["math"], tmp_path, console)
    text = console.export_text()
    for name in ("results.json", "samples.jsonl", "table.md"):
        assert str(tmp_path / name) in text
    assert "aime avg@16" in text and "aime pass@16" in text and "DSR + GRPO" not in text
    assert "DSR + GRPO" in (tmp_path / "table.md").read_text()


# -- Paired differences: the test against enumeration and scipy, the interval against theory -----


AIME = SUITES["math"].select(["aime"])[0]
PAPER = SUITES["kk"].select(["paper_greedy"])[0]


@pytest.mark.parametrize("only_b", range(10))
def test_with_one_response_to_a_question_it_is_the_exact_mcnemar_test(only_b):
    for only_a in range(12):
        changes = [[1.0] * only_b + [-1.0] * only_a + [0.0] * 5]
        expected = 1.0 if only_a + only_b == 0 else binomtest(only_b, only_a + only_b).pvalue
        assert paired.sign_flip_p(changes) == pytest.approx(expected)


def enumerated(groups):
    """The share of all sign flips whose mean of means is as large."""
    terms = [value / len(group) for group in groups for value in group]
    seen = abs(math.fsum(terms))
    flips = itertools.product((-1, 1), repeat=len(terms))
    sums = [abs(math.fsum(s * t for s, t in zip(flip, terms, strict=True))) for flip in flips]
    return sum(total >= seen - 1e-9 for total in sums) / len(sums)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(-16, 16), min_size=1, max_size=5), min_size=1, max_size=2))
def test_it_is_exact_for_counts_in_groups_of_any_size(groups):
    changes = [[float(value) for value in group] for group in groups]
    assert paired.sign_flip_p(changes) == pytest.approx(enumerated(changes), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9))
def test_shares_are_enumerated(changes):
    changes = [round(change, 3) for change in changes]
    assert paired.sign_flip_p([changes]) == pytest.approx(enumerated([changes]), abs=1e-12)


def test_what_is_drawn_is_near_what_is_exact():
    rng = np.random.default_rng(0)
    counts = rng.integers(-8, 12, size=40).astype(float)
    exact = paired.sign_flip_p([list(counts)])
    drawn = paired.sign_flip_p([list(counts / 16 * 0.999)], seed=3)
    assert 0.001 < exact < 0.5
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact / paired.FLIPS) + 1e-5)
    assert drawn == paired.sign_flip_p([list(counts / 16 * 0.999)], seed=3)


def test_it_is_wrong_no_more_often_than_it_says():
    """Over all signs of the same differences, which are equally likely without a difference."""
    sizes = (1.0, 1.0, 2.0, 3.0, 5.0, 5.0, 8.0)
    flips = list(itertools.product((-1, 1), repeat=len(sizes)))
    found = [paired.sign_flip_p([[s * d for s, d in zip(f, sizes, strict=True)]]) for f in flips]
    for level in (0.01, 0.05, 0.1, 0.2, 0.5):
        assert sum(p <= level + 1e-12 for p in found) / len(found) <= level + 1e-12


def drawn_rows(benchmark: Benchmark, n: int, chance: float, seed: int, groups=("",)) -> list[dict]:
    """Harder and easier questions, the same for every seed."""
    hard = np.random.default_rng(1).random(n)
    rng = np.random.default_rng(seed)
    return [
        {
            "id": f"q{number:03d}", "group": groups[number % len(groups)], "sample": sample,
            "correct": bool(rng.random() < chance * hard[number]),
        }
        for number in range(n)
        for sample in range(benchmark.settings.n)
    ]  # fmt: skip


def compared(benchmark, rows, seed):
    """Each score of two models: theirs, and the difference as in `compare.json`."""
    one, other = (metrics.scores(benchmark, part, seed) for part in rows)
    groups = [metrics.grouped_outcomes(benchmark, part) for part in rows]
    return {
        name: (
            one[name],
            other[name],
            paired.difference(
                one[name], other[name], paired.p_value(benchmark, name, *groups, seed)
            ),
        )
        for name in one
        if not name.startswith("bayes@")
    }


def sides(benchmark, *chances, n=40, groups=("",)):
    return [drawn_rows(benchmark, n, c, 10 + i, groups) for i, c in enumerate(chances)]


@pytest.mark.parametrize(("benchmark", "groups"), [(AIME, ("",)), (PAPER, tuple("2345678"))])
def test_a_difference_is_that_of_the_two_scores_with_a_p(benchmark, groups):
    rows = sides(benchmark, 0.4, 0.7, n=49, groups=groups)
    for a, b, found in compared(benchmark, rows, seed=5).values():
        assert (found["a"], found["b"]) == (a.value, b.value)
        assert found["difference"] == pytest.approx(b.value - a.value)
        # The same resamples of the questions on both sides.
        assert found["ci95"] == pytest.approx(np.quantile(b.draws - a.draws, (0.025, 0.975)))
        assert 0 < found["p"] <= 1


def test_the_interval_is_that_of_a_paired_mean():
    rows = sides(AIME, 0.5, 0.6, n=400)
    a, b = (metrics.outcomes_of(part) for part in rows)
    changes = [(sum(b[question]) - sum(flags)) / len(flags) for question, flags in a.items()]
    low, high = compared(AIME, rows, seed=0)["avg@16"][2]["ci95"]
    half = 1.96 * np.std(changes) / math.sqrt(len(changes))
    assert low == pytest.approx(np.mean(changes) - half, abs=0.1 * half)
    assert high == pytest.approx(np.mean(changes) + half, abs=0.1 * half)
    # Pairing takes out what makes some questions harder: unpaired it would be twice as wide.
    apart = math.hypot(*(np.std([np.mean(f) for f in side.values()]) for side in (a, b)))
    assert half < 0.6 * 1.96 * apart / math.sqrt(len(changes))


def test_the_same_responses_differ_nowhere():
    (rows,) = sides(AIME, 0.5)
    for _, _, found in compared(AIME, [rows, rows], seed=0).values():
        assert (found["difference"], found["p"], found["ci95"]) == (0.0, 1.0, [0.0, 0.0])


def test_a_tag_in_a_report_is_shown() -> None:
    """A system prompt may ask for <think>; rich would leave it out."""
    console = Console(record=True, file=io.StringIO(), width=80)
    show(console, ["## Settings", "| system prompt |\n|---|\n| answer in <think> tags |"])
    assert "answer in <think> tags" in console.export_text()
