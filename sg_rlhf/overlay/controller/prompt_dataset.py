"""The prompts of a run, checked for the model that will read them."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf.datasets import PromptDataset as Upstream
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from sg_rlhf.data_io import prompt_validation
from sg_rlhf.data_io.prompt_rows import SUFFIXES, PromptSchema, table_rows
from sg_rlhf.data_io.prompt_validation import checked, max_prompt_tokens, too_long
from sg_rlhf.data_io.records import DataError
from sg_rlhf.overlay.checkpoints.strategy import Strategy
from sg_rlhf.overlay.reporting.errors import UnusablePrompts
from sg_rlhf.tasks import chat


class PromptRows(list[tuple[str, Any]]):
    """Location and fields of each checked prompt; ``error`` if they cannot be used."""

    error: str | None = None

    def select(self, rows: Iterable[int]) -> PromptRows:
        """The rows of these numbers, from 0."""
        chosen = PromptRows(self[row] for row in rows)
        chosen.error = self.error
        return chosen


def training_loader(strategy: Strategy, tokenizer: PreTrainedTokenizerBase) -> StatefulDataLoader:
    """The shuffled prompts of ``data.prompt_dataset``, one at a time."""
    data, seed = strategy.args.data, strategy.args.train.seed
    rows = read_prompts(
        data.prompt_dataset,
        data.prompt_probs,
        strategy,
        seed,
        max_count=data.max_samples,
        dataset_split=data.prompt_split,
    )
    return loader(rows, data.max_samples, strategy, tokenizer, shuffle=True)


def loader(
    rows: PromptRows,
    limit: int | None,
    strategy: Strategy,
    tokenizer: PreTrainedTokenizerBase,
    *,
    shuffle: bool = False,
) -> StatefulDataLoader:
    """The first ``limit`` of the rows as a data loader that yields one prompt at a time."""
    data = strategy.args.data
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    prompts = PromptDataset(rows, tokenizer, strategy, input_template=data.input_template)
    return strategy.setup_dataloader(
        prompts, 1, True, shuffle, prompts.collate_fn, num_workers=data.dataloader_num_workers
    )


def read_prompts(
    names: str,
    probabilities: str | None,
    strategy: Strategy,
    seed: int = 42,
    max_count: int | None = None,
    dataset_split: str = "train",
) -> PromptRows:
    """Read and check prompts as the check before the run does, in the order of upstream."""
    fields = _schema(strategy.args.data)
    try:
        sets = [
            list(itertools.islice(_read(name.strip(), dataset_split, fields, strategy), max_count))
            for name in names.split(",")
        ]
    except DataError as error:
        failed = PromptRows()
        failed.error = str(error)
        return failed
    if probabilities is None:
        return PromptRows(itertools.chain(*sets))
    from datasets import Dataset, interleave_datasets

    places = [
        Dataset.from_dict({"set": [number] * len(rows), "row": range(len(rows))})
        for number, rows in enumerate(sets)
    ]
    shares = [float(share) for share in probabilities.split(",")]
    drawn = interleave_datasets(places, shares, seed=seed, stopping_strategy="all_exhausted")
    return PromptRows(sets[place["set"]][place["row"]] for place in drawn)


def _read(
    name: str, split: str, fields: PromptSchema, strategy: Strategy
) -> Iterator[tuple[str, Any]]:
    path = Path(name.partition("@")[0])
    if not getattr(strategy.args, "use_ms", False) or path.suffix in SUFFIXES or path.is_dir():
        return prompt_validation.read_prompts(name, split, fields)
    from openrlhf.datasets.utils import blending_datasets  # reads ModelScope

    data = blending_datasets(name, None, strategy, dataset_split=split)
    numbered = enumerate(table_rows(data, fields), start=1)
    return checked(((f"{name}: row {number}", row) for number, row in numbered), fields)


def _schema(data: Namespace) -> PromptSchema:
    return PromptSchema(data.input_key, data.label_key, data.image_key, data.apply_chat_template)


class PromptDataset(Upstream):  # type: ignore[misc]  # upstream has no types
    """Upstream's data set with checks of its prompts, and with the BOS that the model expects.

    Upstream encodes prompts without special tokens, and another model's template as plain text.
    """

    prompts: list[str]

    def __init__(
        self,
        dataset: PromptRows,
        tokenizer: PreTrainedTokenizerBase,
        strategy: Strategy,
        **kwargs: Any,
    ):
        """Read as upstream does. The error of a row is kept for :meth:`check`."""
        self._args = strategy.args
        fields = _schema(self._args.data)
        self._row_error = dataset.error
        templated = tokenizer
        if self._args.sg.chat_template_kwargs:
            try:
                apply = chat.template_with(tokenizer, self._args.sg.chat_template_kwargs)
                templated = SimpleNamespace(apply_chat_template=apply)
            except ValueError as error:
                self._row_error = f"data.chat_template_kwargs: {error}"
        if self._row_error is not None:
            # Upstream reads a placeholder, so that the run gets as far as `check`.
            rows = [{fields.prompt: "-", fields.label or "": "-"}]
        else:
            rows = [row for _, row in dataset]
        super().__init__(rows, templated, strategy, **kwargs)
        self.tokenizer = tokenizer
        # A processor of images has a tokenizer inside.
        self._text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.prompts = chat.with_bos(self.prompts, self._text_tokenizer)
        self._places = [place for place, _ in dataset]

    def check(self) -> None:
        """Refuse incomplete rows, prompts of another template, and prompts that are too long.

        Not part of ``__init__``: Ray loses the cause of an actor's failed start.
        """
        if self._row_error is not None:
            raise UnusablePrompts(self._row_error)
        try:
            for prompt in self.prompts[:1]:  # one template made them all
                chat.check_format(prompt, self._text_tokenizer)
        except ValueError as error:
            raise UnusablePrompts(str(error)) from None
        if not self._counted_before():
            self._check_lengths()

    def _counted_before(self) -> bool:
        """Whether the driver counted the tokens, as it does for local files."""
        data = self._args.data
        names = [name.strip().partition("@")[0] for name in data.prompt_dataset.split(",")]
        return not data.apply_chat_template and all(Path(n).suffix in SUFFIXES for n in names)

    def _check_lengths(self) -> None:
        limits = self._args.data.max_len, self._args.rollout.max_new_tokens
        max_tokens = max_prompt_tokens(*limits)
        # A text has no more tokens than bytes, so only long texts are encoded.
        rows = [row for row, text in enumerate(self.prompts, 1) if len(text.encode()) > max_tokens]
        refused = []  # (tokens, row)
        for start in range(0, len(rows), 4096):
            chunk = rows[start : start + 4096]
            texts = [self.prompts[row - 1] for row in chunk]
            encoded = self._text_tokenizer(texts, add_special_tokens=False)["input_ids"]
            lengths = zip(map(len, encoded), chunk, strict=True)
            refused += [(tokens, row) for tokens, row in lengths if tokens > max_tokens]
        if refused:
            tokens, row = max(refused)
            why = too_long(tokens, len(refused), *limits)
            raise UnusablePrompts(f"{self._places[row - 1]}: {why}")
