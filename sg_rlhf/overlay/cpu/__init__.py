"""What an unmodified OpenRLHF needs to run where there is no CUDA. Inactive elsewhere."""
