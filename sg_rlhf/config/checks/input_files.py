"""The files that a recipe names, checked before Ray starts; above all its prompts, row by row.

Each problem is one line: the key, the file, the row and the remedy. Ids of a hub are not checked
here; the workers check them.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import progress_bar
from sg_rlhf.config.checks import files
from sg_rlhf.config.errors import ConfigError, MissingFile
from sg_rlhf.config.recipe import Config, local_path
from sg_rlhf.data_io import model_folder
from sg_rlhf.data_io.prompt_rows import SUFFIXES, PromptSchema
from sg_rlhf.data_io.prompt_validation import (
    PromptIndex,
    max_prompt_tokens,
    read_prompts,
    too_long,
)
from sg_rlhf.data_io.records import DataError
from sg_rlhf.tasks import grade, registry
from sg_rlhf.tasks.domain import Domain

#: Keys that name files or folders, or ids of a hub.
READ_FROM = (*files.MODELS, *files.CODE, "data.prompt_dataset", "eval.dataset")
FILE_CHECKS = (files.check_models, files.check_code, files.check_outputs, files.check_names)
#: What Ray sets for the command of a job that was submitted to it.
IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def check_files(config: Config) -> None:
    """Refuse models, rewards and folders that would stop a run, and prompts that are missing."""
    for prompts in prompt_sets(config):
        _check_there(prompts)
    for check in FILE_CHECKS:
        check(config)


def _check_there(prompts: PromptSet) -> None:
    for name in prompts.names:
        local_prompts(prompts.key, name)


def look(config: Config) -> tuple[list[str], list[str]]:
    """What is missing on this machine, and remarks on the prompts that are here; one line each.

    For a run that may be meant for another machine.
    """
    lacking: list[str] = []

    def there(check: Callable[[Any], None], checked: Any) -> bool:
        try:
            check(checked)
        except MissingFile as error:
            lacking.append(str(error))
            return False
        return True

    try:
        sets = [prompts for prompts in prompt_sets(config) if there(_check_there, prompts)]
    except MissingFile as error:
        lacking.append(str(error))
        sets = []
    for check in FILE_CHECKS:
        there(check, config)
    try:
        return lacking, check_prompts(config, sets)
    except ModuleNotFoundError as error:
        return lacking, [f"the rows of the prompts are not checked: {error.name} is not installed"]


@dataclass(frozen=True)
class PromptSet:
    """Prompts that one key names."""

    key: str  # for messages
    names: tuple[str, ...]  # files, folders or ids of a hub
    split: str  # which part of them is read
    max_len: int  # most tokens of a prompt and its response
    response: int | None  # tokens that a response may have; None: what is left

    @property
    def max_prompt(self) -> int:
        """Largest number of tokens of a prompt."""
        return max_prompt_tokens(self.max_len, self.response)


def prompt_sets(config: Config) -> list[PromptSet]:
    """The prompts to train on, then those of each evaluation."""
    if not config.value("data.prompt_dataset"):
        raise MissingFile(
            "data.prompt_dataset: not set; expected JSON lines "
            "(`sg-rlhf data` makes them) or the id of a data set"
        )
    split, usual = config.value("eval.split"), config.value("rollout.max_new_tokens")
    sets = [
        _prompt_set(config, "data.prompt_dataset", config.value("data.prompt_dataset"),
             config.value("data.prompt_split"), usual),
    ]  # fmt: skip
    if config.value("eval.dataset"):
        sets.append(_prompt_set(config, "eval.dataset", config.value("eval.dataset"), split, usual))
    for one in config.sg.eval_sets:
        most = one.max_new_tokens or usual
        sets.append(_prompt_set(config, f"sg.eval_sets, {one.name}", one.dataset, split, most))
    return sets


def _prompt_set(
    config: Config, key: str, names: str, split: str, response: int | None
) -> PromptSet:
    longest = config.value("data.max_len")
    split_names = tuple(name.strip() for name in str(names).split(","))
    prompt_set = PromptSet(key, split_names, split, longest, response)
    if prompt_set.max_prompt < 1:
        limit = "rollout.max_new_tokens" if key in ("data.prompt_dataset", "eval.dataset") else key
        raise ConfigError(
            f"data.max_len={longest}, {limit}={response}: no tokens left for a prompt; "
            "data.max_len is the limit of prompt and response together"
        )
    return prompt_set


def check_prompts(config: Config, sets: list[PromptSet] | None = None) -> list[str]:
    """Refuse rows that would stop a run, in the local files of ``sets``, by default of all.

    Returns:
        Remarks for the user, one line each.
    """
    _check_probabilities(config)
    fields = _schema(config)
    remarks: list[str] = []
    trained: PromptIndex | None = None
    tokens = functools.cache(lambda: token_counter(config))
    for prompts in prompt_sets(config) if sets is None else sets:
        seen = PromptIndex()
        try:
            for name in prompts.names:
                _check_set(name, prompts, fields, seen, tokens)
        except DataError as error:
            raise ConfigError(f"{prompts.key}: {error}") from None
        remarks += [f"{prompts.key}: {found}" for found in seen.remarks()]
        limit = config.value("data.max_samples")
        if prompts.key == "eval.dataset" and seen.rows > limit:
            remarks.append(
                f"data.max_samples={limit} holds for eval.dataset too: its first {limit} of "
                f"{seen.rows} prompts are evaluated; sets of sg.eval_sets are not cut"
            )
        if prompts.key == "data.prompt_dataset":
            trained = seen
        if trained is None or trained is seen:
            continue
        common = {*seen.prompts} & {*trained.prompts}
        if common:
            where = min(seen.prompts[one][0] for one in common)
            remarks.append(
                f"{prompts.key}: {len(common)} of {len(seen.prompts)} prompts are in "
                f"data.prompt_dataset too (first: {where}): accuracy on them is not held out"
            )
    return remarks


def _check_set(
    name: str,
    prompts: PromptSet,
    fields: PromptSchema,
    seen: PromptIndex,
    tokens: Callable[[], Callable[[list[str]], list[int]] | None],
) -> None:
    path = local_prompts(prompts.key, name)
    if path is None:
        return
    if path.suffix in SUFFIXES and prompts.split != "train":
        key = "data.prompt_split" if prompts.key == "data.prompt_dataset" else "eval.split"
        raise ConfigError(f"{key}={prompts.split}: a file has one split, train ({prompts.key})")
    long: list[tuple[str, str]] = []
    with progress_bar(f"checking {name}", "rows") as bar:
        for place, row in read_prompts(name, prompts.split, fields, seen):
            bar.update()
            if fields.chat:  # the template adds tokens; the run counts them
                continue
            text = fields.text(row[fields.prompt])
            # No tokenizer makes more tokens of a text than it has bytes.
            if len(text.encode()) > prompts.max_prompt:
                long.append((place, text))
    count = tokens() if long else None
    if count is None:
        return
    refused = []
    with progress_bar(f"counting tokens of {name}", "rows", len(long)) as bar:
        for start in range(0, len(long), 4096):
            part = long[start : start + 4096]
            lengths = count([text for _, text in part])
            refused += [
                (n, p) for n, (p, _) in zip(lengths, part, strict=True) if n > prompts.max_prompt
            ]
            bar.update(len(part))
    if refused:
        length, place = max(refused)
        why = too_long(length, len(refused), prompts.max_len, prompts.response)
        raise DataError(f"{place}: {why}")


def local_prompts(key: str, name: str) -> Path | None:
    """The local file or folder of prompts that a name stands for; None for an id of a hub."""
    given, _, _ = name.partition("@")
    path = Path(given)
    if not given:
        raise ConfigError(f"{key}: a name is empty, expected files or ids with commas between them")
    if path.suffix == ".py" or (path / f"{path.name}.py").is_file():
        raise ConfigError(f"{key}={name}: runs a script of the data set, expected its data alone")
    if path.suffix in SUFFIXES:
        if not path.is_file():
            if IN_A_JOB in os.environ:
                raise MissingFile(
                    f"{key}={name}: no such file on this machine; a job does not upload ignored "
                    "files such as data/: put it into a folder that all machines see, and give its "
                    "absolute path"
                )
            made = path.parts[0] == "data"  # where the recipes have what the data command makes
            hint = "; make it with `sg-rlhf data`" if made else f" (in {Path.cwd()})"
            raise MissingFile(f"{key}={name}: no such file{hint}")
        return path
    if path.is_dir():
        if not any(path.iterdir()):
            raise ConfigError(f"{key}={name}: the folder is empty")
        return path
    if os.path.lexists(path):
        raise ConfigError(f"{key}={name}: expected a file that ends in {', '.join(SUFFIXES)}")
    if not model_folder.is_hub_id(given):
        raise MissingFile(f"{key}={name}: no such file or folder, and no id of a hub")
    return None


def _check_probabilities(config: Config) -> None:
    given = config.value("data.prompt_probs")
    if not given:
        return
    names = str(config.value("data.prompt_dataset")).split(",")
    try:
        shares = [float(share) for share in str(given).split(",")]
    except ValueError:
        shares = []
    fine = len(shares) == len(names) and all(0 <= share <= 1 for share in shares)
    if not fine or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise ConfigError(
            f"data.prompt_probs={given}: expected {len(names)} numbers that add up to 1, one for "
            "each of data.prompt_dataset"
        )


def _schema(config: Config) -> PromptSchema:
    template, chat = config.value("data.input_template"), config.value("data.apply_chat_template")
    if config.sg.chat_template_kwargs and not chat:
        raise ConfigError(
            f"data.chat_template_kwargs={config.sg.chat_template_kwargs}: no template is applied "
            "to the prompts; set data.apply_chat_template=true, or leave the key out"
        )
    if template and chat:
        raise ConfigError(
            "data.input_template: not used with data.apply_chat_template=true; set one of them"
        )
    if template:
        # What stands in the prompt's place must be there, and must not be taken apart.
        try:
            found = str(template).format("\0")
        except (LookupError, ValueError, AttributeError):
            found = ""
        if found.count("\0") != 1:
            raise ConfigError(f"data.input_template={template!r}: expected {{}} once, no other {{")
    graders = [domain.grade for domain in domains_of(config)]
    return PromptSchema(
        prompt=config.value("data.input_key"),
        label=config.value("data.label_key"),
        image=config.value("data.image_key"),
        chat=bool(chat),
        template=template or None,
        label_fault=lambda label: grade.label_fault(label, graders),
    )


def domains_of(config: Config) -> list[Domain]:
    """The domains whose grader reads a recipe's labels."""
    reward, agent = map(config.value, ("reward.remote_url", "train.agent_func_path"))
    try:
        return registry.used_by(str(reward or ""), str(agent or ""), config.sg.domains)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def token_counter(config: Config) -> Callable[[list[str]], list[int]] | None:
    """Texts -> tokens of each, by the model's tokenizer; None where its file is not here."""
    key = "actor.model_name_or_path"
    name = local_path(key, str(config.value(key) or ""))
    file: Any = Path(name) / "tokenizer.json"
    if not Path(name).is_dir() and model_folder.is_hub_id(name):
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, "tokenizer.json", revision=config.sg.model_revision)
    if not isinstance(file, (str, Path)) or not Path(file).is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library's own, a bare Exception
        raise ConfigError(f"{key}={name}: its tokenizer.json cannot be read: {error}") from None

    def count(texts: list[str]) -> list[int]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [len(one.ids) for one in encoded]

    return count


def count_prompts(config: Config) -> int | None:
    """Prompts of an epoch: rows of the local files, at most ``data.max_samples``.

    None if a file is not here or of another format, or if ``data.prompt_probs`` repeats files.
    """
    names = str(config.value("data.prompt_dataset") or "").split(",")
    counts = [_count_rows(Path(name.strip())) for name in names]
    if None in counts or config.value("data.prompt_probs"):
        return None
    return min(int(config.value("data.max_samples")), sum(filter(None, counts)))


def _count_rows(path: Path) -> int | None:
    """Rows of a local JSONL or Parquet file; None for any other name."""
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    if path.suffix == ".parquet" and path.is_file():
        from pyarrow import parquet

        return int(parquet.read_metadata(path).num_rows)
    return None
