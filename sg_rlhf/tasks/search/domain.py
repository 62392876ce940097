"""Questions to answer with a search engine (Search-R1, arXiv 2503.09516)."""

from __future__ import annotations

from sg_rlhf.tasks.domain import Domain
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.search.grading import parse_golds, score
from sg_rlhf.tasks.search.protocol import answer_of


def grade(response: str, label: str) -> Grade:
    """+1 for an exact match and -1 otherwise (Eq. 20 of arXiv 2511.00066), without a search engine.

    `label` is a JSON array of gold answers.
    """
    return score(answer_of(response), parse_golds(label))


SEARCH = Domain(
    name="search",
    title="questions to answer with a search engine",
    grade=grade,
    data="sg_rlhf.tasks.search.source:DATA",
    settings="sg_rlhf.tasks.search.settings:SearchSettings",
    check="sg_rlhf.tasks.search.retriever.client:check",
    suite="sg_rlhf.tasks.search.suite:SUITE",
    tiny="sg_rlhf.tasks.search.tiny:TINY",
    environment="sg_rlhf.tasks.search.environment:SearchEnvironment",
)
