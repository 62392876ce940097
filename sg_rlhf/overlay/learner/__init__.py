"""The ranks: experience, micro-batches, losses, and the checks of an update.

``actor`` has the Ray actors of the ranks, ``update`` the loop over the replay buffer. The
controller builds experience with ``experience_maker`` and ``advantages``, and cuts it with
``micro_batches``. ``nonfinite`` is the policy for values that are not finite.
"""
