"""Joined Ray clusters: reserve placement, check the nodes, say what ran where.

``placement`` reserves GPUs; ``node_check`` compares packages and folders; ``locations`` and
``node_failure`` explain which process was lost with a node. Called by ``driver`` and
``controller``.
"""
