"""Recipes: inheritance, overrides, and one clear line for every wrong key or value."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sg_rlhf.algo.weightings import WEIGHTINGS, GrpoSG
from sg_rlhf.config import (
    MODULE_KEYS,
    ConfigError,
    SGSettings,
    load_config,
    recipe_listing,
    weighting_of,
)
from sg_rlhf.config.old_names import OLD_NAMES
from sg_rlhf.config.sg_settings import sg_keys
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS, POLICY_LOSS_TYPES, flags
from sg_rlhf.overlay.driver.arguments import UsageError, upstream_arguments
from sg_rlhf.train import parse_arguments

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted(
    p
    for p in CONFIGS.rglob("*.yaml")
    if p.name not in {"base.yaml", "common.yaml"}
    and p.parent.name not in {"hardware", "algorithms"}
)
ALGORITHMS = sorted((CONFIGS / "algorithms").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_shipped_recipe_becomes_upstreams_arguments(path: Path) -> None:
    config = load_config(path)
    args = upstream_arguments(config)
    for key, value in config.values.items():
        if key not in {*MODULE_KEYS, "ds.attn_implementation"}:
            assert operator.attrgetter(key)(args) == value, key
    assert config.value("data.prompt_dataset")


@pytest.mark.parametrize(
    "base",
    [
        "kk/grpo_sg_tiny_cpu", "kk/grpo_tiny_cpu", "arithmetic/grpo_smollm2-135m_cpu",
        "arithmetic/grpo_smollm2-135m",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_every_algorithm_goes_on_top_of_any_recipe(path: Path, base: str) -> None:
    """The same algorithm whatever it follows, and arguments that the run accepts."""
    config = load_config([CONFIGS / f"{base}.yaml", path])
    on_paper = load_config([CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml", path])
    args = upstream_arguments(config)
    assert args.actor.policy_loss_type == on_paper.value("actor.policy_loss_type")
    keys = [
        key for key, _ in flatten(yaml.safe_load((CONFIGS / "algorithms/grpo.yaml").read_text()))
    ]
    for key in keys:
        assert config.value(key) == on_paper.value(key), key
    own = load_config(CONFIGS / f"{base}.yaml").value("data.prompt_dataset")
    assert config.value("data.prompt_dataset") == own


def flatten(tree: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def test_every_algorithm_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in [*(p.stem for p in ALGORITHMS), *WEIGHTINGS, *POLICY_LOSS_TYPES, *KL_ESTIMATORS]:
        assert any(line.split()[:1] == [name] and len(line.split()) > 4 for line in lines), name
    assert set(recipe_listing.losses()) == set(flags()["actor.policy_loss_type"].choices or ())
    listed = {name for names in recipe_listing.KL for name in names.split(", ")}
    assert listed == set(flags()["algo.kl.estimator"].choices or ())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.policy_loss_type=cispo"], "expected 'outside' with cispo"),
        (
            ["sg.update=lopti", "actor.policy_loss_type=ppo", "algo.kl.estimator=k3"],
            "sg.update=lopti",
        ),
        (["sg.update=lopti", "actor.entropy_coef=0.01"], "actor.entropy_coef=0.01: expected 0"),
        (["sg.update=lopti", "actor.lr_scheduler=cosine"], "actor.lr_scheduler=cosine: expected"),
        (["sg.weighting.type=stapo", "actor.entropy_coef=null"], "actor.entropy_coef=null"),
        (["sg.weighting.type=random", "actor.policy_loss_type=ppo"], "algo.kl.estimator=wk3"),
    ],
)
def test_what_does_not_go_together_gets_one_line(overrides: list[str], message: str) -> None:
    config = load_config(CONFIGS / "kk" / "grpo_sg_tiny_cpu.yaml", overrides)
    with pytest.raises(UsageError) as refusal:
        upstream_arguments(config)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


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
    published = GrpoSG(
        alpha=2.0, mu=0.25, tau=9.0, lower=1.0, upper=1.4, form="product", placement="inside"
    )
    assert weighting_of(config) == published
    assert config.sg == SGSettings(weighting={"type": "grpo_sg", **published.parameters()})


def test_extends_is_relative_and_the_later_wins(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("actor: {adam: {lr: 1.0e-3, eps: 1.0e-8}}\n")
    (tmp_path / "sub" / "child.yaml").write_text("extends: ../base.yaml\nactor: {adam: {lr: 2}}\n")
    config = load_config(tmp_path / "sub" / "child.yaml", ["actor.adam.eps=0.5"])
    assert config.values == {"actor.adam.lr": 2.0, "actor.adam.eps": 0.5}
    assert [Path(s).name for s in config.sources] == ["base.yaml", "child.yaml"]


def test_a_recipe_that_changes_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("rollout: {batch_size: 4}\nsg: {run_dir: '${oc.env:NAME}'}\n")
    monkeypatch.setenv("NAME", "first")
    first = load_config(recipe)
    assert (first.value("rollout.batch_size"), first.value("sg.run_dir")) == (4, "first")
    monkeypatch.setenv("NAME", "second")
    assert load_config(recipe).value("sg.run_dir") == "second"
    recipe.write_text("rollout: {batch_size: 8}\n")
    assert load_config(recipe).value("rollout.batch_size") == 8


def test_extends_finds_the_shipped_recipes_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: configs/kk/grpo_tiny_cpu.yaml\n")
    assert load_config("mine.yaml").values == load_config("configs/kk/grpo_tiny_cpu.yaml").values
    # A file beside the recipe comes first.
    (tmp_path / "configs" / "kk").mkdir(parents=True)
    (tmp_path / "configs/kk/grpo_tiny_cpu.yaml").write_text("train: {seed: 7}\n")
    assert load_config("mine.yaml").values == {"train.seed": 7}
    (tmp_path / "mine.yaml").write_text("extends: configs/kk/gone.yaml\n")
    with pytest.raises(ConfigError, match=r"gone.yaml: no such recipe \(extended by .*mine.yaml"):
        load_config("mine.yaml")


def test_settings_of_other_trainers_are_known_by_name() -> None:
    known = [*flags(), *sg_keys()]
    assert not {key for found in OLD_NAMES.values() for key in found} - {*known}
    assert not {*OLD_NAMES} & {*known}
    for name, found in OLD_NAMES.items():
        with pytest.raises(ConfigError) as error:
            load_config(None, [f"{name}=1"])
        assert any(f"{key}?" in str(error.value) or f"{key} or" in str(error.value)
                   for key in found), error.value  # fmt: skip


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("actor_rollout_ref.actor.clip_ratio_high", "actor.eps_clip_low_high"),
        ("num_generations", "rollout.n_samples_per_prompt"),
        ("actor_learning_rate", "actor.adam.lr"),
        ("micro_train_batch_size", "train.micro_batch_size"),
        ("algorithm.kl_ctrl.kl_coef", "algo.kl.init_coef"),
        ("actor_rollout_ref.rollout.n", "rollout.n_samples_per_prompt"),
        ("data.max_response_length", "rollout.max_new_tokens"),
        ("train_batch_size", "train.batch_size"),
        ("data.train_batch_size", "rollout.batch_size"),
        ("actor.adam.beta", "actor.adam.betas"),
        ("max_prompt_length", "data.max_len or rollout.max_new_tokens"),
    ],
)
def test_the_key_that_is_meant_is_named(key: str, ours: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"{key}=1"])
    assert str(error.value).endswith(f"unknown key {key!r}; did you mean {ours}?")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("configs/kk/x.yaml", ["expected key=value; write a recipe as --config configs/kk/x.yaml"]),
        ("actor.adam.lrr=1", ["unknown key", "actor.adam.lrr", "did you mean actor.adam.lr?"]),
        ("sg.tau=1", ["unknown key", "sg.tau", "did you mean sg.weighting.tau?"]),
        ("actor.adam.lr=abc", ["actor.adam.lr='abc'", "expected a number"]),
        ("train.batch_size=1.5", ["train.batch_size=1.5", "expected an integer"]),
        ("train.colocate_all=1", ["train.colocate_all=1", "true or false"]),
        ("actor.eps_clip_low_high=[0.2]", ["actor.eps_clip_low_high", "2 times a number"]),
        ("algo.kl.estimator=k9", ["algo.kl.estimator='k9'", "wk3_eq11"]),
        ("sg.weighting.form=sum", ["sg.weighting.form='sum'", "product, quotient"]),
        ("sg.weighting.tau=nan", ["sg.weighting.tau"]),
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
        ("a: [", '/bad.yaml", line 2'),
        ("- 1", "expected a mapping"),
        ("extends: gone.yaml", "gone.yaml: no such recipe"),
        ("extends: bad.yaml", "extends itself"),
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match="bad.yaml|gone.yaml") as error:
            load_config(bad)
        assert word in str(error.value)


def test_every_upstream_flag_is_a_key() -> None:
    for key, flag in flags().items():
        value: Any = True
        if flag.type is not bool:
            numbers = {int: 3, float: 0.5 + flag.bounds.get("gt", 0)}
            one = flag.choices[0] if flag.choices else numbers.get(flag.type, "text")
            value = [one] * (flag.nargs if isinstance(flag.nargs, int) else 1)
            value = one if flag.nargs is None else value
        assert load_config(None, [f"{key}={json.dumps(value)}"]).value(key) == value, key


EVAL_SETS = """\
sg:
  eval_sets:
    - {name: math500, dataset: math500.jsonl, temperature: 0.0}
    - {name: amc, dataset: amc.jsonl, temperature: 1.0, n_samples_per_prompt: 16, limit: 8}
