"""Passage retrieval: `index` builds an index once, `server` serves it over HTTP.

The HTTP contract is Search-R1's (`PeterGriffinJin/Search-R1`,
`search_r1/search/retrieval_server.py`), so its clients work unchanged.
"""
