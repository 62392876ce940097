"""Weight sync from the policy's ranks to the vLLM engines.

``sender`` runs on the ranks and packs tensors into ``buckets``; ``receiver`` (``cpu_receiver``
without CUDA) runs in the engines' workers; ``log_prob_check`` compares log-probs after a sync.
"""
