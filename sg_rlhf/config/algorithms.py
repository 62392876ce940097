"""Every algorithm by name, one line each: what ``python -m sg_rlhf.train --help`` lists.

Token weightings, policy losses and KL estimators are registered in code; an algorithm as the field
names it is a choice of them, one file in ``configs/algorithms`` to put on top of any recipe.
"""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parents[2] / "configs" / "algorithms"
LOSSES = {
    "ppo": "upstream's clipped ratio loss: GRPO (arXiv 2402.03300)",
    "gspo": "upstream's loss with one ratio per response (arXiv 2507.18071)",
    "grpo_sg": "the clipped ratio loss with a weight per token (arXiv 2511.00066, Eq. 13)",
    "cispo": "the clipped importance weight, constant in the gradient (arXiv 2506.13585)",
}
KL = {
    "k1, k2, k3": "upstream's estimators (http://joschu.net/blog/kl-approx.html)",
    "wk3": "w * k3: what the gradient in Lemma 3.4 of arXiv 2511.00066 belongs to",
    "wk3_eq11": "w * rho - log(w * rho) - 1: Eq. 11 of TR-GRPO",
}
UPDATES = {
    "together": "every token of a rollout in one update",
    "lopti": "unlikely tokens first, then the rest, on the same rollout (arXiv 2505.12929)",
}


def recipes() -> dict[str, str]:
    """name: first line, of each file in ``configs/algorithms``; {} without a checkout."""
    return {
        path.stem: path.read_text().split("\n", 1)[0].removeprefix("# ").rstrip(".")
        for path in sorted(RECIPES.glob("*.yaml"))
    }


def weightings() -> dict[str, str]:
    """name: summary of every token weighting (imports torch)."""
    from sg_rlhf.algo.weightings import SHAPINGS

    return {name: shaping.summary.rstrip(".") for name, shaping in SHAPINGS.items()}


def listing() -> str:
    """The sections of the help text."""
    sections = {
        "algorithms: add --config configs/algorithms/NAME.yaml to a recipe": recipes(),
        "token weightings: sg.shaping=NAME": weightings(),
        "policy losses: actor.policy_loss_type=NAME": LOSSES,
        "KL estimators: algo.kl.estimator=NAME": KL,
        "updates: sg.update=NAME": UPDATES,
    }
    return "\n".join(
        f"{title}\n" + "".join(f"  {name:<20}{text}\n" for name, text in names.items())
        for title, names in sections.items()
        if names
    )
