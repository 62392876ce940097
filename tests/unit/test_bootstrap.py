"""scripts/bootstrap.sh in a copy of the tree, with a stand-in for Python that records its calls.

The real environment is not touched and nothing is downloaded. The stand-in answers the script's
questions about the interpreter, has the real Python make the venv, takes the place of its
python, and pretends to install.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: What the script may use of the machine, besides Python and a compiler.
TOOLS = [
    "awk", "bash", "cat", "cut", "dirname", "find", "flock", "grep", "ls", "mkdir", "rm",
    "readlink", "sed", "sha256sum", "sleep", "tail", "uname",
]  # fmt: skip

HASHED = "--no-deps --require-hashes --require-build-hashes"

PYTHON = """\
#!/usr/bin/env bash
here=$(dirname "${BASH_SOURCE[0]}")
case $* in
  *_base_executable*) echo "${FAKE_BASE-$0}"; exit ;;
  *"import ensurepip"*) exit "${FAKE_NO_VENV:-0}" ;;
  *sg_rlhf/machine/names.py) exec @REAL@ "$@" ;;
  *sysconfig*) echo "${FAKE_INCLUDE-@INCLUDE@}"; exit ;;
esac
for name in VIRTUAL_ENV PYTHONPATH PYTHONHOME PIP_TARGET PIP_USER UV_SYSTEM_PYTHON UV_CONSTRAINT; do
  [ -z "${!name:-}" ] || echo "leaked $name" >>"@CALLS@"
done
echo "$*" >>"@CALLS@"
case $* in
  "-m venv "*)
    @REAL@ -m venv --without-pip "$3" || exit
    rm "$3/bin/python"
    cp "$0" "$3/bin/python" ;;
  *uv_settings.py) echo "${FAKE_SETTINGS:-}" ;;
  *"-r .venv/torch.txt")
    grep -q +cpu .venv/torch.txt || exit 0
    case "${FAKE_NO_CPU_TORCH:-} $*" in
      " "* | "configured "*--torch-backend*) ;;
      *) echo "Because there is no version of torch==2.13.0+cpu, we can conclude"; exit 1 ;;
    esac ;;
  *"-r .venv/packages.txt"*)
    sleep "${FAKE_SLOW:-0}"
    while [ -e "${FAKE_HELD:-}" ]; do sleep 0.1; done
    [ -z "${FAKE_BROKEN:-}" ] || { echo "no route to the index"; exit 1; } ;;
esac
"""


@dataclass
class Tree:
    """A copy of what the script reads, and a PATH with nothing but what a test allows."""

    root: Path
    tools: Path
    calls_file: Path

    def environment(self, **changes: str) -> dict[str, str]:
        return {"PATH": str(self.tools), "HOME": str(self.root), "SG_HARDWARE": "cpu"} | changes

    def start(self, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", self.root / "scripts" / "bootstrap.sh"],
            env=self.environment(**changes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A suite run in the background inherits an ignored SIGINT, which bash could not trap.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    def bootstrap(self, **changes: str) -> subprocess.CompletedProcess[str]:
        process = self.start(**changes)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self) -> list[str]:
        """What Python was asked to do since the last time."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return lines

    def stub(self, name: str, script: str) -> None:
        (self.tools / name).unlink(missing_ok=True)
        (self.tools / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (self.tools / name).chmod(0o755)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "repo", tmp_path / "tools", tmp_path / "calls")
    (made.root / "scripts").mkdir(parents=True)
    made.tools.mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap.sh", made.root / "scripts")
    shutil.copytree(ROOT / "requirements", made.root / "requirements")
    (made.root / "sg_rlhf" / "machine").mkdir(parents=True)
    for name in ("setup.cfg", "pyproject.toml", "sg_rlhf/machine/names.py"):
        shutil.copy(ROOT / name, made.root / name)
    for name in [*TOOLS, "env", "cp"]:
        found = shutil.which(name)
        assert found, name
        (made.tools / name).symlink_to(found)
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    python = PYTHON.replace("@CALLS@", str(made.calls_file)).replace("@INCLUDE@", str(include))
    python = python.replace("@REAL@", sys._base_executable)  # type: ignore[attr-defined]
    made.stub("python3.11", python)
    made.stub("g++", "exit 0")
    made.stub("df", "echo header; echo disk 0 0 104857600 0% /")
    return made


def installed(calls: list[str]) -> list[str]:
    """The arguments of `uv pip install` that differ from call to call."""
    common = "-m uv pip install --python .venv/bin/python "
    return [call.removeprefix(common) for call in calls if call.startswith(common)]


