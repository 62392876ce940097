"""Which changes between two starts of a run make it another experiment."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path

import pytest

from sg_rlhf.config import ConfigError, load_config, resume_compatibility, sg_keys
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.overlay.driver.prepare import prepare_run_dir
from sg_rlhf.plan.load import with_run_dir

RECIPE = Path(__file__).parents[3] / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text('{"input": "a puzzle"}\n' * 16)
    return file


@pytest.fixture
def run_dir(tmp_path: Path, data: Path) -> Path:
    """Of a run with a checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    assert not start(folder, data)
    latest = folder / "checkpoints" / "deepspeed" / "_actor" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("global_step5")
    return folder


def start(run_dir: Path, data: Path, *overrides: str, allowed: tuple[str, ...] = ()) -> bool:
    config = load_config(RECIPE, [f"data.prompt_dataset={data}", *overrides])
    return prepare_run_dir(with_run_dir(config, run_dir), allowed)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.adam.lr=1e-5", "actor.adam.lr: was 0.0002, now 1e-05"),
        ("sg.weighting.alpha=3.0", "sg.weighting: was {'alpha': 2.0}, now {'alpha': 3.0}"),
        ("train.seed=7", "train.seed: was 42, now 7"),
        ("actor.entropy_coef=0.01", "actor.entropy_coef: was 0.0, now 0.01"),
        ("critic.adam.lr=1e-3", "critic.adam.lr: was "),  # upstream's default before
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(
    run_dir: Path, data: Path, override: str, said: str
) -> None:
    before = (run_dir / "config.yaml").read_text()
    with pytest.raises(ConfigError) as refused:
        start(run_dir, data, override)
    line = str(refused.value)
    key = said.split(":")[0]
    assert line.startswith(f"another run is there: {run_dir} was started with other settings: ")
    assert said in line and "\n" not in line
    assert line.endswith(
        f"use another directory with --run-dir DIR, or resume it with --allow-changed {key}"
    )
    assert (run_dir / "config.yaml").read_text() == before
    assert start(run_dir, data, override, allowed=(key,))
    assert start(run_dir, data, override)  # from now on it is the run's own


