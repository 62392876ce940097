"""What is said of a benchmark for each family of models."""

import re

import pytest

from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.contamination import FAMILIES, ContaminationRecord, Finding, family_of

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
    benchmarks = {b.name: b for suite in SUITES.values() for b in suite.benchmarks}
    qwen, qwen3, llama = FAMILIES
    verdicts = {
        name: [b.exposure.assess(family)["verdict"] for family in (qwen, qwen3, llama)]
        for name, b in benchmarks.items()
    }
    assert verdicts["math500"] == verdicts["amc"] == ["reported", "reported", "not found"]
    assert verdicts["aime"] == ["reported"] * 3
    assert verdicts["aime25"] == ["newer", "not found", "newer"]
    assert verdicts["aime26"] == verdicts["hmmt26"] == ["newer"] * 3
    assert verdicts["hmmt25"] == ["newer", "not studied", "newer"]
    assert verdicts["minerva"] == ["not found"] * 3
    assert verdicts["olympiadbench"] == ["not studied"] * 3
    for benchmark in benchmarks.values():
        assert re.fullmatch(r"20\d\d-[01]\d", benchmark.exposure.published)
        for study in benchmark.exposure.studies:
            assert re.fullmatch(r"\d{4}\.\d{5}", study.arxiv)
            assert study.family in ("", *(family.name for family in FAMILIES))
