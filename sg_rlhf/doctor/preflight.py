"""Check NVIDIA's driver and the GPUs before anything is installed.

    python3 -m sg_rlhf.doctor.preflight

scripts/bootstrap.sh runs this before it downloads packages for ``cpu`` or ``cuda``, and checks
Python, compiler and disk itself. Standard library and Python 3.8 only. Exit status: 0 fine, 1
warnings, 2 cannot work.

torch 2.13 has CUDA 13.0. CUDA 13 needs driver 580 or later
(docs.nvidia.com/deploy/cuda-compatibility); an older driver supports it with NVIDIA's package for
forward compatibility. bf16 and vLLM's FlashAttention need compute capability 8.0.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from sg_rlhf.doctor.check import FAILED, OK, WARNING, Check, exit_status
from sg_rlhf.machine.names import SIZES

if TYPE_CHECKING:
    from collections.abc import Iterable

DRIVER, CUDA, CAPABILITY = 580, 13, (8, 0)
ON_CPU = "SG_HARDWARE=cpu goes without GPUs"
REPAIR = "repair the driver until `nvidia-smi` lists the GPUs (dmesg says more)"
#: nvidia-smi may take several seconds with many GPUs, and hang with a broken driver.
SECONDS = 30


def driver(version: str, cuda: str | None) -> Check:
    """Driver 580 or later, or one whose library supports CUDA 13.

    Args:
        version: such as "580.65.06".
        cuda: newest CUDA version of the driver's library, such as "13.0"; None if not known.
    """
    needed = f"{DRIVER} or later, for CUDA {CUDA}"
    if _numbers(version)[0] >= DRIVER:
        return Check("driver", OK, version, needed)
    if cuda and _numbers(cuda)[0] >= CUDA:
        remark = f"with forward compatibility to CUDA {cuda}"
        return Check("driver", OK, version, needed, remark=remark)
    found = f"{version} (CUDA {cuda})" if cuda else version
    remedy = f"update NVIDIA's driver to {DRIVER} or later, or {ON_CPU}"
    return Check("driver", FAILED, found, needed, remedy)


def capability(versions: Iterable[str]) -> Check:
    """Compute capability of the oldest GPU, such as "9.0": 8.0 or later."""
    needed = "8.0 or later, for bf16 and vLLM"
    least = min(versions, key=_numbers)
    if _numbers(least) >= CAPABILITY:
        return Check("compute capability", OK, least, needed)
    remedy = f"Ampere or a later GPU (A100, RTX 30 and on), or {ON_CPU}"
    return Check("compute capability", FAILED, least, needed, remedy)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def check() -> list[Check]:
    """The driver and the GPUs, by ``nvidia-smi``."""
    try:
        overview = _nvidia_smi()
    except FileNotFoundError:  # no fault: images are built on machines without a GPU
        return [Check("GPUs", OK, "none", remark="the small models train without")]
    except (OSError, subprocess.SubprocessError) as error:
        return [Check("GPUs", WARNING, f"none; nvidia-smi: {_first_line(error)}", "", REPAIR)]
    found = re.search(r"Driver Version:\s*([\d.]+)\s+CUDA Version:\s*(\d+\.\d+)?", overview)
    if not found:
        return [Check("GPUs", WARNING, f"none; nvidia-smi: {overview.strip()[:80]}", "", REPAIR)]
    checks = [driver(found[1], found[2])]
    if checks[0].status == OK:  # an older one may not know these fields
        fields = "--query-gpu=memory.total,compute_cap"
        try:
            table = _nvidia_smi(fields, "--format=csv,noheader,nounits")
        except (OSError, subprocess.SubprocessError) as error:
            problem = f"unknown; nvidia-smi {fields}: {_first_line(error)}"
            return [*checks, Check("GPU memory", WARNING, problem, "", REPAIR)]
        rows = re.findall(r"^\s*(\d+), (\d+\.\d+)", table, re.MULTILINE)
        if rows:
            checks.append(capability(version for _, version in rows))
            checks.append(_memory(min(int(mib) for mib, _ in rows)))
    return checks


def _nvidia_smi(*arguments: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise subprocess.SubprocessError(text or "no output")
    return text


def _first_line(error: Exception) -> str:
    return next(filter(None, str(error).splitlines()), "no output").strip()


def _memory(least_mib: int) -> Check:
    size, found = min(SIZES), f"{least_mib / 1024:.0f} GiB in the smallest"
    if least_mib >= SIZES[size]:
        return Check("GPU memory", OK, found, f"{size} GB")
    return Check("GPU memory", WARNING, found, f"{size} GB", "smaller than any recipe is for")


def main(kind: str = "") -> int:
    """Print the problems on stderr; without a kind of packages, print all checks.

    Args:
        kind: ``cpu`` or ``cuda``; "" outside scripts/bootstrap.sh.
    """
    checks = [] if os.environ.get("SG_HARDWARE") == "cpu" else check()
    if kind == "cpu":  # its packages need no GPU
        checks = [item for item in checks if item.name == "GPUs"]
    for item in checks:
        if not kind:
            print(f"{item.status:<8}{item.line()}")
        elif item.status != OK:
            warning = "" if item.status == FAILED else "warning: "
            print(f"bootstrap: {warning}{item.line()}", file=sys.stderr)
    if not kind:
        print("scripts/bootstrap.sh installs the packages; .venv/bin/sg-rlhf doctor checks more")
    return exit_status(checks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
