"""The policy's ranks: experience, micro-batches, losses, and the checks of an update.

``policy_actor`` extends upstream's ``PolicyModelActor`` and ``ActorPPOTrainer``. The controller
builds experience with ``experience_maker`` and sends it to the ranks in ``micro_batches``.
Nothing here starts an engine.
"""
