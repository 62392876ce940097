"""Runs on a joined Ray cluster: reserve resources, check the nodes, locate the processes.

``placement`` reserves GPUs and starts actors there; ``node_check`` compares packages and folders;
``locations`` and ``node_failure`` say which process was lost with a node.
"""
