"""OpenRLHF imports flash_attn at module level; without CUDA the stand-in satisfies it."""

from sg_rlhf.overlay.cpu import flash_attn_stand_in

flash_attn_stand_in.install()
