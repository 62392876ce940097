"""Rows of questions, and the encyclopedia."""

from __future__ import annotations

import http.server
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sg_rlhf.data import command
from sg_rlhf.tasks.search.data import DataError, Question, read_questions
from sg_rlhf.tasks.search.grading import normalise, parse_golds, score
from sg_rlhf.tasks.search.prompt import build_prompt
from sg_rlhf.tasks.search.protocol import Kind, parse_action
from sg_rlhf.tasks.search.sets import encyclopedia, traces
from tests.full_disk import small_disk
from tests.http_server import serving
from tests.unit.data_command import lines, refusal

# -- Question files: the shapes that are read, one line for a bad row, splits without overlap ----


refused = partial(refusal, "search")
SEARCH_R1 = {
    "id": "train_0",
    "question": "total number of death row inmates in the us?",
    "golden_answers": ["2,718"],
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer the given question. ..."}],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": ["2,718"]}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}
FLASHRAG = {
    "id": "dev_1",
    "question": "Who wrote Dune?",
    "golden_answers": ["Frank Herbert", "Herbert"],
}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object) -> int:
    return command.main(["search", *map(str, arguments)])


def test_both_shapes_from_both_kinds_of_file(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([SEARCH_R1]), tmp_path / "train.parquet")
    without = {k: v for k, v in SEARCH_R1.items() if k != "golden_answers"}
    expected = Question("train_0", SEARCH_R1["question"], ("2,718",), "nq")
    assert read_questions(tmp_path / "train.parquet") == [expected]
    assert read_questions(jsonl(tmp_path / "a.jsonl", SEARCH_R1)) == [expected]
    assert read_questions(jsonl(tmp_path / "b.jsonl", without)) == [expected]
    assert read_questions(jsonl(tmp_path / "bamboogle.jsonl", FLASHRAG)) == [
        Question("dev_1", "Who wrote Dune?", ("Frank Herbert", "Herbert"), "bamboogle")
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"golden_answers": ["x"]}, "question: None, expected the question's text"),
        ({"question": " ", "golden_answers": ["x"]}, "question: ' '"),
        ({"question": "q?"}, "golden_answers: None, expected one or more answers"),
        ({"question": "q?", "golden_answers": []}, "golden_answers: []"),
        ({"question": "q?", "golden_answers": ["x", " "]}, "golden_answers: ['x', ' ']"),
        ({"question": "q?", "golden_answers": [1]}, "golden_answers: [1]"),
        ({"question": "q?", "reward_model": {"ground_truth": {}}}, "target: None"),
        ({"question": "q?", "answer": "Beijing"}, "answer: None"),
        ({"question": "q?", "golden_answers": ["x"], "data_source": "a b"}, "data_source: 'a b'"),
        (["not", "an", "object"], "expected a JSON object"),
    ],
)
def test_a_bad_row_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Any, message: str
) -> None:
    path = jsonl(tmp_path / "train.jsonl", FLASHRAG, row)
    error = refused(capsys, "--source", path, "--out", tmp_path / "out")
    assert f"{path}: row 2: " in error and message in error
    assert not (tmp_path / "out").exists()


def test_files_that_are_no_question_files(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": \n')
    with pytest.raises(DataError, match="row 1: not JSON"):
        read_questions(tmp_path / "bad.jsonl")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable parquet file"):
        read_questions(tmp_path / "bad.parquet")
    pq.write_table(pa.Table.from_pylist([{"query": "q?"}]), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="column 'question' is missing"):
        read_questions(tmp_path / "other.parquet")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="no rows"):
        read_questions(tmp_path / "empty.jsonl")


def test_duplicates_conflicts_and_the_held_out_split(tmp_path: Path) -> None:
    questions = [
        {"id": str(i), "question": f"Question number {i}?", "golden_answers": [str(i)]}
        for i in range(50)
    ]
    again = {"question": "question  NUMBER 7", "golden_answers": ["7"]}
    other = {"question": "Question number 8!", "golden_answers": ["eight"]}
    source = jsonl(tmp_path / "nq.jsonl", *questions, again, other)
    out = tmp_path / "out"
    assert run("--source", source, "--out", out, "--test-fraction", 0.2) == 0
    train, test = lines(out / "train.jsonl"), lines(out / "test.jsonl")
    assert (len(train), len(test)) == (40, 10)
    assert not {r["question"] for r in train} & {r["question"] for r in test}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["duplicates_dropped"] == 2
    assert manifest["duplicates_with_other_golds"] == 1
    assert manifest["counts"] == {"train": {"nq": 40}, "test": {"nq": 10}}
    for row in train:
        assert row["input"] == build_prompt(row["question"])
        assert score(parse_golds(row["answer"])[0], parse_golds(row["answer"])).correct
    # What the command wrote, it reads.
    assert len(read_questions(out / "train.jsonl")) == 40


