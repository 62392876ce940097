"""Recipes: inheritance, overrides, and one clear line for every wrong key or value."""

from __future__ import annotations

from pathlib import Path

import pytest

from sg_rlhf.config import MODULE_KEYS, ConfigError, SGSettings, load_config
from sg_rlhf.upstream_flags import build_parser, flags

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(
    p
    for p in CONFIGS.rglob("*.yaml")
    if p.name not in {"base.yaml", "common.yaml", "paper_weights.yaml"}
    and p.parent.name != "hardware"
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_parses_and_its_command_line_is_upstreams(path: Path) -> None:
    config = load_config(path)
    argv = config.to_argv()
    cut = next(i for i, a in enumerate(argv) if a.startswith("--sg."))
    parsed = vars(build_parser().parse_args(argv[:cut]))
    for key, value in config.values.items():
        if key not in MODULE_KEYS:
            assert parsed[key] == value, key
    assert config.value("data.prompt_dataset")


def test_the_resolved_recipe_gives_itself_back(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml", ["actor.adam.lr=3e-5"])
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    again = load_config(tmp_path / "again.yaml")
    assert (again.values, again.sg) == (config.values, config.sg)


def test_paper_recipe_has_every_value_of_table_6_and_the_unlisted_ones() -> None:
    config = load_config(CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml")
    expected = {
        "rollout.n_samples_per_prompt": 8,
        "rollout.temperature": 0.7,
        "rollout.max_new_tokens": 4096,
        "actor.adam.lr": 1e-6,
        "actor.adam.betas": [0.9, 0.999],
        "actor.adam.weight_decay": 0.01,
        "actor.lr_scheduler": "constant",
        "actor.lr_warmup_ratio": 0.0,
        "actor.max_norm": 1.0,
        "actor.dual_clip": 10.0,
        "actor.eps_clip_low_high": [0.20, 0.24],
        "algo.kl.init_coef": 0.001,
        "algo.kl.use_loss": True,
        "rollout.batch_size": 64,
        "train.batch_size": 256,
        "train.num_episodes": 5,
        "ckpt.save_steps": 20,
    }
    assert {key: config.values.get(key) for key in expected} == expected
    assert config.sg == SGSettings(
        alpha=2.0, mu=0.25, tau=9.0, lower=1.0, upper=1.4, form="product", placement="inside"
    )


def test_extends_is_relative_and_the_later_wins(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("actor: {adam: {lr: 1.0e-3, eps: 1.0e-8}}\n")
    (tmp_path / "sub" / "child.yaml").write_text("extends: ../base.yaml\nactor: {adam: {lr: 2}}\n")
    config = load_config(tmp_path / "sub" / "child.yaml", ["actor.adam.eps=0.5"])
    assert config.values == {"actor.adam.lr": 2.0, "actor.adam.eps": 0.5}
    assert [Path(s).name for s in config.sources] == ["base.yaml", "child.yaml"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.adam.lrr=1", ["unknown key", "actor.adam.lrr", "did you mean actor.adam.lr?"]),
        ("sg.tua=1", ["unknown key", "sg.tua", "sg.tau"]),
        ("actor.adam.lr=abc", ["actor.adam.lr='abc'", "expected a number"]),
        ("train.batch_size=1.5", ["train.batch_size=1.5", "expected an integer"]),
        ("train.colocate_all=1", ["train.colocate_all=1", "true or false"]),
        ("actor.eps_clip_low_high=[0.2]", ["actor.eps_clip_low_high", "2 times a number"]),
        ("algo.kl.estimator=k9", ["algo.kl.estimator='k9'", "wk3_eq11"]),
        ("sg.form=sum", ["sg.form='sum'", "'product' or 'quotient'"]),
        ("sg.tau=nan", ["sg.tau"]),
        ("nonsense", ["expected key=value"]),
        ("actor.adam.lr=[1, 2", ["actor.adam.lr=[1, 2", "not a YAML value"]),
    ],
)
def test_a_wrong_override_gets_one_line(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    for text, word in (
        ("actor: {adam: {lr: x}}", "actor.adam.lr='x'"),
        ("a: [", "not a valid YAML"),
        ("- 1", "expected a mapping"),
        ("extends: gone.yaml", "gone.yaml: no such recipe"),
        ("extends: bad.yaml", "extends itself"),
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match="bad.yaml|gone.yaml") as error:
            load_config(bad)
        assert word in str(error.value)


def test_every_upstream_flag_is_a_key_and_survives_the_round_trip() -> None:
    samples = {"switch": True, "list": None, "value": None}
    for key, flag in flags().items():
        value = samples[flag.kind]
        if value is None:
            one = flag.choices[0] if flag.choices else {int: 3, float: 0.5}.get(flag.type, "text")
            value = [one] * (flag.nargs if isinstance(flag.nargs, int) else 1)
            value = value if flag.kind == "list" else one
        argv = load_config(None, []).with_values({key: value}).to_argv()
        cut = next(i for i, a in enumerate(argv) if a.startswith("--sg."))
        assert vars(build_parser().parse_args(argv[:cut]))[key] == value, key


EVAL_SETS = """\
sg:
  eval_sets:
    - {name: math500, dataset: math500.jsonl, temperature: 0.0}
    - {name: amc, dataset: amc.jsonl, temperature: 1.0, n_samples_per_prompt: 16, limit: 8}
"""


def test_eval_sets_go_through_the_recipe_the_command_line_and_back(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(EVAL_SETS)
    config = load_config(tmp_path / "recipe.yaml")
    greedy, sampled = config.sg.eval_sets
    assert (greedy.temperature, greedy.n_samples_per_prompt, greedy.limit) == (0.0, 1, None)
    assert (sampled.temperature, sampled.n_samples_per_prompt, sampled.limit) == (1.0, 16, 8)
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml").sg == config.sg
    argv = config.to_argv()
    assert SGSettings(eval_sets=argv[argv.index("--sg.eval_sets") + 1]) == config.sg
    assert "--sg.eval_sets" not in load_config(None).to_argv()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sg.eval_sets=[{name: a, dataset: x}]", ["sg.eval_sets.0.temperature", "not set"]),
        (
            "sg.eval_sets=[{name: a, dataset: x, temperature: 0, n_samples_per_prompt: 4}]",
            ["sg.eval_sets.0", "n=1"],
        ),
        ("sg.eval_sets=[{name: a b, dataset: x, temperature: 0}]", ["sg.eval_sets.0.name='a b'"]),
        (
            "sg.eval_sets=[{name: a, dataset: x, temperature: 0}, "
            "{name: a, dataset: y, temperature: 0}]",
            ["same name"],
        ),
        (
            "sg.eval_sets=[{name: a, dataset: x, temperature: 0, temprature: 1}]",
            ["sg.eval_sets.0.temprature"],
        ),
    ],
)
def test_a_wrong_eval_set_gets_one_line(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [override])
    for word in ("command line", *words):
        assert word in str(error.value), str(error.value)


def test_eval_sets_and_eval_dataset_exclude_each_other() -> None:
    sets = "sg.eval_sets=[{name: a, dataset: x, temperature: 0}]"
    with pytest.raises(ConfigError, match=r"eval\.dataset=d\.jsonl: not used beside"):
        load_config(None, [sets, "eval.dataset=d.jsonl"])
    assert load_config(None, [sets, "eval.dataset=null"]).sg.eval_sets
