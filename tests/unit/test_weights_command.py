"""``python -m sg_rlhf.weights``: its table, its JSON, its picture, one line per mistake."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sg_rlhf.weights import main

REPOSITORY = Path(__file__).parents[2]
JSON_KEYS = [
    *("form", "alpha", "mu", "tau", "lower", "upper", "placement"),
    *("min", "max", "constant", "dead_zone_p"),
]


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
    assert list(values) == JSON_KEYS
    assert values == {
        "form": "product",
        "alpha": 2.0,
        "mu": 0.25,
        "tau": 9.0,
        "lower": 1.0,
        "upper": 1.4,
        "placement": "inside",
        "min": 1.0,
        "max": 1.4,
        "constant": False,
        "dead_zone_p": pytest.approx(0.2112176, abs=1e-7),
    }


def test_json_of_eq_19_as_printed(capsys):
    values = report(capsys, "sg.form=quotient")
    assert (values["min"], values["max"], values["constant"]) == (1.0, 1.0, True)
    assert values["dead_zone_p"] is None


@pytest.mark.parametrize(
    ("overrides", "dead_zone_p"),
    [
        (["sg.upper=1.2"], None),
        (["sg.placement=outside"], None),
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
    recipe.write_text("actor:\n  eps_clip_low_high: [0.2, 0.28]\nsg:\n  upper: 1.3\n  tau: 7.0\n")
    values = report(capsys, "--config", str(recipe), "sg.tau=8")
    assert (values["upper"], values["tau"]) == (1.3, 8.0)
    assert values["dead_zone_p"] == pytest.approx(dead_zone(0.28, tau=8))


def test_a_recipe_without_a_clip_gets_upstreams_default(capsys, tmp_path):
    """The run would clip at 1.2, whatever the paper says, so the report does too."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sg:\n  tau: 9.0\n")
    assert report(capsys, "--config", str(recipe))["dead_zone_p"] == pytest.approx(dead_zone(0.2))


def text(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_table_explains_the_dead_zone(capsys):
    shown = text(capsys)
    for row in ("0.00 1.000", "0.10 1.000", "0.25 1.309", "0.50 1.400", "0.75 1.400", "1.00 1.400"):
        assert row in shown
    assert "range: 1 to 1.4" in shown
    assert "for p from 0.2112 to 1 the weight exceeds 1 + eps_high = 1.24" in shown
    assert "no policy gradient even on-policy" in shown


def test_the_table_explains_the_other_cases(capsys):
    assert "plain GRPO; sg_rlhf.train refuses it unless sg.allow_constant=true" in text(
        capsys, "sg.form=quotient"
    )
    assert "plain GRPO at another scale" in text(capsys, "sg.lower=1.2", "sg.upper=1.2")
    assert "dead zone: none at ratio 1" in text(capsys, "sg.upper=1.2")
    wide = text(capsys, "sg.lower=0.5", "sg.upper=1.5")
    assert "dead zone for A < 0: for p from 0 to 0.06878" in wide
    uniform = text(capsys, "sg.shaping=uniform")
    assert "w = 1 (plain GRPO)" in uniform and "refuses" not in uniform
    assert "2 - w with w = clip" in text(capsys, "sg.shaping=reverse")
    assert "divides these weights by their mean" in text(capsys, "sg.normalize=batch_mean")


@pytest.mark.parametrize("overrides", [[], ["sg.lower=0.5", "sg.upper=1.5"], ["sg.form=quotient"]])
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
        (["sg.tau=-1"], "tau=-1.0: expected a number above 0"),
        (["sg.upper=0.5"], "upper=0.5: expected lower=1.0 or more"),
        (["sg.shaping=grpo"], "shaping='grpo': expected one of"),
        (["sg.frm=product"], "sg.frm"),
        (["sg.form"], "expected key=value"),
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
    assert output.err.startswith("sg_rlhf.weights: ") and output.err.count("\n") == 1
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
    assert "sg.form=quotient" in shown and "--json" in shown and "dead zone" in shown


def test_as_a_command():
    command = [sys.executable, "-m", "sg_rlhf.weights", "sg.form=quotient", "--json", "sg.tau=20"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=True
    )
    values = json.loads(result.stdout)
    assert values["constant"] is True and values["tau"] == 20.0
