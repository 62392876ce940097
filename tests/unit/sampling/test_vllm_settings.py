"""What vLLM is asked for, and the seed of each request."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import AsyncEngineArgs, SamplingParams

from sg_rlhf.config.checks import engine_args
from sg_rlhf.config.sg_settings import MIN_TEMPERATURE, sg_keys
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.overlay.rollout import engine
from sg_rlhf.overlay.rollout.engine import SGRolloutActor
from sg_rlhf.overlay.settings.worker_settings import WorkerSettings
from sg_rlhf.plan import shapes
from sg_rlhf.sampling import vllm_settings
from sg_rlhf.sampling.request_seeds import LIMIT, SeedKey, request_seed

# -- What vLLM makes of our settings, by vLLM's own configuration; no engine is started ----------


MODEL = "Qwen/Qwen2.5-7B-Instruct-1M"
#: chunk_size - local_size of its config.json.
EXACT = 262_144 - 8_192
CONTEXT = 5_120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published configuration, with the file beside it that makes vLLM read the setting."""
    folder = tmp_path_factory.mktemp("models") / "long"
    folder.mkdir()
    published = json.loads((Path(shapes.__file__).parent / "model_configs.json").read_text())
    config = {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16", **published[MODEL]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sparse_attention_config.json").write_text('{"0": {"0": ["slash", 1, 2, 0.5]}}')
    return folder


