"""The shipped checkpoint is the one its manifest describes, and writes well-formed answers."""

import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sg_rlhf.lab.rollouts import sample_responses
from sg_rlhf.lab.tiny_model import SHIPPED, build, check, main, measure, new_model
from sg_rlhf.lab.tokenizer import build_tokenizer
from sg_rlhf.lab.warm_start import WarmStart, held_out_puzzles
from sg_rlhf.tasks.kk.prompt import build_prompt


@pytest.fixture(scope="module")
def shipped():
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(SHIPPED)


def test_files_match_the_manifest():
    manifest = check(SHIPPED)
    assert manifest["parameters"] == 855_168
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 2_000_000


def test_a_changed_file_is_named(tmp_path):
    copy = shutil.copytree(SHIPPED, tmp_path / "copy")
    (copy / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json: SHA-256 is"):
        check(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: missing"):
        check(copy)


def test_the_shipped_recipe_is_the_default():
    assert check(SHIPPED)["recipe"] == json.loads(json.dumps(vars(WarmStart())))


def test_shipped_model_is_well_formed_and_fallible(shipped):
    model, tokenizer = shipped
    puzzles = random.Random(0).sample(held_out_puzzles(), 48)
    result = measure(model, tokenizer, puzzles, temperature=0.7)
    assert result["well_formed"] >= 0.9
    # Room to learn and something to learn from: neither 0 nor nearly solved.
    assert 0.1 < result["accuracy"] < 0.6


def test_weights_are_bf16():
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_batched_sampling_equals_one_at_a_time(shipped):
    """Padding, the cache and rows that leave early change nothing."""
    model, tokenizer = shipped
    prompts = [tokenizer(build_prompt(p.quiz))["input_ids"] for p in held_out_puzzles()[96:104]]
    together = sample_responses(model, prompts, max_new_tokens=60, temperature=0)
    alone = [
        sample_responses(model, [prompt], max_new_tokens=60, temperature=0)[0] for prompt in prompts
    ]
    assert together == alone


def test_sampling_stops_at_the_limit():
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, seed=0).eval()
    rows = sample_responses(model, [[5], [6, 7]], max_new_tokens=3, temperature=1.0)
    assert all(len(row) <= 3 for row in rows)


def test_build_writes_a_checkpoint_that_loads(tmp_path):
    out = tmp_path / "tiny"
    recipe = WarmStart(steps=2, rows=2)
    build(out, recipe, seed=0, eval_limit=4, progress=False)
    assert check(out)["recipe"]["steps"] == 2
    AutoModelForCausalLM.from_pretrained(out)
    assert len(AutoTokenizer.from_pretrained(out)) == 520
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    with pytest.raises(ValueError, match="exists already"):
        build(out, recipe, seed=0)


@pytest.mark.parametrize("options", [["--steps", "0"], ["--threads", "0"]])
def test_bad_options_are_one_line_and_status_2(tmp_path, capsys, options):
    assert main(["--out", str(tmp_path / "x"), *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_an_occupied_folder_is_status_2(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
