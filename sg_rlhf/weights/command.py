"""Show a recipe's token weighting before any training: curve, range, mean and dead zones.

A token weighting scales the update of each sampled token by a weight w. In GRPO-SG w depends on p,
the policy's probability of the token. Without a recipe the command shows the published constants.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import OneLineParser
from sg_rlhf.config import ConfigError, builtin_recipes, load_config
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS
from sg_rlhf.data_io import strict_json
from sg_rlhf.weights.describe import RecipeLoss
from sg_rlhf.weights.plot import check_curve, curve, plot

EXAMPLES = """\
examples:
  the published constants, in the product form that is the default here
    sg-rlhf weights
  Eq. 19 as it is printed: every weight is 1, so it is plain GRPO
    sg-rlhf weights sg.weighting.form=quotient
  the weighting of a recipe, as JSON for a script
    sg-rlhf weights --algorithm grpo_sg --json
  an algorithm on top of a recipe
    sg-rlhf weights --config configs/kk/grpo_tiny_cpu.yaml \\
        --config configs/algorithms/reverse.yaml
  a narrower range that leaves no dead zone, with a picture
    sg-rlhf weights sg.weighting.upper=1.2 --plot weights.png
  the dead zone under another clip
    sg-rlhf weights actor.eps_clip_low_high=[0.2,0.28]

  another weighting with a parameter of its own; sg-rlhf train --help lists them
    sg-rlhf weights "sg.weighting={type: power, exponent: 3}"

keys: actor.policy_loss_type, sg.weighting, its parameters sg.weighting.tau, sg.weighting.upper and
so on, and any other key of a recipe. Without a recipe the loss is weighted_ppo and the PPO clip,
actor.eps_clip_low_high=[low,high], the paper's [0.2,0.24]; with one they are what it trains with. A
weight that is the same for every token is reported here and refused by `sg-rlhf train`.

mean: of w over p uniform on (0, 1) at ratio 1, a property of the curve alone. A policy's tokens are
not uniform, most have p near 1; the mean of a run is its metric sg/weight_mean.

