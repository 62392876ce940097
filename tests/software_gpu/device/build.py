"""Build the software GPU and put it in the place of the CUDA libraries of one environment.

    python3 build.py VENV [--out DIR] [--mark]

Needs a C compiler with its binutils, and an environment that was made from requirements/cuda.lock:
the headers are those of its packages. The standard library is enough, so any Python runs this.

The environment must be a copy of its own, as its CUDA libraries are replaced. Its marker,
``software_gpu.json`` in its folder, says so; ``--mark`` writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
MARKER = "software_gpu.json"
LIBRARY = "libsoftware_gpu.so"
FLAGS = ["-std=gnu17", "-O2", "-fPIC", "-fvisibility=default", "-D_GNU_SOURCE", "-Wall", "-Wextra"]
#: Functions have the parameters of their interfaces; many need none of them.
NO_WARNINGS = ["-Wno-unused-parameter"]
#: Libraries of the environment that the software GPU replaces, by the pattern of their paths.
REPLACED = (
    "nvidia/cu*/lib/libcudart.so.*",
    "nvidia/cu*/lib/libcublas.so.*",
    "nvidia/cu*/lib/libcublasLt.so.*",
    "nvidia/nccl/lib/libnccl.so.*",
    "torchvision.libs/libcudart*.so.*",
)
#: Libraries of the driver, which no package has: they go into the folder of --out.
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
#: How a function that is not written fails, by the prefix of its name.
NOT_SUPPORTED = (("cublas", 15), ("cuda", 801), ("nccl", 5), ("cu", 801), ("__cuda", 801))
FUNCTION = re.compile(r"(__cuda|cuda|cublas|nccl)[A-Z_]\w*|cu[A-Z]\w*")
#: Functions of libraries that are not replaced but begin alike.
FOREIGN = re.compile(r"cuFile\w*")


class Unusable(Exception):
    """The environment or the machine cannot be used; the message says why."""


def site_packages(environment: Path) -> Path:
    """The folder with the environment's packages."""
    found = sorted(environment.glob("lib/python3.*/site-packages"))
    if not found:
        raise Unusable(f"{environment}: no lib/python3.*/site-packages")
    return found[-1]


def check_marker(environment: Path, mark: bool) -> None:
    """Refuse an environment without marker; with ``mark``, write it."""
    marker = environment / MARKER
    if mark:
        marker.write_text(json.dumps({"made_for": "the software GPU; has no CUDA"}) + "\n")
    if not marker.is_file():
        raise Unusable(
            f"{environment}: no {MARKER}: its CUDA libraries would be replaced; --mark allows it"
        )


def header_folders(packages: Path) -> list[Path]:
    """Folders with cuda.h and nccl.h."""
    folders = []
    for header, pattern in (("cuda.h", "nvidia/cu*/include"), ("nccl.h", "nvidia/nccl/include")):
        found = [folder for folder in packages.glob(pattern) if (folder / header).is_file()]
        if not found:
            raise Unusable(f"{packages}: no {pattern}/{header}")
        folders.append(found[-1])
    for header in ("crt/host_defines.h", "cublasLt.h"):
        if not (folders[0] / header).is_file():
            raise Unusable(f"{folders[0]}: no {header}")
    return folders


def replaced(packages: Path) -> list[Path]:
    """Libraries of the environment in whose place the software GPU is put."""
    return [path for pattern in REPLACED for path in sorted(packages.glob(pattern))]


