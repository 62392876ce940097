"""A weighting that is not of this package is checked when its class is read, in one line each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sg_rlhf.algo.parameters import ParameterError
from sg_rlhf.algo.weightings import make_weighting
from sg_rlhf.config import ConfigError, load_config

HEAD = """
from dataclasses import dataclass
from sg_rlhf.algo.parameters import number
from sg_rlhf.algo.weightings import Weighting

"""
DATACLASS = "@dataclass(frozen=True, kw_only=True)\n"
CLASS = DATACLASS + "class Mine(Weighting):\n"
OF_P = "    def weights(self, p_BT, context):\n        return 1 + p_BT\n"
BY_SIGN = """
    uses = ("advantages",)
    def weights(self, p_BT, context):
        return 1 + 0.5 * (context.advantages > 0) + 0 * p_BT
"""
BOUNDS = "    def bounds(self):\n        return {}\n"


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """What a recipe, and the library, say of a class; both in one line."""

    def refuse(text: str, where: bool = True) -> str:
        module = f"mine_{re.sub(r'[^a-z0-9]', '_', request.node.name.lower())}"
        file = tmp_path / f"{module}.py"
        file.write_text(HEAD + text)
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ValueError) as in_library:
            make_weighting(f"{module}:Mine")
        with pytest.raises(ConfigError) as in_recipe:
            load_config(None, [f"sg.weighting={{type: '{module}:Mine'}}"])
        said = str(in_recipe.value)
        assert "\n" not in said
        assert said.startswith("command line: sg.weighting")
        if where:
            assert f"class Mine of {file}" in said
        assert str(in_library.value).split("expected ")[-1] in said
        return said

    return refuse


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str):
    (tmp_path / f"{name}.py").write_text(HEAD + text)
    monkeypatch.syspath_prepend(tmp_path)
    return make_weighting(f"{name}:Mine")


@pytest.mark.parametrize(
    ("name", "text", "bounds"),
    [
        ("taken_curve", CLASS + OF_P, (1, 2)),
        ("taken_zero", CLASS + OF_P.replace("1 + p_BT", "p_BT"), (0, 1)),
        ("taken_sign", CLASS + BY_SIGN + BOUNDS.format("(1, 1.5)"), (1, 1.5)),
        ("taken_plain", "class Mine(Weighting):\n" + OF_P, (1, 2)),  # no field, no dataclass
    ],
)
def test_right_ones_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, bounds: tuple[float, ...]
) -> None:
    assert made(tmp_path, monkeypatch, name, text).bounds() == bounds


@pytest.mark.parametrize("field", ["strength: float = number(0.5, 's')", "strength: float = 0.5"])
def test_a_forgotten_dataclass(refused, field: str) -> None:
    said = refused(f"class Mine(Weighting):\n    {field}\n" + OF_P)
    assert "expected @dataclass(frozen=True, kw_only=True) above class Mine" in said
    assert "without it strength is no parameter" in said


def test_more_than_p_needs_bounds(refused) -> None:
    said = refused(CLASS + BY_SIGN)
    assert "expected a method bounds(self) in class Mine" in said
    assert "returns (min, max) of the weight: it depends on advantages" in said


def test_a_misspelt_name_in_uses(refused) -> None:
    said = refused(CLASS + BY_SIGN.replace('("adv', '("adw') + BOUNDS.format("(1, 2)"))
    assert "'adwantages' is none (did you mean advantages?)" in said
    assert "old_log_probs, advantages, entropy, keys, engine_log_probs" in said


def test_uses_that_is_no_tuple(refused) -> None:
    said = refused(CLASS + BY_SIGN.replace('s",)', 's")') + BOUNDS.format("(1, 2)"))
    assert 'a tuple of names such as uses = ("advantages",)' in said


def test_a_context_that_uses_does_not_name(refused) -> None:
    said = refused(CLASS + BY_SIGN.replace("    uses", "    used"))
    assert "its weights cannot be computed: " in said
    assert "it does not name old_log_probs, advantages, entropy" in said


def test_no_weights(refused) -> None:
    assert "expected a method weights(self, p_BT, context) in" in refused(CLASS + "    pass\n")


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("p_BT - 0.5", "weights() gave -0.5 to 0.5"),
        ("1 / (p_BT - p_BT)", "weights() gave inf to inf"),
        ("p_BT.log()", "weights() gave -inf to 0"),
        ("(p_BT - 2) ** 0.5", "weights() gave nan to nan"),
        ("p_BT.mean()", "weights() gave a tensor of [] for p_BT of [3, 11]"),
        ("None", "its weights cannot be computed: AttributeError"),
        ("p_BT.nothing()", "its weights cannot be computed: AttributeError"),
    ],
)
def test_weights_that_nothing_could_train_with(refused, formula: str, message: str) -> None:
    assert message in refused(CLASS + OF_P.replace("1 + p_BT", formula))


@pytest.mark.parametrize("bounds", ["(1, 1.2)", "(-1, 2)", "(1.2, 1.5)", "(2, 1)", "(1, 1e999)"])
def test_bounds_that_the_weights_leave(refused, bounds: str) -> None:
    assert "expected weights of 0 or more" in refused(CLASS + BY_SIGN + BOUNDS.format(bounds))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Mine(Weighting:\n", "SyntaxError: "),
        ("@dataclass\nclass Mine(Weighting):\n" + OF_P, "TypeError: cannot inherit non-frozen"),
        ("nowhere\n", "NameError: name 'nowhere' is not defined ("),
        (CLASS + "    s = number(0.5, 's')\n", "TypeError: 's' is a field but has no type"),
        ("class Other(Weighting):\n" + OF_P, "has no attribute 'Mine'"),
    ],
)
def test_a_file_that_cannot_be_read(refused, text: str, message: str) -> None:
    said = refused(text, where=False)
    assert "expected module:Class that can be imported: " in said
    assert message in said


def test_an_objective_needs_its_dataclass_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sg_rlhf.algo.objectives import make_objective

    (tmp_path / "undecorated_objective.py").write_text(
        HEAD + "from sg_rlhf.algo.objectives import Objective\n"
        "class Mine(Objective):\n    cap: float = number(1.0, 'c')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ParameterError, match="above class Mine of .*: without it cap is no"):
        make_objective("undecorated_objective:Mine")
