"""What the workers of a run find in their environment, started here or as a submitted job."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.runtime_env.runtime_env import _merge_runtime_env

from sg_rlhf.overlay.driver import ray_session
from sg_rlhf.overlay.settings import worker_settings
from sg_rlhf.overlay.settings.worker_settings import WorkerSettings

ARGS = SimpleNamespace(
    sg=SimpleNamespace(
        rotary_fp32=True,
        fused_logprobs=True,
        share_prompts=False,
        domains={},
        weighting={},
        engine_log_probs=True,
        engine_start_timeout=60.0,
        on_nonfinite="skip",
        trust_remote_code=[],
        batch_invariant=False,
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
        engine_log_probs=True,
        skip_nonfinite=True,
        engine_start_timeout=60.0,
        param_dtype="fp16",
        trusted_models=("org/model",),
        activity_log=str(tmp_path / "logs" / "phases.jsonl"),
    )
    assert worker_settings.current().engine_dtype == "float16"


def test_batch_invariant_kernels_are_asked_for_by_a_variable() -> None:
    args = copy.deepcopy(ARGS)
    assert "VLLM_BATCH_INVARIANT" not in ray_session.worker_variables(args, False)
    args.sg.batch_invariant = True
    assert ray_session.worker_variables(args, False)["VLLM_BATCH_INVARIANT"] == "1"
