"""`--suite NAME` alone: the newest finished run, a dated folder, one line for what is missing."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from sg_rlhf.eval import training_runs
from sg_rlhf.eval.model import find_model
from sg_rlhf.eval.run import main
from sg_rlhf.overlay.fork_server.client import ForkServer
from tests.unit.tasks.search.http_retriever import running

ROOT = Path(__file__).parents[3]
TINY = ROOT / "sg_rlhf" / "tiny"
SETTINGS = {
    "kk": {"reward": {"remote_url": "domain:kk/strict"}},
    "math": {"reward": {"remote_url": "/somewhere/sg_rlhf/tasks/math/reward.py"}},
    "search": {
        "train": {"agent_func_path": "domain:search"},
        "sg": {"search": {"url": "http://127.0.0.1:9/retrieve"}},
    },
}
DOMAINS = {"kk": "kk", "math": "math", "qa": "search"}


def finished(folder: Path, domain: str, second: int = 0, **settings) -> Path:
    """A run directory as training leaves it; its name says nothing of what it trained on."""
    (folder / "checkpoints").mkdir(parents=True)
    config = {**SETTINGS[domain], "actor": {"model_name_or_path": "m"}, "data": {}, **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    final = folder / "checkpoints" / "final"
    shutil.copytree(TINY / f"{domain}_tiny", final, ignore=shutil.ignore_patterns("*.py"))
    os.utime(final / "config.json", (second, second))
    return final


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """An interpreter that starts with the imports of a tokenizer made."""
    server = ForkServer(("torch", "transformers.models.auto.tokenization_auto"))
    yield server.python
    server.close()


@pytest.fixture
def evaluate(python: Path) -> Callable[..., tuple[list[str], str]]:
    """Runs the command as a user does, but for the engine; its lines, and its error."""

    def evaluate(folder: Path, *arguments: str, status: int) -> tuple[list[str], str]:
        # The cache is empty, and nothing is downloaded.
        cache = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder.parent / "cache")}
        ran = subprocess.run(
            [python, "-m", "tests.unit.eval.without_engine", *arguments],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **cache},
            capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == status, ran.stdout + ran.stderr
        return ran.stdout.splitlines(), ran.stderr

    return evaluate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.mark.parametrize("suite", DOMAINS)
def test_in_an_empty_folder_one_line_names_all_that_is_missing(
    evaluate, suite: str, folder: Path
) -> None:
    # Port 9 is closed: on the default port somebody may serve.
    options = ("--retriever", "http://127.0.0.1:9") if suite == "qa" else ()
    said, error = evaluate(folder, "--suite", suite, *options, status=2)
    assert not said and error.count("\n") == 1
    assert error.startswith(f"error: --suite {suite}: missing: (1) a model: no finished run of ")
    assert f"sg-rlhf run {DOMAINS[suite]}`" in error
    assert "; (2) questions: " in error and "--data-dir" in error
    assert not list(folder.iterdir())


@pytest.mark.parametrize("suite", DOMAINS)
def test_after_a_run_only_the_questions_are_missing(evaluate, suite: str, folder: Path) -> None:
    finished(folder / "runs" / "mine", DOMAINS[suite])
    options = ("--no-search",) if suite == "qa" else ()
    _, error = evaluate(folder, "--suite", suite, *options, status=2)
    assert error.count("\n") == 1 and "a model" not in error
    needed = {"kk": "test_3to7ppl.parquet", "math": "olympiad_bench_eval.parquet", "qa": "data/qa"}
    assert needed[suite] in error
    assert [path.name for path in folder.iterdir()] == ["runs"]


def test_the_search_engine_of_the_run_is_asked_and_missing_with_the_rest(evaluate, folder):
    finished(folder / "runs" / "mine", "search")
    _, error = evaluate(folder, "--suite", "qa", status=2)
    assert "missing: (1) questions: no data/qa here; get them with `hf download " in error
    assert "(2) a search engine: retriever http://127.0.0.1:9/retrieve: no connection" in error
    # A slow machine also says what it waits for.
    assert "sg-rlhf serve" in error and error.count("error: ") == 1


def test_knights_as_typed_after_a_run(evaluate, folder: Path, puzzle_folder: Path) -> None:
    older = finished(folder / "runs" / "older", "kk", second=1)
    finished(folder / "runs" / "study" / "newer", "kk", second=2)
    finished(folder / "runs" / "other", "math", second=3)
    (older / "model.safetensors").unlink()  # had it been chosen, nothing would work
    small = ("--data-dir", str(puzzle_folder), "--only", "paper_greedy", "--limit", "1")
    said, _ = evaluate(folder, "--suite", "kk", *small, status=0)
    chosen = re.fullmatch(
        r"--model runs/study/newer/checkpoints/final, the newest finished run of kk under runs/; "
        r"--out (out/kk_\d{4}-\d\d-\d\d_\d{6})",
        said[0],
    )
    assert chosen is not None, said
    results = json.loads((folder / chosen[1] / "results.json").read_text())
    assert results["model"]["name"] == "runs/study/newer/checkpoints/final"
    # The folder says which model goes on, though another run has finished since.
    finished(folder / "runs" / "newest", "kk", second=4)
    resume = ("--resume", "--out", chosen[1])
    said, _ = evaluate(folder, "--suite", "kk", *small, *resume, status=0)
    assert said[0] == "--model runs/study/newer/checkpoints/final"


def test_search_as_typed_after_a_run(evaluate, folder: Path) -> None:
    question = {"id": "q", "question": "Who?", "golden_answers": ["a"]}
    (folder / "data" / "qa").mkdir(parents=True)
    (folder / "data" / "qa" / "bamboogle.jsonl").write_text(json.dumps(question) + "\n")
    with running() as retriever:
        search = {"search": {"url": retriever.url}}
        finished(folder / "runs" / "mine", "search", sg=search)
        said, _ = evaluate(folder, "--suite", "qa", status=0)
    assert "--data-dir data/qa, which exists" in said
    assert f"--retriever {retriever.url}, which answers" in said
    chosen = "--model runs/mine/checkpoints/final, the newest finished run of "
    assert any(line.startswith(chosen) for line in said)
    assert list(folder.glob("out/qa_*/results.json"))


def test_only_finished_runs_of_the_domain_count(folder: Path) -> None:
    runs = folder / "runs"
    assert training_runs.newest_checkpoint("kk", runs) is None
    (finished(runs / "killed", "kk") / "model.safetensors").unlink()
    finished(runs / "math", "math")
    (runs / "notes").mkdir()
    (runs / "notes" / "config.yaml").write_text("- a list\n")
    assert training_runs.newest_checkpoint("kk", runs) is None
    first = finished(runs / "first", "kk", second=1)
    assert training_runs.newest_checkpoint("kk", runs) == first
    assert training_runs.newest_checkpoint("search", runs) is None


def test_resuming_without_a_folder_is_refused(capsys) -> None:
    assert main(["--suite", "kk", "--model", "m", "--resume"]) == 2
    assert "--resume needs --out DIR" in capsys.readouterr().err


def test_a_model_may_be_a_module(capsys, tmp_path, puzzle_folder) -> None:
    shipped = find_model("module:sg_rlhf.tiny.kk_tiny", None)
    assert shipped.fingerprint == find_model(str(TINY / "kk_tiny"), None).fingerprint
    command = ["--suite", "kk", "--model", "module:no.such", "--out", str(tmp_path / "out")]
    assert main([*command, "--data-dir", str(puzzle_folder)]) == 2
    assert "--model module:no.such: no such module is installed" in capsys.readouterr().err
