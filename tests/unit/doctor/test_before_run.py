"""The doctor's word before a run: silent where nothing is wrong, one line a reason where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.doctor import recipe as doctor_recipe
from sg_rlhf.doctor.check import FAILED, Check
from sg_rlhf.doctor.facts import Facts, read
from sg_rlhf.doctor.recipe import UnfitMachine, before_run
from sg_rlhf.machine.gpus import detect
from sg_rlhf.train import main
from tests.unit.machine.fake_nvml import H100, install

ROOT = Path(__file__).parents[3]
MACHINES = Path(__file__).parent / "machines"
TINY = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
THREE = ROOT / "configs" / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"


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
    assert before_run(load_config(TINY), tmp_path / "run") == []


def test_a_recipe_for_gpus_where_there_are_none_is_refused_by_its_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if detect().gpus:
        pytest.skip("there are GPUs here")
    assert before_run(load_config(THREE), tmp_path) == []


def with_old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *[H100] * 8, driver="550.163.01", cuda=12040)
    monkeypatch.setattr(doctor_recipe, "model", lambda *_, **__: None)


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
        before_run(load_config(THREE), tmp_path / "run")
    monkeypatch.setenv("SG_SKIP_DOCTOR", "1")
    assert before_run(load_config(THREE), tmp_path / "run") == []


def judged(
    monkeypatch: pytest.MonkeyPatch, machine: Facts, recipe: Path, *overrides: str
) -> list[str]:
    """The warnings of another machine, which has the model."""
    monkeypatch.setattr(doctor_recipe, "model", lambda *_, **__: None)
    monkeypatch.setattr("sg_rlhf.doctor.recipe.gather", lambda run_dir: machine)
    return before_run(load_config(recipe, overrides), Path("runs/first"))


def test_machines_that_fit_and_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {file.stem: read(file) for file in MACHINES.glob("*.json")}
    assert judged(monkeypatch, facts["h100x8"], THREE) == []
    with pytest.raises(UnfitMachine, match=r"^/dev/shm: found 64 MiB free, needed: 9,537 MiB for"):
        judged(monkeypatch, facts["shm-64mb"], THREE)
    with pytest.raises(UnfitMachine, match=r"^host memory: found 128 GiB \(the cgroup's limit"):
        judged(monkeypatch, facts["host-128gb"], THREE)
    (warning,) = judged(monkeypatch, facts["shm-64mb"], TINY)
    assert warning.startswith("/dev/shm: found 64 MiB free, needed: 512 MiB for Ray: Ray keeps")


def test_on_a_cluster_the_drivers_node_may_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    login = read(MACHINES / "cpu-2cores.json").model_copy(update={"ray_address": "10.0.0.1:6379"})
    monkeypatch.setenv("SG_PLATFORM", "cuda")
    assert judged(monkeypatch, login, THREE) == []
    gated = Check("model", FAILED, "gated, and not for this token", "org/gated")
    monkeypatch.setattr(doctor_recipe, "model", lambda *_, **__: gated)
    with pytest.raises(UnfitMachine, match=r"^model: found gated"):
        before_run(load_config(THREE), Path("runs/first"))
