"""The policy's ranks: experience, micro-batches, losses, and the checks of an update.

``actor`` is the Ray actor of a rank, ``scoring_ranks`` those of the reference and reward model.
``update`` is the loop over the replay buffer. The controller builds experience with
``experience_maker`` and ``advantages``, and cuts it with ``micro_batches``. ``nonfinite`` is the
policy for values that are not finite. Nothing here starts an engine.
"""
