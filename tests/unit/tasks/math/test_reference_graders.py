"""Other rules beside ours: in confined processes, ended in time, and only from the pinned files.

The rules' own files are not part of the project; `math_verify` and files written here stand for
them where the machinery is what is tested.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.math import reference_graders
from sg_rlhf.tasks.math.reference_graders import GRADERS, ReferenceGraders, find_sources
from sg_rlhf.tasks.math.suite import SUITE, grader_names
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Setup

IS_EQUIV = """
import os, time
def is_equiv(answer, gold):
    if answer == "never":
        while True:
            pass
    if answer == "all memory":
        return bytearray(1 << 40)
    if answer == "file":
        open("written", "w")
    if answer == "program":
        os.system("touch written")
        return True
    if answer == "fault":
        raise RuntimeError
    return answer == gold
"""


@pytest.fixture(scope="module")
def graders(tmp_path_factory):
    path = tmp_path_factory.mktemp("rule") / "rule.py"
    path.write_text(IS_EQUIV)
    found = ReferenceGraders({"hendrycks": [path], "math_verify": []}, workers=1, limit_s=1.0)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("response", "golds", "rule", "library"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", False, True),
        (r"\boxed{0.5}", ["3", "$0.5$"], True, True),
        (r"\boxed{4}", "5", False, False),
        ("no box", "5", False, False),
        (r"\boxed{never}", "5", None, False),
        (r"\boxed{all memory}", "5", None, False),
        (r"\boxed{fault}", "5", False, False),
        (r"\boxed{file}", "5", False, False),
    ],
)
def test_verdicts(graders, response, golds, rule, library):
    assert graders.grade([(response, golds)]) == [{"hendrycks": rule, "math_verify": library}]


def test_a_rule_cannot_write_or_start_programs(graders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graders.grade([(r"\boxed{file}", "5"), (r"\boxed{program}", "5")])
    assert not list(tmp_path.rglob("written"))


def test_only_the_pinned_file_is_loaded(tmp_path):
    origin = GRADERS["verl"].files[0]
    with pytest.raises(ValueError, match=r"math_reward\.py: no such file"):
        find_sources(["verl"], tmp_path)
    path = tmp_path / origin.repository / origin.path
    path.parent.mkdir(parents=True)
    path.write_text("def compute_score(a, b): return 1.0")
    with pytest.raises(ValueError, match="SHA-256"):
        find_sources(["verl"], tmp_path)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(reference_graders.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--grader deepscaler needs the package pylatexenc"):
        find_sources(["deepscaler"], tmp_path)


def test_names():
    assert grader_names("ours, verl,hendrycks,verl") == ("verl", "hendrycks")
    with pytest.raises(EvalError, match="--grader minerva: expected one or more of ours, math_"):
        grader_names("minerva")


def test_sources_without_a_grader_are_refused(tmp_path):
    options = {"grader": "ours", "grader_sources": tmp_path}
    with ExitStack() as resources, pytest.raises(EvalError, match="only with --grader"):
        SUITE.prepare(Setup((), options, resources, regrade=True))
    options = {"grader": "verl", "grader_sources": tmp_path / "gone"}
    with ExitStack() as resources, pytest.raises(EvalError, match="no such folder"):
        SUITE.prepare(Setup((), options, resources, regrade=True))


def test_statistics_count_each_side():
    verdicts = [(True, True), (True, False), (False, True), (False, None)]
    rows = [{"correct": ours, "graders": {"verl": theirs}} for ours, theirs in verdicts]
    found = SUITE.report({"aime": rows}, {})
    assert found.figures["aime"] == {
        "graders": {"verl": {"accuracy": 0.5, "only_ours": 1, "only_theirs": 1, "no_verdict": 1}}
    }
    (table,) = found.tables
    assert table.rows[0][:3] == ["aime", "ours", "0.500"]
    assert table.rows[1] == ["aime", "verl", "0.500", "1", "1", "1"]
    plain = SUITE.report({"aime": [{"correct": True}]}, {})
    assert plain.figures["aime"] == {} and not plain.tables
    assert Grade(1.0, True, "correct").others == {}
