"""Sums for a small instruct model: rows, held-out sums, grading, one bad key."""

from __future__ import annotations

import re

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.tasks.arithmetic.data import Sum
from sg_rlhf.tasks.arithmetic.domain import grade
from tests.unit.data_command import lines, refusal

QUESTION = re.compile(r"What is (\d+) \+ (\d+)\?$")


def made(tmp_path, *keys):
    from sg_rlhf.data import command as data

    out = tmp_path / "-".join(["out", *keys]).replace("=", "")
    options = ["--generate", *keys] if keys else []
    assert data.main(["arithmetic", "--out", str(out), *options]) == 0
    return lines(out / "train.jsonl"), lines(out / "test.jsonl")


def sums_of(row):
    """The sums of a row's questions, the last one at the end."""
    asked = (m["content"] for m in row["input"] if m["role"] == "user")
    return [Sum(*map(int, QUESTION.search(text).groups())) for text in asked]


@pytest.mark.parametrize("keys", [(), ("shown=0",), ("form=equation", "second=99", "shown=3")])
def test_rows_are_right_and_no_held_out_sum_is_trained_on_or_shown(tmp_path, keys):
    train, test = made(tmp_path, *keys)
    assert (len(train), len(test)) == (160, 64)
    for row in train + test:
        *shown, asked = sums_of(row)
        assert row["answer"] == str(asked.a + asked.b)
        answers = [m["content"] for m in row["input"] if m["role"] == "assistant"]
        assert all(grade(t, s.answer).correct for t, s in zip(answers, shown, strict=True))
        assert asked not in shown and not any(s.held_out for s in shown)
        assert row["datasource"] == ("sums_carry" if asked.carries else "sums_no_carry")
    assert not any(sums_of(row)[-1].held_out for row in train)
    assert all(sums_of(row)[-1].held_out for row in test)
    assert len({str(sums_of(row)[-1]) for row in test}) == 64
    assert made(tmp_path / "again", *keys) == (train, test)


def test_a_sum_and_its_reverse_are_on_one_side():
    assert all(Sum(a, b).held_out == Sum(b, a).held_out for a in range(99) for b in range(99))
    assert Sum(17, 5).carries and Sum(95, 9).carries and not Sum(12, 7).carries


@pytest.mark.parametrize(
    ("response", "correct", "reason"),
    [
        ("12<|im_end|>", True, "correct"),
        ("7 + 5 = 12.<|im_end|>", True, "correct"),
        ("12. Then 7 more is 19", False, "wrong"),
        ("7 + 5 = 12.5", False, "wrong"),
        ("-12", False, "wrong"),
        ("112", False, "wrong"),
        ("twelve", False, "no_number"),
        ("", False, "no_number"),
    ],
)
def test_the_last_number_counts(response, correct, reason):
    found = grade(response, "12")
    assert (found.correct, found.reason) == (correct, reason)
    assert found.reward == float(correct) and found.format_ok == (reason != "no_number")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("shown=9", "shown=9: expected 0 to 8"),
        ("first=8", "first=8: expected 9 to 9999"),
        ("form=words", "form=words: expected one of number, equation"),
        ("count=-1", "count=-1: expected 0 or more"),
        ("test_count=500", "test_count=500: only "),
    ],
)
def test_a_bad_key_is_one_line(tmp_path, capsys, key, said):
    out = tmp_path / "out"
    assert said in refusal("arithmetic", capsys, "--out", out, "--generate", key)
    assert not out.exists()


def test_the_recipe_trains_on_the_domain_through_the_template():
    config = load_config("configs/arithmetic/grpo_smollm2-135m_cpu.yaml")
    assert config.value("reward.remote_url") == "domain:arithmetic"
    assert config.value("data.apply_chat_template") and config.sg.share_prompts
