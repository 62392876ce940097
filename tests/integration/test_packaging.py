"""What is built installs in an empty environment and works there: the source archive and the wheel.

Downloads with pip alone, a few hundred megabytes where its cache is empty.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT

pytestmark = pytest.mark.full


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Without what this environment would add to the other one."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip


def checked(*command: str | Path, cwd: Path) -> str:
    result = run(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip_wheel(source: Path, out: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    checked(*pip, "--wheel-dir", out, source, cwd=out.parent)
    (wheel,) = out.glob("sg_rlhf-*.whl")
    return wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source archive, wheel) of the files that git knows."""
    folder = tmp_path_factory.mktemp("build")
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: which files belong to the project is not known")
    listed = checked("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    backend = "from setuptools import build_meta; build_meta.build_sdist('../sdist')"
    checked(sys.executable, "-c", backend, cwd=folder / "source")
    (archive,) = (folder / "sdist").iterdir()
    return archive, pip_wheel(folder / "source", folder / "wheel")


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a venv with torch alone: the build without CUDA, as in bootstrap.sh."""
    folder = tmp_path_factory.mktemp("venv")
    checked(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    (torch,) = re.findall(r"^torch==\S+", lock, re.M)
    result = run(folder / "bin" / "pip", "install", "--quiet", torch, cwd=folder)
    if result.returncode:
        pytest.skip(f"pip's indexes have no {torch}, and the CUDA build has gigabytes")
    return folder / "bin"


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_source_archive_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    archive, wheel = built
    again = pip_wheel(archive, tmp_path / "again")
    assert names(again) == names(wheel)
    for name in names(wheel):
        if not name.endswith("/RECORD"):
            first, second = (zipfile.ZipFile(path).read(name) for path in (wheel, again))
            assert first == second, name


def test_the_archives_hold_what_they_need(built: tuple[Path, Path]) -> None:
    archive, wheel = built
    inside = names(wheel)
    recipes = {f"sg_rlhf/{p.relative_to(ROOT)}" for p in (ROOT / "configs").rglob("*.yaml")}
    assert recipes and recipes <= inside
    for path in (ROOT / "sg_rlhf").rglob("*"):
        source = path.suffix in {".py", ".json", ".safetensors", ".jinja", ".html", ".css"}
        if source and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in inside
    assert "sg_rlhf/eval/lm_eval_tasks/sg_aime.yaml" in inside
    assert not {name for name in inside if name.startswith(("eval/", "tests/", "lab/", "docs/"))}
    with tarfile.open(archive) as tar:
        members = {name.partition("/")[2] for name in tar.getnames()}
    for name in (
        "Makefile", "README.md", "LICENSE", "setup.cfg", "pyproject.toml", "scripts/bootstrap.sh",
        "requirements/cpu.lock", "configs/base.yaml", "docs/commands.md", "tests/conftest.py",
        "tests/integration/test_packaging.py", "examples/scripts/train_grpo_sg_kk.sh",
    ):  # fmt: skip
        assert name in members, name


def test_it_works_in_an_empty_environment(
    built: tuple[Path, Path], empty_environment: Path, tmp_path: Path
) -> None:
    """The commands that need no pipeline, from a folder that is no checkout."""
    archive, _ = built
    command = empty_environment / "sg-rlhf"
    checked(empty_environment / "pip", "install", "--quiet", archive, cwd=tmp_path)
    assert "No broken requirements" in checked(empty_environment / "pip", "check", cwd=tmp_path)

    assert "sg-rlhf train --config" in checked(command, "--help", cwd=tmp_path)
    assert "0.211" in checked(command, "weights", cwd=tmp_path)
    recipe = "configs/kk/grpo_sg_tiny_cpu.yaml"
    assert '"upper": 1.2' in checked(command, "weights", "--config", recipe, "--json", cwd=tmp_path)
    assert "--suite kk: Knights & Knaves" in checked(command, "eval", "--list", cwd=tmp_path)
    checked(
        command, "data", "kk", "--out", "data", "--generate", "people=2-3", "per_size=20",
        "test_per_size=4", cwd=tmp_path,
    )  # fmt: skip

    shown = checked(command, "train", "--config", recipe, "--dry-run", cwd=tmp_path)
    assert "\n  weighting:\n    type: grpo_sg\n" in shown
    assert "# not on this machine: OpenRLHF is not installed; run scripts/bootstrap.sh" in shown
    refused = run(
        command, "train", "--config", recipe, "data.prompt_dataset=data/train.jsonl",
        "eval.dataset=null", cwd=tmp_path,
    )  # fmt: skip
    assert refused.returncode == 2 and not (tmp_path / "runs").exists()
    (line,) = refused.stderr.splitlines()
    assert line == "error: OpenRLHF is not installed; run scripts/bootstrap.sh in a clone"
    missing = run(command, "tiny", "--out", "tiny", cwd=tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: sg-rlhf tiny: transformers is not installed; pip ins")


def test_the_wheel_installs_too(
    built: tuple[Path, Path], empty_environment: Path, tmp_path: Path
) -> None:
    _, wheel = built
    run(empty_environment / "pip", "uninstall", "--quiet", "--yes", "sg_rlhf", cwd=tmp_path)
    checked(empty_environment / "pip", "install", "--quiet", wheel, cwd=tmp_path)
    for name in ("sg-rlhf",):
        assert "usage: " in checked(empty_environment / name, "--help", cwd=tmp_path)
