"""What the driver prepares: the environment of workers, the model of a revision."""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.runtime_env.runtime_env import _merge_runtime_env

from sg_rlhf.common import home
from sg_rlhf.config import load_config
from sg_rlhf.config.checks.input_files import token_counter
from sg_rlhf.overlay.driver import ray_session
from sg_rlhf.overlay.driver.arguments import UsageError, pin_revision, upstream_arguments
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.overlay.settings.worker_settings import WorkerSettings

# -- What the workers of a run find in their environment, started here or as a submitted job -----


ARGS = SimpleNamespace(
    sg=SimpleNamespace(
        fused_logprobs=True,
        share_prompts=False,
        domains={},
        engine_args={},
        weighting={},
        engine_timeout=600.0,
        on_nonfinite="skip",
        trust_remote_code=[],
        run_dir=None,
    ),
    ds=SimpleNamespace(
        tensor_parallel_size=1, deepcompile=False, packing_samples=False, param_dtype="fp16"
    ),
)


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_a_job_may_set_what_the_run_sets_too(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    job = {"env_vars": {"SG_PLATFORM": platform, "NCCL_DEBUG": "INFO", "OTHER": "1"}}
    monkeypatch.setenv(
        RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps({"runtime_env": job, "metadata": {}})
    )
    own = {"env_vars": ray_session.worker_variables(ARGS, platform == "cpu")}
    merged = _merge_runtime_env(job, own)
    assert merged is not None  # Ray: a conflict
    variables = merged["env_vars"]
    assert {**job["env_vars"], "TOKENIZERS_PARALLELISM": "false"}.items() <= variables.items()


@pytest.mark.parametrize("job", [None, {"metadata": {}}, {"runtime_env": {"pip": ["x"]}}])
def test_without_variables_of_a_job_every_one_is_named(
    monkeypatch: pytest.MonkeyPatch, job: dict[str, object] | None
) -> None:
    monkeypatch.delenv(RAY_JOB_CONFIG_JSON_ENV_VAR, raising=False)
    if job is not None:
        monkeypatch.setenv(RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps(job))
    variables = ray_session.worker_variables(ARGS, on_cpu=False)
    assert variables["SG_PLATFORM"] == "cuda" and "NCCL_DEBUG" in variables


@pytest.mark.parametrize(("exported", "found"), [(None, "0"), ("1", "1")])
def test_the_engines_of_a_run_compile_no_sampler(
    monkeypatch: pytest.MonkeyPatch, exported: str | None, found: str
) -> None:
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.delenv(name, raising=False)
    if exported:
        monkeypatch.setenv(name, exported)
    assert ray_session.worker_variables(ARGS, on_cpu=False)[name] == found
    assert name not in ray_session.worker_variables(ARGS, on_cpu=True)


def test_the_settings_of_the_network_reach_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTHER_SOCKET_IFNAME", "eth1")
    found = ray_session.worker_variables(ARGS, on_cpu=False)
    assert exported.items() <= found.items() and "OTHER_SOCKET_IFNAME" not in found


def test_a_worker_reads_the_settings_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert worker_settings.current() == WorkerSettings()
    args = copy.deepcopy(ARGS)
    args.sg.run_dir = str(tmp_path)
    args.sg.trust_remote_code = ["org/model"]
    for name, value in ray_session.worker_variables(args, True).items():
        monkeypatch.setenv(name, value)
    assert worker_settings.current() == WorkerSettings(
        param_dtype="fp16",
        trusted_models=("org/model",),
        activity_log=str(tmp_path / "logs" / "phases.jsonl"),
    )
    assert worker_settings.current().engine_dtype == "float16"


def test_the_workers_get_the_folder_that_stands_for_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(home.VARIABLE, raising=False)
    assert "HOME" not in ray_session.worker_variables(ARGS, True)
    monkeypatch.setenv(home.VARIABLE, "/tmp/mine")
    assert ray_session.worker_variables(ARGS, True)["HOME"] == "/tmp/mine"


# -- `sg.model_revision`: the commit's folder in the hub's cache replaces the model's id ---------


ROOT = Path(__file__).parents[4]
RECIPE = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model as a commit of org/model in a cache of its own; the hub is out of reach."""
    monkeypatch.setenv("SG_PLATFORM", "cpu")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--model" / "snapshots" / COMMIT
    shutil.copytree(ROOT / "sg_rlhf" / "tiny" / "kk_tiny", snapshot)
    return snapshot


def overrides(revision: str, model: str = "org/model") -> list[str]:
    return [f"actor.model_name_or_path={model}", f"sg.model_revision={revision}"]


def pinned(*words: str) -> argparse.Namespace:
    args = upstream_arguments(load_config(RECIPE, list(words)))
    pin_revision(args)
    return args


def test_every_role_gets_the_commits_folder(folder: Path) -> None:
    args = pinned(*overrides(COMMIT), "sg.trust_remote_code=[org/model]")
    assert args.actor.model_name_or_path == str(folder)
    assert args.sg.trust_remote_code == ["org/model", str(folder)]


def test_without_a_revision_the_id_stays(folder: Path) -> None:
    assert pinned("actor.model_name_or_path=org/model").actor.model_name_or_path == "org/model"


def test_the_tokens_of_prompts_are_counted_with_the_commits_tokenizer(folder: Path) -> None:
    count = token_counter(load_config(RECIPE, overrides(COMMIT)))
    assert count is not None and count(["knight"])[0] > 0
    assert token_counter(load_config(RECIPE, overrides("f" * 40))) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (overrides("f" * 40), "org/model/commits/main has its commits"),
        (overrides(COMMIT, str(ROOT / "sg_rlhf" / "tiny" / "kk_tiny")), "has no revisions"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(folder: Path, words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        pinned(*words)
    assert str(caught.value).startswith("sg.model_revision=") and "\n" not in str(caught.value)
