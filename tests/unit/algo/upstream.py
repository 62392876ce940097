"""OpenRLHF's own loss and KL, the oracles of the bit-equality tests.

``import openrlhf.models`` needs flash-attn, which does not install without CUDA. The two files
that hold the losses do not, so they are loaded from the installed package by path, under a
package of our own. Two things that these functions do not use, ``import deepspeed`` and a
``torch.compile`` decorator, take longer than all tests here, so they are left out while loading.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

_SHIM = "upstream_models_for_tests"


@functools.cache
def _module(name: str) -> ModuleType:
    package = importlib.util.find_spec("openrlhf")
    assert package is not None and package.submodule_search_locations, "openrlhf is not installed"
    folder = Path(next(iter(package.submodule_search_locations))) / "models"
    if _SHIM not in sys.modules:
        shim = ModuleType(_SHIM)
        shim.__path__ = [str(folder)]
        sys.modules[_SHIM] = shim
    stand_in = None
    if "deepspeed" not in sys.modules:
        stand_in = sys.modules["deepspeed"] = ModuleType("deepspeed")
    try:
        with patch.object(torch, "compile", lambda function: function):
            return importlib.import_module(f"{_SHIM}.{name}")
    finally:
        if stand_in is not None:
            del sys.modules["deepspeed"]


def policy_loss_class() -> type:
    """``openrlhf.models.loss.PolicyLoss``."""
    return _module("loss").PolicyLoss  # type: ignore[no-any-return]


def aggregate_loss():  # type: ignore[no-untyped-def]
    return _module("loss").aggregate_loss


def compute_approx_kl():  # type: ignore[no-untyped-def]
    return _module("utils").compute_approx_kl


def log_probs_from_logits():  # type: ignore[no-untyped-def]
    return _module("utils").log_probs_from_logits
