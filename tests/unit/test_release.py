"""The release workflow tries what the metadata promises, and needs one secret."""

from __future__ import annotations

import configparser
import os
import re
from pathlib import Path

import yaml

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
