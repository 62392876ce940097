"""Responses of the evaluated model: requests, their sampling settings, dialogues.

Called by `sg_rlhf.eval.run` and `rescore`.
"""