"""


def test_eval_sets_go_through_the_recipe_and_back(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(EVAL_SETS)
    config = load_config(tmp_path / "recipe.yaml")
    greedy, sampled = config.sg.eval_sets
    assert (greedy.temperature, greedy.n_samples_per_prompt, greedy.limit) == (0.0, 1, None)
    assert (sampled.temperature, sampled.n_samples_per_prompt, sampled.limit) == (1.0, 16, 8)
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml").sg == config.sg


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
    with pytest.raises(ConfigError, match=r"eval\.dataset=d\.jsonl: not used together with"):
        load_config(None, [sets, "eval.dataset=d.jsonl"])
    assert load_config(None, [sets, "eval.dataset=null"]).sg.eval_sets


def test_a_key_of_ours_beside_upstreams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once in the resolved recipe, whichever name it was given by."""
    recipe, tiny = tmp_path / "recipe.yaml", CONFIGS / "kk" / "grpo_tiny_cpu.yaml"
    recipe.write_text(f"extends: {tiny}\nactor: {{fused_logprobs: false}}\n")
    config = load_config(recipe)
    assert not config.sg.fused_logprobs and "actor.fused_logprobs" not in config.values
    assert not upstream_arguments(config).sg.fused_logprobs
    assert upstream_arguments(load_config(tiny)).sg.fused_logprobs
    assert not load_config(tiny, ["actor.fused_logprobs=false"]).sg.fused_logprobs
    capsys.readouterr()
    upstream_arguments(load_config(tiny, ["ds.deepcompile=true"]))
    assert "actor.fused_logprobs: off" in capsys.readouterr().out


