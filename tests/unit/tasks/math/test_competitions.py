"""Sets of a file for each problem: downloaded whole, or not at all."""

import hashlib
import http.server
from functools import partial

import pytest

from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks.math.data import read_rows
from sg_rlhf.tasks.math.sets.competitions import Competitions
from tests.http_server import serving

MADE = (
    '{"problem": "Find $x$.", "answer": "7"}\n'
    '{"problem": "Find $\\\\alpha$,\\nwhich is ü.", "answer": "1, 2"}\n'
    '{"problem": "P1", "answer": "3"}\n'
)
SET = Competitions(
    "a/b", "c" * 40, ("data/x", "data/y"), "x.jsonl", hashlib.sha256(MADE.encode()).hexdigest()
)


@pytest.fixture
def served(tmp_path, monkeypatch):
    folder = tmp_path / "served"
    for place, answers, problems in (
        (
            "data/x",
            'id,answer\n1,7\n2,"1, 2"',
            {"1": "Find $x$.\n", "2": "Find $\\alpha$,\nwhich is ü."},
        ),
        ("data/y", "id,answer\n1,3", {"1": " P1 "}),
    ):
        (folder / place / "problems").mkdir(parents=True)
        (folder / place / "answers.csv").write_text(answers)
        for name, text in problems.items():
            (folder / place / "problems" / f"{name}.tex").write_text(text)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *a: None)
    with serving(handler) as address:
        monkeypatch.setattr(Competitions, "url_of", lambda self, file: f"{address}/{file}")
        yield folder


def test_the_file_is_made_of_the_folders_in_their_order(served, tmp_path):
    path = SET.download(tmp_path / "out", "x.jsonl")
    assert path.read_text(encoding="utf-8") == MADE
    SET.check(path)
    rows = read_rows(path)
    assert [(row.id, row.golds) for row in rows] == [
        ("x-1", ("7",)), ("x-2", ("1, 2",)), ("x-3", ("3",)),
    ]  # fmt: skip
    assert [p.name for p in path.parent.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("fault", ["another text", "a missing problem", "no answers"])
def test_a_fault_leaves_nothing(served, tmp_path, fault):
    if fault == "another text":
        (served / "data/x/problems/1.tex").write_text("Find $y$.")
    elif fault == "a missing problem":
        (served / "data/x/problems/2.tex").unlink()
    else:
        (served / "data/y/answers.csv").unlink()
    expected = "expected" if fault == "another text" else "cannot download"
    with pytest.raises(DataError, match=expected):
        SET.download(tmp_path / "out", "x.jsonl")
    assert list((tmp_path / "out").iterdir()) == []


def test_another_file_is_named_with_both_checksums(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("{}")
    with pytest.raises(DataError) as error:
        SET.check(path)
    assert SET.sha256 in str(error.value) and SET.url in str(error.value)
