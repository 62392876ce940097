"""`python -m lab.measure.accuracy`: counts, pairs, files, refusals."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from lab.measure import accuracy
from sg_rlhf.common.statistics import Z95
from sg_rlhf.tasks.kk.data import generate_splits, to_records
from sg_rlhf.tiny.build import shipped

MODEL = "module:sg_rlhf.tiny.kk_tiny"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "test.jsonl"
    _, test = generate_splits((2, 3), per_size=1, test_per_size=6, seed=0)
    path.write_text("".join(json.dumps(record) + "\n" for record in to_records(test)))
    return path


def test_a_checkpoint_beside_itself(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "accuracy.json"
    arguments = ["--samples", "8", "--threads", "1", "--json", str(out)]
    assert accuracy.main(["--model", MODEL, "--data", f"held_out={data}", *arguments]) == 0
    found = json.loads(out.read_text())["models"][0]["sets"]["held_out"]
    # It guesses: some responses are right and some are not, to most puzzles.
    assert 0.05 < found["all"]["accuracy"] < 0.95 and 0 < max(found["correct"]) <= 8
    assert found["all"]["accuracy"] == sum(found["correct"]) / (8 * 12)
    by_size = [found[size] for size in ("kk_2ppl", "kk_3ppl")]
    assert [size["prompts"] for size in by_size] == [6, 6]
    mean = statistics.fmean(size["accuracy"] for size in by_size)
    assert mean == pytest.approx(found["all"]["accuracy"])
    assert "kk_2ppl" in capsys.readouterr().out
    # The same draws again.
    assert accuracy.main(["--model", MODEL, "--data", f"held_out={data}", *arguments]) == 0
    assert json.loads(out.read_text())["models"][0]["sets"]["held_out"] == found


def test_messages_are_written_with_the_models_template(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    model = shipped("kk")
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "Who is a knave?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        f"    assert prompts == [{text!r}]\n"
        "    right = len(queries[0]) % 2\n"
        "    return {'rewards': right, 'extra_logs': {'correct': right}}\n"
    )
    found = []
    for name, prompt in (("text", text), ("chat", messages)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"input": prompt, "answer": "x"}) + "\n")
        arguments = ["--max-new-tokens", "8", "--reward", str(tmp_path / "reward.py")]
        arguments += ["--json", str(tmp_path / "out.json"), "--data", str(file)]
        assert accuracy.main(["--model", MODEL, *arguments]) == 0
        found.append(json.loads((tmp_path / "out.json").read_text())["models"][0]["sets"][name])
    assert found[0] == found[1] and 0 < found[0]["correct"][0] < 8
    file.write_text('{"input": [{"role": "user"}], "answer": "x"}\n')
    said = refused(accuracy.main, "--model", MODEL, "--data", file)
    assert "row 1: input=[{'role': 'user'}]: expected role and content" in said
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    file.write_text(json.dumps({"input": messages, "answer": "x"}) + "\n")
    said = refused(accuracy.main, "--model", bare, "--data", file)
    assert "row 1: input is messages, and the model has no chat template" in said


def test_one_checkpoint_is_in_memory_at_a_time(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[weakref.ref[Any]] = []
    load = accuracy.load_model

    def watched(*arguments: Any) -> Any:
        assert [model for model in loaded if model() is not None] == []
        model = load(*arguments)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(accuracy, "load_model", watched)
    arguments = ["--data", f"a={data}", "--prompts", "1", "--samples", "1", "--threads", "1"]
    assert accuracy.main(["--model", MODEL, MODEL, *arguments]) == 0
    assert len(loaded) == 2
    assert " nan" not in capsys.readouterr().out  # one response has no interval over draws


def test_figures_are_paired_by_prompt() -> None:
    counts, first = [4, 2, 0, 4], [2, 0, 0, 2]
    found = accuracy.figures(counts, first, ["a", "a", "b", "b"], samples=4)
    assert found["all"]["accuracy"] == 0.625 and found["all"]["difference"] == 0.375
    spread = statistics.stdev([0.5, 0.5, 0.0, 0.5])
    half = Z95 * spread / math.sqrt(4)
    assert found["all"]["difference_ci95"] == pytest.approx(half)
    assert (found["a"]["accuracy"], found["a"]["difference_ci95"]) == (0.75, 0.0)
    draws = [accuracy.draws_half_width(c, 4) for c in (counts, first)]
    assert found["all"]["draws_ci95"] == draws[0] > 0
    assert found["all"]["difference_draws_ci95"] == pytest.approx(math.hypot(*draws))
    assert found["b"]["prompts"] == 2 and found["correct"] == counts


def test_the_noise_of_the_draws_is_the_binomials() -> None:
    """Prompts with p = .1, .5, .9, 1, many times over: how far the mean lands from the truth."""
    generator = np.random.default_rng(0)
    chances, samples = np.array([0.1, 0.5, 0.9, 1.0]), 8
    drawn = generator.binomial(samples, chances, size=(4000, 4))
    halves = [accuracy.draws_half_width(row.tolist(), samples) for row in drawn]
    misses = np.abs(drawn.mean(1) / samples - chances.mean())
    expected = Z95 * math.sqrt((chances * (1 - chances)).sum() / samples) / 4
    assert np.sqrt(np.square(halves).mean()) == pytest.approx(expected, rel=0.02)
    assert Z95 * math.sqrt(np.square(misses).mean()) == pytest.approx(expected, rel=0.05)
    assert accuracy.draws_half_width([8, 0, 8], 8) == 0.0
    assert math.isnan(accuracy.draws_half_width([1, 0], 1))


def test_two_checkpoints_and_two_sets_are_one_table(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", f"a={data}", f"b={data}", "--prompts", "2", "--samples", "2"]
    assert accuracy.main(["--model", MODEL, MODEL, *arguments, "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("2 prompts of") == 2
    lines = [line.split() for line in out.splitlines() if line.startswith(MODEL)]
    first, *_, last = (line[2:] for line in lines if line[1] == "all")
    assert len(first) == 3 and last[:3] == first and last[3:5] == ["0.000", "0.000"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
        (["--model", MODEL, "--reward", "nowhere.py"], "--reward nowhere.py: no such Python file"),
        (["--model", MODEL, "--samples", "0"], "--samples: 0: expected a whole number"),
        (["--model", MODEL, "--data", "a/x.jsonl", "b/x.jsonl"], "--data: two files of one name"),
        (["--model", MODEL, "--json", "."], "--json .: is a folder"),
        (["--model", MODEL, "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", MODEL, "--max-new-tokens", "9999"], "exceed the model's context"),
    ],
)
def test_bad_input_gets_one_line(
    data: Path, arguments: list[str], words: str, refused: Callable[..., str]
) -> None:
    assert words in refused(accuracy.main, "--data", data, *arguments)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("{'rewards': 1.0}", "reports no `correct` in extra_logs"),
        ("[1.0]", "reports no `correct` in extra_logs"),
        ("'good'", "it returned 'good' (str), expected a number"),
    ],
)
def test_a_reward_without_correct_is_refused(
    data: Path, tmp_path: Path, returned: str, words: str, refused: Callable[..., str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(f"def reward_func(queries, prompts, labels):\n    return {returned}\n")
    arguments = ["--data", data, "--prompts", "1", "--samples", "1", "--reward", reward]
    assert words in refused(accuracy.main, "--model", MODEL, *arguments)
