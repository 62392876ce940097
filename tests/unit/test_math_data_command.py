"""`sg-rlhf data math`: what it writes; bad input is one line, status 2 and no files."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from sg_rlhf.data import command as data
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.pinned_download import Origin, download_url
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.math.data import golds_of
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.math.sets import published
from tests.http_server import serving
from tests.unit.data_command import contents, lines, refusal
from tests.unit.tasks.math.fixtures import orz_row, reference_row, write_json, write_jsonl
from tests.unit.tasks.math.fixtures import write_parquet as parquet

refused = partial(refusal, "math")
LONG = "A very long problem of exactly twenty words in all that asks for the sum of some numbers "
ARITHMETIC = ["--source", "arithmetic", "--generate", "count=30", "test_count=6"]


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text(encoding="utf-8"))


def make(out, *args):
    assert data.main(["math", "--out", str(out), *map(str, args)]) == 0
    return manifest_of(out)


@pytest.fixture
def train_file(tmp_path):
    """Twelve rows, ten problems: one repeated, one repeated with another gold, one unanswered."""
    rows = [
        reference_row(f"Find $x_{i}$ in the drawing.", f"\\frac{{{i}}}{{7}}", i) for i in range(8)
    ]
    rows += [
        rows[0],
        reference_row("find  $x_1$ in the drawing", "12", 1),
        reference_row("No answer?", " ", 8),
        reference_row(LONG + "(a)", "3", 9),
    ]
    (tmp_path / "source").mkdir()
    return parquet(tmp_path / "source" / "train.parquet", rows)


@pytest.fixture
def eval_dir(tmp_path, monkeypatch):
    """Small evaluation sets under the real names, pinned to these files."""
    folder = tmp_path / "source" / "eval"
    folder.mkdir(parents=True)
    problems = {
        "aime": ["FIND $x_2$ in the drawing", "Another one, not in train."],
        "amc": [LONG + "(b)", "Short."],
    }
    pinned = {}
    for name, eval_set in published.EVAL_SETS.items():
        texts = problems.get(name, [f"Only in {name}."])
        rows = [reference_row(text, float(i), i, f"{name}_dsr") for i, text in enumerate(texts)]
        path = parquet(folder / eval_set.file, rows)
        origin = replace(eval_set.origin, sha256=sha256_of(path))
        pinned[name] = replace(eval_set, rows=len(rows), origin=origin)
    monkeypatch.setattr(published, "EVAL_SETS", pinned)
    monkeypatch.setattr(published, "MORE_EVAL_SETS", {})
    return folder


def test_a_reference_file_becomes_jsonl_with_a_report(tmp_path, train_file, capsys):
    out = tmp_path / "new" / "math"
    manifest = make(out, "--source", train_file)
    assert sorted(p.name for p in out.iterdir()) == ["manifest.json", "test.jsonl", "train.jsonl"]
    assert [p.name for p in out.parent.iterdir()] == ["math"]
    train = lines(out / "train.jsonl")
    assert train[0] == {
        "input": prompt_of("Find $x_0$ in the drawing."),
        "answer": '["\\\\frac{0}{7}"]',
        "datasource": "deepscaler",
        "id": "deepscaler-0",
        "problem": "Find $x_0$ in the drawing.",
    }
    assert [golds_of(record["answer"]) for record in train][-2:] == [("12",), ("3",)]
    assert manifest["counts"] == {
        "read": 12,
        "without_answer_dropped": 1,
        "ungradable_dropped": 0,
        "overlap_dropped": 0,
        "duplicates_dropped": 0,
        "train": 11,
        "test": 0,
    }
    duplicates = manifest["duplicates"]
    assert (duplicates["different_texts"], duplicates["different_problems"]) == (10, 9)
    assert duplicates["problems_with_different_golds"] == 1
    assert duplicates["examples"] == [
        [{"id": "deepscaler-1", "golds": ["\\frac{1}{7}"]}, {"id": "deepscaler-1", "golds": ["12"]}]
    ]
    digest = hashlib.sha256(train_file.read_bytes()).hexdigest()
    assert manifest["source"] == {
        "kind": "files",
        "train": [{"name": "train.parquet", "sha256": digest}],
    }
    assert manifest["overlap"] == {}
    assert str(tmp_path) not in json.dumps(manifest)
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == sha256_of(out / name)
        assert entry["rows"] == len(lines(out / name))
    report = capsys.readouterr().out
    for text in ("read", "9  (by normalised text; 10 different", "not looked for"):
        assert text in report
    assert f"data.prompt_dataset={out / 'train.jsonl'}" in report


def test_every_shape_gives_the_same_fields(tmp_path):
    sources = {
        "orz.json": write_json(tmp_path / "orz.json", [orz_row("P?", "1")]),
        "deep.jsonl": write_jsonl(tmp_path / "deep.jsonl", [{"problem": "P?", "answer": "1"}]),
    }
    records = []
    for name, path in sources.items():
        make(tmp_path / f"out_{name}", "--source", path)
        records += lines(tmp_path / f"out_{name}" / "train.jsonl")
    make(tmp_path / "again", "--source", tmp_path / "out_orz.json" / "train.jsonl")
    assert lines(tmp_path / "again" / "train.jsonl") == records[:1]
    assert [(r["id"], r["datasource"], r["answer"]) for r in records] == [
        ("orz-1", "orz", '["1"]'),
        ("deep-1", "deep", '["1"]'),
    ]


def test_golds_that_nobody_could_match_are_dropped_and_listed(tmp_path, capsys):
    golds = ["1", "{2", "two\n\nparagraphs", "\\frac{1}{2}", "{2"]
    rows = [reference_row(f"P{i}", gold, i) for i, gold in enumerate(golds)]
    manifest = make(tmp_path / "math", "--source", write_jsonl(tmp_path / "x.jsonl", rows))
    assert manifest["counts"]["ungradable_dropped"] == 3
    assert [entry["golds"] for entry in manifest["ungradable"]] == [["{2"], ["two\n\nparagraphs"]]
    ids = [record["id"] for record in lines(tmp_path / "math" / "train.jsonl")]
    assert ids == ["deepscaler-0", "deepscaler-3"]
    assert "ungradable dropped" in capsys.readouterr().out


def test_dedup_and_a_seeded_split(tmp_path, train_file):
    args = ("--source", train_file, "--dedup", "--test-fraction", "0.3")
    manifest = make(tmp_path / "one", *args)
    assert manifest["counts"]["duplicates_dropped"] == 2
    assert (manifest["counts"]["train"], manifest["counts"]["test"]) == (6, 3)
    train, test = (lines(tmp_path / "one" / f"{part}.jsonl") for part in ("train", "test"))
    assert not {r["problem"] for r in train} & {r["problem"] for r in test}
    make(tmp_path / "two", *args, "--seed", "1")
    assert contents(tmp_path / "one")["test.jsonl"] != contents(tmp_path / "two")["test.jsonl"]


def test_overlap_is_reported_and_dropped_on_request(tmp_path, train_file, eval_dir, capsys):
    out = tmp_path / "math"
    args = ("--source", train_file, "--eval-dir", eval_dir)
    manifest = make(out, *args)
    aime, amc = manifest["overlap"]["aime"], manifest["overlap"]["amc"]
    assert (aime["problems"], aime["exact"], aime["mostly"], aime["some"]) == (2, 1, 0, 0)
    assert (amc["exact"], amc["mostly"], amc["too_short_for_ngrams"]) == (0, 1, 1)
    assert aime["examples"][0]["test_id"] == "aime-0"
    assert aime["examples"][0]["train"] == "Find $x_2$ in the drawing."
    assert manifest["overlap"]["minerva"]["examples"] == []
    assert manifest["counts"]["train"] == 11
    assert manifest["eval_sets"]["aime"] == sha256_of(eval_dir / "aime_eval.parquet")
    assert "aime-0 ~ deepscaler-2 1.00: FIND $x_2$ in the drawing" in capsys.readouterr().out
    # Evaluation sets come as JSONL too, their source by our names.
    amc_records = lines(out / "amc.jsonl")
    assert [(r["datasource"], r["id"], r["answer"]) for r in amc_records] == [
        ("amc", "amc-0", '["0"]'),
        ("amc", "amc-1", '["1"]'),
    ]
    for level, left in ((["exact"], 10), ([], 9), (["mostly"], 9), (["any"], 9)):
        counts = make(out, *args, "--drop-overlap", *level)["counts"]
        assert (counts["train"], counts["overlap_dropped"]) == (left, 11 - left)
    assert "Find $x_2$" not in (out / "train.jsonl").read_text()


def test_generated_arithmetic(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    for out in (one, two):
        manifest = make(out, *ARITHMETIC)
    assert contents(one) == contents(two)
    train, test = lines(one / "train.jsonl"), lines(one / "test.jsonl")
    assert (len(train), len(test)) == (30, 6)
    assert not {r["problem"] for r in train} & {r["problem"] for r in test}
    for record in train + test:
        assert record["input"] == prompt_of(record["problem"])
        assert record["datasource"] == "arithmetic"
        (gold,) = golds_of(record["answer"])
        assert str(int(gold)) == gold
    assert manifest["source"] == {
        "kind": "generated",
        "name": "arithmetic",
        "count": 30,
        "test_count": 6,
        "seed": 0,
        "max_operands": 3,
        "max_digits": 2,
    }
    assert "grpo_sg_tiny_cpu.yaml" in capsys.readouterr().out
    before = (one / "train.jsonl").stat().st_mtime_ns
    make(one, *ARITHMETIC)
    assert "up to date" in capsys.readouterr().out
    assert (one / "train.jsonl").stat().st_mtime_ns == before
    make(one, *ARITHMETIC, "seed=1")
    assert lines(one / "train.jsonl") != train


def test_loads_through_the_loader_that_upstream_uses(tmp_path, train_file, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    make(tmp_path / "math", "--source", train_file)
    path = tmp_path / "math" / "train.jsonl"
    loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].to_list() == lines(path)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "--source"),
        (
            ["--source", "gone.parquet"],
            "gone.parquet: no such file, expected a .parquet, .json, .jsonl or .csv file",
        ),
        (["--source", "arithmetic", "--generate", "n=3"], "n=3: expected KEY=VALUE"),
        (["--source", "arithmetic", "--generate", "seed=1", "seed=2"], "each key once"),
        (["--source", "arithmetic", "--generate", "count=x"], "expected a whole number"),
        (["--source", "arithmetic", "--generate", "count=-1"], "count must not be negative"),
        (["--source", "arithmetic", "--generate", "count=0"], "no training row is left"),
        (["--source", "arithmetic", "--generate", "max_digits=9"], "max_digits must be"),
        (["--source", "arithmetic", "--test-fraction", "0.1"], "the keys count, test_count"),
        (["--source", "dsr_uniform", "--generate"], "--generate belongs to --source arithmetic"),
        (["--source", "dsr_uniform", "--revision", "x"], "--revision belongs to --source hub:"),
        (["--source", "hub:a/b:c.json"], "needs --revision COMMIT, 40 hex digits"),
        (["--source", "hub:a/b:c.json", "--revision", "main"], "--revision main: expected the 40"),
        (["--source", "hub:a"], "hub:a: expected hub:OWNER/NAME:FILE"),
        (["--source", "arithmetic", "--drop-overlap"], "--drop-overlap needs --eval-dir"),
        (["--source", "arithmetic", "--download-eval"], "--download-eval needs --eval-dir"),
        (["--source", "arithmetic", "--ngram", "0"], "--ngram: 0: expected a whole number, 1"),
        (["--source", "arithmetic", "--seed", "1"], "--seed does not go with --source arithmetic"),
        (["--source", "arithmetic", "--eval-dir", "gone"], "aime_eval.parquet: no such file"),
        (["--source", "arithmetic", "--colour", "red"], "unrecognized arguments"),
    ],
)
def test_bad_requests(tmp_path, capsys, args, complaint):
    assert complaint in refused(capsys, "--out", tmp_path / "math", *args)
    assert list(tmp_path.iterdir()) == []


def test_bad_data_leaves_nothing(tmp_path, train_file, eval_dir, capsys):
    out = tmp_path / "math"
    bad = tmp_path / "source" / "bad.jsonl"
    write_jsonl(bad, [reference_row("P", "1"), reference_row("P", True)])
    line = refused(capsys, "--out", out, "--source", bad)
    assert line == (
        f"sg-rlhf data: {bad}: row 2: reward_model.ground_truth: True, "
        "expected text, a finite number or a list\n"
    )
    write_jsonl(bad, [reference_row("P", "")])
    assert "no training row is left of 1" in refused(capsys, "--out", out, "--source", bad)
    fraction = ("--out", out, "--source", train_file, "--test-fraction", "1.5")
    assert "1.5: expected at least 0 and below 1" in refused(capsys, *fraction)
    parquet(eval_dir / "amc_eval.parquet", [reference_row("P", 1.0)])
    line = refused(capsys, "--out", out, "--source", train_file, "--eval-dir", eval_dir)
    assert "amc_eval.parquet: SHA-256" in line
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_files_of_others_are_kept_unless_forced(tmp_path, capsys):
    out = tmp_path / "math"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "not made by this command" in refused(capsys, "--out", out, *ARITHMETIC)
    assert contents(out) == {"notes.txt": b"mine"}
    make(out, *ARITHMETIC, "--force")
    assert (out / "notes.txt").read_text() == "mine"


@pytest.fixture
def server(tmp_path):
    """A web server on this machine's loopback, serving the returned folder; and its address."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            pass

    with serving(Quiet) as url:
        yield folder, url


