"""The stand-in of flash-attn: enough for upstream's import, and nobody takes it for the package."""

from __future__ import annotations

import pytest

from sg_rlhf.overlay.patches import flash_attn_shim
from tests.unit.overlay.cpu.test_platform import in_process

pytestmark = pytest.mark.skipif(flash_attn_shim.installed(), reason="flash-attn is installed")


@pytest.mark.full
def test_upstream_imports_it_and_others_find_none() -> None:
    """On a GPU; every run without one imports it, too."""
    code = """
from sg_rlhf.overlay.patches import table as register
register.install()
import importlib.util
import torch
torch.cuda.is_available = lambda: True  # transformers asks before it looks for the package
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
import openrlhf.models.ring_attn_utils as upstream
from sg_rlhf.overlay.patches import flash_attn_shim as flash_attn_stand_in
print(importlib.util.find_spec("flash_attn"), is_flash_attn_2_available(),
      is_flash_attn_3_available(), upstream.pad_input is flash_attn_stand_in.pad_input)
for name in ("flash_attn", "flash_attn.ops.triton.cross_entropy", "flash_attn.utils"):
    try:
        importlib.import_module(name)
    except ImportError:
        print("absent")
tokens, mask = torch.tensor([[7, 8, 0], [0, 9, 0]]), torch.tensor([[1, 1, 0], [0, 1, 0]])
packed, positions, _, _, indices = upstream.unpad_and_slice_tensor(tokens, mask, None)
print(packed.tolist(), positions.tolist(),
      upstream.gather_and_pad_tensor(packed, None, 0, indices, 2, 3).equal(tokens))
try:
    upstream.all_gather(tokens, None)
except RuntimeError as error:
    print(error)
"""
    assert in_process(code, "cuda").splitlines()[-6:] == [
        "None False False True",
        *["absent"] * 3,
        "[[7, 8, 9]] [[0, 1, 0]] True",
        "ring attention needs flash-attn==2.8.3; set ds.ring_attn_size=1",
    ]


def test_the_real_package_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, object] = {}
    monkeypatch.setattr(flash_attn_shim.sys, "modules", made)
    monkeypatch.setattr(flash_attn_shim.metadata, "version", lambda name: "2.8.3")
    flash_attn_shim.install()
    assert made == {}
