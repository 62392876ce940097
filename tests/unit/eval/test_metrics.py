"""Metrics of results, and comparisons of two."""

from __future__ import annotations

import itertools
import json
import math
import os
import tracemalloc
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.eval.answer import describe, samples_of
from sg_rlhf.eval.run import main
from sg_rlhf.eval.sampling import SamplingOptions
from sg_rlhf.eval.scores import metrics, results
from sg_rlhf.eval.store import Store
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.questions import Question

# -- Scores: pass@k against enumeration, intervals against theory, rates against counts ----------


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, data):
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    flags = [True] * correct + [False] * (n - correct)
    subsets = list(itertools.combinations(flags, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert metrics.pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_exact_for_every_k_of_up_to_64_samples():
    """Beside the product of the chances that one after the other is wrong, without binomials."""
    for n in (1, 2, 16, 32, 63, 64):
        for correct in range(n + 1):
            all_wrong = Fraction(1)
            for k in range(1, n + 1):
                left = n - k + 1  # samples that were not drawn yet
                all_wrong *= Fraction(max(0, left - correct), left)
                assert metrics.pass_at_k(n, correct, k) == pytest.approx(
                    float(1 - all_wrong), abs=1e-15
                )


def test_an_interval_is_that_of_all_resamples_of_the_questions():
    """Three problems can be resampled in 27 ways; whole problems, never single responses."""
    outcomes = {"a": [True] * 4 + [False] * 12, "b": [False] * 16, "c": [True] * 16}
    values = [metrics.pass_at_k(16, sum(flags), 8) for flags in outcomes.values()]
    found = metrics.estimate(values, seed=1)
    resamples = [sum(drawn) / 3 for drawn in itertools.product(values, repeat=3)]
    shares = {round(v, 9): resamples.count(v) / 27 for v in resamples}
    seen = {key: np.isclose(found.draws, key).mean() for key in shares}
    assert sum(seen.values()) == pytest.approx(1.0)  # nothing between: no response was drawn alone
    for key, share in shares.items():
        assert seen[key] == pytest.approx(share, abs=0.02)
    assert found.value == pytest.approx(sum(values) / 3)


def test_bayes_at_n_is_the_mean_and_interval_of_the_posterior():
    outcomes = {"a": [True] * 3 + [False], "b": [False] * 4, "c": [True] * 4}
    found = metrics.bayes(outcomes, seed=1)
    # Laplace's rule of succession, question by question.
    assert found.value == pytest.approx((4 / 6 + 1 / 6 + 5 / 6) / 3)
    variance = sum(a * (6 - a) / (6**2 * 7) for a in (4, 1, 5)) / 3**2
    assert found.draws.mean() == pytest.approx(found.value, abs=0.005)
    assert found.draws.std() == pytest.approx(math.sqrt(variance), rel=0.03)
    low, high = found.interval
    assert low == pytest.approx(found.value - 1.96 * math.sqrt(variance), abs=0.02)
    assert high == pytest.approx(found.value + 1.96 * math.sqrt(variance), abs=0.02)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_bayes_at_n_ranks_as_the_average_does(counts):
    outcomes = {str(q): [True] * c + [False] * (5 - c) for q, c in enumerate(counts)}
    average = sum(counts) / 5 / len(counts)
    assert metrics.bayes(outcomes, 0).value == pytest.approx((1 + 5 * average) / 7)


def test_bayes_at_n_has_a_width_where_every_response_is_right():
    found = metrics.bayes({str(q): [True] * 16 for q in range(30)}, seed=0)
    assert found.value == pytest.approx(17 / 18)
    low, high = found.interval
    assert low < found.value < high < 1.0


def test_the_memory_of_a_bootstrap_is_bounded_and_blocks_draw_what_one_draw_does(monkeypatch):
    values = np.random.default_rng(0).random(14_267)  # as many questions as PopQA has
    monkeypatch.setattr(metrics, "RESAMPLES", 1000)
    tracemalloc.start()
    found = metrics.estimate(values, seed=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6
    monkeypatch.setattr(metrics, "BLOCK", 2**30)
    assert np.allclose(found.draws, metrics.estimate(values, seed=1).draws, rtol=1e-12)


@pytest.mark.parametrize("correct", range(17))
def test_with_k_equal_n_it_is_any_correct_and_with_k_1_the_share(correct):
    assert metrics.pass_at_k(16, correct, 16) == float(correct > 0)
    assert metrics.pass_at_k(16, correct, 1) == pytest.approx(correct / 16)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(n, correct, k):
    with pytest.raises(ValueError):
        metrics.pass_at_k(n, correct, k)


def test_the_interval_is_that_of_the_normal_approximation_for_many_questions():
    values = [1.0] * 300 + [0.0] * 700
    found = metrics.estimate(values, seed=0)
    low, high = found.interval
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert found.value == pytest.approx(0.3)
    assert low == pytest.approx(0.3 - half, abs=0.003)
    assert high == pytest.approx(0.3 + half, abs=0.003)


def test_equal_seeds_keep_the_correlation_of_two_scores_of_the_same_questions():
    values = np.random.default_rng(0).random(40)
    one, two = metrics.estimate(values, seed=5), metrics.estimate(1 - values, seed=5)
    assert np.allclose(one.draws + two.draws, 1.0)
    other = metrics.estimate(1 - values, seed=6)
    assert not np.allclose(one.draws + other.draws, 1.0)


def test_the_mean_of_scores_has_the_interval_of_a_mean():
    parts = [metrics.estimate([0.0, 1.0] * 200, seed=seed) for seed in range(4)]
    found = metrics.mean_of(parts)
    single = parts[0].interval[1] - parts[0].interval[0]
    assert found.value == pytest.approx(0.5)
    # four independent sets: half the width
    assert found.interval[1] - found.interval[0] == pytest.approx(single / 2, rel=0.1)


def row(question, sample, correct, finish="stop", extracted="x", tokens=10):
    return {
        "id": question,
        "sample": sample,
        "correct": correct,
        "finish_reason": finish,
        "extracted": extracted,
        "tokens": tokens,
    }


def test_outcomes_do_not_depend_on_the_order_in_which_samples_were_stored():
    rows = [row("b", 1, True), row("a", 0, False), row("b", 0, False), row("a", 1, True)]
    assert metrics.outcomes_of(rows) == {"a": [False, True], "b": [False, True]}
    assert list(metrics.outcomes_of(rows[::-1])) == ["a", "b"]


def test_rates_count_a_prompt_without_room_as_truncated_and_unreadable():
    rows = [
        row("a", 0, True),
        row("b", 0, False, finish="length", extracted=None, tokens=100),
        row("c", 0, False, finish="prompt_too_long", extracted=None, tokens=0),
        row("d", 0, False, extracted=None),
    ]
    assert metrics.response_statistics(rows) == {
        "n_samples": 4,
        "truncation_rate": 0.5,
        "prompt_too_long_rate": 0.25,
        "extraction_failure_rate": 0.75,
        "mean_tokens": 30.0,
    }


# -- `--compare A B`: what it prints and writes, and which two folders it refuses ----------------


MATH, KK, QA = (SUITES[name] for name in ("math", "kk", "qa"))


def finished(out, suite, only, right, *, n=None, model="m", samples=None, **changes):
    """A folder as an evaluation leaves it.

    Args:
        only: benchmark -> how many questions.
        right: (benchmark, question, sample) -> whether the response is right.
        samples: keep so many alone, as a killed run does.
    """
    loaded = []
    for name, count in only.items():
        (benchmark,) = SamplingOptions(samples=n).apply(suite.select([name]))
        groups = benchmark.headline_groups or ("",)
        questions = [
            Question(f"{name}-{i}", f"P{i}", ["1"], groups[i % len(groups)]) for i in range(count)
        ]
        loaded.append(replace(benchmark, questions=questions))
    asked = samples_of(loaded, lambda prompts: [[1] for _ in prompts], 9000, 0)
    request = {
        "suite": suite.name,
        "model": {"name": model, "revision": None, "fingerprint": model * 64},
        "engine": "vllm", "dtype": "float32", "context": 9000, "seed": 0, "limit": None,
        "benchmarks": {each.name: describe(each, asked) for each in loaded},
    } | changes  # fmt: skip
    rows = [
        {
            "benchmark": sample.key[0], "id": sample.key[1], "group": sample.question.group,
            "sample": sample.index, "prompt": "p", "response": "r", "gold": ["1"],
            "extracted": "1", "correct": bool(right(*sample.key)), "reason": "correct",
            "finish_reason": "stop", "tokens": 3,
        }
        for sample in asked
    ]  # fmt: skip
    begun = {"date": "2026-01-02", "commit": "c", "versions": {}}
    with Store(out) as store:
        store.write_request(request, begun)
        store.append(rows[:samples])
        if samples is None:
            found, _ = results.build(suite, loaded, request, rows, begun)
            (out / "results.json").write_text(json.dumps(found))
    return out


def number(question):
    return int(question.rpartition("-")[2])


def compared(a, b, *arguments, status=0):
    assert main(["--compare", str(a), str(b), *map(str, arguments)]) == status


def test_single_responses_are_compared_question_by_question(tmp_path, capsys):
    a = finished(tmp_path / "a", KK, {"paper_greedy": 25}, lambda b, q, s: number(q) < 6)
    b = finished(
        tmp_path / "b", KK, {"paper_greedy": 25}, lambda b, q, s: 4 <= number(q) < 20, model="n"
    )
    compared(a, b, "--out", tmp_path / "out")
    text = capsys.readouterr().out
    assert "18 of 25 questions differ, 4 better in A, 14 better in B" in text
    names = "paper_greedy-0, paper_greedy-1, paper_greedy-2, paper_greedy-3"
    assert f"right in A alone: {names}" in text
    assert "and 4 more (compare.json has all)" in text
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    scores = found["benchmarks"]["paper_greedy"]["scores"]
    assert list(scores) == ["accuracy", *(f"accuracy/{size}" for size in range(3, 8))]
    whole = scores["accuracy"]
    assert (whole["a"], whole["b"], whole["n_questions"]) == (6 / 25, 16 / 25, 25)
    assert whole["difference"] == pytest.approx(10 / 25)
    assert whole["p"] == pytest.approx(0.030884, abs=1e-6)  # binomial, 4 and 14
    assert whole["ci95"][0] < 10 / 25 < whole["ci95"][1]
    assert [q["id"] for q in found["benchmarks"]["paper_greedy"]["a_better"]] == names.split(", ")
    assert len(found["benchmarks"]["paper_greedy"]["b_better"]) == 14
    assert found["benchmarks"]["paper_greedy"]["alike"] == 7
    assert (found["a"]["model"]["name"], found["b"]["model"]["name"]) == ("m", "n")
    page = (tmp_path / "out" / "compare.md").read_text()
    assert "| paper_greedy accuracy | 0.240 | 0.640 | +0.400 |" in page and "0.031" in page
    assert sorted(os.listdir(tmp_path / "out")) == ["compare.json", "compare.md"]
    compared(a, b, "--out", tmp_path / "out")  # again, over what is there


def test_samples_are_counted_by_question(tmp_path, capsys):
    a = finished(tmp_path / "a", MATH, {"aime25": 6}, lambda b, q, s: s < number(q), n=8)
    b = finished(tmp_path / "b", MATH, {"aime25": 6}, lambda b, q, s: s < 2 + number(q) % 5, n=8)
    compared(a, b, "--k", "1,4", "--out", tmp_path / "out")
    text = capsys.readouterr().out
    assert "better in A: aime25-5 5/8 to 2/8" in text
    assert "better in B: aime25-0 0/8 to 2/8, aime25-1 1/8 to 3/8" in text
    assert "Both folders are of the same model" in text
    scores = json.loads((tmp_path / "out" / "compare.json").read_text())["benchmarks"]["aime25"]
    assert list(scores["scores"]) == ["avg@8", "pass@1", "pass@4"]
    assert scores["scores"]["avg@8"]["p"] == scores["scores"]["pass@1"]["p"]
    # Five differences of 2 and one of -3: 14 of the 64 flips are as far from 0 as the sum of 7.
    assert scores["scores"]["avg@8"]["p"] == pytest.approx(14 / 64)


def test_without_k_it_is_the_pass_rates_that_both_have(tmp_path, capsys):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        finished(folder, MATH, {"aime25": 3}, lambda b, q, s: s == 0)
    compared(*folders[:2])
    assert "aime25 pass@16" in capsys.readouterr().out
    described = json.loads((folders[2] / "run.json").read_text())
    described["request"]["benchmarks"]["aime25"]["pass_at"] = []
    (folders[2] / "run.json").write_text(json.dumps(described))
    compared(folders[0], folders[2])
    text = capsys.readouterr().out
    assert "aime25 avg@16" in text and "pass@" not in text


def test_the_papers_average_is_compared_where_both_have_it(tmp_path, capsys):
    sets = {"olympiadbench": 5, "minerva": 4, "math500": 6, "amc": 4, "aime": 3}
    a = finished(tmp_path / "a", MATH, sets, lambda b, q, s: number(q) == 0)
    b = finished(tmp_path / "b", MATH, {**sets, "aime25": 2}, lambda b, q, s: number(q) < 2)
    compared(a, b)
    text = capsys.readouterr().out
    assert "average of Table 1" in text
    assert "Only in B, and left out: aime25." in text
    compared(a, b, "--only", "amc")
    text = capsys.readouterr().out
    assert "average of" not in text and "amc avg@16" in text and "aime" not in text


def test_answers_to_search_questions_are_compared(tmp_path, capsys):
    search = {"enabled": True, "topk": 3, "probe_sha256": "x"}
    a = finished(tmp_path / "a", QA, {"nq": 9}, lambda b, q, s: False, search=search)
    b = finished(tmp_path / "b", QA, {"nq": 9}, lambda b, q, s: number(q) < 3, search=search)
    compared(a, b)
    assert "nq exact match" in capsys.readouterr().out
    other = {**search, "topk": 5}
    c = finished(tmp_path / "c", QA, {"nq": 9}, lambda b, q, s: False, search=other)
    refused(capsys, a, c, "different questions or settings: search.topk: 3 in A, 5 in B")


def refused(capsys, a, b, message, *arguments):
    compared(a, b, *arguments, status=2)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_what_cannot_be_compared_is_refused_and_nothing_is_written(tmp_path, capsys):
    def folder(name, suite=MATH, only=None, **rest):
        found = finished(
            tmp_path / name, suite, only or {"aime25": 4}, lambda b, q, s: True, **rest
        )
        return found

    a = folder("a")
    out = ("--out", tmp_path / "out")
    refused(capsys, a, tmp_path / "gone", "gone: no run.json there", *out)
    more = folder("more", n=64)
    refused(capsys, a, more, "aime25.settings.n: 16 in A, 64 in B", *out)
    fewer = folder("fewer", only={"aime25": 3})
    refused(capsys, a, fewer, "aime25.questions_sha256", *out)
    refused(capsys, a, fewer, "aime25.n_questions: 4 in A, 3 in B", *out)
    other = folder("other", only={"aime26": 4})
    refused(capsys, a, other, "no benchmark in common: A has aime25, B has aime26", *out)
    puzzles = folder("puzzles", KK, {"official": 5})
    refused(capsys, a, puzzles, "suite math in A, kk in B", *out)
    torn = folder("torn", samples=50)
    refused(capsys, a, torn, "50 of 64 samples of aime25 are there; finish that run", *out)
    unknown = [folder(name, suite=replace(MATH, name="ours")) for name in ("u", "v")]
    refused(capsys, *unknown, "suite ours is not known here", *out)
    refused(capsys, a, a, "--k 32: aime25 has 16 samples", "--k", "32", *out)
    refused(capsys, a, a, "--only amc: not in both folders", "--only", "amc", *out)
    refused(capsys, a, a, "--model: says nothing about two", "--model", "m", *out)
    refused(capsys, a, a, "--grader: says nothing about two", "--grader", "qwen", *out)
    refused(capsys, a, a, "run.json: is a file, expected a folder", "--out", a / "run.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{", "run.json: not JSON"),
        ("run.json", "[]", "damaged: list indices"),
        ("run.json", '{"request": {}, "begun": {}}', "damaged: 'benchmarks'"),
        ("samples.jsonl", "{}\n", "samples.jsonl: line 1: no sample"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, capsys, name, content, message):
    a = finished(tmp_path / "a", MATH, {"aime25": 2}, lambda b, q, s: True)
    b = finished(tmp_path / "b", MATH, {"aime25": 2}, lambda b, q, s: True)
    (b / name).write_text(content)
    refused(capsys, a, b, message)
    refused(capsys, b, a, message)


def test_a_torn_line_counts_as_missing_and_stays(tmp_path, capsys):
    a = finished(tmp_path / "a", MATH, {"aime25": 2}, lambda b, q, s: True)
    b = finished(tmp_path / "b", MATH, {"aime25": 2}, lambda b, q, s: True)
    data = (b / "samples.jsonl").read_bytes()[:-9]
    (b / "samples.jsonl").write_bytes(data)
    refused(capsys, a, b, "31 of 32 samples of aime25")
    assert (b / "samples.jsonl").read_bytes() == data
