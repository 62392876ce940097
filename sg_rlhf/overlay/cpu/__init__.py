"""Lets OpenRLHF, vLLM and DeepSpeed run without CUDA. Inactive on a machine with a GPU."""
