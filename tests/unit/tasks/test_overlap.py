"""Overlap of training rows and benchmarks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.contamination import FAMILIES, ContaminationRecord, Finding, family_of
from sg_rlhf.tasks.math.data import MathRow
from sg_rlhf.tasks.overlap import LEVELS, OverlapReport, find_overlap, ngrams, normalise, words

# -- Overlap with evaluation sets: what counts as the same text, and shared runs of words --------


ALPHABET = [f"{a}{b}" for a in "abcdefgh" for b in "klmnopqr"]


def row(problem: str, row_id: str = "r-1") -> MathRow:
    return MathRow(row_id, problem, ("1",), "r")


def counts(report: OverlapReport) -> list[int]:
    return [report.count(level) for level in LEVELS]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x$ .", "find  x"),
        ("Find \\(x\\):", "Find $x$."),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("Ann's “set”", "ann’s “set”"),
        ("a\\,b \\! c", "abc"),
        ("x \u2212 1", "x-1"),
        ("\uff11 apple", "1 apple"),
    ],
)
def test_typography_does_not_matter(one, other):
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1+2", "1-2"),
        ("1.5", "15"),
        ("(1, 2)", "(12)"),
        ("x^2", "x2"),
        ("a_{12}", "a_1 2"),
        ("", "x"),
    ],
)
def test_meaning_does(one, other):
    assert normalise(one) != normalise(other)


def test_words_drop_signs_and_delimiters():
    assert words("Let $\\cos(x_1) = 0.5$, \\left[2, 3\\right] OK?") == (
        ["let", "cos", "x", "1", "0.5", "2", "3", "ok"]
    )


@given(st.lists(st.sampled_from(ALPHABET), max_size=30), st.integers(1, 15))
def test_ngrams_against_a_slow_restatement(text, n):
    found = ngrams(" ".join(text), n)
    assert found == {tuple(text[i : i + n]) for i in range(len(text)) if len(text[i : i + n]) == n}


def test_every_kind_of_overlap_is_counted_once_per_problem():
    long = " ".join(ALPHABET[:40])  # 28 runs of 13
    half = " ".join([*ALPHABET[:30], *ALPHABET[50:60]])  # shares 18 of them
    some = " ".join([*ALPHABET[25:40], *ALPHABET[40:60]])  # shares 3 of them
    eval_sets = {
        "one": [row(long, "one-0"), row("Too short.", "one-1"), row("Unrelated", "one-2")],
        "two": [row(" ".join(ALPHABET[20:50]), "two-0")],
    }
    train = [row("too short", "t-0"), row(some, "t-1"), row(half, "t-2"), row(half, "t-3")]
    one, two = find_overlap(train, eval_sets)
    assert (one.problems, one.too_short, counts(one)) == (3, 2, [1, 1, 0])
    assert [(m.test.id, m.train.id, m.exact) for m in one.matches] == [
        ("one-1", "t-0", True),
        ("one-0", "t-2", False),
    ]
    assert one.matches[1].share == pytest.approx(18 / 28)
    keys = {level: len(found) for level, found in one.train_keys.items()}
    assert keys == {"exact": 1, "mostly": 2, "any": 3}
    # t-1 shares words 25 to 49 of 20 to 49: 13 runs of 18.
    assert counts(two) == [0, 1, 0]
    assert two.matches[0].share == pytest.approx(13 / 18)
    facts = one.facts()
    assert facts["train_problems"] == keys
    assert facts["examples"][0]["train"] == "too short"

    # The nearest training problem counts, whichever comes first.
    (backwards, _) = find_overlap(train[::-1], eval_sets)
    assert [m.share for m in backwards.matches] == [m.share for m in one.matches]

    equal = find_overlap([*train, row("Again: " + long), row(f"${long}$.")], eval_sets)[0]
    assert counts(equal)[:2] == [2, 0]


def test_the_length_of_a_run_is_a_choice():
    train, test = row("alpha beta gamma one"), row("two alpha beta gamma")
    assert find_overlap([train], {"e": [test]}, n=3)[0].count("mostly") == 1
    assert find_overlap([train], {"e": [test]}, n=4)[0].matches == []
    with pytest.raises(ValueError, match="at least 1, got 0"):
        find_overlap([train], {"e": [test]}, n=0)


def test_no_overlap_and_no_sets():
    assert find_overlap([row("x")], {}) == []
    (found,) = find_overlap([row("x")], {"e": [row("y")]})
    assert found.matches == []


# -- What is said of a benchmark for each family of models ---------------------------------------


SET = ContaminationRecord(
    "2025-02",
    (
        Finding("Qwen2.5", True, "half of it, A 50 %", "1111.22222"),
        Finding("Llama 3.1", False, "none of it", "1111.22222"),
    ),
    "a note",
)


@pytest.mark.parametrize(
    ("names", "family"),
    [
        (["Qwen/Qwen2.5-7B-Instruct-1M"], "Qwen2.5"),
        (["/models/qwen2.5-math-7b"], "Qwen2.5"),
        (["Qwen/Qwen3-4B-Instruct-2507"], "Qwen3"),
        (["meta-llama/Llama-3.1-8B-Instruct"], "Llama 3.1"),
        (["runs/x/checkpoints/final", "Qwen/Qwen3-8B-Base"], "Qwen3"),
        (["Qwen/Qwen3.5-4B"], None),
        (["Qwen/Qwen2-7B"], None),
        (["mistralai/Mistral-7B-Instruct-v0.3"], None),
        (["module:sg_rlhf.tiny.kk_tiny"], None),
    ],
)
def test_a_family_is_known_by_a_name(names, family):
    found = family_of(names)
    assert (found and found.name) == family


@pytest.mark.parametrize(
    ("name", "verdict", "told"),
    [
        ("Qwen/Qwen2.5-7B", "reported", ["signs of it in Qwen2.5: half of it, A 50 %"]),
        # Newer than the model says more than a study that found nothing.
        ("Llama-3.1-8B", "newer", ["no sign of it in Llama 3.1", "after Llama 3.1's report"]),
        ("Qwen3-8B", "not studied", ["public since 2025-02"]),
        ("gpt2", "model unknown", ["in Qwen2.5", "in Llama 3.1"]),
    ],
)
def test_a_verdict_names_what_it_rests_on(name, verdict, told):
    about = SET.assess(family_of([name]))
    assert about["verdict"] == verdict
    text = "; ".join(about["evidence"])
    assert all(words in text for words in told) and text.endswith("a note")
    if verdict not in ("model unknown", "reported"):
        assert "A 50 %" not in text


def test_studies_of_models_in_general_count_for_each():
    finding = Finding("", True, "higher than on newer sets", "1111.22222")
    found = ContaminationRecord("2020-01", (finding,))
    assert found.assess(FAMILIES[0])["verdict"] == "reported"
    assert ContaminationRecord("2020-01").assess(FAMILIES[0])["verdict"] == "not studied"
    none = ContaminationRecord("2020-01", (Finding("Qwen2.5", False, "none", "1111.22222"),))
    assert none.assess(FAMILIES[0])["verdict"] == "not found"


def test_every_published_set_says_something_for_the_papers_models():
    # Sums are generated, and nobody published them: nothing is said of who has seen them.
    published = [suite for name, suite in SUITES.items() if name != "arithmetic"]
    benchmarks = {b.name: b for suite in published for b in suite.benchmarks}
    verdicts = {
        name: [b.exposure.assess(family)["verdict"] for family in FAMILIES]
        for name, b in benchmarks.items()
    }
    # In the order of FAMILIES: Qwen2.5, Qwen3, Llama 3.1.
    assert verdicts["math500"] == ["reported", "reported", "not found"]
    assert verdicts["aime25"] == ["newer", "not found", "newer"]
    assert verdicts["olympiadbench"] == ["not studied"] * 3
    for benchmark in benchmarks.values():
        assert re.fullmatch(r"20\d\d-[01]\d", benchmark.exposure.published)
        for study in benchmark.exposure.studies:
            assert re.fullmatch(r"\d{4}\.\d{5}", study.arxiv)
            assert study.family in ("", *(family.name for family in FAMILIES))
