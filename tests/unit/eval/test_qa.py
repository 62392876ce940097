"""Search questions: files and sizes, prompts, the command's mistakes, scores and tables."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sg_rlhf.common import text as common_text
from sg_rlhf.eval.run import main
from sg_rlhf.eval.scores import results, tables
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.search import suite as search
from sg_rlhf.tasks.search.grading import score
from sg_rlhf.tasks.search.paper import QA
from sg_rlhf.tasks.search.prompt import build_prompt
from sg_rlhf.tasks.search.retriever import retriever_process
from sg_rlhf.tasks.search.sets import published
from sg_rlhf.tasks.suite import load_questions

SUITE = SUITES["qa"]
NAMES = [qa_set.name for qa_set in published.SETS]
BAMBOOGLE = published.SETS[-1]
TINY = Path(__file__).parents[3] / "sg_rlhf" / "tiny" / "search_tiny"
ENVIRONMENT = {"date": "2026-01-02T03:04:05Z", "versions": {"torch": "1"}, "commit": "a" * 40}


def write(path: Path, count: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": f"q{i}", "question": f"Who is number {i}", "golden_answers": [str(i), f"No. {i}"]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_sets_are_the_papers():
    assert sum(qa_set.size for qa_set in published.SETS) == 51713
    assert [b.size for b in SUITE.select(["general"])] == [3610, 11313, 14267]
    assert [b.size for b in SUITE.select(["multihop"])] == [7405, 12576, 2417, 125]
    assert len(SUITE.average) == 7
    assert sum(SUITE.groups.values(), ()) == SUITE.average


@pytest.mark.parametrize(
    "name",
    ["bamboogle/test.jsonl", "bamboogle.jsonl", "bamboogle_9.jsonl", "bamboogle_test9.jsonl",
     "bamboogle_test.jsonl"],
)  # fmt: skip
def test_a_file_is_found_under_flashrags_name_or_a_flat_one(name, tmp_path):
    path = write(tmp_path / name, 9)
    write(tmp_path / "bamboogle_dev9.jsonl", 9)  # another split
    write(tmp_path / "bamboogle_old_9.jsonl", 9)
    assert published.find_file(BAMBOOGLE, tmp_path) == path
    found, (source,) = published.questions(BAMBOOGLE, tmp_path)
    assert (source.name, source.rows) == (name, 9)
    assert [q.id for q in found] == [f"q{i}" for i in range(9)]
    assert found[3].gold == ["3", "No. 3"]


def test_two_flat_files_are_refused_and_the_published_one_wins(tmp_path):
    write(tmp_path / "bamboogle_5.jsonl", 5)
    write(tmp_path / "bamboogle_6.jsonl", 6)
    with pytest.raises(EvalError, match=r"bamboogle_5.jsonl and bamboogle_6.jsonl are both"):
        published.find_file(BAMBOOGLE, tmp_path)
    file = write(tmp_path / "bamboogle" / "test.jsonl", 7)
    assert published.find_file(BAMBOOGLE, tmp_path) == file


def test_more_questions_than_the_set_has_are_no_sample(tmp_path):
    write(tmp_path / "bamboogle.jsonl", 125)
    assert len(published.questions(BAMBOOGLE, tmp_path)[0]) == 125
    write(tmp_path / "bamboogle.jsonl", 126)
    with pytest.raises(EvalError, match=r"126 questions, but Bamboogle's test set has 125"):
        published.questions(BAMBOOGLE, tmp_path)


def test_sets_without_a_file_are_skipped_and_named(tmp_path, capsys):
    write(tmp_path / "bamboogle.jsonl", 3)
    assert [b.name for b in search.present(SUITE.benchmarks, tmp_path)] == ["bamboogle"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6
    assert said[0] == f"notice: nq: skipped, no nq/test.jsonl or nq_N.jsonl in {tmp_path}"
    with pytest.raises(EvalError, match="no file of nq, popqa there"):
        search.present(SUITE.select(["nq", "popqa"]), tmp_path)


def test_a_limit_draws_by_seed_and_a_larger_one_keeps_the_smaller(tmp_path):
    write(tmp_path / "bamboogle.jsonl", 100)

    def ids(limit, seed):
        (loaded,) = load_questions(SUITE.select(["bamboogle"]), tmp_path, limit, seed)
        return [question.id for question in loaded.questions]

    everything = ids(None, 0)
    assert everything == ids(100, 5) == ids(1000, 0)
    ten = ids(10, 0)
    assert ten == ids(10, 0) and len(set(ten)) == 10 and ten != everything[:10]
    assert sorted(ten, key=everything.index) == ten
    assert set(ten) < set(ids(20, 0))
    assert ten != ids(10, 1)


def test_prompts():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = "Who wrote Faust?"
    assert published.prompt_of(text, "raw", True, tokenizer) == build_prompt(text)
    assert published.prompt_of(text, "short", True, tokenizer) == build_prompt(text, "short")
    chat = published.prompt_of(text, "chat", True, tokenizer)
    assert chat.startswith("<|im_start|>user\nAnswer the") and build_prompt(text) in chat
    assert chat.endswith("<|im_start|>assistant\n")
    closed = published.prompt_of(text, "raw", False, tokenizer)
    assert closed.endswith("Question: Who wrote Faust?\n")
    assert "search" not in closed and "<answer>" in closed
    tokenizer.chat_template = None
    with pytest.raises(EvalError, match="no chat template; expected raw or short"):
        published.prompt_of(text, "chat", True, tokenizer)


def test_the_grade_is_exact_match_of_any_gold():
    assert score("The Moon!", ["sun", "moon"]).correct
    assert not score("the full moon", ["sun", "moon"]).correct
    missing = score(None, ["moon"])
    assert (missing.correct, missing.extracted, missing.reason) == (False, None, "no_answer")
    (read,) = search.grade_responses([("<think> x </think><answer> Moon </answer>", ["moon"])])
    assert read.correct and read.extracted == "Moon"


@pytest.mark.parametrize(
    ("given", "posted"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/retrieve"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/retrieve"),
        ("https://host/a/retrieve", "https://host/a/retrieve"),
    ],
)
def test_an_address_may_leave_the_path_out(given, posted):
    assert retriever_process.address(given) == posted


def arguments(**given):
    return {"search": None, "no_search": False, **given}


def test_dialogue_settings_are_the_trainers_and_can_be_changed():
    plain = search.settings_of(arguments(), "http://h:1/retrieve")
    assert (plain.topk, plain.max_turns, plain.turn_tokens, plain.observation_tokens) == (
        3, 4, 500, 500,
    )  # fmt: skip
    assert plain.url == "http://h:1/retrieve"
    changed = search.settings_of(arguments(search=["topk=5", "max_turns=2"]), None)
    assert (changed.topk, changed.max_turns) == (5, 2)
    assert search.settings_of(arguments(no_search=True), None).max_turns == 0


MISTAKES = {
    "two": (
        ["--data-dir", "{data}", "--no-search", "--retriever", "http://x"],
        "--retriever and --no-search: expected one of them",
    ),
    "no index": (["--data-dir", "{data}", "--index", "nowhere"], "--index nowhere: no such folder"),
    "index of nothing": (["--data-dir", "{data}", "--index", "{data}"], "--index {data}: the"),
    "no address": (["--data-dir", "{data}", "--retriever", "x:1"], "--retriever x:1: expected"),
    "nobody there": (
        ["--data-dir", "{data}", "--retriever", "http://127.0.0.1:9"],
        "retriever http://127.0.0.1:9/retrieve: no connection",
    ),
    "unknown setting": (
        ["--data-dir", "{data}", "--no-search", "--search", "reward=f1"],
        "--search reward=f1: expected KEY=VALUE, each key once, of topk",
    ),
    "bad setting": (
        ["--data-dir", "{data}", "--no-search", "--search", "topk=0"],
        "--search topk=0: Input should be greater",
    ),
    "server": (
        ["--data-dir", "{data}", "--no-search", "--engine", "openai", "--base-url", "http://x/v1"],
        "--base-url http://x/v1: no OpenAI-compatible server there",
    ),
    "no file": (["--data-dir", "{empty}", "--no-search"], "no file of nq, triviaqa"),
    "another suite": (["--suite", "kk", "--no-search"], "--no-search: only with --suite qa"),
    "unknown set": (["--data-dir", "{data}", "--no-search", "--only", "squad"], "--only squad"),
}


@pytest.mark.parametrize(("given", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(given, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common_text, "SLOW_S", 600.0)  # a slow machine would say what it waits for
    write(tmp_path / "data" / "bamboogle.jsonl", 3)
    (tmp_path / "empty").mkdir()
    places = {"data": str(tmp_path / "data"), "empty": str(tmp_path / "empty")}
    out = tmp_path / "out"
    start = ["--suite", "qa", "--model", str(TINY), "--out", str(out)]
    assert main([*start, *(argument.format(**places) for argument in given)]) == 2
    error = capsys.readouterr().err
    assert message.format(**places) in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not out.exists()


def report(only, count=None):
    """Half of the questions right, in the first of which two searches took a second each."""
    rows, described = [], {}
    benchmarks = SUITE.select(only)
    for benchmark in benchmarks:
        n = count or benchmark.size
        described[benchmark.name] = {
            "title": benchmark.title,
            "settings": benchmark.settings.as_dict(),
            "n_questions": n,
            "full_size": benchmark.size,
            "context_cuts": {"questions": 0, "shortest_max_tokens": None, "prompts_too_long": 0},
        }
        for i in range(n):
            first = {"searches": 2.0, "search_seconds": 2.0, "gold_retrieved": 1.0, "f1": 1.0}
            rows.append(
                {
                    "benchmark": benchmark.name, "id": f"q{i}", "group": "", "sample": 0,
                    "correct": i < n // 2, "extracted": "x", "finish_reason": "stop", "tokens": 4,
                    "dialogue": first if i == 0 else {},
                }
            )  # fmt: skip
    request = {
        "suite": "qa",
        "model": {"name": "m", "revision": None, "fingerprint": "f" * 64},
        "engine": "vllm", "dtype": "float32", "context": 1024, "seed": 0, "limit": count,
        "search": {"enabled": True, "prompt": "chat", "topk": 3, "max_turns": 4},
        "benchmarks": described,
    }  # fmt: skip
    return results.build(SUITE, benchmarks, request, rows, ENVIRONMENT, {"nq": 3})


def table(found, extra):
    return "\n".join(tables.markdown(found, extra, SUITE))


def our_row(text):
    (line,) = [line for line in text.splitlines() if "this run" in line]
    return [cell.strip() for cell in line.strip("|").split(" | ")][2:]


def test_a_whole_run_has_groups_and_the_papers_average():
    found, extra = report([], 40)
    assert found["groups"]["General"]["value"] == 0.5
    assert found["groups"]["Multi-hop"]["n_questions"] == 160
    assert found["average"]["value"] == 0.5
    assert our_row(table(found, extra))[-1] == "**50.00**"


def test_groups_and_average_need_all_their_sets():
    found, extra = report(["general", "bamboogle"], 40)
    assert found["groups"]["General"] is not None and found["groups"]["Multi-hop"] is None
    assert found["average"] is None
    text = table(found, extra)
    assert our_row(text)[3:6] == ["–"] * 3 and our_row(text)[-1] == "–"
    assert "| General | 0.500" in text and "Multi-hop" not in text


def test_a_sample_is_called_one_and_a_whole_set_is_not():
    text = table(*report(["2wikimultihopqa"], 500))
    assert "**Limited run, not comparable with the paper:**" in text
    assert our_row(text)[4] == "**50.00** (500 of 12,576)"
    whole = table(*report(["bamboogle"]))
    assert "Limited" not in whole and our_row(whole)[6] == "**49.60**"


def test_search_statistics():
    found = report(["nq"], 4)[0]["benchmarks"]["nq"]["search"]
    assert found["searches_per_question"] == 0.5 and found["seconds_per_search"] == 1.0
    assert found["gold_retrieved_rate"] == 0.25 and found["f1"] == 0.25
    assert found["retrieval_failures"] == 3
    assert "| nq | 0.50 |" in table(*report(["nq"], 4))


def test_the_papers_rows_are_there_and_marked():
    text = table(*report(["nq"], 4))
    assert text.count("*paper*, Table 2 |") == len(QA) == 6
    row = "41.80 | 52.30 | 39.10 | 24.50 | 20.30 | 5.00 | 8.00 | 27.29"
    assert f"| Qwen2.5-3B + GRPO-SG | *paper*, Table 2 | {row} |" in text


def test_which_of_the_papers_averages_are_means_of_its_columns():
    means = {name: sum(row[:7]) / 7 for name, row in QA.items()}
    wrong = {
        name: round(mean, 2) for name, mean in means.items() if abs(mean - QA[name][7]) > 0.011
    }
    assert wrong == {"Qwen3-4B + GRPO": 35.51, "Qwen3-4B + GRPO-SG": 39.67}