def test_a_published_file_is_downloaded_and_checked(
    tmp_path, server, train_file, monkeypatch, capsys
):
    folder, address = server
    monkeypatch.setattr(Origin, "url", property(lambda self: f"{address}/{self.path}"))
    (folder / "train.parquet").write_bytes(train_file.read_bytes())
    good = Origin("a/b", "c" * 40, "train.parquet", sha256=sha256_of(train_file))
    monkeypatch.setattr(published, "ORIGINS", {"dsr_uniform": good})
    manifest = make(tmp_path / "math", "--source", "dsr_uniform")
    assert manifest["counts"]["read"] == 12
    assert manifest["source"]["sha256"] == good.sha256
    before = contents(tmp_path / "math")

    for origin, complaint in (
        (replace(good, sha256="0" * 64), f"SHA-256 {good.sha256}, expected {'0' * 64}"),
        (replace(good, path="gone"), "cannot download: HTTP Error 404"),
    ):
        monkeypatch.setattr(published, "ORIGINS", {"dsr_uniform": origin})
        line = refused(capsys, "--out", tmp_path / "math", "--source", "dsr_uniform")
        assert complaint in line
    assert contents(tmp_path / "math") == before


def test_missing_evaluation_sets_are_downloaded(tmp_path, server, eval_dir, monkeypatch, capsys):
    folder, address = server
    monkeypatch.setattr(Origin, "url", property(lambda self: f"{address}/{self.path}"))
    (folder / "data" / "deepscaler").mkdir(parents=True)
    for eval_set in published.EVAL_SETS.values():
        (eval_dir / eval_set.file).rename(folder / eval_set.origin.path)
    out = tmp_path / "math"
    assert "no such file" in refused(capsys, "--out", out, *ARITHMETIC, "--eval-dir", eval_dir)
    make(out, *ARITHMETIC, "--eval-dir", eval_dir, "--download-eval")
    assert sorted(p.name for p in eval_dir.iterdir()) == sorted(
        eval_set.file for eval_set in published.EVAL_SETS.values()
    )


