"""The suites of evaluations, and how responses are sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sg_rlhf.eval.answer import describe, samples_of
from sg_rlhf.eval.command_line import check, parse_arguments
from sg_rlhf.eval.run import main
from sg_rlhf.eval.sampling import SamplingOptions
from sg_rlhf.eval.scores import metrics
from sg_rlhf.eval.scores.metrics import pass_at_k
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.kk.data import read_puzzles
from sg_rlhf.tasks.kk.prompt import build_prompt
from sg_rlhf.tasks.questions import EvalError, Question, first_per_group, questions_hash
from sg_rlhf.tasks.suite import Benchmark, Sampling

# -- The suites as published, their data, and their twins for lm-evaluation-harness --------------


TASKS = Path(__file__).parents[3] / "sg_rlhf" / "eval" / "lm_eval_tasks"
# Of one turn, so that a response is a completion; the others are dialogues (test_qa.py).
BENCHMARKS = {b.name: b for name in ("math", "kk") for b in SUITES[name].benchmarks}
TWINS = BENCHMARKS | {b.name: b for b in SUITES["arithmetic"].benchmarks}


def test_settings_and_sizes_are_the_published_ones():
    sampled = Sampling(temperature=1.0, max_tokens=4096, n=16, top_p=1.0)
    greedy = Sampling(temperature=0.0, max_tokens=4096)
    assert {name: (b.size, b.settings) for name, b in BENCHMARKS.items()} == {
        "olympiadbench": (675, greedy),
        "minerva": (272, greedy),
        "math500": (500, greedy),
        "amc": (83, sampled),
        "aime": (30, sampled),
        "aime25": (30, sampled),
        "aime26": (30, sampled),
        "hmmt25": (30, sampled),
        "hmmt25_nov": (30, sampled),
        "hmmt26": (33, sampled),
        "amc23": (40, sampled),
        "imo_answerbench": (400, Sampling(temperature=1.0, max_tokens=4096, n=4)),
        "official": (700, Sampling(temperature=0.0, max_tokens=2048)),
        "logic_rl": (700, Sampling(temperature=1.0, max_tokens=8192)),
        "paper_greedy": (700, greedy),
        "paper_t1": (700, Sampling(temperature=1.0, max_tokens=4096)),
    }
    assert BENCHMARKS["aime"].pass_at == (16,)
    assert len(SUITES["math"].average) == 6


def test_only_selects_benchmarks_and_harnesses_in_the_order_of_the_suite():
    def names(suite: str, *only: str) -> list[str]:
        return [benchmark.name for benchmark in SUITES[suite].select(only)]

    assert names("math", "aime", "amc") == ["amc", "aime"]
    assert names("kk", "paper") == ["paper_greedy", "paper_t1"]
    assert names("kk", "official", "paper_t1") == ["official", "paper_t1"]
    assert len(names("kk")) == 4
    # The paper's table is what no name means; its average has no other columns.
    table = ["olympiadbench", "minerva", "math500", "amc", "aime"]
    assert names("math") == table
    assert {name for name, _ in SUITES["math"].average} == set(table)
    more = ["aime25", "aime26", "hmmt25", "hmmt25_nov", "hmmt26", "amc23", "imo_answerbench"]
    assert names("math", "more") == more
    assert names("math", "aime", "amc23") == ["aime", "amc23"]
    with pytest.raises(EvalError, match=r"--only aime: not in suite kk, expected one of .*paper"):
        SUITES["kk"].select(["aime"])


def yaml_task(name: str) -> dict:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    task = yaml.load((TASKS / f"sg_{name}.yaml").read_text(), Loader)
    # As lm-evaluation-harness merges them: the task's own keys win.
    return yaml.load((TASKS / task.pop("include")).read_text(), Loader) | task


@pytest.mark.parametrize("benchmark", TWINS.values(), ids=TWINS)
def test_the_lm_eval_task_asks_with_the_same_settings(benchmark: Benchmark):
    task = yaml_task(benchmark.name)
    settings = benchmark.settings
    generation = task["generation_kwargs"]
    assert task["task"] == f"sg_{benchmark.name}"
    assert task["dataset_kwargs"] == {"benchmark_name": benchmark.name}
    assert task["repeats"] == settings.n
    assert generation["max_gen_toks"] == settings.max_tokens
    assert generation["temperature"] == settings.temperature
    assert generation["do_sample"] == (settings.temperature > 0)
    assert generation.get("top_p", 1.0) == settings.top_p
    assert generation["until"] == []
    metrics = [metric["metric"] for metric in task["metric_list"]]
    assert metrics == ["score", *(f"pass_at_{k}" for k in benchmark.pass_at)]


def test_official_files_are_read_and_named(puzzle_folder):
    questions, sources = BENCHMARKS["paper_t1"].load(puzzle_folder)
    assert len(questions) == 700
    assert [source.name for source in sources] == [f"people{n}_num100.jsonl" for n in range(2, 9)]
    puzzle = read_puzzles(puzzle_folder / "people5_num100.jsonl")[12]
    question = next(question for question in questions if question.id == "kk-5ppl-012")
    assert question.prompt == build_prompt(puzzle.quiz)
    assert (question.gold, question.group) == (puzzle.solution_text_format, "5")


def test_sizes_outside_the_files_are_generated_the_same_each_time(puzzle_folder, tmp_path):
    for size in range(3, 8):
        name = f"people{size}_num100.jsonl"
        (tmp_path / name).write_bytes((puzzle_folder / name).read_bytes())
    questions, sources = BENCHMARKS["official"].load(tmp_path)
    again, _ = BENCHMARKS["official"].load(tmp_path)
    assert questions == again
    assert sources[0].name == "generated people=2 seed=0"
    assert sources[-1].name == "generated people=8 seed=0"
    assert questions_hash(questions) == questions_hash(again)


def test_a_file_with_too_few_puzzles_is_named(puzzle_folder, tmp_path):
    lines = (puzzle_folder / "people4_num100.jsonl").read_text().splitlines(keepends=True)
    for size in (2, 3):
        name = f"people{size}_num100.jsonl"
        (tmp_path / name).write_bytes((puzzle_folder / name).read_bytes())
    (tmp_path / "people4_num100.jsonl").write_text("".join(lines[:99]))
    with pytest.raises(EvalError, match=r"people4_num100.jsonl: 99 puzzles .* expected 100 of 4"):
        BENCHMARKS["official"].load(tmp_path)


def test_a_file_with_repeated_puzzles_is_refused(puzzle_folder, tmp_path):
    lines = (puzzle_folder / "people2_num100.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "people2_num100.jsonl").write_text("".join(lines[:60] + lines[10:50]))
    expected = r"people2_num100.jsonl: 40 of the 100 .* the first is puzzle 61, which is puzzle 11"
    with pytest.raises(EvalError, match=expected):
        BENCHMARKS["official"].load(tmp_path)


def test_another_file_under_the_published_name_is_refused(tmp_path):
    (tmp_path / "test_3to7ppl.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"test_3to7ppl.parquet: SHA-256 .* expected 3e27d3db"):
        BENCHMARKS["official"].load(tmp_path)


@pytest.mark.parametrize("name", ["aime", "official"])
def test_offline_without_files_says_what_to_do(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(EvalError, match="HF_HUB_OFFLINE is set.* --data-dir"):
        BENCHMARKS[name].load(None)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "file"), [("aime", "aime_eval.parquet"), ("official", "test_3to7ppl.parquet")]
)
def test_offline_a_file_in_the_cache_is_used(name, file, monkeypatch, tmp_path):
    """Its contents are checked, as they are without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = tmp_path / "sg_rlhf" / "eval" / file
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=f"{cached}: SHA-256 .*, expected "):
        BENCHMARKS[name].load(None)


