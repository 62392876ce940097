"""Training checkpoints: written atomically, verified, and loadable on another number of ranks.

``store`` saves, loads and prunes; ``paths`` names and publishes folders; ``manifest`` holds SHA-256
sums; ``consensus`` makes all ranks load the same checkpoint; ``reshard`` loads one that another
number of ranks wrote; ``shards`` computes which rank has which elements. ``strategy`` is
upstream's strategy, which saves and loads with these.
"""
