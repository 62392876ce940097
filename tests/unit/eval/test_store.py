"""What a result is stored with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.eval.scores import results
from sg_rlhf.eval.store import Store, differences, read_run
from sg_rlhf.tasks.questions import EvalError

# -- The output folder: what a kill, a second process or another request may find there ----------


REQUEST = {"suite": "kk", "model": {"fingerprint": "a"}, "seed": 0}


def row(question="q", sample=0, **changes):
    return {
        "benchmark": "b",
        "id": question,
        "sample": sample,
        "group": "",
        "prompt": "p",
        "response": "r",
        "extracted": None,
        "gold": "g",
        "correct": False,
        "reason": "wrong",
        "finish_reason": "stop",
        "tokens": 1,
    } | changes


def begun(out, rows):
    with Store(out) as store:
        assert store.begin(REQUEST) == {}
        store.write_request(REQUEST, {"date": "d"})
        store.append(rows)
    return out


def resume(out, request=REQUEST):
    with Store(out, resume=True) as store:
        return store.begin(request)


def test_rows_come_back_once_each(tmp_path):
    rows = [row("a", 0), row("a", 1, response='tricky "text"\n\u2028 \ud800'), row("b", 0)]
    found = resume(begun(tmp_path / "out", rows))
    assert list(found) == [("b", "a", 0), ("b", "a", 1), ("b", "b", 0)]
    assert found["b", "a", 1]["response"] == 'tricky "text"\n\u2028 \ud800'


def test_every_way_to_cut_the_last_line_loses_that_line_alone(tmp_path):
    out = begun(tmp_path / "out", [row("a"), row("ü")])
    data = (out / "samples.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data)):
        (out / "samples.jsonl").write_bytes(data[:cut])
        assert list(resume(out)) == [("b", "a", 0)]
        assert (out / "samples.jsonl").read_bytes() == data[:first]
        with Store(out, resume=True) as store:
            store.append([row("ü")])
        assert (out / "samples.jsonl").read_bytes() == data


def test_a_line_damaged_in_the_middle_is_named(tmp_path):
    out = begun(tmp_path / "out", [row("a"), row("b"), row("c")])
    lines = (out / "samples.jsonl").read_text().splitlines()
    (out / "samples.jsonl").write_text("\n".join([lines[0], lines[1][:40], lines[2]]) + "\n")
    with pytest.raises(EvalError, match=r"samples.jsonl: line 2: no sample"):
        resume(out)


@pytest.mark.parametrize("line", ["{}", "[]", "7", json.dumps(row("b"))])
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
    out = begun(tmp_path / "out", [row("a")])
    with (out / "samples.jsonl").open("a") as file:
        file.write(line.replace("correct", "right") + "\n")
    for read in (resume, read_run):
        with pytest.raises(EvalError, match=r"samples.jsonl: line 2: no sample"):
            read(out)


def test_a_sample_that_is_there_twice_is_refused(tmp_path):
    out = begun(tmp_path / "out", [row("a"), row("a")])
    with pytest.raises(EvalError, match="line 2: sample .* twice"):
        resume(out)


def test_a_folder_that_is_not_empty_needs_resume(tmp_path):
    out = begun(tmp_path / "out", [row("a")])
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(EvalError, match="not empty .* --resume"):
        Store(out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_another_request_is_refused_with_the_difference(tmp_path):
    out = begun(tmp_path / "out", [row("a")])
    other = REQUEST | {"model": {"fingerprint": "b"}}
    with pytest.raises(EvalError, match=r'model.fingerprint: was "a", now "b"'):
        resume(out, other)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(EvalError, match=r"holds thesis.tex but no run.json"):
        resume(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(EvalError, match="is a file"):
        Store(tmp_path / "out")


def test_a_run_that_did_not_begin_is_no_run_to_resume(tmp_path):
    with pytest.raises(EvalError, match="no"), Store(tmp_path / "out"):
        raise EvalError("no")
    with Store(tmp_path / "out") as store:
        assert store.begin(REQUEST) == {}


def test_two_processes_cannot_write_into_one_folder(tmp_path):
    out = begun(tmp_path / "out", [row("a")])
    code = (
        "from sg_rlhf.eval.store import Store; from pathlib import Path; "
        f"Store(Path({str(out)!r}), True)"
    )
    with Store(out, resume=True):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another evaluation is writing there" in other.stderr
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_differences_name_every_key():
    before = {"a": 1, "b": {"c": [1, 2], "d": "x"}, "gone": 1}
    now = {"a": 1, "b": {"c": [1, 3], "d": "x"}, "new": 2}
    assert differences(before, now) == [
        "b.c: was [1, 2], now [1, 3]",
        "gone: was 1, now null",
        "new: was null, now 2",
    ]
    assert differences(before, json.loads(json.dumps(before))) == []


def test_a_title_that_was_worded_anew_is_no_other_request(tmp_path):
    before = {**REQUEST, "benchmarks": {"amc": {"title": "AMC", "n_questions": 83}}}
    with Store(tmp_path / "out") as store:
        store.begin(before)
        store.write_request(before, {"date": "d"})
    now = {**REQUEST, "benchmarks": {"amc": {"title": "AMC (83 problems)", "n_questions": 83}}}
    assert resume(tmp_path / "out", now) == {}
    now["benchmarks"]["amc"]["n_questions"] = 40
    with pytest.raises(EvalError, match="benchmarks.amc.n_questions: was 83, now 40"):
        resume(tmp_path / "out", now)


# -- The commit that a result names is this project's, never that of whoever installed it --------


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "theirs.py").write_text("1\n")
    git(tmp_path, "add", "theirs.py")
    git(tmp_path, "commit", "--quiet", "--message", "theirs")
    return tmp_path


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout: Path) -> None:
    installed = checkout / "venv" / "site-packages" / "eval" / "results.py"
    installed.parent.mkdir(parents=True)
    shutil.copy(results.__file__, installed)
    assert results._commit(installed) is None


def test_a_checkouts_own_file_has_its_commit_and_a_plus_where_it_changed(checkout: Path) -> None:
    file = checkout / "theirs.py"
    head = git(checkout, "rev-parse", "HEAD")
    assert results._commit(file) == head
    file.write_text("2\n")
    assert results._commit(file) == f"{head}+"
