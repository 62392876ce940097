"""`sg.weighting` and `sg.objective`: how layers settle, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.config import ConfigError, load_config, weighting_of
from sg_rlhf.overlay.driver.arguments import upstream_arguments

TINY_RECIPE = Path(__file__).parents[3] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"


def weighting(*layers: str | Path) -> dict[str, Any]:
    recipes = [layer for layer in layers if isinstance(layer, Path)]
    overrides = [layer for layer in layers if isinstance(layer, str)]
    return load_config(recipes or None, overrides).sg.weighting


def test_a_type_is_a_statement_of_its_own_and_parameters_amend() -> None:
    assert weighting(TINY_RECIPE)["upper"] == 1.2
    assert weighting("sg.weighting.upper=1.3", "sg.weighting.type=reverse")["upper"] == 1.4
    assert weighting(TINY_RECIPE, "sg.weighting={upper: 1.1}")["upper"] == 1.1
    assert weighting(TINY_RECIPE, "sg.weighting.upper=1.1")["type"] == "grpo_sg"
    assert weighting(TINY_RECIPE, "sg.weighting=stapo") == weighting("sg.weighting={type: stapo}")
    assert weighting(TINY_RECIPE, "sg.weighting.tau=7", "sg.weighting.tau=5")["tau"] == 5.0
    assert weighting("sg.weighting=null")["type"] == "grpo_sg"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sg.weighting.taw=1", r"sg\.weighting\.taw=1: expected one of .*did you mean tau\?"),
        ("sg.weighting.type=grpo", r"sg\.weighting\.type='grpo': expected .*mean grpo_sg"),
        ("sg.weighting.tau=-1", r"sg\.weighting\.tau=-1\.0: expected a finite number above 0"),
        ("sg.weighting.tau=nine", r"sg\.weighting\.tau='nine': expected a finite number above 0"),
        ("sg.weighting.upper=0.5", r"sg\.weighting\.upper=0\.5: expected lower=1\.0 or more"),
        ("sg.weighting.placement=beside", r"placement='beside': expected one of inside, outside"),
        ("sg.weighting=[1]", r"sg\.weighting=\[1\]: expected a mapping"),
        ("sg.weighting.type=os:path", r"sg\.weighting\.type='os:path': expected a subclass"),
        ("sg.weighting.allow_constant=1", "allow_constant=1: expected true or false"),
        ("sg.objective.cap=2", r"sg\.objective\.cap=2: expected no parameters"),
        ("sg.objective=2", r"sg\.objective=2: expected a mapping"),
        ("sg.wieghting.tau=2", r"unknown key 'sg.wieghting.tau'; did you mean"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^command line: .*{message}") as refusal:
        load_config(TINY_RECIPE, [override])
    assert "\n" not in str(refusal.value)


def test_a_wrong_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {TINY_RECIPE}\nsg:\n  weighting: {{type: stapo, probb: 1}}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: sg\.weighting\.probb=1: .*mean prob\?"):
        load_config(recipe)


def test_an_objectives_parameters_belong_to_the_loss() -> None:
    sapo = load_config(TINY_RECIPE, ["actor.policy_loss_type=sapo", "sg.objective.tau_negative=2"])
    assert sapo.sg.objective == {"tau_positive": 1.0, "tau_negative": 2.0}
    assert load_config(TINY_RECIPE, ["actor.policy_loss_type=sapo"]).sg.objective == {}
    with pytest.raises(ConfigError, match="actor.policy_loss_type=ppo is upstream's own loss"):
        load_config(TINY_RECIPE, ["actor.policy_loss_type=ppo", "sg.objective.cap=2"])


def test_a_weighting_of_another_package_is_named_by_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_weighting.py").write_text(
        """
from dataclasses import dataclass
from sg_rlhf.algo.parameters import number
from sg_rlhf.algo.weightings import Weighting

@dataclass(frozen=True, kw_only=True)
class Half(Weighting):
    "w = floor + (1 - floor) * p"
    floor: float = number(0.5, "w at p = 0", least=0.0, most=1.0)

    def weights(self, p_BT, context):
        return self.floor + (1 - self.floor) * p_BT
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "half_weighting:Half"
    config = load_config(TINY_RECIPE, [f"sg.weighting={{type: '{name}', floor: 0.25}}"])
    assert upstream_arguments(config).sg.weighting["floor"] == 0.25
    assert weighting_of(config).bounds() == (0.25, 1.0)
    assert weighting_of(config).describe().startswith(f"{name}: w = floor")
    with pytest.raises(ConfigError, match=r"sg\.weighting\.floor=2\.0: expected a number from 0"):
        load_config(TINY_RECIPE, [f"sg.weighting={{type: '{name}', floor: 2}}"])
