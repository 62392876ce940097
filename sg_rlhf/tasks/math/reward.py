"""Mathematics reward: 1 where the last box of the response equals a gold answer, else 0."""

from sg_rlhf.tasks.math.domain import MATH
from sg_rlhf.tasks.reward import reward_function

reward_func = reward_function(MATH)