def test_a_refused_connection_is_one_line(tmp_path, server):
    _, address = server
    saved = f"cannot download: .*; get the file by hand and save it as {tmp_path / 'x'}$"
    with pytest.raises(DataError, match=saved):
        download_url("http://127.0.0.1:1/x", tmp_path / "x", lambda path: None)
    with pytest.raises(DataError, match="HTTP Error 404"):
        download_url(f"{address}/x", tmp_path / "x", lambda path: None)
    assert [p.name for p in tmp_path.iterdir()] == ["served"]


def test_a_published_set_that_cannot_be_downloaded_names_the_option(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Origin, "url", "http://127.0.0.1:1/x")
    line = refused(capsys, "--out", tmp_path / "out", "--source", "dsr_uniform")
    assert line.rstrip().endswith("get the file by hand and give it as --source FILE")


def in_a_process(*args, **environment):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-m", "sg_rlhf", "data", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_file_from_the_hub_at_a_commit(tmp_path):
    """Through the real client, against a server that answers as the hub's `resolve` does."""
    commit, seen = "d" * 40, []
    body = json.dumps([{"problem": "P?", "answer": "1"}]).encode()

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            seen.append(self.path)
            found = self.path == f"/datasets/own/set/resolve/{commit}/deep.json"
            self.send_response(200 if found else 404)
            if found:
                for key, value in {"X-Repo-Commit": commit, "ETag": f'"{"e" * 40}"'}.items():
                    self.send_header(key, value)
            else:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(body) if found else 0))
            self.end_headers()
            return found

        def do_GET(self):
            if self.do_HEAD():
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    with serving(Hub) as url:

        def run(file):
            out = tmp_path / file
            source = ["--source", f"hub:own/set:{file}", "--revision", commit]
            return in_a_process(
                *["math", "--out", str(out), *source],
                HF_ENDPOINT=url,
                HF_HOME=str(tmp_path / "home"),
                HF_HUB_OFFLINE="0",
            )

        made, failed = run("deep.json"), run("gone.json")
    assert made.returncode == 0, made.stderr
    assert [(r["id"], r["datasource"]) for r in lines(tmp_path / "deep.json" / "train.jsonl")] == [
        ("set-1", "set")
    ]
    assert manifest_of(tmp_path / "deep.json")["source"] == {
        "kind": "hub",
        "repository": "own/set",
        "file": "deep.json",
        "revision": commit,
    }
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"sg-rlhf data: hub:own/set:gone.json at {commit}: ")
    assert failed.stderr.count("\n") == 1
    asked = [path for path in seen if "/set/" in path]
    assert asked and all(f"/resolve/{commit}/" in path for path in asked)


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    source = ["--source", "hub:own/set:deep.json", "--revision", "d" * 40]
    run = in_a_process(
        *["math", "--out", str(tmp_path / "out"), *source],
        HF_ENDPOINT="http://127.0.0.1:1",
        HF_HOME=str(tmp_path / "home"),
        HF_HUB_OFFLINE="0",
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"sg-rlhf data: hub:own/set:deep.json at {'d' * 40}: ")
    assert line.endswith("get the file by hand and give its path as --source")