def test_a_train_question_that_is_in_the_given_test_set_is_dropped(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", SEARCH_R1, FLASHRAG)
    test = jsonl(tmp_path / "dev.jsonl", {**FLASHRAG, "question": "who wrote dune"})
    out = tmp_path / "out"
    assert run("--source", train, "--test-file", test, "--out", out) == 0
    assert [r["id"] for r in lines(out / "train.jsonl")] == ["train_0"]
    assert [r["id"] for r in lines(out / "test.jsonl")] == ["dev_1"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["train_questions_found_in_test_dropped"] == 1


def test_the_same_request_is_done_at_once_and_files_of_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl(tmp_path / "nq.jsonl", SEARCH_R1, FLASHRAG)
    out = tmp_path / "out"
    assert run("--source", source, "--out", out) == 0
    before = (out / "train.jsonl").stat().st_mtime_ns
    capsys.readouterr()
    assert run("--source", source, "--out", out) == 0
    assert "up to date" in capsys.readouterr().out
    assert (out / "train.jsonl").stat().st_mtime_ns == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    assert run("--source", source, "--out", other) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "nq_hotpotqa"], "needs --revision COMMIT"),
        (["--source", "nq_hotpotqa", "--revision", "main"], "expected the 40 hex digits"),
        (["--source", "no/such.parquet"], "no/such.parquet: no such file"),
        (["--source", "a.jsonl", "--generate", "seed=1"], "belongs to --source encyclopedia"),
        (["--source", "a.jsonl", "--revision", "x"], "belongs to --source hub:OWNER"),
        (["--source", "encyclopedia", "--seed", "1"], "--seed does not go with"),
        (["--source", "encyclopedia", "a.jsonl"], "cannot be mixed"),
        (["--source", "encyclopedia", "--generate", "people=x"], "expected a whole number"),
        (["--source", "encyclopedia", "--generate", "people=9999"], "people=9999: expected 4 to"),
        (["--source", "encyclopedia", "--generate", "size=3"], "expected KEY=VALUE"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_encyclopedia_is_written_with_its_corpus(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert (
            run("--source", "encyclopedia", "--generate", "seed=3", "--out", tmp_path / name) == 0
        )
    files = ("train.jsonl", "test.jsonl", "corpus.jsonl", "manifest.json")
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    made = encyclopedia.build(3)
    assert lines(tmp_path / "a" / "corpus.jsonl") == made.corpus
    assert {r["question"] for r in lines(tmp_path / "a" / "test.jsonl")} == {
        problem.question.text for problem in made.test
    }


def test_a_download_that_the_caches_disk_cannot_hold_is_not_begun(tmp_path: Path) -> None:
    """A hub of ours says that its file has 2 MiB, and the disk of the cache has 1."""
    asked = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append((self.command, self.path))
            self.send_response(200)
            for key, value in {"X-Repo-Commit": "a" * 40, "ETag": f'"{"e" * 40}"'}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(2 * 2**20))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(bytes(2 * 2**20))

        def log_message(self, *_: Any) -> None:
            pass

    with serving(Hub) as endpoint, small_disk(tmp_path / "disk", 1) as disk:
        known = {"HF_ENDPOINT": endpoint, "HF_HOME": str(disk / "hub"), "HF_HUB_OFFLINE": "0"}
        source = ["search", "--source", "nq_hotpotqa", "--revision", "a" * 40]
        result = subprocess.run(
            [sys.executable, "-m", "sg_rlhf", "data", *source, "--out", str(tmp_path / "out")],
            env={**os.environ, **known}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert list(disk.iterdir()) == []
    assert result.returncode == 2
    assert result.stderr == (
        f"sg-rlhf data: HF_HUB_CACHE {disk / 'hub/hub'}: the download of train.parquet takes "
        "2.1 MB of disk, 1.05 MB are free (--skip-room-check skips this check)\n"
    )
    assert {method for method, path in asked if "/resolve/" in path} == {"HEAD"}
    assert not (tmp_path / "out").exists()


# -- The generated encyclopedia: answerable, deterministic, its held-out part apart; its traces --


seeds = st.integers(0, 10**6)


def entries(problems: list[encyclopedia.Problem]) -> set[str]:
    return {step.query for problem in problems for step in problem.steps}


@settings(max_examples=20)
@given(seeds, st.integers(4, 60), st.integers(4, 30))
def test_held_out_questions_share_no_entry_with_those_to_train_on(
    seed: int, people: int, towns: int
) -> None:
    made = encyclopedia.build(seed, people=people, towns=towns)
    assert made == encyclopedia.build(seed, people=people, towns=towns)
    assert not entries(made.train) & entries(made.test)
    texts = [p.question.text for p in (*made.train, *made.test)]
    assert len(set(texts)) == len(texts) == 4 * people + 2 * towns
    assert len(made.corpus) == people + towns


def test_every_question_is_answered_by_its_passages_and_by_no_other() -> None:
    made = encyclopedia.build(0)
    by_title = {}
    for record in made.corpus:
        title, _, text = record["contents"].partition("\n")
        assert title not in by_title
        by_title[title] = text
    for problem in (*made.train, *made.test):
        for step in problem.steps:
            assert by_title[step.title] == step.text
            assert step.query in step.text
        *earlier, last = problem.steps
        assert problem.answer in last.text and problem.answer in problem.guesses
        # Two hops are needed: the first passage names the second, and holds no answer.
        assert all(problem.answer not in step.text for step in earlier)
        assert all(
            a.text.endswith(f"{b.query}.") for a, b in zip(earlier, problem.steps[1:], strict=True)
        )
        assert problem.steps[0].query in problem.question.text
    hops = [len(p.steps) for p in made.train]
    assert set(hops) == {1, 2}


def test_another_seed_is_another_encyclopedia() -> None:
    assert encyclopedia.build(0).corpus != encyclopedia.build(1).corpus


@pytest.mark.parametrize("argument", [{"people": 3}, {"towns": 97}, {"test_share": 1.0}])
def test_arguments_out_of_range_are_named(argument: dict[str, float]) -> None:
    name, value = next(iter(argument.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        encyclopedia.build(0, **argument)  # type: ignore[arg-type]


def test_words_of_the_closed_lists_are_distinct_and_survive_normalisation() -> None:
    lists = (
        encyclopedia.FIRST_NAMES, encyclopedia.LAST_NAMES, encyclopedia.TOWN_STARTS,
        encyclopedia.TOWN_ENDS, encyclopedia.LANDS, encyclopedia.RIVERS, encyclopedia.CRAFTS,
    )  # fmt: skip
    words = [word for words in lists for word in words]
    assert len(set(words)) == len(words)
    assert len({normalise(word) for word in words}) == len(words)


@given(seeds)
@settings(max_examples=20)
def test_traces_are_dialogues_of_the_protocol(seed: int) -> None:
    made = encyclopedia.build(seed % 5, people=20, towns=8)
    rng = random.Random(seed)
    for problem in made.train:
        right = traces.demonstrate(problem)
        ours = [parse_action(piece.text) for piece in right.pieces if piece.of_model]
        assert [a.kind for a in ours] == [Kind.SEARCH] * len(problem.steps) + [Kind.ANSWER]
        assert [a.content for a in ours] == [s.query for s in problem.steps] + [problem.answer]
        assert [p.of_model for p in right.pieces[1::2]] == [False] * len(problem.steps)
        guess = traces.demonstrate(problem, 0, rng.choice(problem.guesses))
        assert [p.of_model for p in guess.pieces] == [True]
        assert parse_action(guess.response).content in problem.guesses
        hasty = traces.demonstrate(problem, 1, rng.choice(problem.guesses))
        assert sum(not p.of_model for p in hasty.pieces) == 1
    drawn = [traces.draw(made.train, rng, guesses=0.5, hasty=0.25) for _ in range(400)]
    guessed = sum(len(d.pieces) == 1 for d in drawn) / 400
    assert 0.4 < guessed < 0.6
    assert all(d.prompt.startswith("Question: ") and d.prompt.endswith("?\n") for d in drawn)
