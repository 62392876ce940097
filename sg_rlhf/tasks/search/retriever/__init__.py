"""The search engine as a dialogue sees it.

`client` sends its queries, `retry` decides which are sent again, `retriever_process` starts an
engine for an evaluation. Called by the search agent of training and by `--suite qa`.
"""
