"""Knights & Knaves reward with the reference's totals and the strict reading (`grading.score`)."""

from functools import partial

from sg_rlhf.tasks.kk.domain import KK
from sg_rlhf.tasks.kk.grading import score
from sg_rlhf.tasks.reward import reward_function

reward_func = reward_function(KK, partial(score, reading="strict"))
