"""Knights & Knaves reward with the totals of the paper's Table 5; see `reward.py`."""

from __future__ import annotations

from sg_rlhf.tasks.kk.reward import make_reward_func

reward_func = make_reward_func("table5")
