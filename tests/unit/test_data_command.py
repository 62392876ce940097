"""`sg-rlhf data`: what it writes; bad input is one line, status 2 and no files."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import partial

import pytest

from sg_rlhf.data import command as data
from sg_rlhf.data_io import dataset_writer
from sg_rlhf.tasks.kk.puzzle import generate
from tests.unit.data_command import contents, lines, refusal
from tests.unit.tasks.kk.oracles import LOGIC_RL_PROMPT, brute_force, logic_rl_row, write_parquet

refused = partial(refusal, "kk")
SMALL = ["--generate", "people=2-3", "per_size=12", "test_per_size=4"]


@pytest.fixture
def files(tmp_path):
    """A train and a test parquet of the Logic-RL shape, without overlap."""
    puzzles = {n: generate(n, 30, seed=5) for n in (3, 4)}
    parts = {"train": slice(0, 24), "test": slice(24, 30)}
    folder = tmp_path / "source"
    folder.mkdir()
    return {
        part: write_parquet(
            folder / f"{part}.parquet", [logic_rl_row(p) for n in puzzles for p in puzzles[n][rows]]
        )
        for part, rows in parts.items()
    }


def test_generate_writes_checked_jsonl_and_a_manifest(tmp_path, capsys):
    out = tmp_path / "new" / "kk"
    assert data.main(["kk", "--out", str(out), *SMALL]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "test.jsonl", "train.jsonl"]
    assert [p.name for p in out.parent.iterdir()] == ["kk"]
    train, test = lines(out / "train.jsonl"), lines(out / "test.jsonl")
    sources = [r["datasource"] for r in train]
    assert sorted(sources) == ["kk_2ppl"] * 12 + ["kk_3ppl"] * 12
    # The sizes are mixed, so that the first rows of a file hold them all.
    assert set(sources[:8]) == {"kk_2ppl", "kk_3ppl"}
    assert sorted(r["datasource"] for r in test) == ["kk_2ppl"] * 4 + ["kk_3ppl"] * 4
    for record in train + test:
        assert record["input"] == LOGIC_RL_PROMPT.replace("QUIZ", record["quiz"])
        statements = eval(record["statements"])
        assert brute_force(statements) == [tuple(record["solution"])]
        roles = zip(record["names"], record["solution"], strict=True)
        assert record["answer"].split("\n") == [
            f"({i}) {name} is a {'knight' if k else 'knave'}"
            for i, (name, k) in enumerate(roles, 1)
        ]
    assert not {r["quiz"] for r in train} & {r["quiz"] for r in test}

    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["counts"] == {"train": {"2": 12, "3": 12}, "test": {"2": 4, "3": 4}}
    assert manifest["source"]["kind"] == "generated"
    assert manifest["source"]["seed"] == 0
    assert manifest["prompt"]["version"] == "logic-rl-1"
    assert str(tmp_path) not in json.dumps(manifest)
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
        assert entry["rows"] == len(lines(out / name))

    report = capsys.readouterr().out
    for text in ("2         12        4", "duplicates", str(out / "train.jsonl"), "sg-rlhf train"):
        assert text in report
    assert manifest["files"]["train.jsonl"]["sha256"][:12] in report


@pytest.mark.parametrize(
    ("people", "recipe"), [("2-3", "grpo_sg_tiny_cpu.yaml"), ("3-4", "grpo_sg_outside_qwen2.5-3b-")]
)
def test_the_next_command_names_a_recipe_whose_model_knows_the_sizes(
    tmp_path, capsys, people, recipe
):
    request = ["--generate", f"people={people}", "per_size=4", "test_per_size=2"]
    for _ in range(2):  # the second time it is up to date
        assert data.main(["kk", "--out", str(tmp_path / "kk"), *request]) == 0
        assert f"--config configs/kk/{recipe}" in capsys.readouterr().out


def test_loads_through_the_loader_that_upstream_uses(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    out = tmp_path / "kk"
    data.main(["kk", "--out", str(out), *SMALL])
    loaded = datasets.load_dataset(
        "json", data_files=str(out / "train.jsonl"), cache_dir=str(tmp_path / "cache")
    )["train"]
    assert loaded.to_list() == lines(out / "train.jsonl")


def test_the_same_request_gives_the_same_bytes_and_runs_once(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    for out in (one, two):
        assert data.main(["kk", "--out", str(out), *SMALL]) == 0
    assert contents(one) == contents(two)
    before = (one / "train.jsonl").stat().st_mtime_ns
    capsys.readouterr()
    assert data.main(["kk", "--out", str(one), *SMALL]) == 0
    assert "up to date" in capsys.readouterr().out
    assert (one / "train.jsonl").stat().st_mtime_ns == before


def test_another_request_replaces_our_own_files(tmp_path, capsys):
    out = tmp_path / "kk"
    data.main(["kk", "--out", str(out), *SMALL])
    before = contents(out)
    assert data.main(["kk", "--out", str(out), *SMALL, "seed=1"]) == 0
    assert contents(out)["train.jsonl"] != before["train.jsonl"]
    assert [p.name for p in tmp_path.iterdir()] == ["kk"]


def test_files_of_others_are_kept_unless_forced(tmp_path, capsys):
    out = tmp_path / "kk"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "not made by this command" in refused(capsys, "--out", out, *SMALL)
    assert contents(out) == {"notes.txt": b"mine"}
    assert data.main(["kk", "--out", str(out), *SMALL, "--force"]) == 0
    assert (out / "notes.txt").read_text() == "mine"
    with (out / "train.jsonl").open("a") as file:
        file.write("{}\n")
    edited = contents(out)
    assert "changed since" in refused(capsys, "--out", out, *SMALL)
    assert contents(out) == edited
    assert data.main(["kk", "--out", str(out), "--force", *SMALL]) == 0
    assert contents(out) != edited


def test_an_empty_folder_will_do(tmp_path):
    out = tmp_path / "kk"
    out.mkdir()
    assert data.main(["kk", "--out", str(out), *SMALL]) == 0
    assert (out / "manifest.json").is_file()


def test_parquet_with_a_held_out_file(tmp_path, files, capsys):
    out = tmp_path / "kk"
    args = ["kk", "--out", str(out), "--parquet", str(files["train"])]
    assert data.main([*args, "--test-parquet", str(files["test"])]) == 0
    assert len(lines(out / "train.jsonl")) == 48
    assert len(lines(out / "test.jsonl")) == 12
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"]["train"] == [
        {
            "name": "train.parquet",
            "sha256": hashlib.sha256(files["train"].read_bytes()).hexdigest(),
        }
    ]


def test_parquet_with_a_seeded_split(tmp_path, files):
    out = tmp_path / "kk"
    both = ["--parquet", str(files["train"]), str(files["test"])]
    assert data.main(["kk", "--out", str(out), *both, "--test-fraction", "0.2"]) == 0
    assert json.loads((out / "manifest.json").read_text())["counts"] == {
        "train": {"3": 24, "4": 24},
        "test": {"3": 6, "4": 6},
    }
    before = contents(out)
    assert data.main(["kk", "--out", str(out), *both, "--test-fraction", "0.2", "--seed", "1"]) == 0
    assert contents(out)["test.jsonl"] != before["test.jsonl"]


def test_a_changed_input_file_is_noticed(tmp_path, files, capsys):
    out = tmp_path / "kk"
    args = ["kk", "--out", str(out), "--parquet", str(files["train"])]
    data.main(args)
    write_parquet(files["train"], [logic_rl_row(p) for p in generate(3, 30, seed=8)])
    capsys.readouterr()
    assert data.main(args) == 0
    assert "up to date" not in capsys.readouterr().out
    assert len(lines(out / "train.jsonl")) == 27


def test_prompts_through_a_chat_template(tmp_path, monkeypatch):
    class Tokenizer:
        def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
            return "|".join(f"{m['role']}|{m['content']}" for m in messages) + "<bot>"

    monkeypatch.setattr(data, "_load_tokenizer", lambda model: Tokenizer())
    assert data.main(["kk", "--out", str(tmp_path / "kk"), *SMALL, "--chat-template", "m"]) == 0
    record = lines(tmp_path / "kk" / "train.jsonl")[0]
    assert record["input"].startswith("system|")
    assert record["input"].endswith(f"|user|{record['quiz']}\n<bot><think>")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "one of --generate"),
        (["--generate", "people=1-3"], "people=1-3: expected numbers from 2 to 12"),
        (["--generate", "people=3-2"], "people=3-2: expected"),
        (["--generate", "people="], "people=: expected"),
        (["--generate", "people=2,x"], "people=2,x: expected"),
        (["--generate", "people=-3"], "people=-3: expected"),
        (["--generate", "people=3-"], "people=3-: expected"),
        (["--generate", "people=13"], "people=13: expected"),
        (["--generate", "persons=3"], "persons=3: expected KEY=VALUE"),
        (["--generate", "seed=1", "seed=2"], "seed=2: expected KEY=VALUE, each key once"),
        (["--generate", "people"], "people: expected KEY=VALUE"),
        (["--generate", "per_size=many"], "per_size=many: expected a whole number"),
        (["--generate", "per_size=-1"], "must not be negative"),
        (["--generate", "per_size=0", "test_per_size=0"], "nothing to write"),
        (["--generate", "people=2"], "only 84 of 900 puzzles of 2 people"),
        (["--generate", "distinct=x"], "distinct must be"),
        (["--generate", "--seed", "3"], "--seed does not go with --source puzzles"),
        (["--generate", "--parquet", "x.parquet"], "--generate belongs to --source puzzles"),
        (["--parquet", "absent.parquet"], "absent.parquet: no such file"),
        (["--generate", "people=3", "--colour", "red"], "unrecognized arguments"),
        (["--generate", "people=3", "--seed", "x"], "--seed: x: expected a whole number, 0"),
    ],
)
def test_bad_requests(tmp_path, capsys, args, complaint):
    assert complaint in refused(capsys, "--out", tmp_path / "kk", *args)
    assert list(tmp_path.iterdir()) == []


def test_bad_data_leaves_nothing(tmp_path, files, capsys):
    out = tmp_path / "kk"
    row = logic_rl_row(generate(3, 1, seed=0)[0])
    bad = tmp_path / "source" / "bad.parquet"

    write_parquet(bad, [row, {**row, "statements": "(('lying', 1), ('lying', 2), ('lying', 0))"}])
    line = refused(capsys, "--out", out, "--parquet", bad)
    assert f"{bad}: row 2: statements: " in line
    write_parquet(bad, [{k: v for k, v in row.items() if k != "solution"}])
    assert "column 'solution' is missing" in refused(capsys, "--out", out, "--parquet", bad)

    both = ("--out", out, "--parquet", files["train"], "--test-parquet", files["train"])
    assert "48 of 48 test puzzles are also in train" in refused(capsys, *both)
    fraction = ("--out", out, "--parquet", files["train"], "--test-fraction", "1.5")
    assert "1.5: expected at least 0 and below 1" in refused(capsys, *fraction)
    assert "exclude each other" in refused(
        capsys, "--out", out, "--parquet", files["train"], "--test-parquet", files["test"],
        "--seed", "1",
    )  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_out_may_not_be_a_file(tmp_path, capsys):
    out = tmp_path / "kk"
    out.write_text("")
    assert "is a file, expected a folder" in refused(capsys, "--out", out, *SMALL)


def test_a_failure_while_writing_leaves_the_old_files(tmp_path, capsys, monkeypatch):
    out = tmp_path / "kk"
    data.main(["kk", "--out", str(out), *SMALL])
    before = contents(out)

    def full_disk(path, records):
        path.write_text("half a l")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dataset_writer, "_write_jsonl", full_disk)
    assert "No space left" in refused(capsys, "--out", out, *SMALL, "seed=1")
    assert "No space left" in refused(capsys, "--out", tmp_path / "other", *SMALL)
    assert contents(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["kk"]


def test_as_a_module_in_a_process_of_its_own(tmp_path):
    def run(*args):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "sg_rlhf", "data", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    shown = run("kk", "--help")
    assert shown.returncode == 0
    for text in ("examples:", "--generate people=3-7", "--source train.parquet", "distinct"):
        assert text in shown.stdout
    failed = run("kk", "--out", str(tmp_path / "kk"), "--parquet", "absent.parquet")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == (
        "sg-rlhf data: absent.parquet: no such file, "
        "expected a Logic-RL parquet or K&K jsonl file, one of the sources puzzles, "
        "or hub:OWNER/NAME:FILE\n"
    )
