"""Training checkpoints: written atomically, verified, chosen by all ranks, resharded.

``store`` saves and loads; ``paths`` names and publishes folders; ``manifest`` holds SHA-256 sums;
``consensus`` lets all ranks load the same one; ``reshard`` reads another number of ranks.
Called by ``learner.policy_actor``.
"""
