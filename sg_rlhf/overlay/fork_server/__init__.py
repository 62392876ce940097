"""Ray workers that are forked from a process with its imports already made. CPU runs only.

``server`` imports torch, vLLM and DeepSpeed once; ``worker_launcher`` runs instead of ``python``
and requests a fork; ``client`` starts the server; ``train_task`` trains in a forked worker.
"""