def test_rows_of_another_run_are_replaced_only_when_asked(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a run that ended before its first checkpoint."""
    run_dir = tmp_path / "run"
    start(run_dir, data)
    start(run_dir, data, "train.seed=7")  # nothing is lost
    capsys.readouterr()
    (run_dir / "metrics.jsonl").write_text('{"global_step": 1}\n{"global_step": 2}\n')
    before = sorted((path, path.read_bytes()) for path in run_dir.iterdir())
    with pytest.raises(ConfigError) as refused:
        start(run_dir, data)
    line = str(refused.value)
    assert line.startswith(f"another run is there: {run_dir} was started with other settings: ")
    assert line.endswith("--run-dir DIR, or replace it with --allow-changed train.seed")
    assert sorted((path, path.read_bytes()) for path in run_dir.iterdir()) == before
    assert not capsys.readouterr().out
    said = f"starting from the beginning: {run_dir} has 2 rollouts and no checkpoint; their rows"
    assert not start(run_dir, data, "train.seed=7")
    assert capsys.readouterr().out.startswith(said)
    assert not start(run_dir, data, allowed=("train.seed",))
    assert said in capsys.readouterr().out


def test_a_refusal_stays_short_and_names_the_way_out_of_the_training_scripts(
    run_dir: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SG_RUN_DIR", str(run_dir))
    changed = [
        "actor.adam.lr=1e-5", "train.seed=7", "actor.entropy_coef=0.01", "sg.weighting.alpha=3.0",
        "rollout.temperature=1.0", "data.max_len=600",
    ]  # fmt: skip
    config = load_config(RECIPE, [f"data.prompt_dataset={data}", *changed])
    with pytest.raises(ConfigError) as refused:
        prepare_run_dir(with_run_dir(config, run_dir))
    line = str(refused.value)
    assert line.startswith("another run is there: ") and len(line) - len(str(run_dir)) < 400
    assert line.endswith(
        "; and 3 more; use another directory with SG_RUN_DIR=DIR, or resume it with "
        "--allow-changed KEY for each"
    )


@pytest.mark.parametrize(
    "override",
    [
        "eval.steps=3", "ckpt.save_steps=7", "sg.verbose=true", "vllm.num_engines=2",
        "train.micro_batch_size=16", "actor.num_gpus_per_node=2",
        "sg.share_prompts=false", "sg.on_nonfinite=skip",
        "sg.samples_per_prompt=4", "sg.trackio=true",
    ],
)  # fmt: skip
def test_places_and_layout_may_change(run_dir: Path, data: Path, override: str) -> None:
    assert start(run_dir, data, override)


ZERO_3 = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
ZERO_2 = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize(
    ("files", "override", "line"),
    [
        (ZERO_3, "ds.zero_stage=2", "it was written with ds.zero_stage=3, and now it is 2: set"),
        (ZERO_2, "ds.zero_stage=3", "it was written with ds.zero_stage=1 or 2, and now it is 3"),
        (ZERO_2, "ds.zero_stage=1", ""),
        (ZERO_3, "ds.zero_stage=3", ""),
        (ZERO_3, "ds.tensor_parallel_size=2", "with ds.tensor_parallel_size=1, and now there are"),
    ],
)
def test_files_that_the_ranks_cannot_load_are_refused_before_they_start(
    run_dir: Path, data: Path, files: tuple[str, ...], override: str, line: str
) -> None:
    checkpoint = run_dir / "checkpoints" / "deepspeed" / "_actor" / "global_step5"
    checkpoint.mkdir()
    for name in files:
        (checkpoint / name).touch()
    before = (run_dir / "config.yaml").read_text()
    if not line:
        assert start(run_dir, data, override)
        return
    key = override.split("=")[0]
    with pytest.raises(ConfigError, match=line) as refused:
        start(run_dir, data, override, "actor.num_gpus_per_node=2", allowed=(key,))
    assert "\n" not in str(refused.value) and str(checkpoint) in str(refused.value)
    assert (run_dir / "config.yaml").read_text() == before


def test_data_are_compared_by_what_is_in_them(
    run_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "moved.jsonl"
    shutil.copyfile(data, elsewhere)
    assert start(run_dir, elsewhere)
    elsewhere.write_text('{"input": "another puzzle"}\n' * 16)
    with pytest.raises(
        ConfigError, match=r"other settings: data.prompt_dataset: other contents; use"
    ):
        start(run_dir, elsewhere)
    capsys.readouterr()
    assert start(run_dir, elsewhere, allowed=("data.prompt_dataset",))
    assert (
        "resuming with a changed setting: data.prompt_dataset: other contents"
        in capsys.readouterr().out
    )


def test_another_tokenizer_is_another_model(run_dir: Path, data: Path, tmp_path: Path) -> None:
    import sg_rlhf.tiny.kk_tiny

    shipped = Path(next(iter(sg_rlhf.tiny.kk_tiny.__path__)))
    copied = shutil.copytree(shipped, tmp_path / "model")
    assert start(run_dir, data, f"actor.model_name_or_path={copied}")
    tokenizer = copied / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "other": 1}))
    with pytest.raises(
        ConfigError, match=r"other settings: actor.model_name_or_path: other contents"
    ):
        start(run_dir, data, f"actor.model_name_or_path={copied}")


def test_a_run_of_a_version_that_remembered_no_files_goes_by_names(
    run_dir: Path, data: Path, tmp_path: Path
) -> None:
    (run_dir / resume_compatibility.FILE).unlink()
    assert start(run_dir, data)
    (run_dir / resume_compatibility.FILE).unlink()
    other = shutil.copyfile(data, tmp_path / "other.jsonl")
    with pytest.raises(
        ConfigError, match=r"other settings: data.prompt_dataset: was .*train.jsonl, "
    ):
        start(run_dir, other)


def test_a_service_may_move(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    start(folder, data, "reward.remote_url=http://one:1/reward")
    latest = folder / "checkpoints" / "deepspeed" / "_actor" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("global_step5")
    assert start(folder, data, "reward.remote_url=http://two:2/reward")
    with pytest.raises(
        ConfigError, match=r"reward.remote_url: was http://two:2/reward, now domain:kk"
    ):
        start(folder, data)


@pytest.mark.parametrize("pattern", resume_compatibility.MUTABLE)
def test_every_pattern_is_of_a_key_that_is_there(pattern: str) -> None:
    keys = (*flags(), *sg_keys(), "sg.openenv.timeout_s")  # of a domain outside the registry
    assert any(fnmatch.fnmatch(key, pattern) for key in keys)


def test_a_directory_of_another_version_is_not_compared(
    run_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run_dir / "config.yaml").open("a") as recipe:
        recipe.write("no_such_section: {key: 1}\n")
    assert start(run_dir, data, "actor.adam.lr=1e-5")
    assert "cannot be compared: " in capsys.readouterr().out


def test_where_the_model_came_from_is_recorded(tmp_path: Path, data: Path) -> None:
    tiny = RECIPE.parents[2] / "sg_rlhf" / "tiny" / "kk_tiny"
    model = shutil.copytree(tiny, tmp_path / "model")
    for name, content, expected in (
        ("with", '{"model": "A/B", "source": "hub"}', {"model": "A/B", "source": "hub"}),
        ("broken", "{", None),
    ):
        (model / "source.json").write_text(content)
        start(tmp_path / name, data, f"actor.model_name_or_path={model}")
        found = json.loads((tmp_path / name / "environment.json").read_text())
        assert found.get("model") == expected and found["python"]
