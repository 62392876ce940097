"""Its reward, as OpenRLHF loads it."""

from sg_rlhf.tasks.reward import reward_function
from tests.domains.reverse.domain import REVERSE

reward_func = reward_function(REVERSE)
