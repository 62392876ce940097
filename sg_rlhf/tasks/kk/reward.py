"""Knights & Knaves reward with the totals of the reference code (`grading.score`)."""

from sg_rlhf.tasks.kk.domain import KK
from sg_rlhf.tasks.reward import reward_function

reward_func = reward_function(KK)
