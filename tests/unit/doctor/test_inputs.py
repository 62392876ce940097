"""The files, servers and the model of a recipe: what of them is out of reach."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from sg_rlhf.doctor import recipe
from sg_rlhf.doctor.check import FAILED, OK, WARNING

ROOT = Path(__file__).parents[3]
MODEL = "org/name"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a cache that has nothing."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


def answering(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def metadata(_url: str, **_: object) -> None:
        if error:
            raise error

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)


def refusal(kind: type[errors.HfHubHTTPError]) -> Exception:
    response = httpx.Response(403, request=httpx.Request("HEAD", "https://hub"))
    return kind("no", response=response)


@pytest.mark.parametrize(
    ("error", "status", "found", "remedy"),
    [
        (None, OK, "a download", ""),
        (refusal(errors.GatedRepoError), FAILED, "gated", f"/{MODEL}, then HF_TOKEN"),
        (refusal(errors.RepositoryNotFoundError), FAILED, "not at https://", "check the id"),
        (httpx.ConnectTimeout("too long"), FAILED, "no answer from https://", "HF_ENDPOINT"),
        (OSError("no route"), FAILED, "no route", "actor.model_name_or_path=FOLDER"),
    ],
)
def test_a_model_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, status: str, found: str, remedy: str
) -> None:
    answering(monkeypatch, error)
    check = recipe.model(MODEL)
    assert check is not None and check.status == status
    assert found in check.found and remedy in check.remedy and "\n" not in check.line()


def test_a_hub_that_is_off_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, AssertionError("asked"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check = recipe.model(MODEL)
    assert check is not None and check.status == FAILED and "HF_HUB_OFFLINE" in check.found


def test_a_folder_is_no_matter_of_the_hub(tmp_path: Path) -> None:
    assert recipe.model(str(tmp_path)) is None
    assert recipe.model("/no/such/folder") is None  # the recipe's own checks refuse it


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_in_the_cache(monkeypatch: pytest.MonkeyPatch, hub: Path, whole: bool) -> None:
    answering(monkeypatch, OSError("no route"))
    folder = hub / "models--org--name"
    snapshot = folder / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abc")
    index = {"weight_map": {"a": "one.bin", "b": "two.bin"}}
    (snapshot / "config.json").write_text('{"model_type": "qwen2"}')
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for name in ("one.bin", "two.bin")[: 1 + whole]:
        (snapshot / name).touch()
    found = recipe.cached_model(MODEL)
    assert (found == snapshot) == whole
    check = recipe.model(MODEL, cached=found is not None)
    assert check is not None and check.status == (OK if whole else FAILED)


def test_a_model_in_the_cache_by_its_revision(hub: Path) -> None:
    snapshot = hub / "models--org--name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (hub / "models--org--name" / "refs").mkdir()
    (hub / "models--org--name" / "refs" / "v1").write_text("0123abc")
    (snapshot / "config.json").write_text('{"model_type": "qwen2"}')
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "pytorch_model.bin").touch()
    assert recipe.cached_model(MODEL, "v1") == snapshot and recipe.cached_model(MODEL) is None


def test_what_a_run_would_refuse_is_listed() -> None:
    run = recipe.load(
        [str(ROOT / "configs" / "search" / "grpo_sg_tiny_cpu.yaml")],
        ["data.prompt_dataset=data/none.jsonl", "sg.search.url=http://127.0.0.1:9/retrieve",
         "rollout.top_p=0.9"],
        None,
    )  # fmt: skip
    found = recipe.inputs(run)

    def said(name: str, status: str) -> str:
        return "\n".join(c.remedy or c.found for c in found if (c.name, c.status) == (name, status))

    assert "data/none.jsonl: no such file" in said("file", WARNING)
    assert "http://127.0.0.1:9/retrieve" in said("server", WARNING)
    assert "rollout.top_p=0.9" in said("recipe", FAILED)
