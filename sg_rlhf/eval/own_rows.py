"""`--data FILE --reward REWARD`: a suite made from one's own rows and a reward of training."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from sg_rlhf.common import module_paths
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.prompt_rows import DATASOURCE, SUFFIXES, PromptSchema
from sg_rlhf.data_io.prompt_validation import read_prompts
from sg_rlhf.eval.scores import metrics
from sg_rlhf.eval.scores.report import interval
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.grade import Grade, label_fault
from sg_rlhf.tasks.questions import EvalError, Question, Source, one_line
from sg_rlhf.tasks.reward import Completion
from sg_rlhf.tasks.reward_values import reward_fields
from sg_rlhf.tasks.suite import (
    Benchmark,
    ExtraTable,
    Prepared,
    Report,
    Sampling,
    Setup,
    Suite,
    one_by_one,
    prepare_questions,
)

NAME = "data"
#: (response, gold of a question) -> its grade.
GoldGrader = Callable[[str, Mapping[str, Any]], Grade]
#: What the messages about rows name, which are written for recipes.
_KEYS = {
    "data.input_key=": "--input-key ",
    "data.label_key=": "--label-key ",
    " data.apply_chat_template=true": "",
}


class Reward(NamedTuple):
    """A reward of training, and what names it in `run.json`.

    `label_fault`: label -> what is wrong with it, or None.
    """

    grade: GoldGrader
    identity: dict[str, str]
    label_fault: Callable[[Any], str | None] = lambda label: None


OPTIONS: dict[str, dict[str, Any]] = {
    "--data": {
        "metavar": "FILE",
        "type": Path,
        "help": f"rows to evaluate, as training reads them: {', '.join(SUFFIXES)} (required)",
    },
    "--reward": {
        "metavar": "R",
        "help": "as reward.remote_url of a recipe: domain:NAME, domain:NAME/GRADER or a Python "
        "file with reward_func (required)",
    },
    "--input-key": {
        "metavar": "K",
        "default": "input",
        "help": "field of a row with its prompt, a text or messages, which are written with the "
        "model's chat template (default: input)",
    },
    "--label-key": {
        "metavar": "K",
        "default": "answer",
        "help": "field of a row with its label, '' for rows without one (default: answer)",
    },
}


def with_rows(options: Mapping[str, Any]) -> Suite:
    """The suite with the rows of `--data` as its benchmark."""
    reward = find_reward(options["reward"])
    path = options["data"]
    if path is None:
        raise EvalError(f"--suite {NAME}: --data FILE is missing")
    questions = read_questions(path, options["input_key"], options["label_key"] or None, reward)
    source = Source(path.name, sha256_of(path), len(questions))
    benchmark = replace(
        stored_benchmark(path.stem), title=path.name, size=len(questions),
        load=lambda folder: (questions, [source]),
    )  # fmt: skip
    return replace(ROWS, benchmarks=(benchmark,), training_field=options["input_key"])


def prepare(setup: Setup) -> Prepared:
    """Read the questions; the reward gets the prompt as the model does."""
    reward = find_reward(setup.options["reward"])

    def with_prompt(question: Question) -> Question:
        return replace(question, gold={**question.gold, "prompt": question.prompt})

    asked = [
        replace(each, grade=one_by_one(reward.grade), questions=[*map(with_prompt, each.questions)])
        for each in prepare_questions(setup).benchmarks
    ]
    return Prepared(asked, {"reward": reward.identity})


def report(rows: Mapping[str, Sequence[Mapping[str, Any]]], failures: Mapping[str, int]) -> Report:
    """The mean reward of each file."""
    figures, cells = {}, []
    for name, part in rows.items():
        rewards = metrics.by_question(part, "reward")
        mean = metrics.estimate([sum(found) / len(found) for found in rewards.values()], 0)
        figures[name] = {"mean_reward": mean.as_dict()}
        cells.append([name, f"{mean.value:.3f}", interval(mean.interval)])
    note = (
        "A response is correct if the reward's `extra_logs` have a `correct` above 0, or, "
        "without one, if `scores` (default: the reward) is at least 1."
    )
    heads = ("Data", "Mean reward", "95 % interval")
    return Report(figures, [ExtraTable("Rewards", heads, cells, note)])


def stored_benchmark(name: str) -> Benchmark:
    """The benchmark of a file of rows, without its questions."""
    return Benchmark(
        name=name, family=name, title=name, size=0, licence="your own",
        settings=Sampling(temperature=0.0, max_tokens=2048),
        load=lambda folder: ([], []), grade=lambda pairs: [],
    )  # fmt: skip


ROWS = Suite(
    NAME,
    "your own rows",
    (),
    options=OPTIONS,
    prepare=prepare,
    report=report,
    stored=stored_benchmark,
)


def read_questions(
    path: Path, input_key: str, label_key: str | None, reward: Reward
) -> list[Question]:
    """The rows of a file as questions."""
    if path.suffix not in SUFFIXES or not path.is_file():
        raise EvalError(f"--data {path}: expected a file that ends in {', '.join(SUFFIXES)}")
    if label_key == input_key:
        raise EvalError(f"--label-key {label_key}: is the prompt's field; expected another one")
    fields = PromptSchema(input_key, label_key, chat=True, label_fault=reward.label_fault)
    try:
        rows = [row for _, row in read_prompts(str(path), "train", fields)]
    except ValueError as error:
        said = str(error)
        for key, option in _KEYS.items():
            said = said.replace(key, option)
        raise EvalError(f"--data {said}") from None
    groups = {row.get(DATASOURCE, "") for row in rows}
    return [
        Question(
            f"row {number}",
            prompt if isinstance(prompt, str) else "",
            {"prompt": "", "label": row[label_key] if label_key else ""},
            row.get(DATASOURCE, "") if len(groups) > 1 else "",
            messages=() if isinstance(prompt, str) else prompt,
        )
        for number, row in enumerate(rows, start=1)
        for prompt in [row[input_key]]
    ]


def find_reward(given: str | None) -> Reward:
    """The reward that `--reward` names."""
    if given is None:
        raise EvalError(f"--suite {NAME}: --reward is missing, such as domain:kk or my_reward.py")
    if given.startswith(registry.PREFIX):
        try:
            domain, grader = registry.named_in(given)
        except ValueError as error:
            raise EvalError(f"--reward {given}: {error}") from None
        if domain.environment is not None:
            raise EvalError(f"--reward {given}: a domain of several turns; expected its suite")
        return Reward(
            lambda response, gold: grader(response, gold["label"]),
            {"name": given},
            lambda label: label_fault(label, [grader]),
        )
    try:
        path = Path(module_paths.resolve(given))
    except ModuleNotFoundError:
        raise EvalError(f"--reward {given}: no such module is installed") from None
    function = _reward_function(given, path)

    def own_grade(response: str, gold: Mapping[str, Any]) -> Grade:
        prompt = gold["prompt"]
        try:
            returned = function(*Completion(prompt, response, gold["label"]).reward_arguments())
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned))
            found = reward_fields(returned)
        except Exception as error:  # a user's code raises anything
            raise EvalError(
                f"--reward {given}: {type(error).__name__}: {one_line(error)} (prompt "
                f"{prompt[:60]!r}, label {str(gold['label'])[:60]!r})"
            ) from error
        correct = found["extra_logs"].get("correct")
        is_right = found["scores"] >= 1 if correct is None else correct > 0
        return Grade(found["rewards"], is_right, "correct" if is_right else "wrong", extracted="")

    return Reward(own_grade, {"name": path.name, "sha256": sha256_of(path)})


async def _awaited(returned: Any) -> Any:
    return await returned


def _reward_function(given: str, path: Path) -> Callable[..., Any]:
    if path.suffix != ".py" or not path.is_file():
        raise EvalError(f"--reward {given}: expected domain:NAME or a Python file that exists")
    spec = importlib.util.spec_from_file_location("own_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's code raises anything
        raise EvalError(f"--reward {given}: {type(error).__name__}: {one_line(error)}") from None
    function: Callable[..., Any] | None = getattr(module, "reward_func", None)
    if not callable(function):
        raise EvalError(f"--reward {given}: defines no reward_func")
    return function
