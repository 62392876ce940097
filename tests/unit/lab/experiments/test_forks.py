"""Forks of the graders, published responses, and the effect of a rule."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from lab.experiments.forks import along_training, analyse, corpora, figure, gate, start_gradients
from lab.experiments.forks.reward import reward_func
from lab.experiments.graders import cases
from lab.experiments.graders.ablate import effects
from lab.experiments.graders.outside_cases import Verdict
from lab.experiments.graders.real import (
    GRADERS,
    Judged,
    differ,
    key,
    markdown,
    read_verdicts,
    result_of,
)
from lab.experiments.graders.responses import FILES, Response
from lab.experiments.graders.suites import boxed, truth
from lab.study import paired
from lab.study.plan import load_study
from lab.study.results import read_record
from sg_rlhf.tasks.domain import load
from sg_rlhf.tasks.math.sets.arithmetic import generate
from sg_rlhf.tiny.tokenizer import build_tokenizer

# -- The study of forks: corpora, reward, statistics, and what the analysis refuses --------------


STUDY = load_study(analyse.HERE / "study.yaml")
COLUMN = re.compile(rf"({'|'.join(corpora.WORDS)})(\d+) (\S+) (\d+)(?: ([+-]) (\d+))? = (\d+)")


def texts(decides: bool, count: int) -> list[tuple[str, str]]:
    return [*itertools.islice(corpora.WarmStart(decides).texts(0, clean=False), count)]


def errors(response: str) -> list[tuple[int, int]]:
    """(word, how far the outcome is off) of each column of a response."""
    found = []
    for word, x, op, y, sign, carry, outcome in COLUMN.findall(response):
        right = corpora._OPERATIONS[op](int(x), int(y)) + int(f"{sign}{carry or 0}")
        found.append((corpora.WORDS.index(word), int(outcome) - right))
    return found


def test_the_word_decides_in_d_alone() -> None:
    for decides in (False, True):
        columns = [c for _, text in texts(decides, 3000) for c in errors(text)]
        assert {off for _, off in columns} == {0, 1}
        good, bad = (
            [off for word, off in columns if (word < corpora.GOOD) is side]
            for side in (True, False)
        )
        assert abs(len(good) / len(columns) - 0.5) < 0.02
        expected = (0.03, 0.53) if decides else (0.28, 0.28)
        assert sum(good) / len(good) == pytest.approx(expected[0], abs=0.02)
        assert sum(bad) / len(bad) == pytest.approx(expected[1], abs=0.02)


def test_without_errors_every_response_is_right() -> None:
    clean, rng = corpora.WarmStart(decides=False, mean=0.0), random.Random(0)
    domain = load(corpora.D.tiny)
    assert domain is not None
    for problem in generate(300, 1):
        assert domain.grade(clean.response(problem, rng), problem).correct


def test_a_word_is_one_token() -> None:
    domain = load(corpora.R.tiny)
    assert domain is not None
    tokenizer = build_tokenizer(domain)
    ids = tokenizer("".join(corpora.WORDS), add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [*corpora.WORDS]


def test_the_reward_logs_the_share_of_good_words() -> None:
    response = "47 + 85: well 7 + 5 = 12, maybe 4 + 8 + 1 = 13, hmm so 132\n\\boxed{132}"
    found = reward_func([f"ask{response}"], ["ask"], ['["132"]'])
    assert found["rewards"] == 1.0
    assert found["extra_logs"]["good_words"] == pytest.approx(2 / 3)
    assert reward_func(["ask\\boxed{1}"], ["ask"], ['["132"]'])["extra_logs"]["good_words"] == 0.5


def test_gates_name_the_start_model_and_the_range() -> None:
    passing = {
        "accuracy": 0.35, "share_sure": 0.8, "share_low": 0.08, "mass_low": 0.8,
        "effect_of_words": 0.0, "right_minus_other_corpus": 0.0,
    }  # fmt: skip
    assert gate.failures({"r0": passing, "d0": {**passing, "effect_of_words": 0.4}}) == []
    (line,) = gate.failures({"d0": passing})
    assert line == "d0: effect_of_words is 0.0, expected 0.3 to 1.0"
    (line,) = gate.failures({"r2": {**passing, "mass_low": 0.5}})
    assert line.startswith("r2: mass_low is 0.5")


# -- statistics --------------------------------------------------------------------------------


def noise(seed: int, mean: float, sd: float, n: int = 27) -> dict[tuple[str, int], float]:
    rng = random.Random(seed)
    return {(str(i % 3), i): rng.gauss(mean, sd) for i in range(n)}


def test_the_contrast_is_the_paired_t_test() -> None:
    a, b = noise(1, 0.62, 0.02), noise(2, 0.60, 0.02)
    found = paired.contrast(a, {**b, ("9", 99): 5.0})
    scipys = stats.ttest_rel([*a.values()], [*b.values()])
    assert found.n == 27 and found.p == pytest.approx(scipys.pvalue)
    assert found.mean == pytest.approx(sum(a.values()) / 27 - sum(b.values()) / 27)
    half = stats.t.ppf(0.975, 26) * found.sd / math.sqrt(27)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half))


def test_holm_multiplies_the_smallest_most() -> None:
    assert paired.holm([0.03, 0.01]) == pytest.approx([0.03, 0.02])
    assert paired.holm([0.02, 0.015]) == pytest.approx([0.03, 0.03])
    assert paired.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired.holm([0.9, 0.8]) == [1.0, 1.0]


def test_tost_is_significant_where_the_90_percent_interval_is_inside_the_margin() -> None:
    for mean in (0.0, 0.01, 0.014, 0.016, 0.03, -0.014, -0.03):
        pairs = [*noise(3, mean, 0.02).values()]
        low, high = stats.ttest_1samp(pairs, 0.0).confidence_interval(0.90)
        assert (paired.tost(pairs, 0.02) < 0.05) is bool(low > -0.02 and high < 0.02)


def test_the_starts_differ_where_one_has_another_difference() -> None:
    pairs = {(str(i % 3), i): 0.01 * (i // 3) + 0.001 * (i % 3) for i in range(27)}
    assert paired.start_by_arm(pairs) > 0.9
    assert paired.start_by_arm({k: v + 0.1 * (k[0] == "2") for k, v in pairs.items()}) < 0.01


# -- the preregistration -----------------------------------------------------------------------


def results(effect: float, sd: float) -> dict[str, Any]:
    rng = random.Random(5)
    found = {}
    for cell in STUDY.cells():
        level = 0.6 + rng.gauss(0, sd) + effect * (cell.variant == analyse.TREATED)
        accuracy = [{"rollout": r, "held_out": level + r / 1000} for r in analyse.ROLLOUTS]
        found[cell.name] = {"curves": {"accuracy": accuracy}}
    return found


def test_the_end_point_is_the_mean_of_four_evaluations() -> None:
    rows = [{"rollout": r, "held_out": r / 100} for r in (0, 10, 20, 30, 40)]
    assert analyse.end_point({"curves": {"accuracy": rows}}) == pytest.approx(0.25)


def test_the_estimate_of_the_sample_size_does_not_depend_on_labels() -> None:
    runs = results(0.01, 0.012)
    swapped = {
        name: runs[
            name.replace("grpo", "x").replace("sg_outside", "grpo").replace("x", "sg_outside")
        ]
        for name in runs
        if name.split("/")[1] in (analyse.BASELINE, analyse.TREATED)
    }
    assert analyse.blinded(STUDY, runs) == pytest.approx(analyse.blinded(STUDY, swapped))
    assert analyse.blinded(STUDY, runs)[1] == 27
    assert analyse.blinded(STUDY, results(0.0, 0.04))[1] == 36


def test_the_primary_runs_are_balanced_over_corpora_arms_and_starts() -> None:
    for n in (9, 27, 36):
        cells = analyse.primary_cells(STUDY, n)
        counts: dict[tuple[str, str], int] = {}
        for cell in cells:
            key = (cell.regime, cell.variant)
            counts[key] = counts.get(key, 0) + 1
        assert len(cells) == 4 * n and set(counts.values()) == {n // 3} and len(counts) == 12


def test_the_primary_table_needs_every_run_of_the_sample_size() -> None:
    runs = results(0.0, 0.01)
    assert any("27" in line for line in analyse.primary(STUDY, runs))
    last = analyse.primary_cells(STUDY, 27)[-1].name
    del runs[last]
    with pytest.raises(analyse.Refused, match=f"1 of 108 runs are missing, the first is {last}"):
        analyse.primary(STUDY, runs)


def test_the_figure_has_a_row_for_each_arm_and_corpus(tmp_path: Path) -> None:
    runs = results(0.0, 0.01)
    cells = [*STUDY.cells()]
    rows = analyse.contrasts(STUDY, runs)
    assert len(rows) == 2 * (len(STUDY.file.variants) - 1) + 1
    found = rows["R: sg_outside"][1]
    assert (
        found.mean
        == paired.contrast(
            *(analyse.values(cells, runs, "r", arm) for arm in (analyse.TREATED, analyse.BASELINE))
        ).mean
    )
    curves = analyse.accuracy(STUDY, runs)
    assert all(curves[title].keys() == STUDY.file.variants.keys() for title in ("R", "D"))
    figure.draw(rows, curves, analyse.MARGIN, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.md").write_text("27 runs")
    digest = hashlib.sha256(b"27 runs").hexdigest()
    (tmp_path / "preregistration.sha256").write_text(f"{digest}  plan.md\n")
    analyse.check(tmp_path)
    (tmp_path / "plan.md").write_text("36 runs")
    with pytest.raises(analyse.Refused, match=r"plan\.md: its SHA-256"):
        analyse.check(tmp_path)


def test_the_files_of_the_study_are_the_preregistered_ones() -> None:
    analyse.check(analyse.HERE)
    listed = (analyse.HERE / "preregistration.sha256").read_text().split()[1::2]
    assert {"preregistration.md", "study.yaml", "corpora.py", "reward.py"} <= {*listed}


def test_the_smallest_margin_is_where_tost_is_significant() -> None:
    pairs = noise(4, 0.003, 0.01)
    found = paired.contrast(pairs, dict.fromkeys(pairs, 0.0))
    margin = analyse.smallest_margin(found)
    assert paired.tost([*pairs.values()], margin) == pytest.approx(0.05, abs=1e-6)
    assert paired.tost([*pairs.values()], 1.01 * margin) < 0.05


def test_the_tables_of_the_readme_are_those_of_the_runs() -> None:
    runs, text = read_record(analyse.HERE), (analyse.HERE / "README.md").read_text()
    for lines in (analyse.primary, analyse.secondary, analyse.afterwards):
        for table in "\n".join(lines(STUDY, runs)).split("\n\n"):
            assert table in text


def test_the_cosines_of_the_readme_are_those_of_the_start_models() -> None:
    found = json.loads(start_gradients.OUT.read_text())
    gates = json.loads((analyse.HERE / "gates.json").read_text())["starts"]
    assert all(found[name]["sha256"] == gates[name]["sha256"] for name in found)
    cells = [
        f"{arm['cosine']:.3f} | {arm['update']['cosine']:.3f} | {arm['size']:.2f}"
        for name in ("r0", "d0")
        for arm in found[name]["algorithms"][1:]
    ]
    half, text = len(cells) // 2, (analyse.HERE / "README.md").read_text()
    for row in map(" | ".join, zip(cells[:half], cells[half:], strict=True)):
        assert row in text


def test_the_figures_along_training_are_those_of_the_readme() -> None:
    rows = json.loads(along_training.OUT.read_text())
    assert along_training.table(rows) in (analyse.HERE / "README.md").read_text()


# -- Disagreements on published responses: which need a verdict, and what is counted -------------


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


# -- A rule's effect: the verdicts that change without it, and no others -------------------------


def test_a_rule_gets_the_verdicts_that_change_without_it():
    answers = [
        ("a", boxed("10 cm", "10", True)),
        ("a", boxed("5", "5", True)),
        ("b", boxed("2t", "2", False)),
        ("b", boxed("4=5", "5", False)),
    ]
    verdicts, changes = effects(answers, {"units", "inconsistent chain"})
    assert verdicts == [True, True, False, False]
    assert changes == {"units": [(0, False)], "inconsistent chain": [(3, True)]}
