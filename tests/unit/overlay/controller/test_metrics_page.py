"""docs/metrics.md names every metric and file of a run directory, and no other.

tests/integration/test_pipeline.py asks the same of the rows and files of a real run.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import openrlhf.trainer
import pytest
from openrlhf.trainer.ppo_utils.experience import Experience

from sg_rlhf.algo.analysis.token_statistics import METRIC_NAMES
from sg_rlhf.overlay.controller import evaluation
from sg_rlhf.overlay.learner import metrics as update_metrics
from sg_rlhf.run_dir import alerts, jsonl_log, timing_keys, weight_versions
from sg_rlhf.tasks.codec import CharacterCodec
from sg_rlhf.tasks.rollout import Trajectory
from sg_rlhf.tasks.search.environment import SearchEnvironment
from sg_rlhf.tasks.search.settings import SearchSettings
from tests.unit.docs.metrics_page import is_on_the_page, names, pattern

ROOT = Path(__file__).parents[4]
UPSTREAM = Path(openrlhf.trainer.__file__).parent
GROUPED = re.compile(r"(rollout|async|memory|engines|sync|batches|nonfinite|perf|timing)/\w+")


def constants(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def evaluated() -> list[str]:
    sample = SimpleNamespace(
        prompts=["p"], rewards=[1.0], response_length=[3], truncated=[False],
        info={"correct": [1.0], "format_ok": [1.0]},
    )  # fmt: skip
    loader = [(["kk"], ["p"], [""], [None])]
    one_set = evaluation.compute_eval_metrics(loader, [sample, sample], 2)
    return [*one_set, *evaluation.combine({"a": one_set, "b": one_set})]


def made() -> list[str]:
    """Names that the code puts together."""
    statistics = dict.fromkeys(METRIC_NAMES, 0.0)
    row = {"answer": '["Beijing"]'}
    search = SearchEnvironment(SearchSettings()).begin(row, CharacterCodec()).grade()
    return [
        *update_metrics.logged_names(statistics),
        *timing_keys.row({}),
        *alerts.metrics([]),
        *(timing_keys.PREFIX + name for name in timing_keys.OF_THE_RANK),
        *weight_versions.staleness([], 0, 2),
        *Trajectory([]).logs(search),
        *evaluated(),
    ]


@functools.cache
def written_out() -> set[str]:
    """Every constant text of the code that writes rows and files, ours and upstream's."""
    files = [*ROOT.glob("sg_rlhf/**/*.py"), *UPSTREAM.glob("**/*.py")]
    found = {text for path in files for text in constants(path)}
    return found | {field.name for field in dataclasses.fields(Experience)}


def grouped() -> list[str]:
    """Names that the overlay writes out, by their group."""
    overlay = [text for path in ROOT.glob("sg_rlhf/overlay/**/*.py") for text in constants(path)]
    return sorted({text for text in overlay if GROUPED.fullmatch(text)})


@pytest.mark.parametrize("name", [name for name in [*made(), *grouped()] if name != "correct"])
def test_a_metric_of_the_code_is_on_the_page(name: str) -> None:
    assert is_on_the_page(name)


@pytest.mark.parametrize("name", names("metric"))
def test_a_metric_of_the_page_is_written(name: str) -> None:
    if name.startswith("progress/"):
        name = name.removeprefix("progress/")
    assert name in written_out() or any(map(pattern(name).fullmatch, made()))


@pytest.mark.parametrize("name", [*names("key"), *names("file")])
def test_a_file_and_a_key_of_a_sample_on_the_page_are_written(name: str) -> None:
    parts = [part for part in name.split("/") if part]
    assert name in written_out() or {*parts} <= written_out() or parts == ["wandb"]


def test_every_file_of_steps_is_on_the_page() -> None:
    assert {*jsonl_log.STEP_FILES} <= {*names("file")}


def test_no_statistic_is_logged_under_two_names() -> None:
    logged = update_metrics.logged_names({name: float(i) for i, name in enumerate(METRIC_NAMES)})
    assert len({*logged.values()}) == len(logged) == len(METRIC_NAMES)
    assert {"ppo_kl", "ppo_clip_ratio", "vllm_kl"} <= logged.keys()