def test_first_run_installs_the_lock_and_the_project_in_order(tree: Tree) -> None:
    done = tree.bootstrap(
        VIRTUAL_ENV="/x", PYTHONPATH="/x", PIP_TARGET="/x", PIP_USER="1", UV_SYSTEM_PYTHON="1",
        UV_CONSTRAINT="/x",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    calls = tree.calls()
    assert calls[0].startswith("-m venv")
    assert not [call for call in calls if "leaked" in call]
    (pip,) = [call for call in calls if call.startswith("-m pip install")]
    assert pip.endswith("--no-deps --require-hashes -r .venv/tools.txt")
    tools = (tree.root / ".venv" / "tools.txt").read_text()
    assert re.findall(r"^\w+", tools, re.M) == ["pip", "uv"]
    assert tools.count("--hash=sha256:") >= 2
    assert installed(calls) == [
        "--no-deps --require-hashes -r .venv/torch.txt",
        f"{HASHED} --build-constraint requirements/cpu.lock -r .venv/packages.txt",
        "--no-deps --no-build-isolation --config-settings editable_mode=compat -e .",
    ]
    packages = (tree.root / ".venv" / "packages.txt").read_text()
    torch = (tree.root / ".venv" / "torch.txt").read_text()
    assert "\nray==" in packages
    assert "\ntorch==" not in packages
    assert torch.startswith("torch==2.13.0+cpu")
    lock = (tree.root / "requirements" / "cpu.lock").read_text()
    hashes = re.findall("sha256:[0-9a-f]{64}", lock)
    assert sorted(re.findall("sha256:[0-9a-f]{64}", packages + torch)) == sorted(hashes)
    assert done.stdout.splitlines()[-1].endswith("ready: .venv/bin/python")


def test_a_machine_without_a_gpu_needs_no_compiler_and_compiles_no_bytecode(tree: Tree) -> None:
    hide("g++")(tree)
    done = tree.bootstrap()
    assert done.returncode == 0, done.stderr
    assert not [call for call in tree.calls() if "compileall" in call]


def test_up_to_date_does_nothing_and_says_nothing(tree: Tree) -> None:
    tree.bootstrap()
    tree.calls()
    stamp = tree.root / ".venv" / ".sg_stamp"
    before = stamp.stat().st_mtime_ns

    done = tree.bootstrap()

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert tree.calls() == []
    assert stamp.stat().st_mtime_ns == before


def test_an_environment_keeps_its_kind_until_told(tree: Tree) -> None:
    tree.bootstrap()
    tree.stub("nvidia-smi", "echo 'GPU 0: something'")

    assert tree.bootstrap(SG_HARDWARE="").stdout == ""
    assert "for cuda" in tree.bootstrap(SG_HARDWARE="8xh100").stdout
    assert tree.bootstrap(SG_HARDWARE="").stdout == ""


def test_a_gpu_is_detected_and_nothing_is_compiled(tree: Tree) -> None:
    tree.stub("nvidia-smi", "echo 'GPU 0: something'")

    done = tree.bootstrap(SG_HARDWARE="")  # no toolkit is on this PATH

    assert done.returncode == 0, done.stderr
    calls = tree.calls()
    assert installed(calls) == [
        f"{HASHED} --build-constraint requirements/cuda.lock -r .venv/packages.txt",
        "--no-deps --no-build-isolation --config-settings editable_mode=compat -e .",
    ]
    assert "\ntorch===" in (tree.root / ".venv" / "packages.txt").read_text()


def test_nvidia_smi_without_a_gpu_means_cpu(tree: Tree) -> None:
    tree.stub("nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert "for cpu" in tree.bootstrap(SG_HARDWARE="").stdout


def test_a_changed_lock_is_installed_into_the_same_environment(tree: Tree) -> None:
    tree.bootstrap()
    tree.calls()
    with (tree.root / "requirements" / "cpu.lock").open("a") as file:
        file.write("another==1.0\n")

    done = tree.bootstrap()

    assert done.returncode == 0, done.stderr
    assert "making .venv" not in done.stdout
    assert len(installed(tree.calls())) == 3
    assert "another==1.0" in (tree.root / ".venv" / "packages.txt").read_text()
    assert tree.bootstrap().stdout == ""


def test_a_failed_update_makes_the_environment_again(tree: Tree) -> None:
    tree.bootstrap()
    with (tree.root / "requirements" / "cpu.lock").open("a") as file:
        file.write("another==1.0\n")

    assert tree.bootstrap(FAKE_BROKEN="1").returncode == 1
    assert "making .venv" in tree.bootstrap().stdout


def test_changed_metadata_installs_the_project_alone(tree: Tree) -> None:
    tree.bootstrap()
    tree.calls()
    with (tree.root / "setup.cfg").open("a") as file:
        file.write("# changed\n")

    assert tree.bootstrap().returncode == 0
    assert [call[-4:] for call in installed(tree.calls())] == ["-e ."]


def test_a_moved_tree_makes_the_environment_again(tree: Tree) -> None:
    tree.bootstrap()
    moved = Tree(tree.root.with_name("moved"), tree.tools, tree.calls_file)
    tree.root.rename(moved.root)
    assert "making .venv" in moved.bootstrap().stdout


@pytest.mark.parametrize("there", [True, False])
def test_a_linked_environment_folder_stays_a_link(tree: Tree, there: bool) -> None:
    elsewhere = tree.root.parent / "large disk" / "environment"
    if there:
        elsewhere.mkdir(parents=True)
    (tree.root / ".venv").symlink_to(elsewhere)

    done = tree.bootstrap()
    assert done.returncode == 0, done.stderr
    assert (tree.root / ".venv").is_symlink()
    assert (elsewhere / "bin" / "python").exists()
    assert tree.bootstrap().stdout == ""
    (elsewhere / ".sg_stamp").write_text("of an older version")
    again = tree.bootstrap()
    assert again.returncode == 0 and "emptying .venv" in again.stdout


def test_a_link_to_another_checkouts_environment_is_refused(tree: Tree) -> None:
    other = tree.root.with_name("other")
    shutil.copytree(tree.root, other)
    assert Tree(other, tree.tools, tree.calls_file).bootstrap().returncode == 0
    before = sorted(path.name for path in (other / ".venv").rglob("*"))
    (tree.root / ".venv").symlink_to(other / ".venv")

    done = tree.bootstrap()
    assert done.returncode == 2
    assert f"the environment of the checkout {other}: nothing in it was changed" in done.stderr
    assert sorted(path.name for path in (other / ".venv").rglob("*")) == before


def test_a_link_to_a_folder_with_something_else_is_refused(tree: Tree) -> None:
    work = tree.root.parent / "work"
    work.mkdir()
    (work / "bootstrap.log").touch()  # an environment of an older version: whose is not known
    (tree.root / ".venv").symlink_to(work)

    done = tree.bootstrap()
    assert done.returncode == 2 and "which was not made for this checkout" in done.stderr
    assert list(work.iterdir()) == [work / "bootstrap.log"]


def test_an_interrupted_deletion_is_gone_on_with(tree: Tree) -> None:
    elsewhere = tree.root.with_name("elsewhere")
    (tree.root / ".venv").symlink_to(elsewhere)
    tree.bootstrap()
    for name in (".sg_stamp", "bootstrap.log"):
        (elsewhere / name).unlink()
    assert tree.bootstrap().returncode == 0


@pytest.mark.parametrize("link", [True, False])
def test_git_ignores_the_environment(tmp_path: Path, link: bool) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / "environment").mkdir()
    (tmp_path / ".venv").symlink_to("environment") if link else (tmp_path / ".venv").mkdir()
    ignored = subprocess.run(["git", "check-ignore", "-q", ".venv"], cwd=tmp_path, check=False)
    assert ignored.returncode == 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_is_begun_again(tree: Tree, sent: signal.Signals) -> None:
    process = tree.start(FAKE_SLOW="3600")
    packages = tree.root / ".venv" / "packages.txt"
    wait_until(packages.exists)
    process.send_signal(sent)
    _, err = process.communicate(timeout=300)

    assert process.returncode == 130
    assert "interrupted" in err
    assert not (tree.root / ".venv" / ".sg_stamp").exists()
    tree.calls()
    again = tree.bootstrap()
    assert again.returncode == 0, again.stderr
    assert "waiting" not in again.stdout, "what the first one started is still running"
    assert len(installed(tree.calls())) == 3


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_two_at_once_make_one_environment(tree: Tree) -> None:
    held = tree.root / "held"
    held.touch()
    first = tree.start(FAKE_HELD=str(held))
    wait_until((tree.root / ".venv" / "packages.txt").exists)
    second = tree.start()
    assert second.stdout is not None
    while "waiting for another bootstrap" not in second.stdout.readline():
        assert second.poll() is None
    held.unlink()
    second.communicate(timeout=300)
    first.communicate(timeout=300)

    assert (first.returncode, second.returncode) == (0, 0)
    assert len(installed(tree.calls())) == 3


def test_a_failing_step_shows_the_end_of_the_log(tree: Tree) -> None:
    done = tree.bootstrap(FAKE_BROKEN="1")
    assert done.returncode == 1
    assert "  | no route to the index" in done.stderr
    assert "bootstrap.log" in done.stderr
    assert not (tree.root / ".venv" / ".sg_stamp").exists()


def test_pips_indexes_are_uvs(tree: Tree) -> None:
    done = tree.bootstrap(FAKE_SETTINGS="export UV_INDEX=here; uv_options+=(--no-index)")
    assert done.returncode == 0, done.stderr
    assert all(arguments.startswith("--no-index ") for arguments in installed(tree.calls()))


def test_without_cpu_wheels_pytorchs_own_index_is_asked(tree: Tree) -> None:
    done = tree.bootstrap(FAKE_NO_CPU_TORCH="configured")
    assert done.returncode == 0, done.stderr
    assert "asking PyTorch's own" in done.stdout and "several GB" not in done.stdout
    assert installed(tree.calls())[:2] == [
        "--no-deps --require-hashes -r .venv/torch.txt",
        "--torch-backend cpu --no-deps --require-hashes -r .venv/torch.txt",
    ]


def test_without_any_cpu_wheels_the_large_torch_is_announced_and_installed(tree: Tree) -> None:
    done = tree.bootstrap(FAKE_NO_CPU_TORCH="anywhere")
    assert done.returncode == 0, done.stderr
    assert "several GB" in done.stdout
    assert "PIP_EXTRA_INDEX_URL" in done.stdout
    assert installed(tree.calls())[2] == (
        "--require-hashes --constraint requirements/cuda.lock -r .venv/torch.txt"
    )
    assert (tree.root / ".venv" / "torch.txt").read_text().startswith("torch===2.13.0 ")


def hide(*names: str) -> Callable[[Tree], None]:
    return lambda tree: [(tree.tools / name).unlink() for name in names] and None


def stub(name: str, script: str) -> Callable[[Tree], None]:
    return lambda tree: tree.stub(name, script)


def foreign_folder(tree: Tree) -> None:
    (tree.root / ".venv").mkdir()
    (tree.root / ".venv" / "somebody's work").touch()


@pytest.mark.parametrize(
    ("prepare", "changes", "expected"),
    [
        (None, {"SG_HARDWARE": "tpu"}, "SG_HARDWARE=tpu: no such hardware; expected cpu or "),
        (hide("python3.11"), {}, "no Python 3.11 (tried python3.11 python3"),
        (None, {"SG_PYTHON": "/no/python"}, "no Python 3.11 (tried /no/python"),
        (None, {"FAKE_BASE": ""}, "no Python 3.11"),
        (None, {"FAKE_NO_VENV": "1"}, "no venv module: apt-get install python3.11-venv"),
        (None, {"FAKE_INCLUDE": "/none"}, "no Python.h"),
        (hide("g++"), {"SG_HARDWARE": "cuda"}, "no C++ compiler (g++)"),
        (None, {"SG_HARDWARE": "cuda", "CXX": "/no/clang++"}, "no C++ compiler (/no/clang++)"),
        (stub("df", "echo header; echo disk 0 0 3145728 0% /"), {}, "3 GB free for"),
        (stub("uname", "echo Darwin"), {}, "Darwin on Darwin is not supported"),
        (foreign_folder, {}, "was not made by this script: move it away"),
        (lambda tree: (tree.root / ".venv").touch(), {}, ".venv is not a folder: move it away"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_in_one_line(
    tree: Tree,
    prepare: Callable[[Tree], None] | None,
    changes: dict[str, str],
    expected: str,
) -> None:
    if prepare is not None:
        prepare(tree)

    done = tree.bootstrap(**changes)

    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not [call for call in tree.calls() if "pip" in call or "venv" in call]
    assert not os.path.lexists(tree.root / ".venv" / ".sg_stamp")


def test_the_script_finds_its_tree_from_anywhere(tree: Tree, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere"
    link.mkdir()
    done = subprocess.run(
        ["bash", os.path.relpath(tree.root / "scripts" / "bootstrap.sh", link)],
        cwd=link, env=tree.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tree.root / ".venv" / ".sg_stamp").exists()
