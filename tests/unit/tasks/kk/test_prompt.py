"""Prompts of Knights and Knaves, and the examples of docs."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sg_rlhf.data.command import main
from sg_rlhf.tasks.kk.prompt import build_chat_prompt, build_prompt
from sg_rlhf.tasks.kk.puzzle import generate
from tests.unit.tasks.kk.oracles import LOGIC_RL_PROMPT

# -- The prompt against an independent copy, against real data where given, and through templates --


PUZZLES = [puzzle for n in (2, 5, 7) for puzzle in generate(n, 5, seed=0)]


class ChatML:
    """The chat template of Qwen2.5, in Python."""

    ending = "<|im_start|>assistant\n"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        turns = (f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return "".join(turns) + self.ending


def test_the_prompt_is_logic_rls():
    assert build_prompt("QUIZ") == LOGIC_RL_PROMPT


@pytest.mark.skipif("SG_KK_PARQUET" not in os.environ, reason="SG_KK_PARQUET names no parquet")
def test_the_prompts_of_the_real_data_are_reproduced_byte_for_byte():
    rows = pq.read_table(os.environ["SG_KK_PARQUET"], columns=["quiz", "prompt"]).to_pylist()
    assert rows
    for row in rows:
        assert build_prompt(row["quiz"]) == row["prompt"][0]["content"]


def test_chatml_gives_the_same_bytes():
    for puzzle in PUZZLES:
        assert build_chat_prompt(puzzle.quiz, ChatML()) == build_prompt(puzzle.quiz)


@pytest.mark.parametrize(
    "ending",
    ["<bot>", "<bot><think>", "<bot><think>\n", "<bot><think>\n\n</think>\n\n"],
)
def test_a_template_that_writes_the_tag_gets_no_second_one(ending):
    tokenizer = ChatML()
    tokenizer.ending = ending
    assert build_chat_prompt("Q", tokenizer).endswith("<|im_end|>\n<bot><think>")


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif tone is defined %}{{ tone }}{% endif %}"
)


def test_arguments_of_a_template_reach_the_prompts_of_the_data(tmp_path, capsys):
    tiny = ROOT / "sg_rlhf" / "tiny" / "kk_tiny"
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "chat_template.jinja").write_text(THINKING)
    given = ["kk", "--chat-template", str(model), "--chat-template-kwargs"]
    few = ["--generate", "people=2", "per_size=1", "test_per_size=0"]

    def made(name, kwargs, *more):
        return main([*given, kwargs, "--out", str(tmp_path / name), *few, *more])

    assert made("tone", '{"tone": "Hm. "}') == 0
    row = json.loads((tmp_path / "tone" / "train.jsonl").read_text())
    assert row["input"].endswith("assistant\nHm. <think>")
    # The tiny model does not read prompts of another model's form.
    following = capsys.readouterr().out.partition("Next: ")[2]
    assert f" actor.model_name_or_path={model} " in following and "tiny_cpu" not in following
    assert made("off", '{"enable_thinking": false}') == 0
    row = json.loads((tmp_path / "off" / "train.jsonl").read_text())
    assert row["input"].endswith("assistant\n<think>")
    prompt = json.loads((tmp_path / "off" / "manifest.json").read_text())["prompt"]
    assert prompt["chat_template_kwargs"] == {"enable_thinking": False}
    capsys.readouterr()
    assert made("wrong", '{"enable_thinkng": false}') == 2
    said = capsys.readouterr().err
    assert "--chat-template-kwargs: enable_thinkng: the model's chat template does not" in said
    with pytest.raises(SystemExit):
        made("wrong", "enable_thinking=false")
    assert "expected an object of JSON" in capsys.readouterr().err
    alone = ["kk", "--chat-template-kwargs", '{"tone": "x"}', "--out", str(tmp_path / "wrong")]
    assert main([*alone, *few]) == 2 and not (tmp_path / "wrong").exists()
    assert "needs --chat-template" in capsys.readouterr().err


def test_without_a_system_role_the_user_says_it_all():
    class WithoutSystem(ChatML):
        def apply_chat_template(self, messages, **options):
            users = [message for message in messages if message["role"] == "user"]
            return super().apply_chat_template(users, **options)

    prompt = build_chat_prompt("QUIZ", WithoutSystem())
    whole = build_prompt("QUIZ").replace("<|im_end|>\n<|im_start|>user\n", "\n", 1)
    assert prompt == whole.replace("im_start|>system", "im_start|>user", 1)


# -- The puzzles that the help and the pages tell people to generate can be generated ------------


ROOT = Path(__file__).parents[4]
FILES = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "sg_rlhf").rglob("*.py")]
EXAMPLES = sorted(
    {
        words.strip()
        for path in FILES
        for words in re.findall(
            r"data kk --out \S+ --generate ((?:\w+=[\w-]+ ?)+)", path.read_text()
        )
    }
)


def test_there_are_some():
    assert len(EXAMPLES) > 4


@pytest.mark.parametrize("words", [words for words in EXAMPLES if "people=2-3" in words])
def test_they_can_be_made(words, tmp_path):
    assert main(["kk", "--out", str(tmp_path / "out"), "--generate", *words.split()]) == 0
