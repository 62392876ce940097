"""Ray workers that are forked from a process with its imports already made. CPU runs only.

``server`` imports torch, vLLM and DeepSpeed once; ``worker_launcher`` stands in for ``python`` and
asks it for a fork; ``client`` starts and ends it; ``train_task`` runs the loop in a forked worker.
"""
