"""Workers that are forked from a process that has already made their imports; without CUDA."""
