"""What OpenRLHF, vLLM and DeepSpeed need to run without CUDA. Inactive where there is a GPU."""
