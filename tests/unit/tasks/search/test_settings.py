"""`sg.search.*`: checked in the recipe, carried on upstream's command line, read by workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError

from sg_rlhf.config import ConfigError, load_config, removed, set_by
from sg_rlhf.tasks.search.limits import LIMITS
from sg_rlhf.tasks.search.settings import SearchSettings

ROOT = Path(__file__).parents[4]
RECIPES = sorted((ROOT / "configs" / "search").glob("grpo*.yaml"))
PAPER = ("grpo_qwen2.5-3b", "grpo_qwen3-4b", "grpo_sg_qwen2.5-3b", "grpo_sg_qwen3-4b")


@pytest.mark.parametrize("name", PAPER)
def test_paper_recipes_have_the_values_of_table_6(name: str) -> None:
    config = load_config(ROOT / "configs" / "search" / f"{name}.yaml")
    expected = {
        "rollout.batch_size": 32,
        "rollout.n_samples_per_prompt": 8,
        "train.batch_size": 256,
        "rollout.temperature": 0.8,
        "rollout.max_new_tokens": 4096,
        "actor.adam.lr": 1e-6,
        "actor.adam.betas": [0.9, 0.999],
        "actor.adam.weight_decay": 0.01,
        "algo.kl.init_coef": 0.001,
        "algo.kl.use_loss": True,
        "actor.eps_clip_low_high": [0.20, 0.24],
        "actor.dual_clip": 10.0,
        "data.apply_chat_template": True,
        "train.agent_func_path": "domain:search",
        "sg.search.max_turns": 4,
        "sg.search.topk": 3,
        "sg.search.observation_tokens": 500,
        "sg.search.turn_tokens": 500,
        "sg.search.reward": "sign",
    }
    assert {key: config.value(key) for key in expected} == expected
    model = {"2.5-3b": "Qwen/Qwen2.5-3B", "3-4b": "Qwen/Qwen3-4B-Instruct-2507"}
    assert config.value("actor.model_name_or_path") == model[name.partition("qwen")[2]]
    ours = name.startswith("grpo_sg")
    assert config.value("actor.policy_loss_type") == ("weighted_ppo" if ours else "ppo")
    assert config.value("algo.kl.estimator") == ("wk3" if ours else "k3")
    if ours:
        keys = (
            "sg.weighting.tau",
            "sg.weighting.alpha",
            "sg.weighting.mu",
            "sg.weighting.lower",
            "sg.weighting.upper",
        )
        assert [config.value(key) for key in keys] == [9.0, 2.0, 0.25, 1.0, 1.4]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_dialogue_fits_into_the_context(path: Path) -> None:
    config = load_config(path)
    left = config.value("data.max_len") - config.value("rollout.max_new_tokens")
    search = config.sg.domains["search"]
    assert search is not None and left >= 64
    assert config.value("rollout.max_new_tokens") >= search.turn_tokens + search.observation_tokens
    samples = config.value("rollout.batch_size") * config.value("rollout.n_samples_per_prompt")
    assert samples % config.value("train.batch_size") == 0


def test_settings_come_back_from_the_resolved_recipe(tmp_path: Path) -> None:
    path = ROOT / "configs" / "search" / "grpo_sg_qwen2.5-3b.yaml"
    config = load_config(path, ["sg.search.topk=5", "sg.search.url=http://127.0.0.1:9/retrieve"])
    assert config.sg.domains["search"] == SearchSettings(topk=5, url="http://127.0.0.1:9/retrieve")
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    again = load_config(tmp_path / "again.yaml")
    assert (again.values, again.sg) == (config.values, config.sg)


def test_other_recipes_have_no_search_section() -> None:
    config = load_config(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")
    assert config.sg.domains == {}
    assert "search" not in config.to_yaml()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sg.search.topk=0", "command line: sg.search.topk=0: "),
        ("sg.search.reward=plus", "command line: sg.search.reward='plus': "),
        ("sg.search.url=localhost:8000", "command line: sg.search.url='localhost:8000': expected"),
        ("sg.search.top_k=3", "unknown key 'sg.search.top_k'; did you mean sg.search.topk?"),
        ("sg.search.observation_tokens=5", "sg.search.observation_tokens=5: "),
        ("sg.search.outage_s=3", "command line: sg.search.outage_s: removed, because it is always"),
    ],
)
def test_a_wrong_value_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(ROOT / "configs" / "search" / "grpo_sg_qwen2.5-3b.yaml", [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_limit_that_is_no_key_any_more_loads_with_the_value_of_every_run() -> None:
    assert dataclasses.asdict(LIMITS) == removed.SEARCH_LIMITS
    given = [f"sg.search.{name}={value}" for name, value in removed.SEARCH_LIMITS.items()]
    path = ROOT / "configs" / "search" / "grpo_sg_qwen2.5-3b.yaml"
    former = ["sg.search.timeout_s=10.0"]  # the default of earlier runs
    plain = load_config(path)
    for found in (load_config(path, given), load_config(path, former)):
        assert (found.sg, set_by(found)) == (plain.sg, set_by(plain))


def test_workers_read_the_settings_from_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SearchSettings.env_name(), raising=False)
    assert SearchSettings.from_environment() == SearchSettings()
    chosen = SearchSettings(topk=2, url="https://retriever.example/retrieve", reward="f1")
    monkeypatch.setenv(SearchSettings.env_name(), chosen.to_env())
    assert SearchSettings.from_environment() == chosen
    monkeypatch.setenv(SearchSettings.env_name(), '{"topkk": 2}')
    with pytest.raises(ValidationError, match="topkk"):
        SearchSettings.from_environment()
