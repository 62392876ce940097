"""Exact-match reward of an answer without a search engine; the agent grades its own dialogues."""

from sg_rlhf.tasks.reward import reward_function
from sg_rlhf.tasks.search.domain import SEARCH

reward_func = reward_function(SEARCH)
