"""Programs for a PATH of a test's own, which print what NVIDIA's real ones print."""

from __future__ import annotations

import os
import sys
from pathlib import Path

H100 = "NVIDIA H100 80GB HBM3, 81559, 1, {driver}, 9.0"
A_HEADER = """\
Mon Nov  3 09:12:44 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver}             Driver Version: {driver}     CUDA Version: {cuda}     |
+-----------------------------------------+------------------------+----------------------+
"""
#: As on an H100 node: the heading underlined by escape codes, NICs behind the GPUs.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \t{link}\tPIX\t0-55\t0\t\tN/A
GPU1\t{link}\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
NVCC = """\
nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Cuda compilation tools, release {release}, V{release}.88
"""


def program(folder: Path, name: str, script: str) -> Path:
    """An executable shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def nvidia_smi(
    folder: Path,
    gpus: int = 2,
    driver: str = "580.95.05",
    cuda: str = "13.0",
    link: str = "NV18",
    row: str = H100,
    mig: str = "",
) -> Path:
    """An ``nvidia-smi`` of a node with H100s."""
    row = row.format(driver=driver)
    rows = "\n".join(f"{i}, GPU-{i}a8f3c52-0000, {row}" for i in range(gpus))
    listed = "\n".join(
        f"GPU {i}: NVIDIA H100 (UUID: GPU-{i}a8f3c52-0000){mig}" for i in range(gpus)
    )
    return program(
        folder,
        "nvidia-smi",
        f"""\
case $* in
  --query-gpu=*) cat <<'EOF'
{rows}
EOF
  ;;
  -L) cat <<'EOF'
{listed}
EOF
  ;;
  "topo -m") cat <<'EOF'
{TOPOLOGY.format(link=link)}EOF
  ;;
  "") cat <<'EOF'
{A_HEADER.format(driver=driver, cuda=cuda)}EOF
  ;;
esac""",
    )


def nvcc(folder: Path, release: str = "13.0") -> Path:
    """An ``nvcc`` that tells its release."""
    return program(folder, "nvcc", f"cat <<'EOF'\n{NVCC.format(release=release)}EOF")


def path(*folders: Path) -> str:
    """A PATH: these folders, then what a shell script needs."""
    return os.pathsep.join([*map(str, folders), "/usr/bin", "/bin"])


PYTHON = sys.executable
