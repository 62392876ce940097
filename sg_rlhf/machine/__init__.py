"""The machine: its GPUs and memory, and the names and settings of hardware."""
