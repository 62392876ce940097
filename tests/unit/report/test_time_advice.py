"""What the report says of a rollout's time: the largest share, and settings of this run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.config.sg_settings import sg_keys
from sg_rlhf.config.upstream_flags import flags
from sg_rlhf.report import timing_figures
from sg_rlhf.report.runs import Group
from sg_rlhf.report.time_advice import RULES, advice
from sg_rlhf.report.timing_figures import SHOWN, of_rollouts, what_to_change
from sg_rlhf.run_dir.timing_keys import PARTS, SUBSECTIONS
from tests.unit.report.synthetic import RECIPES, write_run
from tests.unit.report.test_page import page

EVERY_PART = [*PARTS, *(name for names in SUBSECTIONS.values() for name in names)]
#: Seconds of a rollout in which nothing stands out.
EVEN = {
    "generation": 30.0, "longest_response": 8.0, "update_forward": 15.0, "update_backward": 30.0,
    "reference_log_probs": 10.0, "broadcast": 5.0, "other": 2.0,
}  # fmt: skip


def said(seconds: dict[str, float], **changed: Any) -> str:
    config = load_config(RECIPES / "grpo_sg_tiny_cpu.yaml", [])
    keys = {name.replace("__", "."): value for name, value in changed.items()}
    return advice(seconds, lambda key: keys[key] if key in keys else config.value(key))


@pytest.mark.parametrize(
    ("part", "seconds", "changed", "words"),
    [
        ("longest_response", 60.0, {}, ["waiting for the longest", "max_new_tokens (now "]),
        ("generation", 300.0, {}, ["generation with all engines busy", "vllm.num_engines, now "]),
        ("generation", 300.0, {"vllm__enforce_eager": True}, ["vllm.enforce_eager=false"]),
        ("engines_wake", 30.0, {"vllm__enable_sleep": True}, ["vllm.enable_sleep=false where"]),
        ("broadcast", 30.0, {}, ["weight sync", "rollout.batch_size (now 16)", "ds.zero_stage=2"]),
        ("sync_check", 20.0, {"sg__sync_check_every": 1}, ["sg.sync_check_every=0 (now 1)"]),
        ("update_forward", 1.0, {"sg__fused_logprobs": False}, ["float32 logits of every token",
                                                                    "actor.fused_logprobs=true"]),
        ("update_backward", 200.0, {"ds__packing_samples": False}, ["ds.packing_samples=true"]),
        ("reference_log_probs", 60.0, {}, ["reference log-probs", "algo.kl.init_coef=0"]),
        ("ppo_train", 60.0, {}, ["the update outside its passes", "rank 0 waits for the slowest"]),
        ("ppo_train", 60.0, {"sg__batches": "upstream"}, ["sg.batches=balanced"]),
        ("broadcast", 30.0, {"sg__weight_sync": "upstream"}, ["sg.weight_sync=buckets"]),
        ("old_log_probs", 30.0, {"sg__skip_old_log_probs": False},
         ["old log-probs", "sg.skip_old_log_probs=false"]),
        ("update_old_log_probs", 30.0, {}, ["larger train.batch_size, as a rollout is 2 optim"]),
        ("hand_over", 20.0, {}, ["sending samples to the ranks"]),
        ("logging", 40.0, {}, ["sg.samples_per_step (now 4)"]),
    ],
)  # fmt: skip
def test_a_part_that_takes_much_has_a_setting(
    part: str, seconds: float, changed: dict[str, Any], words: list[str]
) -> None:
    found = said({**EVEN, part: seconds}, **changed)
    for word in words:
        assert word in found, found
    share = seconds / (sum(EVEN.values()) - EVEN.get(part, 0.0) + seconds)
    if part not in ("update_forward", "update_backward"):  # which are named together
        assert f" {share:.0%}: " in found


def test_where_nothing_stands_out_the_largest_share_is_named() -> None:
    even = dict.fromkeys(EVERY_PART, 1.0) | {"generation": 5.0}
    found = said(even)
    assert "generation with all engines busy" in found and found.count(":") == 2
    assert said({}) == "" and said(dict.fromkeys(EVERY_PART, 0.0)) == ""


def test_a_check_that_is_off_and_logits_that_are_not_made_are_not_spoken_of() -> None:
    found = said({**EVEN, "sync_check": 50.0}, sg__sync_check_every=0)
    assert "sync_check" not in found and "logits" not in found
    assert "the check" not in found


def test_a_run_whose_settings_are_not_known_gets_a_sentence_too() -> None:
    assert "rollout.batch_size (not known)" in advice({"broadcast": 1.0}, lambda _key: None)


def test_every_part_is_drawn_once_and_every_setting_exists() -> None:
    drawn = [name for shown in SHOWN for name in shown.names]
    assert sorted(drawn) == sorted(EVERY_PART)
    assert len({(shown.color, shown.hatch) for shown in SHOWN}) == len(SHOWN)
    keys = {*flags(), *sg_keys()}
    asked: set[str] = set()

    def note(key: str) -> Any:
        asked.add(key)
        return True

    for rule in RULES:
        rule.change(note)
        assert set(rule.parts) <= set(EVERY_PART)
    assert asked <= keys, asked - keys


def test_seeds_are_their_mean_and_the_page_says_what_to_change(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"sg_s{seed}", seed=seed, rollouts=3) for seed in (0, 1)]
    metrics = runs[1] / "metrics.jsonl"
    more = {"broadcast": ("3.0", "7.0"), "step_total": ("82.0", "86.0")}
    for name, (old, new) in more.items():
        text = metrics.read_text().replace(f'"timing/{name}": {old}', f'"timing/{name}": {new}')
        metrics.write_text(text)
    read, groups = page.read_runs(runs)
    assert isinstance(groups[0], Group)
    parts = of_rollouts(groups[0])
    assert list(parts) == [1, 2, 3] and parts[2]["broadcast"] == 5.0
    (sentence,) = what_to_change(groups)
    assert sentence.startswith("Of 84.0 s a rollout: ")
    assert f"<strong>{sentence}</strong>" in page.build(read, groups)


def test_a_part_that_is_large_in_a_short_run_keeps_its_bar_beside_a_long_one() -> None:
    none = dict.fromkeys(EVERY_PART, 0.0)
    short = [none | {"generation": 8.0, "sync_check": 2.0}]
    long = [none | {"generation": 900.0, "sync_check": 2.0, "logging": 1.0}]
    large = timing_figures._large_parts([short, long])
    assert [shown.title for shown in large] == ["generation", "its check"]
    found = timing_figures._drawn_parts(long, large)
    assert [(shown.title, values) for shown, values in found] == [
        ("generation", [900.0]), ("its check", [2.0]), ("less than 1 % each", [1.0])
    ]  # fmt: skip
    in_order = timing_figures._drawn_parts(short, large)
    assert [shown.title for shown, _ in in_order] == ["generation", "its check"]
