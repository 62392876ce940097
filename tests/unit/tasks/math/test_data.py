"""Readers of every shape, golds as written, one line for each malformed row, pinned files."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.config import load_config
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.pinned_download import Origin, git_blob_of
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.labels import encode_golds
from sg_rlhf.tasks.math.data import MathRow, golds_of, hold_out, read_rows, to_records
from sg_rlhf.tasks.math.sets import published
from sg_rlhf.tasks.math.sets.published import (
    DSR_UNIFORM,
    EVAL_SETS,
    MORE_EVAL_SETS,
    ORZ_57K,
    read_eval_set,
)
from sg_rlhf.tasks.math.source import next_step
from tests.unit.tasks.math.fixtures import (
    SUFFIX,
    orz_row,
    reference_row,
    write_json,
    write_jsonl,
    write_parquet,
)

PROBLEMS = [
    " leading space",
    "trailing \n",
    "two\n\nlines $x^2$",
    "Ünïcode ≤ \\(x\\)",
    "a\\boxed{7}b",
]


def test_reference_parquet_gives_back_its_prompts_byte_for_byte(tmp_path):
    rows = [reference_row(p, "1", i) for i, p in enumerate(PROBLEMS)]
    path = write_parquet(tmp_path / "x.parquet", rows)
    read = read_rows(path)
    assert [row.problem for row in read] == PROBLEMS
    assert [row.id for row in read] == [f"deepscaler-{i}" for i in range(len(PROBLEMS))]
    inputs = [record["input"] for record in to_records(read)]
    assert inputs == [row["prompt"][0]["content"] for row in rows]


def test_imo_answer_bench_is_read_and_its_misplaced_quotation_mark_is_mended(tmp_path):
    path = tmp_path / "imo_answerbench.csv"
    path.write_text(
        "Problem ID,Problem,Short Answer,Category,Subcategory,Source\n"
        'one,"Find $N$.\n",$\\frac{1}{2}$.,Algebra,Operation,IMO 2021\n'
        # The quotation mark that ends the problem stands behind the answer.
        'two,"Find all $Y$.\n,$Y(x)=A$""",Algebra,Functional Equation,Iran 2002\n',
        newline="",
    )
    assert [(row.id, row.problem, row.golds) for row in read_rows(path)] == [
        ("imo_answerbench-1", "Find $N$.", ("$\\frac{1}{2}$.",)),
        ("imo_answerbench-2", "Find all $Y$.", ("$Y(x)=A$",)),
    ]


@pytest.mark.parametrize(
    ("golds", "expected"),
    [
        ([142.0, 0.0, -0.0, -3.0], ["142", "0", "0", "-3"]),
        ([0.5, 1e-7, 1e30], ["0.5", "1e-07", "1e+30"]),
        (["025", "142.0", " \\frac12\n", "1,000"], ["025", "142.0", "\\frac12", "1,000"]),
        ([7, -2], ["7", "-2"]),
        ([["9.6\n"], ["1", ""]], ["9.6", "1"]),
        ([["4.4e7", "4.4 \\times 10^7"]], [("4.4e7", "4.4 \\times 10^7")]),
    ],
)
def test_golds_of_a_column(tmp_path, golds, expected):
    path = write_parquet(tmp_path / "x.parquet", [reference_row("p", gold) for gold in golds])
    several = [gold if isinstance(gold, tuple) else (gold,) for gold in expected]
    assert [row.golds for row in read_rows(path)] == several


ORZ = [orz_row("Determine $n$.", "n = 4"), orz_row("And?", "\\frac{1}{2}")]
DEEPSCALER = [
    {"problem": "P?", "answer": "3/2", "solution": "long"},
    {"problem": "Q?", "answer": 12, "solution": ""},
    {"problem": "R?", "answer": ["1", "one"]},
]


@pytest.mark.parametrize(
    ("items", "rows"),
    [
        (ORZ, [("Determine $n$.", ("n = 4",)), ("And?", ("\\frac{1}{2}",))]),
        (DEEPSCALER, [("P?", ("3/2",)), ("Q?", ("12",)), ("R?", ("1", "one"))]),
    ],
    ids=["Open-Reasoner-Zero", "DeepScaleR"],
)
def test_a_json_file_is_one_list_or_lines(tmp_path, items, rows):
    expected = [MathRow(f"set-{i}", *row, "set") for i, row in enumerate(rows, 1)]
    whole = write_json(tmp_path / "set.json", items)
    assert read_rows(whole) == read_rows(write_jsonl(tmp_path / "set.jsonl", items)) == expected
    whole.write_text("\n  " + json.dumps(items, indent=2))
    named = [MathRow(f"orz57k-{i}", *row, "orz57k") for i, row in enumerate(rows, 1)]
    assert read_rows(whole, source="orz57k") == named


