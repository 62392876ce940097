"""Build what a bare GPU machine without internet lacks, in slices of at most 50 MiB.

    python lab/bench/gpu_kit.py --have pip_list.txt --python 3.12     into out/gpu_kit

The bare machine has a driver and a Python with PyTorch. Three archives, in the order of their use,
each cut into slices: ``trainer`` (DeepSpeed, OpenRLHF and what they import), ``engine`` (Ray and
vLLM, with the binaries of an H100 or H200), ``model`` (SmolLM2-135M-Instruct).
``gpu_quarter_hour.sh`` unpacks those whose slices are complete. Versions are those of
requirements/cuda.lock. Run it with the project's environment, on a machine with internet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "cuda.lock"
SLICE = 50 * 2**20
#: Pure Python, copied from this environment: DeepSpeed has no wheel, and OpenRLHF's names another
#: version of Python.
COPIED = ("deepspeed", "openrlhf")
#: "ARCHIVE: NAMES" on a line: what the processes of a run imported on the software GPU, and what
#: that needs, but for PyTorch and the copied.
NAMES = Path(__file__).with_suffix(".txt")
#: Parts of Ray and vLLM that a run on an H100 or H200 with a dense model does not load.
UNUSED = (
    "ray/jars", "ray/rllib", "ray/serve", "ray/tune", "ray/data", "ray/dashboard/client", "ray/llm",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/_flashkda_C.abi3.so", "vllm/_flashmla_C.abi3.so", "vllm/_deepselect_C.abi3.so",
    "vllm/_qutlass_C.abi3.so", "vllm/third_party/deep_gemm/_C_extension.abi3.so",
)  # fmt: skip


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Name -> version, of the lock file."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)", LOCK.read_text(), re.M)
    return {canonical(name): version for name, version in found}


def names_in(file: Path | None) -> set[str]:
    """The distributions of a `pip list --format=freeze`; none without a file."""
    lines = file.read_text().splitlines() if file else []
    return {canonical(line.partition("==")[0].strip()) for line in lines if line.strip()}


def install(names: list[str], have: set[str], python: str, folder: Path) -> list[str]:
    """Install those of the names that the lock has and the machine lacks; returns them."""
    known = pins()
    wanted = sorted({canonical(n) for n in names} & known.keys() - have)
    if wanted:
        command = [
            str(Path(sys.executable).parent / "uv"), "pip", "install", "-q", "--no-deps",
            "--only-binary", ":all:", "--target", str(folder), "--python-version", python,
            "--python-platform", "x86_64-manylinux_2_34", "--no-config",
        ]  # fmt: skip
        subprocess.run([*command, *(f"{name}=={known[name]}" for name in wanted)], check=True)
    return wanted


def copy_installed(name: str, folder: Path) -> None:
    """The files of a distribution of this environment."""
    for file in importlib.metadata.files(name) or ():
        source = Path(str(file.locate()))
        if ".." in file.parts or "__pycache__" in file.parts or not source.is_file():
            continue
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def slices(name: str, folder: Path, out: Path) -> int:
    """Write ``name.00``, ``name.01`` ... and ``name.count``; returns the number of slices."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        archive = Path(scratch) / name
        with tarfile.open(archive, "w:xz", preset=2) as packed:
            packed.add(folder, ".")
        count = 0
        with archive.open("rb") as opened:
            while part := opened.read(SLICE):
                (out / f"{name}.{count:02d}").write_bytes(part)
                count += 1
    (out / f"{name}.count").write_text(f"{count}\n")
    return count


def main() -> int:
    """Build the archives; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--have", type=Path, help="`pip list --format=freeze` of the bare machine")
    parser.add_argument("--python", default="3.12", help="its version of Python [3.12]")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu_kit", help="[%(default)s]")
    parser.add_argument("--only", nargs="+", choices=("trainer", "engine", "model"))
    arguments = parser.parse_args()
    if arguments.have and not arguments.have.is_file():
        print(f"gpu_kit: --have {arguments.have}: no such file", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    have = names_in(arguments.have)
    for name in arguments.only or ("trainer", "engine", "model"):
        with tempfile.TemporaryDirectory(dir=arguments.out) as scratch:
            folder = Path(scratch)
            installed: list[str] = []
            if name == "model":
                command = [sys.executable, "-m", "sg_rlhf", "data", "model", "smollm2-135m"]
                subprocess.run([*command, "--out", str(folder / "smollm2-135m")], check=True)
            else:
                (names,) = re.findall(rf"^{name}: (.*)$", NAMES.read_text(), re.M)
                installed = install(names.split(), have, arguments.python, folder)
                for copied in COPIED if name == "trainer" else ():
                    copy_installed(copied, folder)
            for unused in UNUSED:
                path = folder / unused
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for old in arguments.out.glob(f"{name}.*"):
                old.unlink()
            count = slices(name, folder, arguments.out)
        print(
            f"{name}: {count} slices; {len(installed)} packages: {' '.join(installed)}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
