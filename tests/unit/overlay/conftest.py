"""Upstream as workers import it, but for the CPU platform: CUDA's calls keep their meaning here.

OpenRLHF imports flash_attn at module level; where it is absent the stand-in satisfies it.
"""

from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.patches import flash_attn_shim, table

flash_attn_shim.install()
table.apply_at_import(
    patch for patch in table.PATCHES if patch.when not in (platform.is_cpu, platform.emulates_bf16)
)
