"""A model's own code does not run unless the model is asked for by name; upstream runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.overlay.settings.worker_settings import WorkerSettings

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
#: Loads what upstream loads in its workers, with the overlay or without, and says what came of it.
LOADS = """
import sys
from types import SimpleNamespace
if sys.argv[2] == "overlay":
    from sg_rlhf.overlay.patches import table
    table.install()
from openrlhf.utils.utils import get_tokenizer, is_vlm_model
from transformers import AutoConfig, AutoModelForCausalLM
folder = sys.argv[1]
try:
    get_tokenizer(folder, SimpleNamespace(is_vlm=False, config=SimpleNamespace()))
    is_vlm_model(folder)
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    print("loaded")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny model with a configuration class of its own, which leaves a mark when it runs."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'w')\n"
        "from transformers import Qwen2Config\nclass OwnConfig(Qwen2Config): pass\n"
    )
    return folder


def load(model: Path, how: str, tmp_path: Path, trusted: tuple[str, ...] = ()) -> str:
    run = subprocess.run(
        [sys.executable, "-c", LOADS, str(model), how],
        env={
            "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "SG_PLATFORM": "cpu",
            "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path),
            worker_settings.VARIABLE: WorkerSettings(trusted_models=trusted).to_json(),
        },
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return (run.stdout.splitlines() or [run.stderr])[-1]


def test_a_models_code_runs_only_if_it_is_asked_for_by_name(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    said = load(model, "overlay", tmp_path)
    assert said.startswith(f"ModelCodeError {model}: the model contains its own code (own.py)")
    assert not mark.exists()
    load(model, "overlay", tmp_path, trusted=(str(model),))
    assert mark.exists()  # so the mark is one


def test_code_of_another_repository_is_asked_for_beside_the_model(
    model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(model / "own.py", other / "own.py")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": f"{other}--own.OwnConfig"}
    (model / "config.json").write_text(json.dumps(config))
    said = load(model, "overlay", tmp_path, trusted=(str(model),))
    assert said.startswith(f"ModelCodeError {other}: the model contains its own code (own.py)")
    assert said.endswith(f"sg.trust_remote_code=[{model},{other}]")
    assert not (tmp_path / "mark").exists()
    load(model, "overlay", tmp_path, trusted=(str(model), str(other)))
    assert (tmp_path / "mark").exists()


def test_a_model_without_code_loads_as_ever(tmp_path: Path) -> None:
    assert load(MODEL, "overlay", tmp_path) == "loaded"
