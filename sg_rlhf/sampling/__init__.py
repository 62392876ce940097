"""Seeds of requests, a sampler without generator state, and the settings of every vLLM engine.

Training and evaluation both use it, so both sample in the same way.
"""
