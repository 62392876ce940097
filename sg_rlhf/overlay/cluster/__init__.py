"""The machines of a run: reserve resources, check the nodes, locate the processes.

``placement`` reserves GPUs; ``free_port`` chooses the ports of the ranks; ``node_check`` compares
packages and folders; ``locations`` and ``node_failure`` say which process was lost with a node.
"""