def output_of(*command: str | Path) -> str:
    """What a program prints; an empty text for a file that it does not understand."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout


def shared_libraries(packages: Path, excluded: Iterable[Path]) -> Iterator[Path]:
    """Shared libraries of the packages, without those that are replaced."""
    skipped = set(excluded)
    for folder, _, names in os.walk(packages):
        for name in names:
            path = Path(folder, name)
            if ".so" in name and path not in skipped and path.is_file():
                yield path


def needed_functions(packages: Path, libraries: list[Path]) -> dict[str, str]:
    """Functions that the environment's libraries import -> symbol version, "" for none."""
    sonames = {path.name for path in libraries} | set(DRIVER)
    needed: dict[str, str] = {}
    for path in shared_libraries(packages, libraries):
        dynamic = output_of("readelf", "--dynamic", "--wide", path)
        if sonames.isdisjoint(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)):
            continue
        for line in output_of("nm", "--dynamic", "--undefined-only", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if not FUNCTION.fullmatch(name) or FOREIGN.fullmatch(name):
                continue
            if version in sonames or not version:
                needed[name] = version or needed.get(name, "")
    if "cudaMalloc" not in needed:
        raise Unusable(f"{packages}: no library that uses the CUDA runtime")
    return needed


def defined_functions(objects: Iterable[Path]) -> set[str]:
    """Functions that the sources define."""
    text = output_of("nm", "--defined-only", "--extern-only", *objects)
    return set(re.findall(r" T (\w+)$", text, re.MULTILINE))


def stubs(names: Iterable[str]) -> str:
    """C source of the functions that no source defines.

    Functions of cuBLAS that compute do nothing, as kernels do. The others would leave a result
    unwritten: they fail.
    """
    lines = ['#include "stubs.h"', ""]
    for name in sorted(names):
        if name.startswith("cublas") and not re.match(r"cublas(Lt|Xt)?Get", name):
            call = f'sw_nothing("{name}", &reported)'
        else:
            error = next(code for prefix, code in NOT_SUPPORTED if name.startswith(prefix))
            call = f'sw_missing("{name}", &reported, {error})'
        lines.append(f"int {name}(void) {{ static bool reported; return {call}; }}")
    return "\n".join(lines) + "\n"


def version_script(needed: dict[str, str]) -> str:
    """Exported symbols, with the versions under which the environment's libraries import them."""
    versions: dict[str, list[str]] = {}
    for name, version in needed.items():
        if version:
            versions.setdefault(version, []).append(name)
    text = "".join(
        f"{version} {{ global: {'; '.join(sorted(names))}; }};\n"
        for version, names in sorted(versions.items())
    )
    return (
        text + "SOFTWARE_GPU { global: cu*; __cuda*; nccl*; nvml*; software_gpu_*; local: *; };\n"
    )


def compile_source(source: Path, target: Path, includes: list[Path]) -> None:
    """Compile one C file, with warnings except in headers of the packages."""
    folders = [part for folder in includes for part in ("-isystem", str(folder))]
    command = [compiler(), *FLAGS, *NO_WARNINGS, f"-I{HERE}", *folders, "-c"]
    if subprocess.run([*command, source, "-o", target], check=False).returncode:
        raise Unusable(f"{source} does not compile")


def compiler() -> str:
    """The C compiler: $CC, else cc."""
    name = os.environ.get("CC", "cc")
    for program in (name, "nm", "readelf"):
        if not shutil.which(program):
            raise Unusable(f"no {program}: install a C compiler and binutils")
    return name


def build(packages: Path, libraries: list[Path], folder: Path) -> Path:
    """Compile the library into a folder and return its path."""
    includes = header_folders(packages)
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in sorted(HERE.glob("*.c")):
        objects.append(folder / f"{source.stem}.o")
        compile_source(source, objects[-1], includes)
    needed = needed_functions(packages, libraries)
    stub_source, script = folder / "stubs.c", folder / "exports.map"
    stub_source.write_text(stubs(set(needed) - defined_functions(objects)))
    script.write_text(version_script(needed))
    compile_source(stub_source, folder / "stubs.o", includes)
    library = folder / LIBRARY
    link = [compiler(), "-shared", "-Wl,-z,defs", f"-Wl,--version-script={script}"]
    inputs = [*objects, folder / "stubs.o"]
    command = [*link, *inputs, "-o", library, "-lpthread", "-ldl", "-lm"]
    if subprocess.run(command, check=False).returncode:
        raise Unusable("the library cannot be linked")
    return library


def put(library: Path, target: Path) -> None:
    """Link the library under another name.

    The target may be a hard link to the file of another environment: it is removed, never written.
    All names are links to one file, as the loader would load two files twice.
    """
    target.unlink(missing_ok=True)
    os.link(library, target)


def main() -> int:
    """Build and install; 2 where that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path, help="folder of the virtual environment")
    where = "folder for the library and the driver's libraries, on the environment's file system"
    parser.add_argument("--out", type=Path, help=f"{where} (default: software_gpu in it)")
    parser.add_argument("--mark", action="store_true", help=f"write {MARKER} into the environment")
    arguments = parser.parse_args()
    environment = arguments.environment.resolve()
    out = (arguments.out or environment / "software_gpu").resolve()
    try:
        packages = site_packages(environment)
        check_marker(environment, arguments.mark)
        libraries = replaced(packages)
        built = build(packages, libraries, out / "build")
        # Under one name nothing may see the old library; so the new one gets its own file first.
        library = out / LIBRARY
        library.unlink(missing_ok=True)
        built.rename(library)
        runtimes = [path for path in libraries if path.name.startswith("libcudart.so.")]
        for target in [*libraries, *(out / name for name in (*DRIVER, runtimes[0].name))]:
            put(library, target)
    except (Unusable, OSError) as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 2
    print(f"{library}: in the place of {len(libraries)} libraries of {environment}")
    print(f"LD_LIBRARY_PATH={out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
