"""Completion of `sg-rlhf` in real shells: what a tab makes of a line."""

from __future__ import annotations

import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("argcomplete", reason="argcomplete is not installed: run scripts/bootstrap.sh")

from sg_rlhf.config import shell_completion

ROOT = Path(__file__).parents[2]
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ""),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -D; "),
}


@pytest.fixture(scope="module")
def path_with_command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `sg-rlhf` is this checkout's."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "sg-rlhf"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script.write_text(
        f"#!/bin/sh\nPYTHONPATH='{paths}' exec '{sys.executable}' -m sg_rlhf \"$@\"\n"
    )
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def completed(shell: str, line: str, path: str) -> str:
    """What the line is after a tab, in an interactive shell on a terminal."""
    argv, prepare = SHELLS[shell]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        environment = {"PATH": path, "HOME": "/nonexistent", "TERM": "dumb", "PS1": "> "}
        os.execvpe(argv[0], argv, environment)
    try:
        setup = f"{prepare}eval \"$(sg-rlhf completion {shell})\"; echo READ''Y\n"
        os.write(terminal, setup.encode())
        _read(terminal, "READY\r\n")
        # Home, end: the completed line becomes the argument of an echo.
        os.write(terminal, f"{line}\t\x01echo 'IS \x05'; echo DO''NE\n".encode())
        output = _read(terminal, "DONE\r\n")
        os.write(terminal, b"exit\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    (found,) = [x for x in output.splitlines() if x.startswith("IS ")]
    return found.removeprefix("IS ")


def _read(terminal: int, until: str, seconds: float = 300) -> str:
    text, deadline = "", time.monotonic() + seconds
    while until not in text:
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sg-rlhf wei", "sg-rlhf weights "),
        ("sg-rlhf measure mini", "sg-rlhf measure minibatch-gradients "),
        ("sg-rlhf train --dry", "sg-rlhf train --dry-run "),
        ("sg-rlhf data k", "sg-rlhf data kk "),
        ("sg-rlhf eval --suite qa --no-s", "sg-rlhf eval --suite qa --no-search "),
        ("sg-rlhf data kk --gen", "sg-rlhf data kk --generate "),
        ("sg-rlhf weights actor.adam.l", "sg-rlhf weights actor.adam.lr="),
        ("sg-rlhf train sg.lopti_t", "sg-rlhf train sg.lopti_threshold="),
        (
            "sg-rlhf train --config configs/kk/grpo_tiny_cpu.yaml actor.policy_loss_type=cis",
            "sg-rlhf train --config configs/kk/grpo_tiny_cpu.yaml actor.policy_loss_type=cispo ",
        ),
        (
            "sg-rlhf weights --config configs/kk/grpo_t",
            "sg-rlhf weights --config configs/kk/grpo_tiny_cpu.yaml ",
        ),
        ("sg-rlhf weights --config conf", "sg-rlhf weights --config configs/"),
    ],
)
def test_a_tab_completes(shell: str, line: str, expected: str, path_with_command: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert completed(shell, line, path_with_command).rstrip() == expected.rstrip()


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        shell_completion.main(["fish"])
    assert stopped.value.code == 2
    assert "'fish'" in capsys.readouterr().err


def test_shipped_recipes_are_offered_outside_the_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "other.txt").touch()
    found = set(shell_completion._recipes(""))
    assert {"mine.yaml", "configs/kk/grpo_sg_tiny_cpu.yaml"} <= found
    assert "other.txt" not in found
