"""A model's own code does not run unless the model is asked for by name; upstream runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sg_rlhf.overlay.fork_server.client import ForkServer
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.overlay.settings.worker_settings import WorkerSettings

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
#: Loads what upstream loads in its workers, and says what came of it.
LOADS = """
import sys
from types import SimpleNamespace
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


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An interpreter that starts with transformers imported, as a run's processes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))  # read at the import
        server = ForkServer(("transformers.trainer",))
    yield server.python
    server.close()


@pytest.fixture
def load(python: Path, tmp_path: Path) -> Callable[..., str]:
    """Load a model with the overlay; the last line of what that said."""

    def load(model: Path, *trusted: str) -> str:
        run = subprocess.run(
            [python, "-c", LOADS, str(model)],
            env={
                "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "SG_PLATFORM": "cpu",
                "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path),
                worker_settings.VARIABLE: WorkerSettings(trusted_models=trusted).to_json(),
            },
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        return (run.stdout.splitlines() or [run.stderr])[-1]

    return load


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


def test_a_models_code_runs_only_if_it_is_asked_for_by_name(
    model: Path, load: Callable[..., str], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    said = load(model)
    assert said.startswith(f"ModelCodeError {model}: the model contains its own code (own.py)")
    assert not mark.exists()
    load(model, str(model))
    assert mark.exists()  # so the mark is one


def test_code_of_another_repository_is_asked_for_beside_the_model(
    model: Path, load: Callable[..., str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.move(model / "own.py", other / "own.py")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": f"{other}--own.OwnConfig"}
    (model / "config.json").write_text(json.dumps(config))
    said = load(model, str(model))
    assert said.startswith(f"ModelCodeError {other}: the model contains its own code (own.py)")
    assert said.endswith(f"sg.trust_remote_code=[{model},{other}]")
    assert not (tmp_path / "mark").exists()
    load(model, str(model), str(other))
    assert (tmp_path / "mark").exists()


def test_a_model_without_code_loads_as_ever(load: Callable[..., str]) -> None:
    assert load(MODEL) == "loaded"