dead zone: the p at which a token has no policy gradient at ratio 1, by the sign of its advantage.
JSON keys: dead_zone_positive and dead_zone_negative [first, last], dead_zone_dual_clip (A < 0 and w
above actor.dual_clip), null where there is none; dead_zone_p is the first p of dead_zone_positive.
dead_weights gives the same as weights, for the weightings that are not a function of p alone too.
With normalize all of it is before the division by the mean weight. docs/method.md explains.
"""

TABLE_P = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="sg-rlhf weights",
        description=__doc__,
        epilog=EXAMPLES,
    )
    builtin_recipes.add_arguments(parser, hardware_too=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--plot", metavar="F.png", help="draw the curve; a missing folder is created"
    )
    return parser.parse_intermixed_args(argv)


def summary(rule: RecipeLoss) -> dict[str, Any]:
    """The JSON object: the settings that take effect and what they can do; see --help."""
    from sg_rlhf.algo.weightings import CONSTANT_TOLERANCE

    cfg = rule.weighting
    low, high = rule.limits()
    dead = {zone.kind: zone for zone in rule.dead_zones()}
    kinds = ("positive", "negative", "dual_clip")
    zones = {
        f"dead_zone_{kind}": list(dead[kind].zone or ()) or None if kind in dead else None
        for kind in kinds
    }
    levels = {kind: dead[kind].level if kind in dead else None for kind in kinds}
    return {
        "policy_loss_type": rule.loss,
        "weighting": cfg.name if cfg else "uniform",
        "parameters": cfg.own_parameters() if cfg else {},
        "placement": cfg.placement if cfg else None,
        "normalize": cfg.normalize if cfg else None,
        "lopti_threshold": rule.lopti_threshold,
        "kl_estimator": rule.kl,
        "eps_low": rule.eps_low,
        "eps_high": rule.eps_high,
        "dual_clip": rule.dual_clip,
        "min": low,
        "max": high,
        "mean": rule.mean(),
        "constant": high - low <= CONSTANT_TOLERANCE,
        "dead_zone_p": zones["dead_zone_positive"] and zones["dead_zone_positive"][0],
        **zones,
        "dead_weights": {
            "positive_above": levels["positive"],
            "negative_below": levels["negative"],
            "negative_above": levels["dual_clip"],
        },
    }


def table(rule: RecipeLoss) -> str:
    """The printed text: curve, range, mean, and what they mean."""
    cfg, report = rule.weighting, summary(rule)
    lines = [textwrap.fill(rule.describe(), 88, subsequent_indent="  ")]
    if cfg and cfg.is_curve and not cfg.constant_by_name:
        weights = curve(rule, list(TABLE_P))
        lines += ["", "     p   weight"]
        lines += [f"  {p:4.2f}   {w:6.3f}" for p, w in zip(TABLE_P, weights, strict=True)]
    lines += ["", f"range: {report['min']:.4g} to {report['max']:.4g}"]
    if report["mean"] is None:
        lines.append("mean: not known without a model, as w depends on more than p")
    else:
        lines.append(f"mean: {report['mean']:.4g} over p uniform on (0, 1)")
    lines += [textwrap.fill(n, 88, subsequent_indent="  ") for n in notes(rule, report)]
    return "\n".join(lines)


def notes(rule: RecipeLoss, report: dict[str, Any]) -> list[str]:
    found = []
    cfg = rule.weighting
    if cfg and report["constant"] and not cfg.constant_by_name:
        plain = "GRPO" if rule.is_weighted_ppo else rule.loss
        scale = "" if abs(report["min"] - 1) < 1e-6 else " at another scale"
        found.append(
            f"constant: every token gets the same weight, so this is plain {plain}{scale}; "
            f"sg-rlhf train refuses it unless sg.weighting.allow_constant=true"
        )
    if not rule.is_curve():
        found.append(
            "the weight is not a function of p alone, so there is no curve; the share of zeroed "
            "tokens is in the training metrics"
        )
    if rule.lopti_threshold is not None:
        found.append(
            f"two updates: tokens with p_old < {rule.lopti_threshold:g}, then the rest; a "
            "token has its policy gradient in one of them"
        )
    found += _dead_zone_notes(rule, report)
    if cfg and cfg.normalize:
        inside = cfg.placement == "inside"
        moving = "their range and dead zones move" if inside else "their range moves"
        found.append(
            f"normalize={cfg.normalize}: training divides these weights by their mean over the "
            f"tokens, so {moving} with the data"
        )
    if rule.kl in KL_ESTIMATORS:
        found.append(_kl_note(rule))
    return found


def _dead_zone_notes(rule: RecipeLoss, report: dict[str, Any]) -> list[str]:
    found = []
    for dead in rule.dead_zones():
        remedy = "; sg.weighting.placement=outside or a larger eps_high avoids this"
        found.append(f"dead zone: {dead.sentence()}{remedy if dead.positive else ''}")
    if found:
        return found
    if rule.loss == "cispo":
        return ["dead zone: none; the clip bounds the importance ratio and removes no gradient"]
    if report["min"] == 0:
        found.append("a token of weight 0 has no policy gradient at any ratio")
    if rule.objective is not None and not rule.is_weighted_ppo:
        found.append(f"dead zone: none at ratio 1; {rule.objective.summary()}")
        return found
    ratio = "the response's ratio" if rule.loss == "gspo" else "the ratio"
    clip = f"{1 - rule.eps_low:g} to {1 + rule.eps_high:g}"
    if rule.weighting and rule.weighting.placement == "inside":
        ratio = "w times the ratio"
    found.append(f"dead zone: none at ratio 1; the clip acts where {ratio} leaves {clip}")
    return found


def _kl_note(rule: RecipeLoss) -> str:
    text = f"KL: {rule.kl}, "
    if rule.kl_weighting is None:
        text += "weighted by the same w"
    else:
        text += f"which alone is weighted, by {rule.kl_weighting.describe()}"
    if rule.kl == "wk3_eq11":
        text += "; w*rho - log(w*rho) - 1 with rho = p_ref / p is least at p = w * p_ref"
    return text


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        rule = RecipeLoss.of(
            load_config(arguments.config, arguments.overrides), allow_constant=True
        )
        if arguments.plot:
            check_curve(rule)
            plot(rule, Path(arguments.plot))
    except ConfigError as error:
        return _fail(str(error))
    except (OSError, ValueError) as error:
        return _fail(f"--plot {arguments.plot}: {error}")
    if arguments.json:
        print(strict_json.dumps(summary(rule)))
    else:
        print(table(rule))
        unread = [o for o in arguments.overrides if o.startswith("sg.")]
        if unread and rule.weighting is None and rule.kl_weighting is None:
            print(
                f"not read by policy loss {rule.loss}: {', '.join(unread)}; "
                "actor.policy_loss_type=weighted_ppo reads it"
            )
        if arguments.plot:
            print(f"picture: {arguments.plot}")
    return 0


def _fail(message: str) -> int:
    print(f"sg-rlhf weights: {' '.join(message.split())}", file=sys.stderr)
    return 2
