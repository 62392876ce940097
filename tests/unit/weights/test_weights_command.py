"""``python -m sg_rlhf.weights``: its table, its JSON, its picture, one line per mistake."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sg_rlhf.algo.lopti import PASSES, in_pass
from sg_rlhf.algo.policy_loss import LossSettings, policy_loss
from sg_rlhf.algo.weightings import TokenContext, token_keys
from sg_rlhf.config import ConfigError, load_config, weighting_of
from sg_rlhf.config.weighting_resolution import built_objective
from sg_rlhf.weights.command import main
from sg_rlhf.weights.describe import describe_loss
from tests.unit.algo import upstream

REPOSITORY = Path(__file__).parents[3]
CONFIGS = REPOSITORY / "configs"
RECIPES = sorted(
    str(path.relative_to(CONFIGS))
    for folder in ("algorithms", "kk", "math", "search", "arithmetic")
    for path in (CONFIGS / folder).glob("*.yaml")
)


def dead_zone(eps_high: float, tau: float = 9.0) -> float:
    """w = 1 + eps_high solved for p, product form with the published alpha and mu."""
    sigmoid = (1 + eps_high) / 2.0 + 0.25
    return math.log(sigmoid / (1 - sigmoid)) / tau


def report(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out)


def test_json_of_the_published_constants(capsys):
    values = report(capsys)
    dead_zone_p = pytest.approx(0.2112176, abs=1e-7)
    assert values == {
        "policy_loss_type": "weighted_ppo",
        "weighting": "grpo_sg",
        "parameters": {
            "alpha": 2.0,
            "mu": 0.25,
            "tau": 9.0,
            "lower": 1.0,
            "upper": 1.4,
            "form": "product",
        },
        "placement": "inside",
        "normalize": None,
        "lopti_threshold": None,
        "kl_estimator": None,
        "eps_low": 0.2,
        "eps_high": 0.24,
        "dual_clip": None,
        "min": 1.0,
        "max": 1.4,
        "mean": pytest.approx(published_mean(), abs=1e-9),
        "constant": False,
        "dead_zone_p": dead_zone_p,
        "dead_zone_positive": [dead_zone_p, 1.0],
        "dead_zone_negative": None,
        "dead_zone_dual_clip": None,
        "dead_weights": {"positive_above": 1.24, "negative_below": None, "negative_above": None},
    }


def published_mean() -> float:
    """The integral of w over p in [0, 1]: w leaves 1 where sigmoid = .75, meets 1.4 at .95."""
    leaves, meets = math.log(3) / 9, math.log(19) / 9
    rising = 2 / 9 * (math.log1p(19) - math.log1p(3)) - 0.5 * (meets - leaves)
    return leaves + rising + 1.4 * (1 - meets)


def test_json_of_the_reversed_weights(capsys):
    """2 - w < 0.8 where w > 1.2, that is sigmoid(9 p) > 0.85."""
    values = report(capsys, "--config", str(CONFIGS / "algorithms" / "reverse.yaml"))
    assert values["weighting"] == "reverse" and values["min"] == pytest.approx(0.6)
    assert values["mean"] == pytest.approx(2 - published_mean(), abs=1e-9)
    assert values["dead_zone_positive"] is None and values["dead_zone_p"] is None
    assert values["dead_zone_negative"] == [pytest.approx(math.log(0.85 / 0.15) / 9), 1.0]


def test_a_weight_above_the_dual_clip_is_a_dead_zone_too(capsys):
    """20 (sigmoid(9 p) - 0.25) > 10 where sigmoid > 0.75."""
    arguments = ["sg.weighting.alpha=20", "sg.weighting.upper=15", "actor.dual_clip=10"]
    values = report(capsys, *arguments)
    assert values["dead_zone_dual_clip"] == [pytest.approx(math.log(3) / 9), 1.0]
    said = text(capsys, *arguments)
    assert "a token with negative advantage and p > 0.122" in said and "w > dual_clip = 10" in said


# --- the shipped recipes -----------------------------------------------------------------------


def token_gradients(config, log_p, advantage, entropy):
    """The loss's gradient of each token's log-probability, by the loss the recipe trains with.

    One response at ratio 1; sg.update=lopti makes two passes.
    """
    eps_low, eps_high = config.clip_range()
    dual_clip, loss_type = config.value("actor.dual_clip"), config.value("actor.policy_loss_type")
    log_p = log_p.clone().requires_grad_()
    advantages, mask = torch.full_like(log_p, advantage), torch.ones_like(log_p)
    if loss_type in ("ppo", "gspo"):
        stock = upstream.policy_loss_class()(
            clip_eps_low=eps_low,
            clip_eps_high=eps_high,
            dual_clip=dual_clip,
            policy_loss_type=loss_type,
        )
        loss = stock(log_p, log_p.detach(), advantages, action_mask=mask)[0]
        return torch.autograd.grad(loss, log_p)[0], mask
    keys = token_keys(torch.arange(log_p.shape[1] + 1)[None], torch.ones(1, log_p.shape[1] + 1))
    passes = PASSES if config.sg.update == "lopti" else (None,)
    objective = built_objective(config.value("actor.policy_loss_type"), config.sg.objective)
    gradients, weights = [], mask
    for name in passes:
        terms = policy_loss(
            log_p,
            log_p.detach(),
            advantages,
            mask,
            LossSettings(weighting_of(config), eps_low, eps_high, dual_clip, objective=objective),
            context=TokenContext(
                entropy=torch.full_like(log_p, entropy), keys=keys, engine_log_probs=log_p
            ),
            active=name and in_pass(log_p, config.sg.lopti_threshold, name),
        )
        gradients.append(torch.autograd.grad(terms.loss, log_p)[0])
        weights = terms.weights_BT
    return sum(gradients), weights


def claimed_dead(values, p, weights, positive):
    """The tokens that the report says have no policy gradient."""
    dead = weights == 0
    bounds = values["dead_weights"]
    if positive and bounds["positive_above"] is not None:
        dead |= weights > bounds["positive_above"]
    if not positive and bounds["negative_below"] is not None:
        dead |= weights < bounds["negative_below"]
    if values["weighting"] in ("uniform", "grpo_sg", "reverse"):
        zones = ["positive"] if positive else ["negative", "dual_clip"]
        by_p = torch.zeros_like(dead)
        for first, last in filter(None, (values[f"dead_zone_{zone}"] for zone in zones)):
            by_p |= (p >= first) & (p <= last)
        assert torch.equal(by_p, dead)
    return dead


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_said_of_a_shipped_recipe_holds_for_its_loss(capsys, recipe):
    values = report(capsys, "--config", str(CONFIGS / recipe))
    config = load_config(CONFIGS / recipe)
    assert values["policy_loss_type"] == config.value("actor.policy_loss_type")
    p = (torch.arange(4000, dtype=torch.float64)[None] + 0.5) / 4000
    for advantage in (1.0, -1.0):
        for entropy in (0.1, 2.0):
            gradient, weights = token_gradients(config, p.log(), advantage, entropy)
            dead = claimed_dead(values, p, weights, advantage > 0)
            assert torch.equal(gradient == 0, dead)
            if values["normalize"] is None:
                assert values["min"] - 1e-12 <= weights.min()
                assert weights.max() <= values["max"] + 1e-12
                if values["mean"] is not None:
                    noise = 0.02 if values["weighting"] == "random" else 1e-6
                    assert float(weights.mean()) == pytest.approx(values["mean"], abs=noise)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loss_without_token_weights_is_reported_as_such(capsys, recipe):
    values = report(capsys, "--config", str(CONFIGS / recipe))
    if values["policy_loss_type"] not in ("ppo", "gspo"):
        return
    assert (values["min"], values["max"], values["mean"]) == (1.0, 1.0, 1.0)
    assert values["weighting"] == "uniform" and values["constant"] and values["placement"] is None
    assert values["parameters"] == {} and values["dead_zone_p"] is None
    shown = text(capsys, "--config", str(CONFIGS / recipe))
    assert "no token weights, w = 1" in shown and "range: 1 to 1 " in shown
    assert "dead zone: none at ratio 1" in shown and "p weight 0.00" not in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ar", "a * p_old + 1 - a, a = alpha: advantage reweighting"),
        ("ar_lopti", "two updates: tokens with p_old < 0.5, then the rest"),
        ("cispo", "dead zone: none; the clip bounds the importance ratio"),
        ("gspo", "the clip acts where the response's ratio leaves 0.9997 to 1.0004"),
        ("grpo_sg_normalized", "so their range moves with the data"),
        ("grpo_sg_quotient", "every token gets the same weight, so this is plain GRPO"),
        ("lopti", "two updates: tokens with p_old < 0.5, then the rest"),
        ("random", "a token with negative advantage and w < 0.8 has no policy gradient even"),
        ("random", "mean: 1 over p uniform on (0, 1)"),
        ("reverse", "dead zone: a token with negative advantage and p > 0.193 has"),
        ("stapo", "a token of weight 0 has no policy gradient at any ratio"),
        ("stapo", "mean: not known without a model"),
        ("tr_grpo", "KL: wk3_eq11, weighted by the same w"),
        ("uniform", "uniform: w = 1 (plain GRPO)"),
    ],
)
def test_the_text_of_an_algorithm(capsys, name, words):
    assert words in text(capsys, "--config", str(CONFIGS / "algorithms" / f"{name}.yaml"))


def test_a_stock_loss_with_a_weighted_kl_and_with_settings_it_does_not_read(capsys):
    baseline = ["--config", str(CONFIGS / "kk" / "grpo_tiny_cpu.yaml")]
    shown = text(capsys, *baseline, "algo.kl.estimator=wk3")
    assert "no token weights" in shown and "KL: wk3, which alone is weighted, by grpo_sg" in shown
    assert "not read by policy loss ppo: sg.weighting.tau=7" in text(
        capsys, *baseline, "sg.weighting.tau=7"
    )


def test_the_start_of_a_run_says_the_same():
    def says(*names, overrides=()):
        files = [CONFIGS / "algorithms" / f"{name}.yaml" for name in names]
        return describe_loss(load_config(files, overrides))

    assert says("grpo") == "policy loss: ppo (upstream's own; no token weights)"
    assert "advantage and p > 0.211 has no" in says("grpo_sg")
    assert "DEAD ZONE: a token with negative advantage and p > 0.193 has" in says("reverse")
    assert "positive advantage and w > 1.24 has no" in says("random")
    assert "DEAD ZONE" not in says("ar") + says("stapo") + says("cispo") + says("uniform")
    with pytest.raises(ConfigError, match="every token would get the weight 1"):
        says("grpo_sg", overrides=["sg.weighting.form=quotient"])


# --- overrides and recipes ---------------------------------------------------------------------


def test_json_of_eq_19_as_printed(capsys):
    values = report(capsys, "sg.weighting.form=quotient")
    assert (values["min"], values["max"], values["constant"]) == (1.0, 1.0, True)
    assert values["dead_zone_p"] is None


@pytest.mark.parametrize(
    ("overrides", "dead_zone_p"),
    [
        (["sg.weighting.upper=1.2"], None),
        (["sg.weighting.placement=outside"], None),
        (["actor.eps_clip_low_high=[0.2,0.28]"], dead_zone(0.28)),
        (["actor.eps_clip_low_high=[0.2,0.5]"], None),
        (["actor.eps_clip=0.3"], dead_zone(0.3)),
    ],
)
def test_overrides_reach_the_dead_zone(capsys, overrides, dead_zone_p):
    expected = dead_zone_p if dead_zone_p is None else pytest.approx(dead_zone_p)
    assert report(capsys, *overrides)["dead_zone_p"] == expected


def test_a_recipe_and_an_override_on_top(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "actor:\n  policy_loss_type: weighted_ppo\n  eps_clip_low_high: [0.2, 0.28]\n"
        "sg: {weighting: {upper: 1.3, tau: 7.0}}\n"
    )
    values = report(capsys, "--config", str(recipe), "sg.weighting.tau=8")
    assert (values["parameters"]["upper"], values["parameters"]["tau"]) == (1.3, 8.0)
    assert values["dead_zone_p"] == pytest.approx(dead_zone(0.28, tau=8))


def test_a_recipe_without_a_clip_gets_upstreams_default(capsys, tmp_path):
    """The run would clip at 1.2, whatever the paper says, so the report does too."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("actor:\n  policy_loss_type: weighted_ppo\n")
    assert report(capsys, "--config", str(recipe))["dead_zone_p"] == pytest.approx(dead_zone(0.2))


