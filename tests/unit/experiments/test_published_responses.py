"""Disagreements on published responses: which need a verdict, and what is counted."""

import pytest

from experiments.graders import cases
from experiments.graders.outside_cases import Verdict
from experiments.graders.real import (
    GRADERS,
    Judged,
    differ,
    key,
    markdown,
    read_verdicts,
    result_of,
)
from experiments.graders.responses import FILES, Response
from experiments.graders.suites import truth


def verdicts(*accept):
    return {name: name in accept for name in GRADERS}


def test_which_differences_need_a_verdict():
    assert not differ(verdicts(*GRADERS))
    # Comparisons of texts reject what has the same value.
    assert not differ(verdicts("ours", "math_verify", "deepscaler", "qwen"))
    assert differ(verdicts("verl"))
    assert differ(verdicts("ours", "math_verify", "deepscaler"))


def test_counts_follow_the_verdicts():
    golds = ("5",)
    found = [
        Response("m", "aime", f"{n}/0", text, golds)
        for n, text in enumerate((r"\boxed{6}", r"\boxed{5.0}", "It is 5.", r"\boxed{7}"))
    ]
    given = [verdicts("qwen"), verdicts("ours"), verdicts("math_verify"), verdicts()]
    judged = {
        key(golds, "6"): Judged(False, "another number"),
        key(golds, "5.0"): Judged(True, "a decimal"),
    }
    result = result_of(found, given, judged)
    assert (
        result["errors"]["ours"]["accepts_wrong"] == result["errors"]["ours"]["rejects_right"] == 0
    )
    assert result["errors"]["qwen"] == {
        "accepts_wrong": 1, "accepts_without_box": 0, "rejects_right": 1, "no_verdict": 0,
    }  # fmt: skip
    assert result["errors"]["math_verify"]["accepts_without_box"] == 1
    assert [one["verdict"] for one in result["disagreements"]] == ["wrong", "right"]
    assert result["right"] == [key(golds, "5.0")]
    table = markdown({**result, "command": "c", "date": "d"})
    assert "| qwen | 1 | 0 | 1 |" in table
    assert result_of(found, given, {})["disagreements"][0]["verdict"] == "unjudged"


def test_the_committed_verdicts_are_read_and_the_files_are_pinned():
    assert len(read_verdicts()) > 200
    assert len({f.origin.sha256 for f in FILES}) == len(FILES)
    assert sum(f.rows for f in FILES) == 6973


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [(None, True), (Verdict("out of scope", ""), None), (Verdict("theirs arguable", ""), False)],
)
def test_what_a_case_of_others_comes_to(verdict, expected):
    case = cases.Case("qwen", "here", "5", "5.0", True)
    given = {} if verdict is None else {("qwen", case.key): verdict}
    assert truth(case, given) is expected