def test_a_limit_takes_from_every_group():
    questions = [Question(f"{g}{i}", "p", "g", g) for g in "abc" for i in range(4)]
    kept = first_per_group(questions, 7)
    assert [question.id for question in kept] == ["a0", "a1", "a2", "b0", "b1", "c0", "c1"]
    assert first_per_group(questions, None) == questions
    assert first_per_group(questions, 100) == questions


def test_responses_are_cut_to_what_the_context_leaves():
    benchmark = BENCHMARKS["aime"]
    questions = [Question(str(n), "x" * n, ["1"]) for n in (10, 500, 999, 1000, 2000)]
    benchmark = replace(benchmark, questions=questions)
    cut = samples_of([benchmark], lambda ps: [[7] * len(p) for p in ps], 1000, 0)
    limits = {s.question.id: s.max_tokens for s in cut}
    assert limits == {"10": 990, "500": 500, "999": 1, "1000": 0, "2000": 0}
    assert describe(benchmark, cut)["context_cuts"] == {
        "questions": 5,
        "shortest_max_tokens": 0,
        "prompts_too_long": 2,
    }
    free = samples_of([benchmark], lambda ps: [[7] * len(p) for p in ps], 9000, 0)
    assert {s.max_tokens for s in free} == {4096}


def test_samples_are_complete_longest_first_and_each_has_its_own_seed():
    questions = [Question(str(n), "x" * n, ["1"]) for n in (10, 30, 20)]
    benchmark = replace(BENCHMARKS["aime"], questions=questions)

    def drawn(seed):
        return samples_of([benchmark], lambda ps: [[7] * len(p) for p in ps], None, seed)

    samples = drawn(0)
    assert [s.question.id for s in samples] == ["30"] * 16 + ["20"] * 16 + ["10"] * 16
    assert len({s.key for s in samples}) == 48
    assert len({s.seed for s in samples}) == 48
    assert all(0 <= s.seed < 2**31 for s in samples)
    assert drawn(0) == samples
    assert not {s.seed for s in drawn(1)} & {s.seed for s in samples}