def text(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_table_explains_the_dead_zone(capsys):
    shown = text(capsys)
    for row in ("0.00 1.000", "0.10 1.000", "0.25 1.309", "0.50 1.400", "0.75 1.400", "1.00 1.400"):
        assert row in shown
    assert "range: 1 to 1.4 mean: 1.319 over p uniform on (0, 1)" in shown
    assert "a token with positive advantage and p > 0.211 has no policy gradient even on-" in shown
    assert "because w > 1 + eps_high = 1.24; sg.weighting.placement=outside or a larger" in shown


def test_the_table_explains_the_other_cases(capsys):
    assert "plain GRPO; sg-rlhf train refuses it unless sg.weighting.allow_constant=true" in text(
        capsys, "sg.weighting.form=quotient"
    )
    assert "plain GRPO at another scale" in text(
        capsys, "sg.weighting.lower=1.2", "sg.weighting.upper=1.2"
    )
    assert "dead zone: none at ratio 1" in text(capsys, "sg.weighting.upper=1.2")
    wide = text(capsys, "sg.weighting.lower=0.5", "sg.weighting.upper=1.5")
    assert "a token with negative advantage and p < 0.069 has no policy gradient" in wide
    uniform = text(capsys, "sg.weighting.type=uniform")
    assert "w = 1 (plain GRPO)" in uniform and "refuses" not in uniform
    assert "2 - w with w = clip" in text(capsys, "sg.weighting.type=reverse")
    assert "divides these weights by their mean" in text(
        capsys, "sg.weighting.normalize=batch_mean"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["sg.weighting.lower=0.5", "sg.weighting.upper=1.5"],
        ["sg.weighting.form=quotient"],
        ["sg.weighting.type=reverse"],
        ["actor.policy_loss_type=ppo"],
    ],
)
def test_plot_writes_a_picture_into_a_new_folder(capsys, tmp_path, overrides):
    target = tmp_path / "new" / "weights.png"
    assert main(["--plot", str(target), *overrides]) == 0
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 10_000
    assert f"picture: {target}" in capsys.readouterr().out


