"""`--data FILE --reward REWARD`: one's own rows, with the reward of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from sg_rlhf.eval.engines import vllm
from sg_rlhf.eval.engines.base import Sample
from sg_rlhf.eval.run import main
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.arithmetic.data import Sum
from tests.http_server import Handler, serving

TINY = Path(__file__).parents[3] / "sg_rlhf" / "tiny" / "math_tiny"

REWARD = """
async def reward_func(queries, prompts, labels):
    assert queries[0].startswith(prompts[0])
    reward = float(queries[0][len(prompts[0]):] == labels[0])
    return {"rewards": 2 * reward - 1, "extra_logs": {"correct": reward}}
"""
PLAIN = "def reward_func(queries, prompts, labels):\n    return 0.25 if '7' in queries[0] else 1\n"
Run = Callable[..., tuple[int, Path, str]]


class Echo(Handler):
    """A server whose response is the last word of the prompt."""

    asked: list[str]

    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": "served"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.content())
        self.asked.append(body["prompt"])
        choice = {"text": body["prompt"].split()[-1], "finish_reason": "stop"}
        self.answer(json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode())


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "plain.py").write_text(PLAIN)
    Echo.asked = []
    with serving(Echo) as url:

        def start(data: str, *options: str, reward: str = "reward.py", out: str = "out") -> Any:
            given = ["--model", "served", "--engine", "openai", "--base-url", f"{url}/v1"]
            if not reward.startswith("domain:"):
                reward = str(tmp_path / reward)
            given += ["--data", str(tmp_path / data), "--reward", reward, *options]
            status = main([*given, "--out", str(tmp_path / out)])
            return status, tmp_path / out, capsys.readouterr().err

        yield start


def results_of(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())


ROWS = [{"q": "say 7", "a": 7}, {"q": "say 2.50", "a": 2.5}, {"q": "say yes", "a": "no"}]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_rows_of_a_file_are_graded_by_the_reward_of_a_file(
    suffix: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        parquet.write_table(pa.Table.from_pylist([{**r, "a": str(r["a"])} for r in ROWS]), path)
    elif suffix == "csv":
        path.write_text("q,a\n" + "".join(f"{r['q']},{r['a']}\n" for r in ROWS))
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    status, out, said = run(path.name, "--input-key", "q", "--label-key", "a")
    assert status == 0, said
    found = results_of(out)
    scores = found["benchmarks"]["rows"]["scores"]["accuracy"]
    assert scores["value"] == pytest.approx(1 / 3) and scores["n_questions"] == 3
    assert scores["ci95"][0] < scores["value"] < scores["ci95"][1]
    mean = found["benchmarks"]["rows"]["mean_reward"]
    assert mean["value"] == pytest.approx(-1 / 3) and mean["ci95"][0] < mean["ci95"][1]
    assert "Mean reward" in (out / "table.md").read_text()


def test_a_killed_run_is_resumed_with_the_same_reward_alone(run: Run, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"input": f"say {n}", "answer": "7"}) + "\n" for n in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    status, out, _ = run("rows.jsonl", reward="plain.py")
    assert status == 0 and len(Echo.asked) == 9
    whole = results_of(out)["benchmarks"]["rows"]
    assert whole["scores"]["accuracy"]["value"] == pytest.approx(8 / 9)
    assert whole["mean_reward"]["value"] == pytest.approx((8 + 0.25) / 9)
    samples = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").write_text("".join(samples[:4]))
    assert run("rows.jsonl", "--resume", reward="reward.py")[0] == 2
    (tmp_path / "rows.jsonl").write_text(rows.replace('"7"', '"8"'))
    assert run("rows.jsonl", "--resume", reward="plain.py")[0] == 2
    (tmp_path / "rows.jsonl").write_text(rows)
    assert run("rows.jsonl", "--resume", reward="plain.py")[0] == 0 and len(Echo.asked) == 14
    assert results_of(out)["benchmarks"]["rows"] == whole
    # Two models on the same rows are compared as those of any suite; stored responses rescored.
    assert run("rows.jsonl", reward="plain.py", out="other")[0] == 0
    assert main(["--compare", str(out), str(tmp_path / "other"), "--only", "rows"]) == 0
    again = ["--rescore", str(out), "--reward", str(tmp_path / "reward.py"), "--only", "rows"]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    again = results_of(tmp_path / "again")["benchmarks"]["rows"]
    assert again["scores"]["accuracy"]["value"] == pytest.approx(1 / 9)


def test_a_domains_reward_and_groups_of_the_rows(run: Run, tmp_path: Path) -> None:
    rows = [("say 7", "7", "small"), ("say 8", "9", "small"), (r"say \boxed{7}", "7", "large")]
    (tmp_path / "rows.jsonl").write_text(
        "".join(
            json.dumps({"input": q, "answer": json.dumps([a]), "datasource": s}) + "\n"
            for q, a, s in rows
        )
    )
    status, out, _ = run("rows.jsonl", reward="domain:math")
    assert status == 0
    scores = results_of(out)["benchmarks"]["rows"]["scores"]
    assert {name: found["value"] for name, found in scores.items()} == {
        "accuracy": pytest.approx(1 / 3), "accuracy/large": 1.0, "accuracy/small": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "options", "reward", "words"),
    [
        ('{"question": "x", "answer": 1}', [], "reward.py",
         "row 1: input: missing, expected the prompt's text; the row has ['question', 'answer']: "
         "set --input-key question --label-key answer"),
        ('{"input": "x"}', [], "reward.py", "row 1: answer: missing or empty"),
        ("{", [], "reward.py", "row 1: not JSON"),
        ('{"input": [{"role": "user", "content": "x"}], "answer": 1}', [], "reward.py",
         "--engine openai: the questions of rows are messages"),
        ('{"input": [{"role": "user"}], "answer": 1}', [], "reward.py",
         "expected messages with role and content"),
        ('{"input": "x", "answer": "y"}', [], "domain:kk", "row 1: answer: reference answer line"),
        ('{"input": "x", "answer": "y"}', [], "domain:nothing", "--reward domain:nothing: "),
        ('{"input": "x", "answer": "y"}', [], "domain:search", "a domain of several turns"),
        ('{"input": "x", "answer": "y"}', [], "gone.py", "expected domain:NAME or a Python file"),
        ('{"input": "x", "answer": "y"}', [], "broken.py", "broken.py: ZeroDivisionError"),
        ('{"input": "x", "answer": "y"}', [], "other.py", "other.py: defines no reward_func"),
        ('{"input": "x", "answer": "y"}', ["--suite", "kk"], "reward.py",
         "--data: only with --suite data"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_the_server_is_asked(
    content: str, options: list[str], reward: str, words: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "other.py").write_text("x = 1")
    status, out, said = run("rows.jsonl", *options, reward=reward)
    assert status == 2 and words in said and len(said.splitlines()) == 1
    assert not out.exists() and not Echo.asked


def test_a_reward_that_fails_stops_the_run_with_its_question(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "say 7", "answer": "7"}')
    (tmp_path / "reward.py").write_text("def reward_func(*given):\n    return 'good'\n")
    status, _, said = run("rows.jsonl")
    assert status == 1 and "it returned 'good' (str), expected a number" in said
    assert "prompt 'say 7', label '7'" in said


@pytest.mark.parametrize("missing", ["--data", "--reward"])
def test_both_are_needed(missing: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "x", "answer": "y"}')
    given = {"--data": str(tmp_path / "a.jsonl"), "--reward": "domain:math"}
    del given[missing]
    assert main(["--suite", "data", *[word for pair in given.items() for word in pair]]) == 2
    assert f"{missing}" in capsys.readouterr().err


# -- rows of messages: a model's folder has the template that writes them --------------------------


class Adds:
    """An engine that adds the numbers of the last question."""

    asked: list[str]
    in_flight = 1

    def __init__(self, *_given: Any) -> None:
        pass

    async def generate(self, sample: Sample) -> Sample:
        prompt = sample.question.prompt
        Adds.asked.append(prompt)
        return replace(sample, response=str(sum_of(prompt)), finish_reason="stop", tokens=2)

    def close(self) -> None:
        pass


def sum_of(prompt: str) -> int:
    numbers = prompt.rpartition("What is ")[2].partition("?")[0].split(" + ")
    return sum(map(int, numbers))


@pytest.fixture
def adds(monkeypatch: pytest.MonkeyPatch) -> None:
    Adds.asked = []
    monkeypatch.setattr(vllm, "VllmEngine", Adds)
    monkeypatch.setattr(vllm, "set_environment", lambda *given: None)


CHAT = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "What is 2 + 3?"},
]


def test_rows_of_messages_are_written_with_the_models_template(adds: None, tmp_path: Path) -> None:
    rows = [{"input": CHAT, "answer": "5"}, {"input": "What is 4 + 4?", "answer": "8"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD.replace("assert", "assert prompts[0] and"))
    (tmp_path / "train.jsonl").write_text(json.dumps({"input": CHAT[-1:], "answer": "5"}))
    given = ["--model", str(TINY), "--data", str(tmp_path / "rows.jsonl")]
    given += ["--reward", str(tmp_path / "reward.py"), "--out", str(tmp_path / "out")]
    given += ["--train-data", str(tmp_path / "train.jsonl")]
    assert main(given) == 0
    assert Adds.asked == [
        "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n",
        "What is 4 + 4?",
    ]
    found = results_of(tmp_path / "out")["benchmarks"]["rows"]
    assert found["scores"]["accuracy"]["value"] == 1.0
    # What is asked last was trained on.
    assert found["train_overlap"]["ids"] == ["row 1"]


def test_messages_are_written_once(
    adds: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": CHAT, "answer": "5"}))
    given = ["--model", str(TINY), "--data", str(tmp_path / "rows.jsonl"), "--chat-template"]
    assert main([*given, "--reward", "domain:arithmetic", "--out", str(tmp_path / "out")]) == 2
    assert "--chat-template: the questions of rows are messages" in capsys.readouterr().err


def test_the_suite_of_sums_asks_held_out_sums(adds: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["--suite", "arithmetic", "--model", str(TINY), "--out", str(out)]) == 0
    found = results_of(out)["benchmarks"]
    assert {name: part["scores"]["avg@4"]["value"] for name, part in found.items()} == {
        "sums": 1.0, "larger_sums": 1.0,
    }  # fmt: skip
    assert len(Adds.asked) == 4 * (64 + 200) and len({*Adds.asked}) == 264
    asked = {
        (a, b)
        for benchmark in SUITES["arithmetic"].benchmarks
        for question in benchmark.load(None)[0]
        for a, b in [question.problem.removeprefix("What is ").rstrip("?").split(" + ")]
    }
    assert all(Sum(int(a), int(b)).held_out for a, b in asked)
