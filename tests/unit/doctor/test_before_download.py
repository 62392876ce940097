"""scripts/bootstrap.sh checks driver and GPUs before it downloads anything.

In the copy of the tree that tests/unit/test_bootstrap.py makes: its stand-in for Python hands the
preflight to the real one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.unit.doctor.fake_programs import nvidia_smi, program
from tests.unit.test_bootstrap import Tree, tree  # noqa: F401

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tree: Tree) -> Tree:  # noqa: F811
    """With the doctor in it, and two GPUs."""
    data = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sg_rlhf" / "doctor", tree.root / "sg_rlhf" / "doctor", ignore=data)
    machine = tree.root / "sg_rlhf" / "machine"
    shutil.copytree(ROOT / "sg_rlhf" / "machine", machine, ignore=data, dirs_exist_ok=True)
    (tree.root / "sg_rlhf" / "common").mkdir()
    shutil.copy(ROOT / "sg_rlhf" / "__init__.py", tree.root / "sg_rlhf" / "__init__.py")
    for name in ("__init__", "environment"):
        place = f"sg_rlhf/common/{name}.py"
        shutil.copy(ROOT / place, tree.root / place)
    stand_in = tree.tools / "python3.11"
    handed_on = f'case $* in *sg_rlhf.doctor.preflight*) exec {sys.executable} "$@" ;; esac\n'
    stand_in.write_text(stand_in.read_text().replace("here=", f"{handed_on}here=", 1))
    nvidia_smi(tree.tools)
    return tree


def test_nothing_is_said_where_nothing_is_wrong(checkout: Tree) -> None:
    done = checkout.bootstrap(SG_HARDWARE="")
    assert done.returncode == 0 and done.stderr == ""
    assert "making .venv for cuda" in done.stdout


def test_a_wrong_name_of_hardware_is_refused(checkout: Tree) -> None:
    done = checkout.bootstrap(SG_HARDWARE="8x80")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: SG_HARDWARE=8x80: no such hardware"
    )
    assert done.stderr.count("\n") == 1 and "making" not in done.stdout


def test_an_old_driver_is_refused_and_the_cpu_offered(checkout: Tree) -> None:
    nvidia_smi(checkout.tools, driver="550.163.01", cuda="12.4")
    done = checkout.bootstrap(SG_HARDWARE="")
    assert done.returncode == 2
    assert done.stderr == (
        "bootstrap: driver: found 550.163.01 (CUDA 12.4), needed: 580 or later, for CUDA 13: "
        "update NVIDIA's driver to 580 or later, or SG_HARDWARE=cpu goes without GPUs\n"
    )
    assert not [call for call in checkout.calls() if "pip" in call or "venv" in call]
    on_cpu = checkout.bootstrap(SG_HARDWARE="cpu")
    assert on_cpu.returncode == 0 and on_cpu.stderr == ""


def test_a_gpu_too_old_for_bf16(checkout: Tree) -> None:
    nvidia_smi(checkout.tools, row="32768, 7.0")
    done = checkout.bootstrap(SG_HARDWARE="")
    assert done.returncode == 2
    assert done.stderr.startswith("bootstrap: compute capability: found 7.0, needed: 8.0 or later")


def test_a_driver_that_fails_is_said_before_the_cpus_packages_come(checkout: Tree) -> None:
    program(checkout.tools, "nvidia-smi", "echo 'NVIDIA-SMI has failed because'; exit 9")
    done = checkout.bootstrap(SG_HARDWARE="")
    assert done.returncode == 0 and "making .venv for cpu" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("bootstrap: warning: GPUs: found none; nvidia-smi: NVIDIA-SMI has fail")


def test_a_preflight_that_breaks_keeps_nobody_from_installing(checkout: Tree) -> None:
    (checkout.root / "sg_rlhf" / "doctor" / "preflight.py").write_text("raise RuntimeError\n")
    assert checkout.bootstrap(SG_HARDWARE="").returncode == 0
