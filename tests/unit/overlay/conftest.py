"""Upstream as workers import it, but for the CPU platform: CUDA's calls keep their meaning here.

OpenRLHF imports flash_attn at module level; where it is absent the stand-in satisfies it.
"""

from sg_rlhf.overlay import flash_attn_stand_in, register
from sg_rlhf.overlay.cpu import platform

flash_attn_stand_in.install()
register.apply_at_import(
    patch
    for patch in register.PATCHES
    if patch.when not in (platform.active, platform.emulates_bf16, platform.on_cuda)
)
