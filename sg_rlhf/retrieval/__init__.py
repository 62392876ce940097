"""Passage retrieval: build an index once, serve it to every rollout worker over HTTP.

`index` builds, `server` serves one process, `replicas` serves several behind one address. The HTTP
contract is Search-R1's (`PeterGriffinJin/Search-R1`, `search_r1/search/retrieval_server.py`), so
its clients work unchanged.
"""
