"""The commit that a result names is this project's, never that of whoever installed it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sg_rlhf.eval.scores import results


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "theirs.py").write_text("1\n")
    git(tmp_path, "add", "theirs.py")
    git(tmp_path, "commit", "--quiet", "--message", "theirs")
    return tmp_path


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout: Path) -> None:
    installed = checkout / "venv" / "site-packages" / "eval" / "results.py"
    installed.parent.mkdir(parents=True)
    shutil.copy(results.__file__, installed)
    assert results._commit(installed) is None


def test_a_checkouts_own_file_has_its_commit_and_a_plus_where_it_changed(checkout: Path) -> None:
    file = checkout / "theirs.py"
    head = git(checkout, "rev-parse", "HEAD")
    assert results._commit(file) == head
    file.write_text("2\n")
    assert results._commit(file) == f"{head}+"
