"""Hardware names: the grammar, the models that fit, and the settings that follow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.machine import names
from sg_rlhf.machine.names import BY_SIZE, GPUS, Layout, parse

ROOT = Path(__file__).parents[3]
FILE = ROOT / "sg_rlhf" / "machine" / "names.py"


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [
        ("cpu", Layout(), "cpu"),
        ("8x80gb", Layout(1, 8, "h100"), "8x80gb"),
        ("8xh100", Layout(1, 8, "h100"), "8x80gb"),
        ("8xH200", Layout(1, 8, "h200"), "8x80gb"),
        ("2x8x80gb", Layout(2, 8, "h100"), "2x8x80gb"),
        ("2x8xh200", Layout(2, 8, "h200"), "2x8x80gb"),
        ("3x80gb", Layout(1, 3, "h100"), "2x80gb"),
        ("16x40gb", Layout(1, 16, "a100-40gb"), "8x40gb"),
        ("4xl40s", Layout(1, 4, "l40s"), "4x40gb"),
        ("1xh100-pcie", Layout(1, 1, "h100-pcie"), "1x80gb"),
        ("1xA10", Layout(1, 1, "a10"), "1x24gb"),
    ],
)
def test_a_name_is_a_layout_and_has_settings(name: str, layout: Layout, settings: str) -> None:
    assert parse(name) == layout
    assert parse(name).settings_name == settings


@pytest.mark.parametrize(
    "name",
    ["", "80gb", "8x", "0x80gb", "8x80", "8x33gb", "8xv100", "x80gb", "h100", "8x80gb ", "8xcpu",
     "2x0x80gb", "1x2x8x80gb", "CPU", "cuda", "٨x80gb", "99999x80gb"],
)  # fmt: skip
def test_any_other_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="no such hardware; expected cpu or ") as error:
        parse(name)
    assert "\n" not in str(error.value) and str(error.value).startswith(f"{name}: ")


def test_every_type_has_a_size_whose_settings_fit() -> None:
    for name, gpu in GPUS.items():
        size = parse(f"8x{name}").size
        assert size == max(one for one in names.SIZES if one <= gpu.memory_gb)
        # CUDA gives less than nvidia-smi reports.
        assert names.size_of(gpu.usable_gib * 1024 + 700) == size
    assert set(BY_SIZE) == set(names.SIZES)


@pytest.mark.parametrize(
    ("memory", "size"),
    [(81559, 80), (81920, 80), (183359, 80), (40960, 40), (46068, 40), (24564, 24), (23028, 24),
     (32607, 24), (16376, 0)],
)  # fmt: skip
def test_sizes_by_what_cards_report(memory: float, size: int) -> None:
    assert names.size_of(memory) == size


@pytest.mark.parametrize(
    ("count", "memory", "name"),
    [(8, 81559, "8x80gb"), (7, 81559, "4x80gb"), (3, 40960, "2x40gb"), (1, 24564, "1x24gb"),
     (16, 143771, "8x80gb"), (0, 0, "cpu"), (2, 16376, "")],
)  # fmt: skip
def test_the_name_of_a_machine_uses_most_of_its_gpus(count: int, memory: float, name: str) -> None:
    assert names.name_of(count, memory) == name


@pytest.mark.parametrize(
    ("name", "gib", "models"),
    [
        ("cpu", None, "tiny"), ("cpu", 4, "tiny"),
        ("1x24gb", None, "1b"), ("2x24gb", None, "1b"), ("4x24gb", None, "3b"),
        ("8x24gb", None, "3b"), ("1x40gb", None, "3b"), ("2x40gb", None, "3b"),
        ("4x40gb", None, "8b"), ("8x40gb", None, "8b"), ("1x80gb", None, "8b"),
        ("2x8x80gb", None, "8b"),
        ("1x80gb", 196, "8b"), ("1x80gb", 195.9, "3b"), ("1x80gb", 87, "3b"), ("1x80gb", 86, "1b"),
        ("1x40gb", 79, "1b"), ("4x24gb", 147, "3b"), ("4x24gb", 146, "1b"),
        ("8x80gb", 448, "8b"), ("8x80gb", 447, "3b"), ("8x80gb", 226, "1b"),
        ("2x8x80gb", 447, "3b"), ("1x24gb", 1, "1b"),
    ],
)  # fmt: skip
def test_the_largest_models_fit_gpus_and_host(name: str, gib: float | None, models: str) -> None:
    assert names.largest_models(parse(name), gib) == models


#: Name -> nodes, ranks of each, engines, share of vLLM, optimizer in host memory, micro-batches of
#: rollout and training.
SETTINGS = {
    "1x24gb": (1, 1, 1, 0.55, True, 2, 1),
    "2x24gb": (1, 2, 2, 0.55, True, 2, 1),
    "4x24gb": (1, 4, 4, 0.55, True, 2, 1),
    "8x24gb": (1, 8, 8, 0.55, True, 2, 1),
    "1x40gb": (1, 1, 1, 0.5, True, 2, 1),
    "2x40gb": (1, 2, 2, 0.5, True, 2, 1),
    "4x40gb": (1, 4, 4, 0.6, True, 2, 1),
    "8x40gb": (1, 8, 8, 0.6, True, 2, 1),
    "1x80gb": (1, 1, 1, 0.5, True, 16, 8),
    "2x80gb": (1, 2, 2, 0.6, True, 8, 4),
    "4x80gb": (1, 4, 4, 0.6, False, 8, 4),
    "8x80gb": (1, 8, 8, 0.6, False, 8, 4),
    "2x8x80gb": (2, 8, 16, 0.6, False, 8, 4),
    "8xh100": (1, 8, 8, 0.6, False, 8, 4),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_name(name: str) -> None:
    nodes, gpus, engines, share, offload, rollout, train = SETTINGS[name]
    ranks = {"num_nodes": nodes, "num_gpus_per_node": gpus}
    assert names.settings(parse(name)) == {
        "actor": ranks,
        "ref": ranks,
        "vllm": {"num_engines": engines, "gpu_memory_utilization": share},
        "ds": {"zero_stage": 3 if engines > 1 else 2, "adam_offload": offload},
        "rollout": {"micro_batch_size": rollout},
        "train": {"micro_batch_size": train},
    }


def test_every_type_has_sane_figures() -> None:
    for gpu in GPUS.values():
        assert 0.85 * gpu.memory_gb < gpu.usable_gib < gpu.memory_gb
        assert gpu.tflops > 50 and gpu.bandwidth >= 300
    assert set(BY_SIZE.values()) <= set(GPUS)


# -- as a program, before anything is installed ----------------------------------------------------


def packages(folder: Path, hardware: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", FILE], capture_output=True, text=True,
        env={"PATH": str(folder), "SG_HARDWARE": hardware},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("hardware", "kind"),
    [("cpu", "cpu"), ("cuda", "cuda"), ("8xh200", "cuda"), ("1x24gb", "cuda"), ("", "cpu")],
)
def test_it_prints_the_packages_of_a_name(tmp_path: Path, hardware: str, kind: str) -> None:
    assert packages(tmp_path, hardware).stdout.strip() == kind


def test_a_wrong_name_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = packages(tmp_path, "8x80")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: SG_HARDWARE=8x80: no such hardware; expected cpu or ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "kind"),
    [("echo 'GPU 0: something'", "cuda"), ("echo 'No devices found'", "cpu"),
     ("echo 'NVIDIA-SMI has failed'; exit 9", "cpu")],
)  # fmt: skip
def test_without_a_name_the_gpus_decide(tmp_path: Path, script: str, kind: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert packages(tmp_path).stdout.strip() == kind


def names_of(node: ast.Import) -> list[str]:
    return [alias.name for alias in node.names]


def test_it_imports_the_standard_library_alone_and_is_python_3_8() -> None:
    tree = ast.parse(FILE.read_text(), feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else names_of(node))
    }
    assert imported <= sys.stdlib_module_names
