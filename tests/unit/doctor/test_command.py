"""`sg-rlhf doctor` as it is called: by people, by scripts/bootstrap.sh, by any Python."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.doctor.command import main
from sg_rlhf.doctor.facts import parse
from tests.unit.doctor.fake_programs import nvcc, nvidia_smi, path

ROOT = Path(__file__).parents[3]
MACHINES = Path(__file__).parent / "machines"
TINY = str(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")


@pytest.fixture(autouse=True)
def no_choice_of_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SG_HARDWARE", raising=False)


def facts_of(name: str) -> list[str]:
    return ["--facts", str(MACHINES / f"{name}.json")]


@pytest.mark.parametrize(
    ("machine", "status", "verdict"),
    [
        (
            "h100x8",
            0,
            "fine; the training scripts choose SG_HARDWARE=8x80gb here: models of 3B to 8B",
        ),
        (
            "cpu-2cores",
            0,
            "fine; the training scripts choose SG_HARDWARE=cpu here: the small models",
        ),
        ("toolkit-12.8", 1, "works, with warnings: CUDA toolkit; the training scripts choose"),
        ("driver-550", 2, "cannot work: driver"),
        ("shm-64mb", 2, "cannot work: /dev/shm"),
    ],
)
def test_exit_status_and_verdict(
    capsys: pytest.CaptureFixture[str], machine: str, status: int, verdict: str
) -> None:
    assert main(facts_of(machine)) == status
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[-1].startswith(verdict)


def test_a_line_a_check_in_aligned_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(facts_of("driver-550")) == 2
    heading, *lines, _ = capsys.readouterr().out.splitlines()
    assert heading.split() == ["found", "needed", "what", "to", "do"]
    (driver,) = [line for line in lines if " driver " in line]
    assert driver.startswith("failed  driver")
    assert driver.index("550.163.01 (CUDA 12.4)") == heading.index("found")
    assert driver.index("580 or later") == heading.index("needed")
    assert driver.index("update NVIDIA's driver") == heading.index("what to do")
    assert "\x1b" not in "".join(lines)


def on_a_terminal(*words: str, **variables: str) -> str:
    """What the command prints where its output is a terminal."""
    reader, writer = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "sg_rlhf.doctor", *words],
            cwd=ROOT, stdout=writer, check=False,
            env={**os.environ, "TERM": "xterm", **variables},
        )  # fmt: skip
        return os.read(reader, 65536).decode()
    finally:
        os.close(writer)
        os.close(reader)


def test_colour_on_a_terminal_and_never_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31mfailed" in on_a_terminal(*facts_of("driver-550"))
    assert "\x1b" not in on_a_terminal(*facts_of("driver-550"), NO_COLOR="1")


def test_json_has_facts_that_can_be_judged_elsewhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*facts_of("shm-64mb"), "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert {"facts", "checks", "verdict"} == set(printed)
    (failed,) = [one for one in printed["checks"] if one["status"] == "failed"]
    assert failed["name"] == "/dev/shm" and failed["remedy"] == "docker run --shm-size=16g"
    assert parse(printed["facts"]).dev_shm_mib == 64
    # The whole output, or its facts alone.
    for found in (printed, printed["facts"]):
        file = tmp_path / "machine.json"
        file.write_text(json.dumps(found))
        assert main(["--facts", str(file)]) == 2
        assert "cannot work: /dev/shm" in capsys.readouterr().out


def test_a_recipe_is_judged_on_a_described_machine(capsys: pytest.CaptureFixture[str]) -> None:
    seven = str(ROOT / "configs" / "kk" / "grpo_sg_qwen2.5-7b-instruct-1m.yaml")
    assert main([*facts_of("host-128gb"), "--config", seven]) == 2
    out = capsys.readouterr().out
    assert "128 GiB (the cgroup's limit, of 2,015)" in out
    assert out.splitlines()[-1] == "cannot work: host memory"
    assert main([*facts_of("cpu-2cores"), "--config", TINY]) == 0
    # Overrides on both sides of an option; what `train` would not read is not advised.
    big = ["ckpt.max_num=1", "--config", seven, *facts_of("4090x1"), "ckpt.save_steps=50"]
    assert main(big) == 2
    out = capsys.readouterr().out
    assert "--hardware 1x24gb is for these" in out and "SG_HARDWARE" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--facts", "none.json"], "error: --facts none.json: cannot be read as JSON: No such"),
        (["--config", "none.yaml"], "error: "),
        (["--config", TINY, "actor.adam.rl=1"], "unknown key 'actor.adam.rl'; did you mean"),
        (["actor.adam.lr"], "error: override 'actor.adam.lr': expected key=value"),
        (["--config", TINY, "actor.num_nodes=two"], "actor.num_nodes='two': expected"),
        (["--install", "tpu"], "sg_rlhf.doctor: argument --install: invalid choice: 'tpu'"),
        (["--jsn"], "sg_rlhf.doctor: unrecognized arguments: --jsn; see --help"),
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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SG_HARDWARE", "8x80gb")
    assert main(facts_of("h100x4")) == 2
    assert "SG_HARDWARE=4x80gb is for these" in capsys.readouterr().out
    monkeypatch.setenv("SG_HARDWARE", "cpu")
    assert main(facts_of("driver-550")) == 0
    monkeypatch.setenv("SG_HARDWARE", "8x80")
    assert main(facts_of("h100x8")) == 2
    assert capsys.readouterr().err.startswith(
        "error: SG_HARDWARE=8x80: no such hardware; expected cpu or [NODESx]COUNTx"
    )
    assert main([*facts_of("h100x8"), "--config", TINY]) == 2
    assert capsys.readouterr().err.startswith(
        "error: SG_HARDWARE=8x80: no such hardware; expected cpu or [NODESx]COUNTx"
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which nothing is installed."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap.sh", root / "scripts")
    data = shutil.ignore_patterns("__pycache__", "*_tiny", "configs")
    shutil.copytree(ROOT / "sg_rlhf", root / "sg_rlhf", ignore=data)
    return root


def bare_run(root: Path, *words: str, options: tuple[str, ...] = ("-S", "-E"), **variables: str):
    """The command by this Python without its packages, in such a checkout."""
    return subprocess.run(
        [sys.executable, *options, "-m", "sg_rlhf.doctor", *words],
        cwd=root, capture_output=True, text=True, timeout=300, check=False,
        env={"PATH": path(), "HOME": str(root), "HF_HUB_OFFLINE": "1", **variables},
    )  # fmt: skip


def test_it_needs_nothing_installed(bare: Path) -> None:
    done = bare_run(bare, "--json")
    assert done.returncode in (0, 1, 2) and done.stderr == ""
    facts = parse(json.loads(done.stdout)["facts"])
    assert facts.host_memory_gib and facts.installed is False
    where = [disk for disk in facts.disks or [] if "environment" in disk.holds]
    assert where and str(bare).startswith(where[0].path)


def test_it_imports_nothing_but_the_standard_library(bare: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(bare)!r})\n"
        "from sg_rlhf.doctor.command import main\n"
        "main(['--install', 'cpu'])\n"
        "print(sorted({n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    names = [name for name in ast.literal_eval(done.stdout) if not name.startswith("_")]
    assert names == ["sg_rlhf"]


def test_a_recipe_without_its_packages_is_skipped_and_says_how(bare: Path) -> None:
    done = bare_run(bare, *facts_of("h100x8"), "--config", TINY)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("skipped  recipe")]
    assert "is not installed" in line and "scripts/bootstrap.sh" in line


def test_every_file_is_python_3_8() -> None:
    for file in (ROOT / "sg_rlhf" / "doctor").glob("*.py"):
        ast.parse(file.read_text(), feature_version=(3, 8))


def pythons(version: str) -> list[str]:
    """Where such a Python may be."""
    of_pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    return [*filter(None, [shutil.which(f"python{version}")]), *map(str, of_pyenv)]


def works(program: str) -> bool:
    """A shim of pyenv is there for versions that are not chosen, too."""
    tried = subprocess.run([program, "-S", "-c", ""], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.12", "3.13"])
def test_other_pythons(bare: Path, version: str) -> None:
    program = next(filter(works, pythons(version)), "")
    if not program:
        pytest.skip(f"no Python {version} here")
    done = subprocess.run(
        [program, "-S", "-m", "sg_rlhf.doctor", *facts_of("driver-550")],
        cwd=bare, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "")
    gathered = subprocess.run(
        [program, "-S", "-m", "sg_rlhf.doctor", "--json", "--config", TINY],
        cwd=bare, capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert gathered.stderr == ""
    checks = {one["name"]: one for one in json.loads(gathered.stdout)["checks"]}
    assert re.search(r"3\.\d+\.\d+ is not 3\.11$|is not installed$", checks["recipe"]["found"])


@pytest.mark.parametrize(
    ("driver", "cuda", "release", "status", "said"),
    [
        ("580.95.05", "13.0", "13.0", 0, ""),
        ("550.163.01", "12.4", "13.0", 2, "bootstrap: driver: found 550.163.01 (CUDA 12.4), neede"),
        ("550.163.01", "13.0", "13.0", 0, ""),
        ("580.95.05", "13.0", "12.8", 1, "bootstrap: warning: CUDA toolkit: found 12.8"),
    ],
)
def test_before_an_installation(
    bare: Path, tmp_path: Path, driver: str, cuda: str, release: str, status: int, said: str
) -> None:
    nvidia_smi(tmp_path, driver=driver, cuda=cuda)
    nvcc(tmp_path, release)
    done = bare_run(bare, "--install", "cuda", PATH=path(tmp_path))
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(said) and len(done.stderr.splitlines()) == bool(said)
    on_cpu = bare_run(bare, "--install", "cpu", PATH=path(tmp_path), SG_HARDWARE="cpu")
    assert (on_cpu.returncode, on_cpu.stdout, on_cpu.stderr) == (0, "", "")
