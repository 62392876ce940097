"""The report: the paper's rows as printed, ours beside them, nothing filled in."""

import pytest
from rich.console import Console

from sg_rlhf.eval.scores import results, tables
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.kk.paper import KK
from sg_rlhf.tasks.math.paper import MATH
from sg_rlhf.tasks.suite import Benchmark

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
    return results.build(suite, benchmarks, request, rows, ENVIRONMENT)


def our_rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if "this run" in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_a_whole_mathematics_run_has_the_papers_average():
    found = report("math", [])
    # odd sizes: half of 675 is 338 right
    expected = [338 / 675, 0.5, 0.5, 42 / 83 * 15 / 16, 15 / 30, 15 / 30 * 15 / 16]
    cells = [f"**{100 * value:.2f}**" for value in [*expected, sum(expected) / 6]]
    text = tables.markdown(found, SUITES["math"])
    assert our_rows(text) == [["`m\\|x`", "this run", *cells]]
    assert found["average"]["value"] == pytest.approx(sum(expected) / 6)
    assert "Limited" not in text


def test_what_was_not_run_stays_empty_and_there_is_no_average():
    found = report("math", ["aime"])
    text = tables.markdown(found, SUITES["math"])
    assert our_rows(text)[0][2:] == ["–", "–", "–", "–", "**50.00**", "**46.88**", "–"]
    assert found["average"] is None


def test_a_limited_run_says_so():
    text = tables.markdown(report("math", ["aime"], 5), SUITES["math"])
    assert "**Limited run, not comparable with the paper:** questions of aime 5 of 30." in text


def test_every_row_of_the_paper_is_there_and_marked():
    text = tables.markdown(report("math", ["aime"]), SUITES["math"])
    paper = [line for line in text.splitlines() if "*paper*, Table 1 |" in line]
    assert len(paper) == len(MATH) == 5
    numbers = "38.48 | 32.35 | 79.40 | 46.84 | 43.33 | 18.13 | 43.09"
    assert f"| DSR + GRPO-SG | *paper*, Table 1 | {numbers} |" in paper
    text = tables.markdown(report("kk", ["official"], 70), SUITES["kk"])
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
    found = results.scores(benchmark, rows, seed=0)
    assert found["accuracy"].value == pytest.approx(1 / 5)
    assert found["accuracy/2"].value == found["accuracy/8"].value == 1.0
    assert list(found) == ["accuracy", *(f"accuracy/{n}" for n in range(2, 9))]


def test_the_terminal_table_says_where_the_files_are(tmp_path):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    tables.show(report("math", ["aime"], 5), SUITES["math"], tmp_path, console)
    text = console.export_text()
    for name in ("results.json", "samples.jsonl", "table.md"):
        assert str(tmp_path / name) in text
    assert "aime avg@16" in text and "aime pass@16" in text