def test_our_own_records_come_back(tmp_path):
    rows = [
        MathRow(f"s-{i}", problem, ("\\frac{1}{2}", "0.5"), "s")
        for i, problem in enumerate(PROBLEMS)
    ]
    path = write_jsonl(tmp_path / "train.jsonl", list(to_records(rows)))
    assert read_rows(path) == rows


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1))
def test_a_label_gives_its_golds_back(golds):
    assert golds_of(encode_golds(golds)) == tuple(golds)


def test_a_label_stays_readable():
    assert encode_golds(["90°", "\\pi"]) == '["90°", "\\\\pi"]'


@pytest.mark.parametrize("label", ["", "42", '"42"', "[]", '[""]', "[1]", "[", "[" * 100_000])
def test_a_bad_label_is_an_error(label):
    with pytest.raises(ValueError, match="expected a JSON array of reference answers"):
        golds_of(label)


GOOD = reference_row("P", "1")
RECORD = next(to_records([MathRow("s-1", "P", ("1",), "s")]))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**GOOD, "prompt": "text"}, ["prompt: 'text'", "a list of one message of the user"]),
        ({**GOOD, "prompt": [{"role": "system", "content": "x"}]}, ["prompt: ", "of the user"]),
        ({**GOOD, "prompt": GOOD["prompt"] * 2}, ["prompt: ", "one message"]),
        (
            {**GOOD, "prompt": [{"role": "user", "content": "P"}]},
            ["prompt[0].content: 'P'", "expected a prompt that ends in"],
        ),
        (
            {**GOOD, "prompt": [{"role": "user", "content": 3}]},
            ["prompt[0].content: 3", "expected text"],
        ),
        (
            {**GOOD, "prompt": [{"role": "user", "content": "  " + SUFFIX}]},
            ["prompt[0].content: '  '"],
        ),
        ({**GOOD, "data_source": None}, ["data_source: None"]),
        ({**GOOD, "reward_model": {"style": "rule"}}, ["reward_model: ", "ground_truth"]),
        (reference_row("P", True), ["reward_model.ground_truth: True", "a finite number"]),
        (reference_row("P", float("nan")), ["NaN is no number of JSON"]),
        (reference_row("P", [["1"]]), ["reward_model.ground_truth: ['1']"]),
        (reference_row("P", {"a": 1}), ["reward_model.ground_truth: {'a': 1}"]),
        (reference_row("P", ""), ["the answer is empty"]),
        (reference_row("P", [" ", None]), ["the answer is empty"]),
        (reference_row("P", "\ud800"), ["ground_truth: '\\ud800'", "valid Unicode"]),
        ({"problem": "", "answer": "1"}, ["problem: ''", "not empty"]),
        ({"problem": "P"}, ["the answer is empty"]),
        ({"question": "P"}, ["fields ['question']", "expected prompt and reward_model"]),
        ("text", ["'text'", "expected a JSON object"]),
        (orz_row("P", "1")[:1], ["from: ['human']", "a turn of human and one of assistant"]),
        (orz_row("P", "1")[::-1], ["from: ['assistant', 'human']"]),
        (["x", 3], ["from: [None, None]"]),
        (orz_row(None, "1"), ["value of the human: None"]),
        ([orz_row("P", "1")[0], {"from": "assistant", "value": "1"}], ["ground_truth: None"]),
        ({**RECORD, "input": "P"}, ["input: 'P'", "expected the prompt of the problem"]),
        ({**RECORD, "answer": "1"}, ["answer: '1'", "JSON array"]),
        ({**RECORD, "id": 4}, ["id: 4"]),
        ({**RECORD, "datasource": ""}, ["datasource: ''"]),
    ],
)
def test_a_malformed_row_is_named(tmp_path, row, words):
    good = GOOD if not isinstance(row, list) else orz_row("P", "1")
    path = write_jsonl(tmp_path / "x.jsonl", [good, row])
    with pytest.raises(DataError) as error:
        read_rows(path)
    line = str(error.value)
    assert line.startswith(f"{path}: row 2: ")
    assert "\n" not in line
    for word in words:
        assert word in line


def test_rows_without_an_answer_can_be_kept_for_counting(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [GOOD, reference_row("Q", " "), GOOD])
    assert [row.golds for row in read_rows(path, allow_empty=True)] == [("1",), (), ("1",)]


