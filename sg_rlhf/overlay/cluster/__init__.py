"""The machines of a run: reserve resources, check the nodes, locate lost processes."""
