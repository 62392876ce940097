"""`--samples` and `--k`: which benchmarks change, and what is refused."""

import pytest

from sg_rlhf.eval import results
from sg_rlhf.eval.metrics import pass_at_k
from sg_rlhf.eval.run import check, main, parse_arguments
from sg_rlhf.eval.sampling import sampled
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.questions import EvalError

MATH, KK = SUITES["math"], SUITES["kk"]


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
    assert list(found)[:3] == ["avg@4", "pass@1", "pass@2"]
