"""A tutorial of docs/tutorials as a person would follow it: its files, its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TUTORIALS = ROOT / "docs" / "tutorials"
#: The first line of a block that only a machine with a GPU can run.
NEEDS_A_GPU = "# needs a GPU"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_TRAINING = re.compile(r"(?:-m sg_rlhf\.train|sg-rlhf train|train_grpo_sg_kk\.sh)\b")
_READS_A_RUN = re.compile(
    r"^.*(?:sg_rlhf\.report|sg-rlhf report|sg-rlhf summary) .*\n", re.MULTILINE
)
_TRAINED_MODEL = re.compile(r"runs/\w+/checkpoints/final")


def blocks(page: Path) -> tuple[dict[str, str], list[str]]:
    """(name: text of the files that the page has one write, its shell blocks)."""
    files, commands = {}, []
    for language, title, body in _BLOCK.findall(page.read_text()):
        if title:
            files[title] = body
        elif language == "bash" and not body.startswith(NEEDS_A_GPU):
            commands.append(body)
    return files, commands


def trainings(page: Path) -> int:
    """How many training commands the page has."""
    return len(_TRAINING.findall("".join(blocks(page)[1])))


def clone(folder: Path) -> None:
    """Make the folder look like a clone with its environment, whose Python is ours."""
    for name in ("configs", "examples", "lab", "tests"):
        (folder / name).symlink_to(ROOT / name)
    programs = {
        "scripts/bootstrap.sh": "exit 0\n",
        ".venv/bin/activate": "",
        ".venv/bin/python": f'exec "{sys.executable}" "$@"\n',
        ".venv/bin/sg-rlhf": f'exec "{sys.executable}" -m sg_rlhf "$@"\n',
    }
    for name, body in programs.items():
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}")
        program.chmod(0o755)


def follow(folder: Path, training: bool, page: Path) -> subprocess.CompletedProcess[str]:
    """Do what the page says. Without training: dry runs, and a shipped model to evaluate."""
    files, commands = blocks(page)
    clone(folder)
    for name, text in files.items():
        (folder / name).write_text(text)
    script = "".join(commands)
    assert trainings(page)
    if not training:
        script = _TRAINING.sub(r"\g<0> --dry-run", script)
        script = _READS_A_RUN.sub("", script)
        script = _TRAINED_MODEL.sub("module:sg_rlhf.tiny.math_tiny", script)
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    path = os.pathsep.join([str(folder / ".venv" / "bin"), os.environ["PATH"]])
    no_gpu = {"SG_HARDWARE": "cpu"}
    if not training:  # a Ray of its own does not start with this
        no_gpu["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, **no_gpu, "PATH": path, "PYTHONPATH": search, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
