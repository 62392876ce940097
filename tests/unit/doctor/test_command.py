"""`sg-rlhf doctor` as it is called: by people, by scripts/bootstrap.sh, by any Python."""

from __future__ import annotations

import ast
import json
import os
import pty
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sg_rlhf.doctor import command, preflight
from sg_rlhf.doctor.command import main
from sg_rlhf.machine.facts import Facts
from tests.unit.doctor.described import described
from tests.unit.doctor.fake_programs import nvidia_smi, program

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")


@pytest.fixture(autouse=True)
def no_choice_of_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SG_HARDWARE", raising=False)


@pytest.fixture
def doctor_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Call the command on a described machine."""

    def doctor(machine: str, *words: str) -> int:
        monkeypatch.setattr(command, "gather", lambda run_dir: described(machine))
        monkeypatch.setattr(command.recipe, "inputs", lambda config, *, cached: [])
        return main(words)

    return doctor


@pytest.mark.parametrize(
    ("machine", "status", "verdict"),
    [
        (
            "h100x8",
            0,
            "fine; `sg-rlhf run` chooses --hardware 8x80gb here: up to 8B parameters",
        ),
        (
            "cpu-2cores",
            0,
            "fine; `sg-rlhf run` chooses --hardware cpu here: the tiny models",
        ),
        ("driver-550", 2, "cannot work: driver"),
        ("shm-64mb", 2, "cannot work: /dev/shm"),
    ],
)
def test_exit_status_and_verdict(
    doctor_on: Callable[..., int], capsys: pytest.CaptureFixture[str],
    machine: str, status: int, verdict: str,
) -> None:  # fmt: skip
    assert doctor_on(machine) == status
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[-1].startswith(verdict)


def test_a_line_a_check_in_aligned_columns(
    doctor_on: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor_on("driver-550") == 2
    heading, *lines, _ = capsys.readouterr().out.splitlines()
    assert heading.split() == ["found", "needed", "what", "to", "do"]
    (driver,) = [line for line in lines if " driver " in line]
    assert driver.startswith("failed  driver")
    assert driver.index("550.163.01 (CUDA 12.4)") == heading.index("found")
    assert driver.index("580 or later") == heading.index("needed")
    assert driver.index("update NVIDIA's driver") == heading.index("what to do")
    assert "\x1b" not in "".join(lines)


def test_colour_on_a_terminal_and_never_with_no_color(
    doctor_on: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", name)
        reader, writer = pty.openpty()
        with os.fdopen(writer, "w") as terminal, monkeypatch.context() as patched:
            patched.setattr("sys.stdout", terminal)
            doctor_on("driver-550")
        assert ("\x1b[31mfailed" in os.read(reader, 65536).decode()) == coloured
        os.close(reader)


def test_json_has_facts_and_checks(
    doctor_on: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor_on("shm-64mb", "--json") == 2
    printed = json.loads(capsys.readouterr().out)
    assert {"facts", "checks", "verdict"} == set(printed)
    (failed,) = [one for one in printed["checks"] if one["status"] == "failed"]
    assert failed["name"] == "/dev/shm" and "docker run --shm-size=16g" in failed["remedy"]
    assert Facts.model_validate(printed["facts"]).dev_shm_mib == 64


def test_a_recipe_is_judged_on_a_machine(
    doctor_on: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    seven = str(ROOT / "configs" / "kk" / "grpo_sg_qwen2.5-7b-instruct-1m.yaml")
    assert doctor_on("host-128gb", "--config", seven) == 2
    out = capsys.readouterr().out
    assert "128 GiB (the cgroup's limit, of 2,015)" in out
    assert out.splitlines()[-1] == "cannot work: host memory"
    assert doctor_on("cpu-2cores", "--config", TINY) == 0
    # Overrides on both sides of an option; what `train` would not read is not advised.
    big = ["ckpt.max_num=1", "--config", seven, "ckpt.save_steps=50"]
    assert doctor_on("4090x1", *big) == 2
    out = capsys.readouterr().out
    assert "--hardware 1x24gb is for these" in out and "SG_HARDWARE" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "none.yaml"], "error: "),
        (["--config", TINY, "actor.adam.rl=1"], "unknown key 'actor.adam.rl'; did you mean"),
        (["actor.adam.lr"], "error: override 'actor.adam.lr': expected key=value"),
        (["--config", TINY, "actor.num_nodes=two"], "actor.num_nodes='two': expected"),
        (["--jsn"], "sg-rlhf doctor: unrecognized arguments: --jsn; see --help"),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    try:
        status = main(argv)
    except SystemExit as stopped:
        status = stopped.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert len(err.splitlines()) == 1 and message in err


def test_hardware_that_is_asked_for(
    doctor_on: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SG_HARDWARE", "8x80gb")
    assert doctor_on("h100x4") == 2
    assert "SG_HARDWARE=4x80gb is for these" in capsys.readouterr().out
    monkeypatch.setenv("SG_HARDWARE", "cpu")
    assert doctor_on("driver-550") == 0
    monkeypatch.setenv("SG_HARDWARE", "8x80")
    assert doctor_on("h100x8") == 2
    assert capsys.readouterr().err.startswith(
        "error: SG_HARDWARE=8x80: no such hardware; expected cpu or [NODESx]COUNTx"
    )
    assert doctor_on("h100x8", "--config", TINY) == 2
    assert capsys.readouterr().err.startswith(
        "error: SG_HARDWARE=8x80: no such hardware; expected cpu or [NODESx]COUNTx"
    )


FILES = (
    "__init__", "common/__init__", "common/environment", "doctor/__init__",
    "doctor/check", "doctor/preflight", "machine/__init__", "machine/names",
)  # fmt: skip


def test_files_that_run_before_an_installation_are_python_3_8() -> None:
    for name in FILES:
        ast.parse((ROOT / "sg_rlhf" / f"{name}.py").read_text(), feature_version=(3, 8))


def pythons(version: str) -> list[str]:
    """Where such a Python may be."""
    of_pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    return [*filter(None, [shutil.which(f"python{version}")]), *map(str, of_pyenv)]


def works(program: str) -> bool:
    """A shim of pyenv is there for versions that are not chosen, too."""
    tried = subprocess.run([program, "-S", "-c", ""], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13"])
def test_any_python_without_packages_checks_driver_and_gpus(version: str, tmp_path: Path) -> None:
    python = next(filter(works, pythons(version)), "")
    if not python:
        pytest.skip(f"no Python {version} here")

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-S", "-E", "-m", "sg_rlhf.doctor.preflight"], cwd=ROOT, capture_output=True,
            text=True, check=False, env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        )  # fmt: skip

    nvidia_smi(tmp_path)
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    *checks, next_step = done.stdout.splitlines()
    assert [line.split(":")[0] for line in checks] == [
        "ok      driver", "ok      compute capability", "ok      GPU memory",
    ]  # fmt: skip
    assert "scripts/bootstrap.sh" in next_step
    nvidia_smi(tmp_path, driver="550.163.01", cuda="12.4")
    assert run().returncode == 2


@pytest.mark.parametrize(
    ("kind", "machine", "status", "said"),
    [
        ("cuda", {}, 0, ""),
        ("cuda", {"driver": "550.163.01", "cuda": "12.4"}, 2,
         "bootstrap: driver: found 550.163.01 (CUDA 12.4), needed: 580 or later, for CUDA 13"),
        ("cuda", {"driver": "550.163.01", "cuda": "13.0"}, 0, ""),
        ("cuda", {"row": "32768, 7.0"}, 2, "bootstrap: compute capability: found 7.0"),
        ("cuda", {"row": "16384, 8.0"}, 1, "bootstrap: warning: GPU memory: found 16 GiB"),
        ("cpu", {"driver": "550.163.01", "cuda": "12.4"}, 0, ""),
    ],
)  # fmt: skip
def test_before_an_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    kind: str, machine: dict[str, str], status: int, said: str,
) -> None:  # fmt: skip
    nvidia_smi(tmp_path, **machine)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert preflight.main(kind) == status
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(said) and len(err.splitlines()) == bool(said)
    monkeypatch.setenv("SG_HARDWARE", "cpu")
    assert preflight.main("cpu") == 0 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'NVIDIA-SMI has failed because it could not'; exit 9", "NVIDIA-SMI has failed"),
        ("echo; echo 'No devices were found'; exit 6", "No devices were found"),
        ("exit 3", "no output"),
        ("sleep 3600", "timed out"),
    ],
)
def test_an_nvidia_smi_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, problem: str
) -> None:
    program(tmp_path, "nvidia-smi", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(preflight, "SECONDS", 1)
    (check,) = preflight.check()
    assert check.status == "warning" and problem in check.found and check.remedy


@pytest.mark.parametrize(("answer", "problem"), [("exit 2", "no output"), ("sleep 3600", "timed")])
def test_a_second_query_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, problem: str
) -> None:
    file = nvidia_smi(tmp_path)
    file.write_text(file.read_text().replace("printf '81559, 9.0\\n81559, 9.0\\n'", answer))
    assert answer in file.read_text()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(preflight, "SECONDS", 1)
    driver, memory = preflight.check()
    assert driver.status == "ok" and memory.status == "warning"
    assert problem in memory.found and "\n" not in memory.line()


def test_a_machine_without_nvidia_smi_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (check,) = preflight.check()
    assert check.status == "ok" and check.found == "none"