def test_files_that_are_no_data(tmp_path):
    def complaint(name, content=None):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError) as error:
            read_rows(path)
        assert str(error.value).startswith(f"{path}: ")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no such file" in complaint("gone.parquet")
    assert "unknown kind of file '.txt'" in complaint("x.txt", b"a,b\n")
    assert "not a readable parquet file" in complaint("x.parquet", b"PAR1 no")
    assert "no rows" in complaint("empty.jsonl", b"")
    assert "no rows" in complaint("empty.json", b"[]")
    assert "not JSON" in complaint("cut.json", b'[{"problem": "P", "ans')
    assert "row 2: not JSON" in complaint("cut.jsonl", b'{"problem": "P", "answer": "1"}\n{"pro')
    assert "not JSON" in complaint("bytes.json", b"[\xff\xfe]")
    assert "not JSON" in complaint("deep.json", b"[" * 200_000)


def test_the_evaluation_sets_are_those_of_the_paper_and_each_is_pinned():
    assert {name: (e.file, e.rows) for name, e in EVAL_SETS.items()} == {
        "aime": ("aime_eval.parquet", 30),
        "amc": ("amc_eval.parquet", 83),
        "math500": ("math_eval.parquet", 500),
        "minerva": ("minerva_eval.parquet", 272),
        "olympiadbench": ("olympiad_bench_eval.parquet", 675),
    }
    sets = [*EVAL_SETS.values(), *MORE_EVAL_SETS.values()]
    assert len({e.title for e in sets}) == len({e.file for e in sets}) == 12
    for origin in [DSR_UNIFORM, *(e.origin for e in sets)]:
        known = "hmmt_nov_2025" not in origin.repository
        assert (len(origin.sha256), len(origin.commit)) == (64 if known else 0, 40)
        assert origin.url.startswith("https://") and origin.commit in origin.url
    assert (len(ORZ_57K.git_blob), len(ORZ_57K.commit)) == (40, 40)


@pytest.fixture
def small_amc(tmp_path, monkeypatch):
    """An "amc" of three rows, pinned to a file in `tmp_path`."""
    golds = (142.0, 144.0, 3.5)
    rows = [reference_row(f"P{i}", gold, i, "amc_dsr") for i, gold in enumerate(golds)]
    path = write_parquet(tmp_path / "amc_eval.parquet", rows)
    origin = Origin("a/b", "c" * 40, "data/amc_dsr.parquet", sha256=sha256_of(path))
    pinned = replace(EVAL_SETS["amc"], rows=3, origin=origin)
    monkeypatch.setattr(published, "EVAL_SETS", {**EVAL_SETS, "amc": pinned})
    return path


def test_the_sentence_behind_a_prompt_is_not_the_problem(tmp_path):
    asked = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"Find $x$.{asked}", "answer": "7"}])
    assert read_rows(path, source="aime26") == [MathRow("aime26-1", "Find $x$.", ("7",), "aime26")]
    for prompt, complaint in (("Find $x$.", "ends in"), (asked, "not empty"), (None, "text")):
        write_jsonl(path, [{"prompt": prompt, "answer": "7"}])
        with pytest.raises(DataError, match=rf"row 1: prompt: .*{complaint}"):
            read_rows(path)


def test_a_file_called_test_needs_its_folder(tmp_path, monkeypatch):
    """`test.jsonl` is a name of many sets; `amc23/test.jsonl` is of one."""
    path = write_jsonl(tmp_path / "test.jsonl", [{"problem": "P", "answer": 27.0}])
    origin = Origin("a/b", "c" * 40, "evaluation/data/amc23/test.jsonl", sha256=sha256_of(path))
    pinned = replace(MORE_EVAL_SETS["amc23"], rows=1, origin=origin)
    monkeypatch.setattr(published, "MORE_EVAL_SETS", {"amc23": pinned})
    with pytest.raises(DataError, match=r"amc23.jsonl: no such file, expected AMC 2023, the 40"):
        read_eval_set("amc23", tmp_path)
    (tmp_path / "amc23").mkdir()
    path.rename(tmp_path / "amc23" / "test.jsonl")
    assert read_eval_set("amc23", tmp_path)[0].golds == ("27",)


def test_a_set_on_the_hub_is_downloaded_at_its_commit(tmp_path, monkeypatch):
    """Its columns are MathArena's; another file of that name in the folder is none of it."""
    hub, folder = tmp_path / "hub", tmp_path / "sets"
    origin = MORE_EVAL_SETS["hmmt25_nov"].origin
    file = hub / "datasets" / origin.repository / "resolve" / origin.commit / origin.path
    file.parent.mkdir(parents=True)
    rows = [{"problem_idx": i, "problem": f"P{i}", "answer": "\\frac{1}{2}", "problem_type": ["A"]}
            for i in range(1, 31)]  # fmt: skip
    write_parquet(file, rows)
    monkeypatch.setenv("HF_ENDPOINT", hub.as_uri())
    folder.mkdir()
    (folder / "train-00000-of-00001.parquet").touch()
    path = published.download_eval_set(MORE_EVAL_SETS["hmmt25_nov"], folder)
    assert path == folder / "hmmt25_nov.parquet"
    found = read_eval_set("hmmt25_nov", folder)
    assert [row.problem for row in found] == [row["problem"] for row in rows]
    assert found[0].golds == ("\\frac{1}{2}",)
    path.rename(folder / "hmmt26.parquet")
    with pytest.raises(DataError, match="SHA-256 .* expected e5fcff6b1c22"):
        read_eval_set("hmmt26", folder)


