"""The machine: its facts (GPUs, memory, disks, cores), and the names and settings of hardware."""
