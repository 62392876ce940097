"""Engines turn prompts into responses: vLLM in this process, or a server."""
