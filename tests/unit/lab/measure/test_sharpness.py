"""`lab.measure.sharpness` on the shipped model: its numbers, its files, its refusals."""

import json

import pytest

from lab.measure import sharpness
from lab.measure.batch_loss import UNIFORM, Surrogate
from lab.measure.checkpoint import MeasureError
from sg_rlhf.config import load_config

MODEL = "module:sg_rlhf.tiny.kk_tiny"
REWARD = "domain:kk"
SMALL = ["--prompts", "3", "--group", "4", "--steps", "2", "--max-new-tokens", "48"]


def test_sampled_batch_all_files_and_the_same_numbers_again(puzzles, tmp_path, capsys):
    batch, out = tmp_path / "new/b.json", tmp_path / "o.json"
    common = ["--model", MODEL, "--rho", "0.001", "0.1", "--batch", str(batch), *SMALL]
    data = ["--data", str(puzzles), "--reward", REWARD]
    assert sharpness.main([*common, *data, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    report = json.loads(out.read_text())
    (entry,) = report["models"]
    small, large = entry["results"]
    assert entry["parameters"] == 855_168
    assert report["batch"]["responses"] == 12
    assert small["first_order"] == pytest.approx(0.001 * entry["grad_norm"])
    assert small["sharpness"] == pytest.approx(small["first_order"], rel=0.1)
    assert large["sharpness"] > 10 * small["sharpness"]
    assert len(large["steps"]) == 2
    assert large["sharpness"] == max(step["rise"] for step in large["steps"])
    assert f"{large['sharpness']:.4g}" in text
    assert "12 responses" in text and "uniform: w = 1" in text

    # The batch that was kept: no data needed, another process would read the same tokens.
    rows = json.loads(batch.read_text())["rows"]
    for start in range(0, 12, 4):
        group = [row["advantage"] for row in rows[start : start + 4]]
        assert sum(group) == pytest.approx(0.0, abs=1e-6)
    assert sharpness.main([*common, "--json", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["models"] == report["models"]


@pytest.mark.full
def test_sampling_depends_on_the_seed_alone(puzzles, tmp_path):
    texts = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        batch = tmp_path / name
        arguments = ["--model", MODEL, "--rho", "0.01", "--loss", "nll", *SMALL, "--steps", "1"]
        options = ["--data", str(puzzles), "--batch", str(batch), "--seed", seed]
        assert sharpness.main([*arguments, *options]) == 0
        texts.append([row["response"] for row in json.loads(batch.read_text())["rows"]])
    assert texts[0] == texts[1] != texts[2]


@pytest.fixture
def rollouts(tmp_path):
    """Rows as a run's samples.jsonl holds them."""
    path = tmp_path / "samples.jsonl"
    row = {"global_step": 1, "prompt": "Try", "response": "Guess</think><answer>"}
    rows = [{**row, "advantage": 1.0}, {**row, "response": "Guess ok", "advantage": -1.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_relative_radii_and_overrides_behind_several_values(rollouts, tmp_path, capsys):
    out = tmp_path / "o.json"
    arguments = ["--data", str(rollouts), "--json", str(out), "--relative", "--steps", "1"]
    assert (
        sharpness.main([*arguments, "--model", MODEL, "--rho", "1e-4", "sg.weighting.upper=1.2"])
        == 0
    )
    report = json.loads(out.read_text())
    (entry,) = report["models"]
    (result,) = entry["results"]
    assert result["rho"] == pytest.approx(1e-4 * entry["parameter_norm"])
    assert ", 1, 1.2)" in report["loss"]


def test_several_checkpoints_on_one_batch(rollouts, tmp_path):
    out = tmp_path / "o.json"
    arguments = ["--data", rollouts, "--json", out, "--rho", "0.01", "--steps", "1"]
    assert sharpness.main([*map(str, arguments), "--model", MODEL, MODEL]) == 0
    first, second = json.loads(out.read_text())["models"]
    assert first == second


def test_models_of_two_families_are_refused(rollouts, refused):
    other = "module:sg_rlhf.tiny.math_tiny"
    message = refused(sharpness.main, "--data", rollouts, "--rho", "1", "--model", MODEL, other)
    assert f"--model {other}: its tokenizer differs" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rho", "0"], "--rho: 0: expected a finite number above 0"),
        (["--rho", "x"], "--rho: x: expected a finite number above 0"),
        (["--rho", "1", "--steps", "0"], "--steps: 0: expected a whole number, 1 or more"),
        (["--rho", "1", "--device", "nowhere"], "--device nowhere"),
        (["--rho", "1", "sg.upper=1"], "unknown key 'sg.upper'; did you mean sg.weighting.upper?"),
        (["--rho", "1", "sg.weighting.tau=-1"], "tau=-1"),
        (["--rho", "1", "actor.policy_loss_type=gspo"], "actor.policy_loss_type=gspo: expected"),
        (
            ["--rho", "1", "actor.policy_loss_type=cispo"],
            "this command measures the clipped surrogate",
        ),
        (["--rho", "1", "sg.weighting.type=rando"], "'rando': expected one of"),
        (["--rho", "1", "--config", "none.yaml"], "none.yaml: no such recipe"),
        (["--rho", "1", "--json", "/dev/null/x.json"], "--json /dev/null/x.json"),
        (["--rho", "1", "--model", "./none"], "--model ./none: no such folder"),
        (["--rho", "1", "--model", "module:sg_rlhf.none"], "no such module is installed"),
    ],
)
def test_bad_options_are_one_line(rollouts, tmp_path, refused, arguments, message):
    batch = tmp_path / "batch.json"
    first = ["--model", MODEL, "--data", rollouts, "--batch", batch]
    assert message in refused(sharpness.main, *first, *arguments)


def test_bad_data_is_one_line_and_nothing_is_written(puzzles, tmp_path, refused):
    out = tmp_path / "o.json"
    arguments = ["--model", MODEL, "--rho", "1", "--json", out, "--batch", tmp_path / "b.json"]
    assert "--data FILE: not set" in refused(sharpness.main, *arguments)
    missing = tmp_path / "none.jsonl"
    assert "none.jsonl: no such file" in refused(sharpness.main, *arguments, "--data", missing)
    assert "expected --reward" in refused(sharpness.main, *arguments, "--data", puzzles)
    reward = ["--data", puzzles, "--reward"]
    assert "no such Python file" in refused(sharpness.main, *arguments, *reward, "none.py")
    one = [*reward, REWARD, "--group", "1"]
    assert "--group 1: expected 2 or more" in refused(
        sharpness.main, *arguments, *reward, REWARD, *one
    )
    long = ["--max-new-tokens", "1020"]
    assert "context of 1024" in refused(sharpness.main, *arguments, *reward, REWARD, *long)
    bad = tmp_path / "bad.jsonl"
    for text, message in (
        ("", "no rows"),
        ("{", "row 1: not JSON"),
        ("3\n", "row 1: 3, expected a JSON object"),
        ('{"answer": "x"}\n', "row 1: input=None: expected a text"),
        ('{"prompt": "Try", "response": "ok"}\n', "without advantage"),
        ('{"input": "Try", "answer": "?"}\n', "row 1: the reward does not take answer='?'"),
    ):
        bad.write_text(text)
        options = ["--data", bad, "--reward", REWARD, "--group", "2", "--max-new-tokens", "2"]
        assert message in refused(sharpness.main, *arguments, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]


def test_the_loss_is_the_recipes():
    assert sharpness.surrogate_of(load_config(None), []) == Surrogate()
    assert Surrogate().weights is UNIFORM
    overrides = ["actor.eps_clip_low_high=[0.1,0.3]", "actor.dual_clip=3"]
    found = sharpness.surrogate_of(load_config(None, overrides), overrides)
    assert found == Surrogate(eps_low=0.1, eps_high=0.3, dual_clip=3.0)
    weighted = sharpness.surrogate_of(
        load_config(None, ["sg.weighting.upper=1.2"]), ["sg.weighting.upper=1.2"]
    )
    assert weighted.weights.upper == 1.2 and weighted.dual_clip == 10.0
    recipe = load_config("configs/kk/grpo_sg_tiny_cpu.yaml")
    assert sharpness.surrogate_of(recipe, []).weights.upper == 1.2
    plain = load_config("configs/kk/grpo_tiny_cpu.yaml")
    assert sharpness.surrogate_of(plain, []).weights is UNIFORM
    both = load_config(["configs/kk/grpo_tiny_cpu.yaml", "configs/algorithms/grpo_sg_u1.2.yaml"])
    assert sharpness.surrogate_of(both, []).weights.upper == 1.2
    by_prompt = ["actor.loss_agg_mode=prompt-mean"]
    with pytest.raises(MeasureError, match="^actor.loss_agg_mode=prompt-mean: expected token-mean"):
        sharpness.surrogate_of(load_config(None, by_prompt), by_prompt)
