"""The policy's ranks: experience, micro-batches, losses, and the checks of an update.

``actor`` extends upstream's ``PolicyModelActor``, the Ray actor of a rank. ``update`` is its loop
over the replay buffer. The controller builds experience with ``experience_maker`` and cuts it with
``micro_batches``. Nothing here starts an engine.
"""
