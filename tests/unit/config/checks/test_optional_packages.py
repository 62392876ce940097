"""Flags whose package the locks leave out are refused in one line, before anything starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.config.checks import optional_packages
from sg_rlhf.config.upstream_flags import build_parser, upstream_root
from sg_rlhf.overlay.driver.arguments import (
    UnsupportedHere,
    check_platform,
    check_trackers,
    upstream_arguments,
)
from sg_rlhf.overlay.patches import flash_attn_shim

ROOT = Path(__file__).parents[4]
PAPER = ROOT / "configs" / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
USED = {
    "ds.ring_attn_size": 2, "ds.use_liger_kernel": True, "ds.load_in_4bit": True,
    "ds.experts_implementation": "deepgemm", "vllm.sync_with_ray": True, "use_ms": True,
}  # fmt: skip
DEFAULTS = {action.dest: action.default for action in build_parser()._actions}
BY_KEY = {need.key: need for need in optional_packages.NEEDS}


def value(**given: Any) -> Any:
    return ({**DEFAULTS, **given}).__getitem__


def test_the_defaults_of_upstream_need_nothing() -> None:
    assert set(USED) == set(BY_KEY)
    assert optional_packages.missing(value(), installed=lambda _: False) == []


@pytest.mark.parametrize("key", USED)
def test_each_flag_names_its_package_and_what_to_do(key: str) -> None:
    need, given = BY_KEY[key], value(**{key: USED[key]})
    (line,) = optional_packages.missing(given, installed=lambda _: False)
    assert line.startswith(f"{key}={str(USED[key]).lower()}: needs {need.modules[0]}")
    assert need.install in line and line.endswith(f"or set {key}={need.instead}")
    assert optional_packages.missing(given, installed=lambda _: True) == []
    instead = {"false": False, "1": 1}.get(need.instead, need.instead)
    assert optional_packages.missing(value(**{key: instead}), installed=lambda _: False) == []


def test_only_what_is_lacking_is_named() -> None:
    found = optional_packages.missing(value(**USED), installed=lambda name: name == "flash_attn")
    assert len(found) == len(USED)
    assert "needs ring_flash_attn, not installed" in found[0]


@pytest.mark.parametrize("need", optional_packages.NEEDS, ids=lambda need: need.key)
def test_a_package_of_a_cuda_lock_is_installed_there(need: optional_packages.Need) -> None:
    """A row says what is missing here; the CUDA lock has bitsandbytes in the version named."""
    locked = (ROOT / "requirements" / "cuda.lock").read_text()
    for pinned in re.findall(r"([\w-]+)==([\w.]+)", need.install):
        lines = re.findall(rf"^{pinned[0]}==\S+", locked, re.M)
        assert lines in ([], ["==".join(pinned)])


def test_no_import_of_upstream_is_without_a_row_or_a_lock() -> None:
    """Every package that upstream imports anywhere on the way of a run."""
    skipped = {"cli/serve_rm.py", "cli/lora_combiner.py"}
    imported = set()
    for path in upstream_root().rglob("*.py"):
        if str(path.relative_to(upstream_root())) not in skipped:
            imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M))
    rows = {module for need in optional_packages.NEEDS for module in need.modules}
    unknown = {
        name for name in imported - rows - {"openrlhf"} if not optional_packages.is_installed(name)
    }
    # The stand-in, or whatever packs samples on CUDA.
    assert unknown <= {"flash_attn"} and not unknown & set(sys.stdlib_module_names)


def test_a_stand_in_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    before = optional_packages.is_installed("flash_attn")
    flash_attn_shim.install()
    assert optional_packages.is_installed("flash_attn") == before
    for name in flash_attn_shim.MODULES if not before else ():
        monkeypatch.delitem(sys.modules, name)
    assert optional_packages.is_installed("torch") and not optional_packages.is_installed(
        "no_such_module"
    )


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_a_run_refuses_ring_attention(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setenv("SG_PLATFORM", platform)
    expected = "needs ring_flash_attn" if platform == "cuda" else "without CUDA use 1"
    with pytest.raises(UnsupportedHere, match=expected):
        check_platform(upstream_arguments(load_config(PAPER, ["ds.ring_attn_size=2"])))


def test_a_run_refuses_the_other_hub() -> None:
    with pytest.raises(UnsupportedHere, match="use_ms=true: needs modelscope, not installed: pip"):
        upstream_arguments(load_config(PAPER, ["use_ms=true"]))


def test_a_run_refuses_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"
    args = upstream_arguments(load_config(tiny, ["sg.trackio=true"]))
    monkeypatch.setattr(optional_packages, "is_installed", lambda module: module != "trackio")
    with pytest.raises(UnsupportedHere, match="sg.trackio=true: needs trackio, not installed: pip"):
        check_trackers(args)