def test_plot_and_json_keep_stdout_pure(capsys, tmp_path):
    assert report(capsys, "--plot", str(tmp_path / "w.svg"))["max"] == 1.4
    assert (tmp_path / "w.svg").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sg.weighting.tau=-1"], "tau=-1.0: expected a finite number above 0"),
        (["sg.weighting.upper=0.5"], "upper=0.5: expected lower=1.0 or more"),
        (["sg.weighting.type=grpo"], "type='grpo': expected one of"),
        (["sg.frm=product"], "sg.frm"),
        (["sg.weighting.form"], "expected key=value"),
        (["actor.policy_loss_type=cispo"], "placement='inside': expected 'outside' with cispo"),
        (["actor.policy_loss_type=pqo"], "expected one of ppo, gspo, weighted_ppo, cispo"),
        (["actor.policy_loss_type=ppo", "sg.update=lopti"], "actor.policy_loss_type=ppo: expected"),
        (["actor.dual_clip=1"], "actor.dual_clip=1: expected a number, above 1"),
        (
            ["actor.eps_clip_low_high=[-0.2,0.2]"],
            "[-0.2, 0.2]: expected a list (2 times a number, 0 or more)",
        ),
        (["sg.weighting.type=random", "--plot", "w.png"], "not a function of p alone"),
        (["--config", "no_such_recipe.yaml"], "no_such_recipe.yaml"),
        (["--plot", "weights.xyz"], "--plot weights.xyz"),
        (["--plot", "/dev/null/weights.png"], "--plot /dev/null/weights.png"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("sg-rlhf weights: ") and output.err.count("\n") == 1
    assert words in output.err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_flag_is_one_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--csv"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "--csv" in error and "--help" in error and error.count("\n") == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "sg.weighting.form=quotient" in shown and "--json" in shown and "dead zone" in shown
    assert "mean: of w over p uniform on (0, 1)" in shown


def test_as_a_command():
    command = [
        sys.executable,
        "-m",
        "sg_rlhf.weights",
        "sg.weighting.form=quotient",
        "--json",
        "sg.weighting.tau=20",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=True
    )
    values = json.loads(result.stdout)
    assert values["constant"] is True and values["parameters"]["tau"] == 20.0


def test_a_weight_that_rises_and_falls_has_a_zone_with_gaps(tmp_path, monkeypatch, capsys):
    (tmp_path / "hump.py").write_text(
        """
from dataclasses import dataclass
from sg_rlhf.algo.weightings import Weighting

@dataclass(frozen=True, kw_only=True)
class Hump(Weighting):
    "w = 0.5 + 2.4 * p * (1 - p)"

    def weights(self, p_BT, context):
        return 0.5 + 2.4 * p_BT * (1 - p_BT)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = text(capsys, "sg.weighting.type=hump:Hump")
    assert "negative advantage, p from 0.000 to 1.000 and w < 0.8 has no policy gradient" in said
