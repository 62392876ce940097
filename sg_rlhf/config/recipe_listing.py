"""List the shipped recipes: a model of a domain, with an algorithm, on hardware."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from sg_rlhf.algo.objectives import OBJECTIVES
from sg_rlhf.algo.weightings import WEIGHTINGS
from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.builtin_recipes import CONFIGS
from sg_rlhf.config.weighting_resolution import OBJECTIVE_OF_LOSS
from sg_rlhf.machine import names
from sg_rlhf.tasks.registry import DOMAINS

EXAMPLE = """\
all three
  sg-rlhf train --config configs/kk/grpo_qwen2.5-3b-instruct.yaml --algorithm grpo_sg \\
      --hardware 4x40gb --dry-run
"""


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


def models() -> list[tuple[str, str, str]]:
    """(domain, model, file) of every recipe that can be trained."""
    found = []
    for domain in DOMAINS:
        for file in sorted((CONFIGS / domain).glob("*.yaml")):
            model = str(load_config(file).value("actor.model_name_or_path") or "")
            if model:
                short = model.rpartition(".")[2] if model.startswith("module:") else model
                found.append((domain, short, f"configs/{domain}/{file.name}"))
    return found


def hardware() -> list[tuple[str, str]]:
    """(name, models that fit) of the usual machines."""
    sizes, counts = sorted(names.SIZES), reversed(names.COUNTS)
    usual = [f"{count}x{size}gb" for size, count in itertools.product(sizes, counts)]
    found = {"cpu": names.TINY, **{n: names.largest_models(names.parse(n)) for n in usual}}
    rows = [
        (", ".join(n for n in found if found[n] == models), text)
        for models, text in names.MODELS.items()
    ]
    return [*rows, ("[NODESx]COUNTxTYPE", f"such as 2x8xh200; types: {', '.join(names.GPUS)}")]


def algorithms() -> dict[str, str]:
    """name: first line, of each file in ``configs/algorithms``."""
    return {
        path.stem: path.read_text().split("\n", 1)[0].removeprefix("# ").rstrip(".")
        for path in sorted((CONFIGS / "algorithms").glob("*.yaml"))
    }


def losses() -> dict[str, str]:
    """name: summary of every policy loss, upstream's and ours."""
    ours = {name: OBJECTIVES[objective].summary() for name, objective in OBJECTIVE_OF_LOSS.items()}
    return {**UPSTREAM_LOSSES, **ours}


def algorithm_listing() -> str:
    """The sections that ``sg-rlhf train --help`` ends with."""
    sections = {
        "algorithms: --algorithm NAME": algorithms(),
        "token weightings: sg.weighting.type=NAME": {
            name: one.summary() for name, one in WEIGHTINGS.items()
        },
        "policy losses: actor.policy_loss_type=NAME": losses(),
        "KL estimators: algo.kl.estimator=NAME": KL,
        "updates: sg.update=NAME": UPDATES,
    }
    return "\n".join(
        f"{title}\n" + "".join(f"  {name:<20}{text}\n" for name, text in names.items())
        for title, names in sections.items()
        if names
    )


def table() -> str:
    """The whole listing."""
    sections: dict[str, Sequence[tuple[str, ...]]] = {
        "models: --config FILE": models(),
        "algorithms: --algorithm NAME": list(algorithms().items()),
        "hardware: --hardware NAME, the largest models that fit": hardware(),
    }
    lines = []
    for title, rows in sections.items():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append(title)
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  " + "  ".join(cells).rstrip())
        lines.append("")
    return "\n".join(lines) + EXAMPLE


def main(argv: list[str] | None = None) -> int:
    """Print the listing. Exit status 0; 2 for a wrong ``SG_DOMAINS``."""
    OneLineParser(prog="sg-rlhf recipes", description=__doc__).parse_args(argv)
    try:
        print(table(), end="")
    except ConfigError as error:
        print(f"sg-rlhf recipes: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
