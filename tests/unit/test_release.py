"""What is released: versions and images."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

# -- The release workflow tries what the metadata promises, and needs one secret -----------------


ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_every_python_of_the_metadata_is_tried() -> None:
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    promised = re.findall(r"Python :: (3\.\d+)", metadata["metadata"]["classifiers"])
    tried = yaml.safe_load(WORKFLOW)["jobs"]["try"]["strategy"]["matrix"]["python"]
    assert promised == tried
    assert metadata["options"]["python_requires"] == f">={tried[0]}"


def test_one_secret_is_enough() -> None:
    assert set(re.findall(r"secrets\.(\w+)", WORKFLOW)) == {"PYPI_TOKEN"}


def test_what_it_runs_is_there() -> None:
    for script in re.findall(r"run: (scripts/\S+)", WORKFLOW):
        assert os.access(ROOT / script, os.X_OK), script
    for target in re.findall(r"run: make (\S+)", WORKFLOW):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target


# -- docker/: linted, pinned, for an ordinary user, with nothing of the checkout but what they name
# tests/integration/test_images.py carries the CPU one out.


KINDS = ("cpu", "cuda")


def steps(kind: str) -> list[tuple[str, str]]:
    found = DockerfileParser(path=str(ROOT / "docker" / f"{kind}.Dockerfile")).structure
    return [(s["instruction"], s["value"]) for s in found if s["instruction"] != "COMMENT"]


def values(kind: str, instruction: str) -> list[str]:
    return [value for name, value in steps(kind) if name == instruction]


@pytest.mark.parametrize("kind", KINDS)
def test_hadolint_is_content(kind: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    hadolint = shutil.which("hadolint", path=path)
    if hadolint is None:
        pytest.skip("hadolint is not installed; `make lint` runs it")
    file = ROOT / "docker" / f"{kind}.Dockerfile"
    done = subprocess.run([hadolint, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_packages_are_those_of_the_lock_and_the_user_is_no_root(kind: str) -> None:
    (base,) = values(kind, "FROM")
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", base)
    (install,) = [run for run in values(kind, "RUN") if "bootstrap.sh" in run]
    assert f"SG_HARDWARE={kind} " in install
    assert (ROOT / "requirements" / f"{kind}.lock").is_file()
    (user,) = values(kind, "USER")
    assert user == "1000:1000"
    after = [name for name, _ in steps(kind)][[name for name, _ in steps(kind)].index("USER") :]
    assert not {"RUN", "COPY", "ADD"} & set(after)
    assert json.loads(values(kind, "ENTRYPOINT")[0])[-1] == "sg-rlhf"


def test_both_are_built_alike() -> None:
    """But for the packages, and what the NVIDIA container toolkit and compilers read."""
    texts = []
    for kind in KINDS:
        lines = [f"{name} {value}" for name, value in steps(kind)]
        text = re.sub(r"(NVIDIA|VLLM|TRITON)_\w+=\S+\s*", "", "\n".join(lines))
        text = text.replace(f"={kind} ", "=KIND ")
        texts.append(re.sub(r" *(ibverbs-providers|libibverbs1)(?= )", "", text).split())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied_is_there_and_let_through(kind: str) -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    given = [rule for rule in rules if rule and not rule.startswith("#")]
    allowed = {rule[1:] for rule in given if rule.startswith("!")}
    copied = [source for value in values(kind, "COPY") for source in value.split()[:-1]]
    assert given[0] == "*"
    assert {source.split("/")[0] for source in copied} == allowed
    for source in copied:
        assert (ROOT / source).exists(), source
    assert not allowed & {".git", ".venv", ".cache", "data", "runs", "out", "site", "tests"}
