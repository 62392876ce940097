"""Every algorithm by name, one line each: what ``python -m sg_rlhf.train --help`` lists.

Token weightings, policy losses and KL estimators are registered in code; an algorithm as the field
names it is a choice of them, one file in ``configs/algorithms`` to put on top of any recipe.
"""

from __future__ import annotations

from sg_rlhf.algo.objectives import OBJECTIVES
from sg_rlhf.algo.weightings import WEIGHTINGS
from sg_rlhf.config.builtin_recipes import CONFIGS
from sg_rlhf.config.weighting_resolution import OBJECTIVE_OF_LOSS

UPSTREAM_LOSSES = {
    "ppo": "upstream's clipped ratio loss: GRPO (arXiv 2402.03300)",
    "gspo": "upstream's loss with one ratio per response (arXiv 2507.18071)",
}
KL = {
    "k1, k2, k3": "upstream's estimators (http://joschu.net/blog/kl-approx.html)",
    "wk3": "w * k3: the KL whose gradient Lemma 3.4 of arXiv 2511.00066 gives",
    "wk3_eq11": "w * rho - log(w * rho) - 1: Eq. 11 of TR-GRPO",
}
UPDATES = {
    "together": "every token of a rollout in one update",
    "lopti": "unlikely tokens first, then the rest, on the same rollout (arXiv 2505.12929)",
}


def recipes() -> dict[str, str]:
    """name: first line, of each file in ``configs/algorithms``."""
    return {
        path.stem: path.read_text().split("\n", 1)[0].removeprefix("# ").rstrip(".")
        for path in sorted((CONFIGS / "algorithms").glob("*.yaml"))
    }


def weightings() -> dict[str, str]:
    """name: summary of every token weighting."""
    return {name: weighting.summary() for name, weighting in WEIGHTINGS.items()}


def losses() -> dict[str, str]:
    """name: summary of every policy loss, upstream's and ours."""
    ours = {name: OBJECTIVES[objective].summary() for name, objective in OBJECTIVE_OF_LOSS.items()}
    return {**UPSTREAM_LOSSES, **ours}


def listing() -> str:
    """The sections of the help text."""
    sections = {
        "algorithms: --algorithm NAME": recipes(),
        "token weightings: sg.weighting.type=NAME": weightings(),
        "policy losses: actor.policy_loss_type=NAME": losses(),
        "KL estimators: algo.kl.estimator=NAME": KL,
        "updates: sg.update=NAME": UPDATES,
    }
    return "\n".join(
        f"{title}\n" + "".join(f"  {name:<20}{text}\n" for name, text in names.items())
        for title, names in sections.items()
        if names
    )