def test_as_a_module_in_a_process_of_its_own(tmp_path):
    run = in_a_process
    shown = run("math", "--help")
    assert shown.returncode == 0
    for text in ("examples:", "dsr_uniform", "--revision COMMIT", "max_operands", "at least half"):
        assert text in shown.stdout
    failed = run("math", "--out", str(tmp_path / "math"), "--source", "gone.json")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("sg-rlhf data: gone.json: no such file, expected")
    assert failed.stderr.count("\n") == 1


def test_other_sets_are_compared_where_their_files_are(
    tmp_path, server, eval_dir, monkeypatch, capsys
):
    folder, address = server
    monkeypatch.setattr(Origin, "url", property(lambda self: f"{address}/{self.path}"))
    path = write_jsonl(folder / "amc23.jsonl", [{"problem": LONG + "(a)", "answer": 3.0}])
    origin = Origin("a/b", "c" * 40, "amc23.jsonl", sha256=sha256_of(path))
    more = published.EvalSet("amc23", "amc23.jsonl", 1, origin, "AMC 2023, the 40")
    monkeypatch.setattr(published, "MORE_EVAL_SETS", {"amc23": more})
    arguments = (*ARITHMETIC, "--eval-dir", eval_dir)
    without = make(tmp_path / "without", *arguments, "--download-eval")
    assert "amc23" not in without["eval_sets"] and not (eval_dir / "amc23.jsonl").exists()
    fetched = make(tmp_path / "fetched", *arguments, "--download-eval", "all")
    assert fetched["eval_sets"]["amc23"] == origin.sha256
    assert fetched["overlap"]["amc23"]["problems"] == 1
    there = make(tmp_path / "there", *arguments)
    assert there["eval_sets"] == fetched["eval_sets"]
    assert (tmp_path / "there" / "amc23.jsonl").is_file()


def test_rows_of_a_test_file_are_checked_as_rows_to_train_on(tmp_path, train_file, capsys):
    rows = [
        reference_row("Find  $x_3$ in the drawing", "\\frac{3}{7}", 0),  # in the training rows too
        reference_row("No answer?", " ", 1),
        reference_row("Who?", "{2", 2),  # refused even as its own answer
        reference_row("What is 2 + 2?", "4", 3),
    ]
    test_file = parquet(tmp_path / "source" / "test.parquet", rows)
    found = make(tmp_path / "out", "--source", train_file, "--test-file", test_file)
    assert found["counts"] == {
        **{name: found["counts"][name] for name in list(found["counts"])[:7]},
        "test": 2,
        "test_without_answer_dropped": 1,
        "test_ungradable_dropped": 1,
        "test_problems_in_train": 1,
    }
    written = lines(tmp_path / "out" / "test.jsonl")
    assert [golds_of(row["answer"]) for row in written] == [("\\frac{3}{7}",), ("4",)]
    assert "test problems in train                               1" in capsys.readouterr().out
