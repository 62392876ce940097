"""Seeds of requests, a sampler that needs no generator state, and vLLM's settings.

Shared by training and evaluation, so that both sample in the same way.
"""