def test_read_eval_set(small_amc):
    assert read_eval_set("amc", small_amc.parent) == [
        MathRow("amc-0", "P0", ("142",), "amc"),
        MathRow("amc-1", "P1", ("144",), "amc"),
        MathRow("amc-2", "P2", ("3.5",), "amc"),
    ]
    small_amc.rename(small_amc.with_name("amc_dsr.parquet"))  # the repository's own name
    assert len(read_eval_set("amc", small_amc.parent)) == 3


def test_a_wrong_eval_file_is_named_with_what_was_expected(small_amc, monkeypatch):
    folder = small_amc.parent
    pinned = published.EVAL_SETS["amc"]
    with pytest.raises(DataError, match="'gsm8k': unknown, expected one of aime, amc, math500"):
        read_eval_set("gsm8k", folder)
    with pytest.raises(
        DataError, match=r"aime_eval.parquet: no such file, expected AIME 2024 \(30"
    ):
        read_eval_set("aime", folder)
    monkeypatch.setattr(published, "EVAL_SETS", {"amc": replace(pinned, rows=83)})
    with pytest.raises(DataError, match=r"amc_eval.parquet: 3 rows, expected 83"):
        read_eval_set("amc", folder)
    monkeypatch.setattr(published, "EVAL_SETS", {"amc": pinned})
    write_parquet(small_amc, [reference_row("P", 1.0)])
    with pytest.raises(DataError) as error:
        read_eval_set("amc", folder)
    for word in (str(small_amc), pinned.sha256, pinned.origin.url, "AMC 2022-23, the 83, 3 rows"):
        assert word in str(error.value)


def test_git_blob_id_is_gits_own(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"some bytes\n" * 300_000)
    git = subprocess.run(
        ["git", "hash-object", "--no-filters", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert git_blob_of(path) == git.stdout.strip()
    origin = Origin("a/b", "c" * 40, "x", git_blob=git.stdout.strip())
    origin.check(path)
    path.write_bytes(b"others")
    with pytest.raises(DataError, match=f"git blob id .*expected {git.stdout.strip()}"):
        origin.check(path)


def test_hold_out_keeps_all_rows_of_a_problem_on_one_side():
    rows = [MathRow(f"r-{i}", f"problem {i % 40}", ("1",), "r") for i in range(100)]
    train, test = hold_out(rows, 0.25, seed=3)
    assert len(test) == 10
    assert not {row.problem for row in train} & {row.problem for row in test}
    assert {row.id for row in test} <= {f"r-{i}" for i in range(40)}  # the first of each
    tested = {row.problem for row in test}
    assert train == [row for row in rows if row.problem not in tested]
    assert hold_out(rows, 0.25, seed=3) == (train, test)
    assert hold_out(rows, 0.25, seed=4)[1] != test
    assert hold_out(rows, 0.0, seed=3) == (rows, [])
    with pytest.raises(DataError, match="at least 0 and below 1, got 1.0"):
        hold_out(rows, 1.0, seed=3)


@pytest.mark.parametrize("folder", ["data/math_dsr", "data/mine"])
@pytest.mark.parametrize("held_out", [[], ["test"], ["math500", "amc", "aime"]])
@pytest.mark.parametrize(
    "source", [{"kind": "published", "name": "dsr_uniform"}, {"kind": "generated"}]
)
def test_the_next_command_is_one_that_train_takes(source, held_out, folder):
    files = {f"{name}.jsonl": {"rows": 5} for name in ("train", *held_out)}
    command = next_step(Path(folder), {"source": source, "files": files})
    _, _, _, recipe, *overrides = shlex.split(command)
    config = load_config(recipe, overrides)
    sets = [config.value("eval.dataset"), *(one.dataset for one in config.sg.eval_sets)]
    if held_out:
        assert f"{folder}/{held_out[0]}.jsonl" in sets
    own = len(held_out) == 3 and folder == "data/math_dsr" and "name" in source
    assert len(config.sg.eval_sets) == (3 if own else 0)
