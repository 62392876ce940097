"""Programs for a PATH of a test's own, which print what NVIDIA's real ones print."""

from __future__ import annotations

from pathlib import Path

A_HEADER = """\
Mon Nov  3 09:12:44 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver}             Driver Version: {driver}     CUDA Version: {cuda}     |
+-----------------------------------------+------------------------+----------------------+
"""


def program(folder: Path, name: str, script: str) -> Path:
    """An executable shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def nvidia_smi(
    folder: Path, driver: str = "580.95.05", cuda: str = "13.0", row: str = "81559, 9.0"
) -> Path:
    """An ``nvidia-smi`` of a node with two GPUs: MiB and compute capability of each."""
    return program(
        folder,
        "nvidia-smi",
        f"""\
case $* in
  --query-gpu=memory.total,compute_cap*) printf '{row}\\n{row}\\n' ;;
  -L) echo 'GPU 0: NVIDIA H100 (UUID: GPU-0a8f3c52-0000)' ;;
  "") cat <<'EOF'
{A_HEADER.format(driver=driver, cuda=cuda)}EOF
  ;;
esac""",
    )
