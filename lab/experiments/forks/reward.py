"""The mathematics reward. It also logs the share of good words (`good_words`)."""

from dataclasses import replace

from experiments.forks.corpora import GOOD, WORDS
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.math.domain import MATH
from sg_rlhf.tasks.reward import reward_function


def grade(response: str, label: str) -> Grade:
    """The reward's grade. A response without any word has a share of .5."""
    counts = [response.count(word) for word in WORDS]
    share = sum(counts[:GOOD]) / sum(counts) if any(counts) else 0.5
    found = MATH.grade(response, label)
    return replace(found, logs={**found.logs, "good_words": share})


reward_func = reward_function(MATH, grade)
