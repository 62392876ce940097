"""What a model was trained on, found beside its checkpoint or given, against what is asked."""

import json
from dataclasses import replace

import pytest

from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.run_config import run_of
from sg_rlhf.eval import contamination
from sg_rlhf.eval.contamination import find_training_overlap
from sg_rlhf.eval.run import main
from sg_rlhf.eval.scores import results, tables
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.kk.data import to_records
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.kk.puzzle import generate
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.overlap import LEVELS
from sg_rlhf.tasks.questions import EvalError, Question
from sg_rlhf.tasks.suite import Suite
from tests.unit.tasks.math.fixtures import write_jsonl

LONG = "A very long problem of exactly twenty words in all that asks for the sum of some numbers "
PROBLEMS = ["Find $x$ in the drawing.", LONG + "(a)", "Another one."]
MATH, KK, QA = (SUITES[name] for name in ("math", "kk", "qa"))


def loaded(suite, name, questions):
    (benchmark,) = suite.select([name])
    return [replace(benchmark, questions=questions)]


def mathematics():
    questions = [
        Question(f"aime-{i}", prompt_of(text), ["1"], bare=text) for i, text in enumerate(PROBLEMS)
    ]
    return loaded(MATH, "aime", questions)


@pytest.fixture
def trained(tmp_path):
    """A run's checkpoint, and the file that it was trained on."""
    (tmp_path / "data").mkdir()
    data = write_jsonl(
        tmp_path / "data" / "train.jsonl",
        [
            {"problem": "find  $x$ in the drawing", "answer": "1"},
            {"problem": LONG + "(b)", "answer": "2"},
            {"problem": "Unlike the others.", "answer": "3"},
        ],
    )
    checkpoint = tmp_path / "runs" / "one" / "checkpoints" / "final"
    checkpoint.mkdir(parents=True)
    config = checkpoint.parents[1] / "config.yaml"
    config.write_text(
        "actor: {model_name_or_path: Qwen/Qwen2.5-3B}\ndata: {prompt_dataset: data/train.jsonl}\n"
    )
    return run_of(str(checkpoint)), config, data


def test_a_checkpoint_of_a_run_names_its_data(trained):
    run, config, data = trained
    assert (run.config, run.base, run.data) == (config, "Qwen/Qwen2.5-3B", ["data/train.jsonl"])
    seen = find_training_overlap(MATH, mathematics(), "m", run, None)
    assert seen.family.name == "Qwen2.5"
    # The path is relative to where the run was started, a folder above it.
    assert seen.data["files"] == [
        {"name": str(data), "sha256": sha256_of(data), "rows": 3},
    ]
    (overlap,) = seen.overlap.values()
    assert [overlap.count(level) for level in LEVELS] == [1, 1, 0]
    (benchmark,) = MATH.select(["aime"])
    found = contamination.exposure_of(seen, benchmark, MATH)
    assert found["train_overlap"]["ids"] == ["aime-0", "aime-1"]


def test_what_is_given_counts_instead(trained, tmp_path):
    run, _, _ = trained
    other = write_jsonl(tmp_path / "other.jsonl", [{"problem": "Another one", "answer": "1"}])
    seen = find_training_overlap(MATH, mathematics(), "m", run, [other])
    assert seen.data["source"] == "--train-data"
    (match,) = seen.overlap["aime"].matches
    assert match.test.id == "aime-2"


def test_data_that_is_gone_is_said_and_stops_nothing(trained):
    run, config, data = trained
    data.unlink()
    seen = find_training_overlap(MATH, mathematics(), "m", run, None)
    assert "data/train.jsonl: no such file" in seen.data["problem"]
    assert str(config) in seen.data["problem"] and not seen.overlap
    config.write_text("[")
    damaged = run_of(str(config.parent / "checkpoints" / "final"))
    assert find_training_overlap(MATH, mathematics(), "m", damaged, None).data is None
    assert run_of("Qwen/Qwen3-8B") is None


def test_a_file_that_cannot_be_read_is_one_line(trained, tmp_path):
    run, _, _ = trained
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"problem": 3}\n')
    with pytest.raises(EvalError, match=r"--train-data .*bad.jsonl: row 1: problem: 3"):
        find_training_overlap(MATH, mathematics(), "m", run, [bad])


def test_a_file_that_is_not_there_is_a_mistake(capsys):
    arguments = ["--suite", "math", "--model", "m", "--out", "o", "--train-data", "gone.jsonl"]
    assert main(arguments) == 2
    assert capsys.readouterr().err == "error: --train-data gone.jsonl: no such file\n"