@pytest.mark.parametrize("key", flags())
def test_null_is_the_value_that_trains_or_is_refused(key: str) -> None:
    """Where upstream has a default, ``null`` would train with that and be stored as null."""
    for given in (f"{key}=null", f"{key}="):  # the latter: a shell variable that is not set
        if flags()[key].default is None:
            assert load_config(None, [given]).value(key) is None
            continue
        with pytest.raises(ConfigError, match=f"command line: {key}=null: expected ") as refusal:
            load_config(None, [given])
        assert "\n" not in str(refusal.value)


def test_a_list_has_no_null() -> None:
    with pytest.raises(ConfigError, match="expected a list"):
        load_config(None, ["ds.lora.target_modules=[q_proj,null]"])


def test_off_is_a_choice_and_not_yamls_false(tmp_path: Path) -> None:
    key = "algo.advantage.is_correction_level"
    config = load_config(RECIPES[0], [f"{key}=off"])
    assert config.value(key) == "off"
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config.to_yaml())
    assert load_config(resolved).value(key) == "off"
    with pytest.raises(ConfigError, match="expected one of off, token, seq"):
        load_config(RECIPES[0], [f"{key}=on"])


def test_arguments_of_the_chat_template_are_one_mapping(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("data: {chat_template_kwargs: {enable_thinking: false}}")
    config = load_config(recipe)
    assert config.sg.chat_template_kwargs == {"enable_thinking": False}
    (tmp_path / "b.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "b.yaml").sg == config.sg
    for key in ("data.chat_template_kwargs", "data.apply_chat_template_kwargs"):  # TRL's, verl's
        given = load_config(recipe, [f"{key}={{tone: kind}}"])
        assert given.sg.chat_template_kwargs == {"tone": "kind"}


def test_vllms_own_arguments_are_one_mapping(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("vllm: {engine_args: {max_num_seqs: 64}}")
    config = load_config(recipe)
    assert config.sg.engine_args == {"max_num_seqs": 64}
    (tmp_path / "b.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "b.yaml").sg == config.sg
    with pytest.raises(ConfigError, match="sg.engine_args"):
        load_config(recipe, ["vllm.engine_args=64"])
