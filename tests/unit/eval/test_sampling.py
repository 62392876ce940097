"""Sampling options: which benchmarks they change, and which combinations are refused."""

import pytest

from sg_rlhf.eval.command_line import check, parse_arguments
from sg_rlhf.eval.generation.sampling import SamplingOptions
from sg_rlhf.eval.run import main
from sg_rlhf.eval.scores import results
from sg_rlhf.eval.scores.metrics import pass_at_k
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.questions import EvalError

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


def test_the_command_line_reaches_it():
    given = ["--suite", "math", "--only", "aime25", "--model", "m", "--out", "o"]
    line = [*given, "--samples", "64", "--k", "64,1,8,8"]
    _, benchmarks = check(parse_arguments(line))
    assert shape(benchmarks) == {"aime25": (64, "avg@64", (1, 8, 64))}


def test_a_k_above_the_samples_is_one_line(capsys):
    line = ["--suite", "math", "--only", "aime25", "--model", "m", "--out", "o", "--k", "64"]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --k 64: aime25 has 16 samples") and error.count("\n") == 1


def test_pass_at_k_of_puzzles_is_averaged_over_their_sizes():
    (benchmark,) = sampled(KK.select(["paper_t1"]), 4, (1, 2))
    # One puzzle of each size; as many of its four samples are right as it has people, above 4.
    right = {"2": 4, "3": 0, "4": 1, "5": 2, "6": 3, "7": 4, "8": 4}
    rows = [
        {"group": size, "id": size, "sample": number, "correct": number < count}
        for size, count in right.items()
        for number in range(4)
    ]
    found = results.scores(benchmark, rows, seed=0)
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
        (["--only", "aime", "--temperature", "0", "--samples", "4"], "--samples 4: aime: greedy"),
        (["--system-prompt", "S"], "--system-prompt: needs --chat-template"),
        (["--list", "--temperature", "1"], "--temperature: has no effect on --list"),
        (["--compare", "a", "b", "--max-tokens", "1"], "--max-tokens: says nothing about two"),
        (["--suite", "qa", "--chat-template"], "--chat-template: only for raw prompts"),
        (["--suite", "qa", "--max-tokens", "5"], "--max-tokens 5: a dialogue has limits"),
        (
            ["--engine", "openai", "--base-url", "http://x/v1", "--replicas", "2"],
            "--replicas 2: only with --engine vllm",
        ),
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
    line = [*given, "--temperature", "0.6", "--max-tokens", "100", "--samples", "2"]
    _, benchmarks = check(parse_arguments(line))
    assert settings(benchmarks) == {"aime": (0.6, 1.0, 100, 2)}