def test_puzzles_are_the_same_whatever_their_prompt(tmp_path):
    puzzles = generate(2, 6, seed=1)
    train = write_jsonl(tmp_path / "kk.jsonl", list(to_records(puzzles[:2] + puzzles[4:])))
    questions = [
        Question(f"kk-{i}", build_prompt(p.quiz), p.solution_text_format, "2", p.quiz)
        for i, p in enumerate(puzzles[:4])
    ]
    seen = find_training_overlap(KK, loaded(KK, "official", questions), "m", None, [train])
    (overlap,) = seen.overlap.values()
    # Every puzzle begins with the same words: runs of words say nothing.
    assert [overlap.count(level) for level in LEVELS] == [2, 0, 0]
    described = contamination.exposure_of(seen, KK.select(["official"])[0], KK)
    assert described["train_overlap"] == {"problems": 4, "exact": 2, "ids": ["kk-0", "kk-1"]}


def test_questions_and_prompts_of_other_suites_are_compared(tmp_path):
    rows = [{"question": "Who wrote Dune", "golden_answers": ["Frank Herbert"], "id": "1"}]
    train = write_jsonl(tmp_path / "nq.jsonl", rows)
    asked = [Question("q", "Answer it. Who wrote Dune?", ["x"], bare="Who wrote Dune?")]
    overlap = find_training_overlap(QA, loaded(QA, "nq", asked), "m", None, [train]).overlap["nq"]
    assert overlap.count("exact") == 1
    plain = Suite("plain", "Plain", QA.benchmarks)
    train = write_jsonl(tmp_path / "plain.jsonl", [{"input": "reverse abc", "answer": "cba"}])
    asked = [Question("1", "Reverse abc", "cba"), Question("2", "reverse abcd", "dcba")]
    overlap = find_training_overlap(plain, loaded(plain, "nq", asked), "m", None, [train]).overlap[
        "nq"
    ]
    assert (overlap.problems, overlap.count("exact")) == (2, 1)
    train = write_jsonl(tmp_path / "odd.jsonl", [{"input": ["x"]}])
    with pytest.raises(EvalError, match="row 1: input: "):
        find_training_overlap(plain, loaded(plain, "nq", asked), "m", None, [train])


def test_the_report_says_it_at_each_score(trained):
    run, config, data = trained
    asked = mathematics()
    benchmark = replace(asked[0], size=3)
    rows = [
        {
            "benchmark": "aime", "id": question.id, "group": "", "sample": sample,
            "correct": question.id != "aime-2", "extracted": "1", "finish_reason": "stop",
            "tokens": 5,
        }
        for question in asked[0].questions
        for sample in range(16)
    ]  # fmt: skip
    request = {
        "suite": "math", "model": {"name": "m", "revision": None, "fingerprint": "f" * 64},
        "engine": "vllm", "dtype": "float32", "context": 99, "seed": 0,
        "benchmarks": {"aime": {
            "settings": benchmark.settings.as_dict(), "n_questions": 3, "full_size": 3,
            "context_cuts": {"questions": 0},
        }},
    }  # fmt: skip
    begun = {"date": "2026-01-02", "versions": {}, "commit": None}
    seen = find_training_overlap(MATH, asked, "m", run, None)
    found, _ = results.build(MATH, [benchmark], request, rows, begun, {}, seen)
    found = json.loads(json.dumps(found))
    described = found["benchmarks"]["aime"]
    assert described["contamination"]["verdict"] == "reported"
    assert described["train_overlap"]["scores_without"]["avg@16"]["value"] == 0.0
    assert described["scores"]["avg@16"]["value"] == pytest.approx(2 / 3)
    text = "\n".join(tables.markdown(found, [], MATH))
    assert "| 2 trained on |" in text
    assert "aime: reported for Qwen2.5: signs of it in Qwen2.5: Qwen2.5-7B 13.33 %, " in text
    assert "arXiv 2507.10532" in text and "Llama" not in text
    assert f"Training data, by {config}: {data} (3 rows)." in text
    line = "aime: 1 of 3 questions are in it, 1 more share half or more of their runs of 13 words"
    assert line in text and "avg@16 without them 0.000" in text
    unknown, _ = results.build(MATH, [benchmark], request, rows, begun)
    text = "\n".join(tables.markdown(unknown, [], MATH))
    assert "| model unknown |" in text and "Training data: not known" in text
    assert "Llama3.1-8B 0 %" in text
