"""`eval.run --grader`: a whole run whose responses a server gives, scored by a file of others."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
from dataclasses import replace

import pytest

from sg_rlhf.data_io.pinned_download import Origin
from sg_rlhf.eval.run import main
from sg_rlhf.eval.suites import SUITES
from sg_rlhf.tasks.math import reference_graders
from sg_rlhf.tasks.math.grading import grade_many
from sg_rlhf.tasks.math.reference_graders import GRADERS
from sg_rlhf.tasks.math.suite import MathSuite
from sg_rlhf.tasks.questions import Question, generated_source
from sg_rlhf.tasks.suite import Benchmark, Sampling
from tests.http_server import serving

#: A rule of another project, as its file could be: equal as texts.
IS_EQUIV = "def is_equiv(answer, gold):\n    return answer.replace(' ', '') == gold\n"
# Prompt, what the server answers, gold; ours and the rule on it.
ANSWERS = [
    ("one half", r"So \boxed{0.5}.", r"\frac{1}{2}", True, False),
    ("a sum", r"So \boxed{x + 1}.", "x+1", True, True),
    ("another sum", r"So \boxed{x+2}.", "x+1", False, False),
    ("no box", "It is 5.", "5", False, False),
]


class Completions(http.server.BaseHTTPRequestHandler):
    """The two endpoints of an OpenAI-compatible server that an evaluation asks."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer({"data": [{"id": "served"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = next(answer for prompt, answer, *_ in ANSWERS if prompt == body["prompt"])
        self._answer({"choices": [{"text": text, "finish_reason": "stop"}]})

    def _answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def serve():
    """Starts a web server on the loopback; returns its address."""
    with contextlib.ExitStack() as running:
        yield lambda handler: running.enter_context(serving(handler))


@pytest.fixture
def rule(monkeypatch):
    """The rule `hendrycks`, pinned to the file above."""
    origin = replace(
        GRADERS["hendrycks"].files[0], sha256=hashlib.sha256(IS_EQUIV.encode()).hexdigest()
    )
    monkeypatch.setitem(GRADERS, "hendrycks", replace(GRADERS["hendrycks"], files=(origin,)))
    return origin


@pytest.fixture
def run(monkeypatch, serve, tmp_path):
    """Runs the evaluation with more options; returns status and folder."""

    def questions(folder):
        found = [Question(prompt, prompt, [gold]) for prompt, _, gold, *_ in ANSWERS]
        return found, [generated_source("here", found)]

    settings = Sampling(temperature=0.0, max_tokens=64)
    benchmark = Benchmark(
        "four", "four", "Four", len(ANSWERS), settings, questions, grade_many, "ours"
    )
    monkeypatch.setitem(SUITES, "math", MathSuite("math", "Four questions", (benchmark,)))
    server = ["--engine", "openai", "--base-url", f"{serve(Completions)}/v1"]
    out = tmp_path / "out"

    def start(*options):
        given = ["--suite", "math", "--model", "served", "--out", str(out), *server]
        return main([*given, *map(str, options)]), out

    return start


def check(out):
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    found = {row["id"]: (row["correct"], row["graders"]["hendrycks"]) for row in rows}
    assert found == {prompt: (ours, theirs) for prompt, _, _, ours, theirs in ANSWERS}
    results = json.loads((out / "results.json").read_text())["benchmarks"]["four"]
    assert results["scores"]["accuracy"]["value"] == 0.5
    counts = {"accuracy": 0.25, "only_ours": 1, "only_theirs": 0, "no_verdict": 0}
    assert results["graders"]["hendrycks"] == counts
    table = (out / "table.md").read_text()
    assert "| four | hendrycks | 0.250 | 1 | 0 | 0 |" in table


def test_a_file_in_a_folder_scores_a_run(run, rule, tmp_path, capsys):
    path = tmp_path / "sources" / rule.repository / rule.path
    path.parent.mkdir(parents=True)
    path.write_text(IS_EQUIV)
    options = ("--grader", "hendrycks,math_verify", "--grader-sources", tmp_path / "sources")
    status, out = run(*options)
    assert status == 0, capsys.readouterr()
    check(out)
    request = json.loads((out / "run.json").read_text())["request"]
    assert request["graders"]["hendrycks"] == f"hendrycks/math@{rule.commit}"
    # Which rules score is part of what is resumed.
    assert run("--grader", "math_verify", "--resume")[0] == 2
    assert "graders" in capsys.readouterr().err
    path.write_text(IS_EQUIV + "\n")
    assert run(*options, "--resume")[0] == 2
    assert "SHA-256" in capsys.readouterr().err


def test_a_file_is_downloaded_once(run, rule, serve, tmp_path, monkeypatch, capsys):
    asked = []

    class Raw(Completions):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(IS_EQUIV)))
            self.end_headers()
            self.wfile.write(IS_EQUIV.encode())

    address = serve(Raw)
    monkeypatch.setattr(Origin, "url", property(lambda self: f"{address}/{self.path}"))
    monkeypatch.setattr(reference_graders, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("--grader", "hendrycks")[0] == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    status, out = run("--grader", "hendrycks")
    assert status == 0, capsys.readouterr()
    check(out)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run("--grader", "hendrycks", "--resume")[0] == 0
    assert asked == [f"/{rule.path}"]
    kept = tmp_path / "cache" / "graders" / rule.repository / rule.path
    assert kept.read_text() == IS_EQUIV