def configured(folder: Path, context: int = CONTEXT, **settings: Any) -> Any:
    """vLLM's whole configuration of an engine, as both of our engines make it."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=context,
        dtype="float32",  # bf16 is refused where the GPU is hidden
        **settings,
    )
    return arguments.create_model_config()


@pytest.mark.parametrize("context", [CONTEXT, 262_144])
def test_without_the_override_vllm_is_asked_for_dual_chunks(folder: Path, context: int) -> None:
    found = configured(folder, context)
    assert found.hf_config.dual_chunk_attention_config["chunk_size"] == 262_144
    assert found.max_model_len == context


def test_the_override_deletes_the_setting_and_nothing_else(folder: Path) -> None:
    from vllm.config.load import LoadConfig

    stock = configured(folder)
    ours = configured(folder, **vllm_settings.engine_settings(None, False))
    assert not hasattr(ours.hf_config, "dual_chunk_attention_config")
    before, after = stock.hf_config.to_dict(), ours.hf_config.to_dict()
    del before["dual_chunk_attention_config"]
    before["max_position_embeddings"] = EXACT
    assert after == before
    assert ours.max_model_len == stock.max_model_len == CONTEXT
    # What would fail with None in the setting's place: the file beside config.json is read into it.
    ours.verify_dual_chunk_attention_config(LoadConfig())


def test_the_rotary_embedding_of_the_context_is_the_plain_one(folder: Path) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    stock, ours = (
        configured(folder, **settings)
        for settings in ({}, vllm_settings.engine_settings(None, False))
    )
    head = ours.get_head_size()
    tables = []
    for config, positions in ((stock, 1_010_000), (ours, EXACT)):
        hf = config.hf_config
        assert hf.max_position_embeddings == positions
        with set_current_vllm_config(VllmConfig()):
            rope = get_rope(
                head,
                max_position=positions,
                rope_parameters=hf.rope_parameters,
                dtype=torch.float32,
            )
        tables.append(rope.cos_sin_cache[:CONTEXT])
    assert torch.equal(*tables)


@pytest.mark.parametrize(("gib", "sequences"), [(23.5, 256), (39.4, 256), (79.1, 1024)])
def test_an_engine_on_a_gpu_takes_what_vllms_server_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gib: float, sequences: int
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    def of_gpu(_device: int = 0) -> int:
        return int(gib * 2**30)

    monkeypatch.setattr(type(current_platform), "get_device_total_memory", staticmethod(of_gpu))
    monkeypatch.setattr(type(current_platform), "get_device_name", staticmethod(lambda: "H100"))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    _, expected = EngineArgs.get_batch_defaults(1)
    found = vllm_settings.cuda_settings(gib)
    assert found["max_num_seqs"] == sequences == expected[UsageContext.OPENAI_API_SERVER]
    assert found.keys() <= engine_args.names()


def test_the_names_of_the_engines_arguments_are_vllms() -> None:
    expected = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert engine_args.names() == expected
    assert engine_args.OF_THE_TRAINER.keys() <= expected
    keys = {key for key in engine_args.OF_THE_TRAINER.values() if key}
    assert all(key in flags() or key in sg_keys() for key in keys)


def test_a_recipes_arguments_win_over_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def arguments(**kwargs: Any) -> None:
        found.update(kwargs)
        raise InterruptedError

    monkeypatch.setattr(engine.vllm, "AsyncEngineArgs", arguments)
    monkeypatch.setenv("RAY_ADDRESS", "none")
    given = WorkerSettings(engine_args={"max_num_batched_tokens": 99, "enforce_eager": False})
    monkeypatch.setenv("SG_WORKER", given.to_json())
    actor: Any = SGRolloutActor.__new__(SGRolloutActor)
    with pytest.raises(InterruptedError):
        asyncio.run(actor.__init__(model="m", max_model_len=4096, seed=1))
    assert found["max_num_batched_tokens"] == 99 and found["enforce_eager"] is False
    assert found["seed"] == 1 and "enable_chunked_prefill" in found


def test_a_context_beyond_the_first_chunk_is_refused(folder: Path) -> None:
    settings = vllm_settings.engine_settings(None, False)
    assert configured(folder, EXACT, **settings).max_model_len == EXACT
    with pytest.raises(ValueError, match=f"{EXACT}"):
        configured(folder, EXACT + 1, **settings)


def test_another_model_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["dual_chunk_attention_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = configured(tmp_path, **vllm_settings.engine_settings(None, False))
    assert ours.hf_config.to_dict() == configured(tmp_path).hf_config.to_dict()
    assert ours.hf_config.max_position_embeddings == 1_010_000


def test_the_override_reaches_another_process() -> None:
    settings = vllm_settings.engine_settings((9, 0), False)
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("capability", "compiled", "backend"),
    [
        (None, False, None),
        ((8, 0), False, None),
        ((8, 9), False, None),
        ((9, 0), False, None),
        ((10, 0), False, "FLASH_ATTN"),
        ((10, 3), False, "FLASH_ATTN"),
        ((10, 0), True, None),
        ((12, 0), False, None),
    ],
)
def test_b200_does_not_wait_for_a_compiler(
    folder: Path, capability: tuple[int, int] | None, compiled: bool, backend: str | None
) -> None:
    settings = vllm_settings.engine_settings(capability, compiled)
    assert settings.get("attention_backend") == backend
    configured(folder, **settings)


def test_flashinfers_sampler_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    from vllm import envs

    assert envs.VLLM_USE_FLASHINFER_SAMPLER  # vLLM's default
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    assert vllm_settings.cuda_variables()[name] == "0"
    monkeypatch.setenv(name, "1")
    assert vllm_settings.cuda_variables()[name] == "1"


def test_a_folder_for_compiled_graphs_is_every_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/shared/vllm")
    found = vllm_settings.cuda_variables()
    assert found["VLLM_CACHE_ROOT"] == "/shared/vllm" and "TRITON_CACHE_DIR" not in found


@pytest.mark.parametrize("exported", [None, "0"])
def test_engines_report_no_usage_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, exported: str | None
) -> None:
    from vllm.usage import usage_lib

    name = "VLLM_NO_USAGE_STATS"
    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    monkeypatch.delenv(name, raising=False)
    if exported:
        monkeypatch.setenv(name, exported)
    monkeypatch.setenv(name, vllm_settings.cuda_variables()[name])
    assert usage_lib.is_usage_stats_enabled() == (exported == "0")


@pytest.mark.parametrize("asked", [MIN_TEMPERATURE, 0.7])
def test_vllm_samples_at_the_temperature_that_was_asked_for(asked: float) -> None:
    assert SamplingParams(temperature=asked).temperature == asked
    # Why recipes with less are refused.
    assert SamplingParams(temperature=MIN_TEMPERATURE / 2).temperature == MIN_TEMPERATURE


# -- Seeds of sampling: one for each request of a run, and the same ones for ever ----------------


def test_no_two_requests_of_a_run_share_a_seed() -> None:
    seeds = [
        request_seed(SeedKey(42, purpose, step, prompt), response, turn)
        for purpose in ("rollout", "eval/kk")
        for step in range(12)
        for prompt in range(12)
        for response in range(12)
        for turn in range(3)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < LIMIT for seed in seeds)


def test_a_seed_is_what_it_was_in_the_runs_that_were_published() -> None:
    assert request_seed(SeedKey(42, "rollout", 0, 0), 0) == 4289459534486724766
    assert request_seed(SeedKey(42, "rollout", 1, 11), 1) != request_seed(
        SeedKey(42, "rollout", 11, 1), 1
    )
