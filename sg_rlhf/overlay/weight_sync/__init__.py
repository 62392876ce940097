"""Weight sync from the policy's ranks to the vLLM engines.

On the ranks ``sender`` takes the policy's tensors from ``tensors`` and packs them into ``buckets``.
``receiver`` (``cpu_receiver`` without CUDA) loads them in the engines' workers. ``log_prob_check``
compares the log-probs of ranks and engines after a sync.
"""
