"""A model's own code does not run unless it is named; a port that is free."""

from __future__ import annotations

import inspect
import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from sg_rlhf.overlay.cluster import free_port as ports
from sg_rlhf.overlay.fork_server.client import ForkServer
from sg_rlhf.overlay.learner.actor import (
    SGPolicyModelActor,
    SGReferenceModelActor,
    SGRewardModelActor,
)
from sg_rlhf.overlay.learner.update import SGActorPPOTrainer
from sg_rlhf.overlay.rollout.engine import SGRolloutActor
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.overlay.settings.worker_settings import WorkerSettings
from sg_rlhf.overlay.weight_sync import sync_trainer

# -- A model's own code does not run unless the model is asked for by name; upstream runs it -----


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


# -- The ranks' port: free, and none that the kernel gives to somebody else meanwhile ------------


def test_it_is_free_and_below_the_kernels_range() -> None:
    first = int(ports.RANGE.read_text().split()[0])
    chosen = {ports.free_port() for _ in range(20)}
    assert len(chosen) > 10 and all(ports.FIRST <= port < first for port in chosen)
    with socket.socket() as sock:
        sock.bind(("", chosen.pop()))


def test_the_ranks_of_every_model_use_it() -> None:
    for rank in (SGPolicyModelActor, SGReferenceModelActor, SGRewardModelActor):
        port = rank._get_free_port(None)
        assert ports.FIRST <= port < int(ports.RANGE.read_text().split()[0])


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", ports.free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", port)
        assert ports.free_port(first_of_kernel=port + 1) != port


def test_a_kernel_that_hands_out_all_of_them() -> None:
    assert ports.free_port(first_of_kernel=1024) > 0


def test_the_weight_sync_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    signature = inspect.signature(SGRolloutActor.init_process_group)

    def remote(*given: Any, **named: Any) -> None:
        told.append(signature.bind(None, *given, **named).args[1:])

    join = SimpleNamespace(remote=remote)
    trainer: Any = SGActorPPOTrainer.__new__(SGActorPPOTrainer)
    vllm = SimpleNamespace(tensor_parallel_size=2, sync_with_ray=False, sync_backend="nccl")
    trainer.args = SimpleNamespace(vllm=vllm)
    trainer.vllm_engines = [SimpleNamespace(init_process_group=join)] * 2
    monkeypatch.setattr(ray, "get", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sync_trainer.platform, "is_cpu", lambda: False)
    monkeypatch.setattr(sync_trainer, "stateless_init_process_group", lambda *given: given)
    trainer.connect_engines()
    address, port, rank, size, _ = trainer._model_update_group
    assert (rank, size) == (0, 5)
    assert ports.FIRST <= port < int(ports.RANGE.read_text().split()[0])
    assert told == [(address, port, first, 5, "openrlhf", "nccl", False) for first in (1, 3)]
