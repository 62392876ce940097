"""`sg-rlhf serve-env`: OpenEnv's own client plays episodes on the server's real socket."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sg_rlhf.tasks.arithmetic.data import generate
from tests.integration.test_other_trainers import FOLDER, ROOT, pytestmark, run
from tests.unit.tasks.search.http_retriever import running

__all__ = ["pytestmark"]

SOLVED = "By cases. </think><answer> {answer} </answer>"


@contextmanager
def serving(
    domain: str, rows: Sequence[Mapping[str, Any]], folder: Path, *settings: str
) -> Iterator[str]:
    """The command's server on a free port; gives its address."""
    data, log = folder / "rows.jsonl", folder / "log"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["-m", "sg_rlhf.environments.command", domain, "--data", str(data), "--port", "0"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(FOLDER / "bin" / "python"), *command, *settings],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        while not (found := re.search(r"running on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def play(url: str, episodes: list[list[str]]) -> list[dict[str, Any]]:
    return run("tests/integration/openenv_client.py", url, json.dumps(episodes))


def test_knights_and_knaves(tmp_path: Path) -> None:
    answer = "(1) Zoey is a knight\n(2) Oliver is a knave"
    rows = [{"input": f"Puzzle {n}.", "answer": answer, "datasource": "kk_2ppl"} for n in (1, 2)]
    wrong = answer.replace("knave", "knight")
    with serving("kk", rows, tmp_path) as url:
        right, other = play(url, [[SOLVED.format(answer=a)] for a in (answer, wrong)])
    assert right["texts"] == ["Puzzle 1.", ""] and right["done"] and right["steps"] == 1
    assert right["reward"] == 3.0 and right["metadata"]["correct"] is True
    assert other["texts"][0] == "Puzzle 2." and other["metadata"]["correct"] is False
    assert other["reward"] < 0


def test_rows_of_messages(tmp_path: Path) -> None:
    """As `sg-rlhf data arithmetic` writes them."""
    rows, _, _ = generate(2, 0, 0, first=49, second=9, shown=2, form="equation")
    turns = [f"It is {row['answer']}." for row in rows[:1]] + ["I do not know."]
    with serving("arithmetic", rows, tmp_path) as url:
        right, wrong = play(url, [[turn] for turn in turns])
    assert right["messages"] == rows[0]["input"] and len(right["messages"]) == 5
    assert right["texts"] == [rows[0]["input"][-1]["content"], ""]
    assert (right["reward"], wrong["reward"]) == (1.0, 0.0)
    assert wrong["metadata"]["reason"] == "no_number"


def test_search_has_several_turns(tmp_path: Path) -> None:
    rows = [{"input": "Question: Who?\n", "answer": json.dumps(["Ada"])}]
    turns = ["<search> Ada </search>", "Hm.", "<answer> Ada </answer>"]
    with (
        running() as retriever,
        serving("search", rows, tmp_path, "--set", f"url={retriever.url}") as url,
    ):
        (episode,) = play(url, [turns])
    assert 'Doc 1(Title: "About Ada")' in episode["texts"][1]
    assert episode["texts"][2].startswith("\nMy previous action is invalid.")
    assert (episode["reward"], episode["done"], episode["steps"]) == (1.0, True, 3)
    assert episode["metadata"]["f1"] == 1.0
