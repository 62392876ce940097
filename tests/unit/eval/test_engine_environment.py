"""What an engine's process finds in its environment before its library is imported."""

from __future__ import annotations

import os
from importlib import metadata

import pytest

from sg_rlhf.eval.engines.start import set_environment
from sg_rlhf.eval.model import cpu_only


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that the test may fill; it is as before afterwards."""
    for name in [*os.environ]:
        if name.startswith(("VLLM_", "SG_", "OMP_", "PYTORCH_", "TOKENIZERS_")):
            monkeypatch.delenv(name)
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(
    ("engine", "cpu", "expected"),
    [("vllm", False, "0"), ("vllm", True, None), ("openai", False, None)],
)
def test_flashinfers_sampler_is_off_on_cuda(
    monkeypatch: pytest.MonkeyPatch, engine: str, cpu: bool, expected: str | None
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", {**os.environ})
        set_environment(engine, cpu, replicas=1)  # type: ignore[arg-type]
        assert os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") == expected
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "1"
        set_environment(engine, cpu, replicas=1)  # type: ignore[arg-type]
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


@pytest.mark.usefixtures("empty")
def test_torch_is_asked_for_gpus_without_initialising_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has initialised CUDA cannot be forked, and vLLM forks its engine."""
    import torch

    asked = []
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0")  # the build for CUDA
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: asked.append(torch.cuda._nvml_based_avail())
    )
    assert cpu_only()
    assert asked == [True]
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
