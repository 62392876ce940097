"""The CUDA builds of PyTorch, vLLM and DeepSpeed without a GPU: on a device made of software."""
