"""A prompt's way through training for every family of models, its tokenizer and ends as published.

Prompt -> upstream's tokenization -> a response -> its text -> the reward -> the experience that is
trained on. The model is replaced by a text that it would write; vLLM's own code says where it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.utils import get_tokenizer
from vllm import SamplingParams
from vllm.transformers_utils.config import try_get_generation_config

from sg_rlhf.data_io.prompt_rows import PromptSchema
from sg_rlhf.data_io.prompt_validation import checked
from sg_rlhf.data_io.records import DataError
from sg_rlhf.overlay.controller.prompt_dataset import PromptDataset, PromptRows
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from sg_rlhf.overlay.rollout.engine import SGRolloutActor
from sg_rlhf.overlay.rollout.executors import StrictSingleTurnExecutor
from sg_rlhf.overlay.rollout.samples import to_experience
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.kk.prompt import SYSTEM, build_chat_prompt, build_prompt
from sg_rlhf.tasks.kk.puzzle import generate as puzzles
from sg_rlhf.tasks.math.prompt import prompt_of
from sg_rlhf.tasks.search import prompt as search
from tests.unit.families import FAMILIES, Family

PUZZLE = puzzles(3, 1, seed=0)[0]
GOLD = PUZZLE.solution_text_format
REASONING = " Suppose the first one lies; then nobody is left.</think>\n<answer>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: family.write(root / name) for name, family in FAMILIES.items()}


def upstreams_tokenizer(folder: Path) -> Any:
    return get_tokenizer(str(folder), SimpleNamespace(is_vlm=False, config=SimpleNamespace()))


def read(
    rows: Sequence[dict[str, Any]], tokenizer: Any, *, apply_template: bool, max_len: int = 4096,
    input_key: str = "input", label_key: str = "answer", kwargs: dict[str, Any] | None = None,
) -> PromptDataset:  # fmt: skip
    """The prompts as the trainer has them."""
    data = SimpleNamespace(
        input_key=input_key, label_key=label_key, apply_chat_template=apply_template,
        image_key="images", prompt_dataset="org/set", max_len=max_len,
    )  # fmt: skip
    sg = SimpleNamespace(chat_template_kwargs=kwargs or {})
    args = SimpleNamespace(data=data, rollout=SimpleNamespace(max_new_tokens=256), sg=sg)
    strategy = SimpleNamespace(args=args, is_rank_0=lambda: False)
    placed, fields = PromptRows(), PromptSchema(input_key, label_key, chat=apply_template)
    try:
        placed += checked(((f"org/set: row {n}", row) for n, row in enumerate(rows, 1)), fields)
    except DataError as error:
        placed.error = str(error)
    return PromptDataset(placed, tokenizer, strategy)


class Engine(SGRolloutActor):
    """The rollout engine with a model that writes ``text``; it ends where vLLM would end it."""

    def __init__(self, folder: Path, tokenizer: Any, text: str, reward: str) -> None:
        self.folder, self.tokenizer, self.text = folder, tokenizer, text
        self.executor = StrictSingleTurnExecutor(reward)
        self._expects_reward = True
        self.prompts: list[list[int]] = []

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        self.prompts.append(prompt_token_ids)
        params = sampling_params.clone()
        found = try_get_generation_config(str(self.folder), trust_remote_code=False)
        params.update_from_generation_config(found.to_diff_dict(), self.tokenizer.eos_token_id)
        written = self.tokenizer(self.text, add_special_tokens=False)["input_ids"]
        ends = {params.eos_token_id, *params.stop_token_ids}
        length = next((i for i, token in enumerate(written, 1) if token in ends), None)
        output = SimpleNamespace(
            token_ids=written[:length], text="", logprobs=None,
            finish_reason="stop" if length else "length",
        )  # fmt: skip
        return SimpleNamespace(outputs=[output])


def rollout(
    folder: Path, tokenizer: Any, prompt: str, label: str, text: str, reward: str
) -> tuple[dict[str, Any], Experience]:
    """One rollout, as upstream makes and keeps it."""
    engine = Engine(folder, tokenizer, text, reward)
    shared = SamplingParams(max_tokens=4096)
    (output,) = asyncio.run(
        engine.generate_responses(
            prompt, label, shared, 8192, hf_tokenizer=tokenizer, num_samples=1
        )
    )
    assert shared.stop_token_ids == []  # other prompts use it too
    return output, to_experience(output, 8192)


def assert_one_bos(ids: Sequence[int], tokenizer: Any, family: Family) -> None:
    if family.bos is None:
        assert tokenizer.bos_token_id is None or tokenizer.bos_token_id not in ids
    else:
        assert ids[0] == tokenizer.bos_token_id and list(ids).count(ids[0]) == 1


def prompt_for(tokenizer: Any, *, chatml: bool) -> str:
    return build_prompt(PUZZLE.quiz) if chatml else build_chat_prompt(PUZZLE.quiz, tokenizer)


@pytest.mark.parametrize("behind", ["", "\nI go on", "{turn}user\nAnother?</think><answer>"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_puzzle_is_read_answered_graded_and_trained_on(
    folders: dict[str, Path], name: str, behind: str
) -> None:
    family, tokenizer = FAMILIES[name], upstreams_tokenizer(folders[name])
    prompt = prompt_for(tokenizer, chatml=name.startswith("qwen2.5"))
    data = read([{"input": prompt, "answer": GOLD}], tokenizer, apply_template=False)
    data.check()
    assert data.prompts == [prompt] and prompt.endswith("<think>")
    answer = f"{REASONING}{GOLD}</answer>"
    written = f"{answer}{family.turn_end}{behind.format(turn='<|im_start|>')}"
    output, kept = rollout(folders[name], tokenizer, prompt, GOLD, written, "domain:kk")
    assert (output["reward"], output["truncated"]) == (3.0, False)
    ids = output["observation_tokens"]
    assert_one_bos(ids, tokenizer, family)
    # It ends with its turn, whatever the model writes behind it, and the end is trained on.
    end = tokenizer.convert_tokens_to_ids(family.turn_end)
    assert ids[-1] == end and bool(kept.action_mask[0, -1])
    (start, stop) = output["action_ranges"][0]
    assert end not in ids[start : stop - 1] and stop == len(ids)
    assert int(kept.action_mask.sum()) == stop - start
    # Padding is the end token itself where the tokenizer has none, and is not trained on.
    assert (tokenizer.pad_token_id == tokenizer.eos_token_id) == (family.pad in (None, family.eos))
    shorter, _ = rollout(
        folders[name], tokenizer, prompt, GOLD, f"no{family.turn_end}", "domain:kk"
    )
    other = to_experience(shorter, 8192)
    both = Experience.concat_experiences([kept, other], tokenizer.pad_token_id)
    ((first, behind_last),) = shorter["action_ranges"]
    assert both.action_mask.sum(-1).tolist() == [stop - start, behind_last - first]
    last = both.attention_mask.sum(-1) - 1
    assert both.sequences[torch.arange(2), last].tolist() == [end, end]
    assert both.action_mask[torch.arange(2), last - 1].tolist() == [1, 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_of_a_text_ends_a_response_too(folders: dict[str, Path], name: str) -> None:
    tokenizer = upstreams_tokenizer(folders[name])
    prompt = prompt_for(tokenizer, chatml=False)
    for end in FAMILIES[name].ends:
        text = f"{REASONING}{GOLD}</answer>{end} and on"
        output, _ = rollout(folders[name], tokenizer, prompt, GOLD, text, "domain:kk")
        assert output["observation_tokens"][-1] == tokenizer.convert_tokens_to_ids(end)
        assert (output["reward"], output["truncated"]) == (3.0, False)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrong_or_formless_answer_is_graded_as_such(folders: dict[str, Path], name: str) -> None:
    """The prompt holds tags and an example of its own, which must not count."""
    family, tokenizer = FAMILIES[name], upstreams_tokenizer(folders[name])
    prompt = prompt_for(tokenizer, chatml=False)
    wrong = GOLD.replace("knight", "k").replace("knave", "knight").replace(" k\n", " knave\n")
    wrong = wrong.removesuffix(" k") + (" knave" if wrong.endswith(" k") else "")
    for text, reward in (
        (f"{REASONING}{wrong}</answer>", -0.5),
        (f"{REASONING}who knows</answer>", -1.0),
        (f"<think>{REASONING}{GOLD}</answer>", -3.0),
        ("nothing", -3.0),
    ):
        output, _ = rollout(
            folders[name], tokenizer, prompt, GOLD, f"{text}{family.turn_end}",
            "domain:kk",
        )  # fmt: skip
        assert output["reward"] == reward, text


@pytest.mark.parametrize("name", FAMILIES)
def test_the_instructions_are_in_the_prompt_whatever_the_template_makes_of_a_system_message(
    folders: dict[str, Path], name: str
) -> None:
    prompt = build_chat_prompt(PUZZLE.quiz, upstreams_tokenizer(folders[name]))
    assert prompt.count(SYSTEM.strip()) == 1 and prompt.count(PUZZLE.quiz.strip()) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_problem_in_plain_text_begins_with_one_bos_and_ends_with_the_text(
    folders: dict[str, Path], name: str
) -> None:
    family, tokenizer = FAMILIES[name], upstreams_tokenizer(folders[name])
    row = {"input": prompt_of("What is 1+1?"), "answer": '["2"]'}
    (prompt,) = read([row], tokenizer, apply_template=False).prompts
    assert prompt.removeprefix(family.bos or "") == row["input"]
    assert chat.stop_token_ids(prompt, tokenizer) == ()
    text = f" It is \\boxed{{2}}.{family.eos}"
    output, kept = rollout(folders[name], tokenizer, prompt, '["2"]', text, "domain:math")
    assert output["reward"] == 1.0
    assert_one_bos(output["observation_tokens"], tokenizer, family)
    assert output["observation_tokens"][-1] == tokenizer.eos_token_id
    assert bool(kept.action_mask[0, -1])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_question_goes_through_the_chat_template(folders: dict[str, Path], name: str) -> None:
    family, tokenizer = FAMILIES[name], upstreams_tokenizer(folders[name])
    row = {"input": search.build_prompt("Who wrote Faust"), "answer": '["Goethe"]'}
    (prompt,) = read([row], tokenizer, apply_template=True).prompts
    assert row["input"].strip() in prompt
    ids = tokenizer(text=prompt, add_special_tokens=False)["input_ids"]
    assert_one_bos(ids, tokenizer, family)
    end = tokenizer.convert_tokens_to_ids(family.turn_end)
    assert chat.stop_token_ids(prompt, tokenizer) == (end,)


@pytest.mark.parametrize("name", ["llama-3.1-instruct", "mistral-v0.3", "mistral-old-tokenizer"])
def test_prompts_in_another_familys_form_are_refused(folders: dict[str, Path], name: str) -> None:
    row = {"input": build_prompt(PUZZLE.quiz), "answer": GOLD}
    data = read([row], upstreams_tokenizer(folders[name]), apply_template=False)
    with pytest.raises(UnusablePrompts) as refusal:
        data.check()
    assert "written in ChatML (Qwen)'s form" in str(refusal.value)
    assert "no token <|im_start|>" in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_evaluation_gives_the_model_the_ids_that_training_gave_it(
    folders: dict[str, Path], name: str
) -> None:
    tokenizer = upstreams_tokenizer(folders[name])
    rows = [
        {"input": prompt_for(tokenizer, chatml=False), "answer": GOLD},
        {"input": prompt_of("What is 1+1?"), "answer": '["2"]'},
    ]
    texts = [row["input"] for row in rows]
    trained = read(rows, tokenizer, apply_template=False).prompts
    assert chat.encode(texts, tokenizer) == [
        tokenizer(text=prompt, add_special_tokens=False)["input_ids"] for prompt in trained
    ]
    assert chat.encode([], tokenizer) == []


@pytest.mark.parametrize(
    ("rows", "max_len", "words"),
    [
        ([{"input": "x", "answer": None}], 4096, "org/set: row 1: answer: missing or empty"),
        ([{"other": "x", "answer": "y"}], 4096, "org/set: row 1: input: missing"),
        ([{"input": "x", "answer": "y"}, {"input": "knave " * 90, "answer": "z"}], 300,
         "org/set: row 2: the prompt has"),
    ],
)  # fmt: skip
def test_rows_of_a_hub_are_checked_where_they_are_read(
    rows: list[dict[str, Any]], max_len: int, words: str, folders: dict[str, Path]
) -> None:
    """The driver reads local files alone; `check` is asked before the first rollout."""
    tokenizer = upstreams_tokenizer(folders["qwen2.5-base"])
    prompts = read(rows, tokenizer, apply_template=False, max_len=max_len)
    with pytest.raises(UnusablePrompts) as error:
        prompts.check()
    assert words in str(error.value)


def test_nested_fields_and_labels_that_are_numbers_reach_upstream(folders: dict[str, Path]) -> None:
    tokenizer = upstreams_tokenizer(folders["qwen2.5-base"])
    row = {
        "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "reward_model": {"ground_truth": 42, "style": "rule"}, "question": {"text": "6 * 7?"},
    }  # fmt: skip
    label = {"label_key": "reward_model.ground_truth"}
    found = read([row], tokenizer, apply_template=True, input_key="prompt", **label)
    found.check()
    assert "What is 6 * 7?" in found.prompts[0] and found.labels == ["42"]
    found = read([row], tokenizer, apply_template=False, input_key="question.text", **label)
    assert (found.prompts, found.labels) == (["6 * 7?"], ["42"])
    whole = read([row], tokenizer, apply_template=True, input_key="prompt",
                 label_key="reward_model")  # fmt: skip
    assert whole.labels == [{"ground_truth": 42, "style": "rule"}]


def test_arguments_of_the_chat_template_reach_the_prompts(folders: dict[str, Path]) -> None:
    tokenizer = upstreams_tokenizer(folders["qwen2.5-base"])
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
    )
    row = {"input": "Hi", "answer": "x"}
    found = read([row], tokenizer, apply_template=True, kwargs={"enable_thinking": False})
    found.check()
    assert found.prompts == ["Hi<think>\n\n</think>"] and found.tokenizer is tokenizer
    found = read([row], tokenizer, apply_template=True, kwargs={"enable_thinkng": False})
    with pytest.raises(UnusablePrompts, match=r"data.chat_template_kwargs: enable_thinkng: "):
        found.check()
