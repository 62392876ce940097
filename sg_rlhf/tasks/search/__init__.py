"""Questions answered with a search engine (Search-R1, arXiv 2503.09516)."""
