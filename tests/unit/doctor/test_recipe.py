"""What a recipe needs: its files, servers and model, and the check before a run."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from sg_rlhf.config import load_config
from sg_rlhf.doctor import recipe
from sg_rlhf.doctor.check import FAILED, OK, WARNING, Check
from sg_rlhf.doctor.recipe import UnfitMachine, before_run
from sg_rlhf.machine.facts import Facts
from sg_rlhf.machine.gpus import detect
from sg_rlhf.plan.load import load_fitted
from sg_rlhf.train import main
from tests.unit.doctor.described import described
from tests.unit.machine.fake_nvml import H100, install

ROOT = Path(__file__).parents[3]
TINY = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
THREE = ROOT / "configs" / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
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
    config = load_fitted(
        [str(ROOT / "configs" / "search" / "grpo_sg_tiny_cpu.yaml")],
        ["data.prompt_dataset=data/none.jsonl", "sg.search.url=http://127.0.0.1:9/retrieve",
         "rollout.top_p=0.9"],
    )  # fmt: skip
    found = recipe.inputs(config, cached=False)

    def said(name: str, status: str) -> str:
        return "\n".join(c.remedy or c.found for c in found if (c.name, c.status) == (name, status))

    assert "data/none.jsonl: no such file" in said("file", WARNING)
    assert "http://127.0.0.1:9/retrieve" in said("server", WARNING)
    assert "rollout.top_p=0.9" in said("recipe", FAILED)


# -- before a run -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def plain_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SG_PLATFORM", "SG_SKIP_DOCTOR", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("platform", [None, "cpu"])
def test_nothing_to_say_of_a_run_that_fits_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str | None
) -> None:
    if platform:
        monkeypatch.setenv("SG_PLATFORM", platform)
    assert before_run(load_config(TINY)) == []


def test_a_recipe_for_gpus_where_there_are_none_is_refused_by_its_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if detect().gpus:
        pytest.skip("there are GPUs here")
    assert before_run(load_config(THREE)) == []


def test_a_run_that_is_to_use_cuda_needs_gpus_whatever_its_recipe_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SG_PLATFORM", "cuda")
    with pytest.raises(UnfitMachine, match=r"^GPUs: found none, needed: 1"):
        judged(monkeypatch, described("cpu-2cores"), TINY)


def with_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *[H100] * 8, driver="550.163.01", cuda=12040)
    monkeypatch.setattr(recipe, "model", lambda *_, **__: None)


def test_a_driver_too_old_is_named_before_the_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch sees no GPU then, and the flags would be refused one by one, misleadingly."""
    with_old_driver(monkeypatch)
    data = tmp_path / "train.jsonl"
    data.write_text('{"input": "a puzzle"}\n' * 64)
    arguments = [f"data.prompt_dataset={data}", f"eval.dataset={data}"]
    run_dir = tmp_path / "run"
    assert main(["--config", str(THREE), "--run-dir", str(run_dir), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert lines[0].startswith("error: driver: found 550.163.01 (CUDA 12.4), needed: 580 or later")
    assert "without CUDA use" not in "".join(lines)
    assert lines[-1].endswith("(SG_SKIP_DOCTOR=1 starts it all the same)")
    assert not run_dir.exists()


def test_at_ones_own_risk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_old_driver(monkeypatch)
    with pytest.raises(UnfitMachine):
        before_run(load_config(THREE))
    monkeypatch.setenv("SG_SKIP_DOCTOR", "1")
    assert before_run(load_config(THREE)) == []


def judged(
    monkeypatch: pytest.MonkeyPatch, machine: Facts, config: Path, *overrides: str
) -> list[str]:
    """The warnings of another machine, which has the model."""
    monkeypatch.setattr(recipe, "model", lambda *_, **__: None)
    monkeypatch.setattr("sg_rlhf.doctor.recipe.gather", lambda run_dir: machine)
    return before_run(load_config(config, overrides))


def test_machines_that_fit_and_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, described("h100x8"), THREE) == []
    with pytest.raises(UnfitMachine, match=r"^/dev/shm: found 64 MiB free, needed: 9,537 MiB for"):
        judged(monkeypatch, described("shm-64mb"), THREE)
    with pytest.raises(UnfitMachine, match=r"^host memory: found 128 GiB \(the cgroup's limit"):
        judged(monkeypatch, described("host-128gb"), THREE)
    (warning,) = judged(monkeypatch, described("shm-64mb"), TINY)
    assert warning.startswith("/dev/shm: found 64 MiB free, needed: 512 MiB for Ray: Ray keeps")


def test_on_a_cluster_the_drivers_node_may_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    login = described("cpu-2cores").model_copy(update={"ray_address": "10.0.0.1:6379"})
    monkeypatch.setenv("SG_PLATFORM", "cuda")
    assert judged(monkeypatch, login, THREE) == []
    gated = Check("model", FAILED, "gated, and not for this token", "org/gated")
    monkeypatch.setattr(recipe, "model", lambda *_, **__: gated)
    with pytest.raises(UnfitMachine, match=r"^model: found gated"):
        before_run(load_config(THREE))