# -- Sampling options: which benchmarks they change, and which combinations are refused ----------


MATH, KK = SUITES["math"], SUITES["kk"]


def sampled(benchmarks, samples, ks):
    return SamplingOptions(samples=samples, ks=ks).apply(benchmarks)


def shape(benchmarks):
    return {b.name: (b.settings.n, b.mean_name, b.pass_at) for b in benchmarks}


def test_without_a_flag_the_suite_is_as_it_was():
    for suite in SUITES.values():
        assert sampled(suite.benchmarks, None, None) == suite.benchmarks


def test_only_what_is_sampled_gets_more_samples():
    found = shape(sampled(MATH.select([]), 64, None))
    assert found == {
        "olympiadbench": (1, "accuracy", ()),
        "minerva": (1, "accuracy", ()),
        "math500": (1, "accuracy", ()),
        "amc": (64, "avg@64", ()),
        "aime": (64, "avg@64", (16, 64)),
    }
    assert shape(sampled(MATH.select(["aime"]), 8, None)) == {"aime": (8, "avg@8", (8,))}
    assert shape(sampled(MATH.select(["aime"]), 1, None)) == {"aime": (1, "accuracy", ())}


def test_k_names_the_pass_rates():
    found = shape(sampled(MATH.select(["aime25", "math500"]), 64, (1, 8, 64)))
    assert found["aime25"] == (64, "avg@64", (1, 8, 64))
    assert found["math500"] == (1, "accuracy", ())
    assert shape(sampled(MATH.select(["amc"]), None, (4,)))["amc"] == (16, "avg@16", (4,))


@pytest.mark.parametrize(
    ("suite", "only", "samples", "ks", "message"),
    [
        (MATH, ["math500"], 8, None, "--samples 8: math500: greedy"),
        (MATH, ["aime"], None, (1, 32), "--k 1,32: aime has 16 samples .* at most 16"),
        (MATH, ["aime"], 8, (16,), "--k 16: aime has 8 samples .* or --samples 16"),
        (MATH, ["math500"], None, (1,), "--k 1: math500: one response"),
        (KK, ["paper_t1"], None, (1,), "--k 1: paper_t1: one response"),
    ],
)
def test_what_cannot_be_is_refused(suite, only, samples, ks, message):
    with pytest.raises(EvalError, match=message):
        sampled(suite.select(only), samples, ks)


