"""What one GPU can test, in stages: ``tests/gpu.sh``, docs/gpu.md.

The runner (``run``, ``stages``, ``launch``, ``result``) needs the standard library alone, so that
it can say on any machine what it skips and why. Each stage runs in a process of its own.
"""
