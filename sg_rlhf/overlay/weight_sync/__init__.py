"""Weight sync from the policy's ranks to the vLLM engines.

``sync_trainer`` and ``sender`` run on the ranks: ``sender`` takes the policy's tensors from
``tensors`` and packs them into ``buckets``. ``receiver`` (``cpu_receiver`` without CUDA) runs in
the engines' workers and loads them. ``log_prob_check`` compares the log-probs of ranks and engines
after a sync.
"""