def test_pass_at_k_of_puzzles_is_averaged_over_their_sizes():
    (benchmark,) = sampled(KK.select(["paper_t1"]), 4, (1, 2))
    # One puzzle of each size; as many of its four samples are right as it has people, above 4.
    right = {"2": 4, "3": 0, "4": 1, "5": 2, "6": 3, "7": 4, "8": 4}
    rows = [
        {"group": size, "id": size, "sample": number, "correct": number < count}
        for size, count in right.items()
        for number in range(4)
    ]
    found = metrics.scores(benchmark, rows, seed=0)
    sizes = [right[str(size)] for size in range(3, 8)]
    for k in (1, 2):
        expected = sum(pass_at_k(4, count, k) for count in sizes) / 5
        assert found[f"pass@{k}"].value == pytest.approx(expected)
    assert found["pass@2/4"].value == pytest.approx(0.5)
    assert list(found)[:4] == ["avg@4", "pass@1", "pass@2", "bayes@4"]


def settings(benchmarks):
    return {
        b.name: (b.settings.temperature, b.settings.top_p, b.settings.max_tokens, b.settings.n)
        for b in benchmarks
    }


def test_settings_replace_the_suites_own():
    given = MATH.select(["math500", "aime"])
    assert SamplingOptions().apply(given) == given
    assert settings(SamplingOptions(0.6, 0.95, 32768).apply(given)) == {
        "math500": (0.6, 0.95, 32768, 1),
        "aime": (0.6, 0.95, 32768, 16),
    }


def test_top_p_changes_what_is_sampled_alone():
    found = settings(SamplingOptions(top_p=0.9).apply(MATH.select(["math500", "aime"])))
    assert found == {"math500": (0.0, 1.0, 4096, 1), "aime": (1.0, 0.9, 4096, 16)}


def test_temperature_0_has_one_response_and_no_pass_at_k():
    (found,) = SamplingOptions(temperature=0.0).apply(MATH.select(["aime"]))
    assert shape([found]) == {"aime": (1, "accuracy", ())}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "math500", "--top-p", "0.9"], "--top-p 0.9: math500: greedy"),
        (["--only", "aime", "--temperature", "0", "--top-p", "0.9"], "--top-p 0.9: aime: greedy"),
        (["--only", "aime", "--top-p", "1.5"], "--top-p 1.5: expected a number above 0"),
        (["--only", "aime25", "--k", "64"], "--k 64: aime25 has 16 samples"),
        (["--only", "aime", "--temperature", "0", "--samples", "4"], "--samples 4: aime: greedy"),
        (["--system-prompt", "S"], "--system-prompt: needs --chat-template"),
        (
            ["--chat-template", "--chat-template-kwargs", '{"tokenize": true}'],
            "--chat-template-kwargs: tokenize is set by the command",
        ),
        (["--list", "--temperature", "1"], "--temperature: has no effect on --list"),
        (["--compare", "a", "b", "--max-tokens", "1"], "--max-tokens: says nothing about two"),
        (["--suite", "qa", "--chat-template"], "--chat-template: only for raw prompts"),
        (["--suite", "qa", "--max-tokens", "5"], "--max-tokens: a dialogue has limits"),
    ],
)
def test_an_option_without_effect_is_one_line(options, message, capsys):
    given = [] if options[0] in ("--list", "--compare") else ["--model", "m", "--out", "o"]
    suite = [] if "--suite" in options or not given else ["--suite", "math"]
    assert main([*suite, *given, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_the_settings_reach_the_benchmarks():
    given = ["--suite", "math", "--only", "aime", "--model", "m", "--out", "o"]
    line = [*given, "--temperature", "0.6", "--max-tokens", "100", "--samples", "64"]
    _, benchmarks = check(parse_arguments([*line, "--k", "64,1,8,8"]))
    assert settings(benchmarks) == {"aime": (0.6, 1.0, 100, 64)}
    assert shape(benchmarks) == {"aime": (64, "avg@64", (1, 8, 64))}
