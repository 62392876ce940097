"""Toolkits of any version, by an nvcc that prints it; and what DeepSpeed does with each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from sg_rlhf.common import cuda_home
from sg_rlhf.config.checks import cuda_toolkit

NVCC = """#!/bin/sh
echo 'nvcc: NVIDIA (R) Cuda compiler driver'
echo 'Cuda compilation tools, release {version}, V{version}.48'
"""


def toolkit(folder: Path, version: str) -> Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC.format(version=version))
    nvcc.chmod(0o755)
    return folder


@pytest.mark.parametrize("version", ["13.0", "13.1", "13.4"])
def test_deepspeed_takes_any_toolkit_when_its_check_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    from deepspeed.ops.op_builder import builder

    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(toolkit(tmp_path, version)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert builder.assert_no_cuda_mismatch("an operator")


def test_the_release_of_a_toolkit(tmp_path: Path) -> None:
    assert cuda_toolkit.release(toolkit(tmp_path / "a", "13.1")) == (13, 1)
    assert cuda_toolkit.release(tmp_path / "none") is None
    broken = toolkit(tmp_path / "b", "13.1")
    (broken / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert cuda_toolkit.release(broken) is None


@pytest.mark.parametrize(
    ("home", "found", "torch_cuda", "expected"),
    [
        ("/opt/cuda", (13, 0), "13.0", None),
        ("/opt/cuda", (13, 3), "13.0", None),
        ("/opt/cuda", None, None, None),
        ("/opt/cuda", (12, 8), "13.0", "/opt/cuda is 12.8, and torch is built for 13.0: install"),
        ("/opt/cuda", None, "13.0", "/opt/cuda has no nvcc that runs: install one of 13.x and set"),
        (None, None, "13.0", "there is none: install one of 13.x and set CUDA_HOME; or set"),
    ],
)
def test_deepcompile_needs_one_of_torchs_major_version(
    home: str | None, found: tuple[int, int] | None, torch_cuda: str | None, expected: str | None
) -> None:
    line = cuda_toolkit.problem(home, found, torch_cuda)
    assert line == expected if expected is None else line is not None and expected in line


@pytest.mark.parametrize("named", [None, "", "/opt/mine"])
def test_the_usual_folder_is_named_for_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    monkeypatch.setenv("CUDA_HOME", "")
    if named is None:
        monkeypatch.delenv("CUDA_HOME")
    else:
        monkeypatch.setenv("CUDA_HOME", named)
    cuda_home.install(tmp_path)
    assert os.environ.get("CUDA_HOME") == named
    cuda_home.install(toolkit(tmp_path, "13.0"))
    assert os.environ["CUDA_HOME"] == (named or str(tmp_path))
