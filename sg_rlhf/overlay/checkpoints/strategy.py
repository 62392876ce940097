"""Upstream's DeepSpeed strategy with our optimizer, checkpoints and model folders."""

from __future__ import annotations

import functools
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from openrlhf.models import Actor
from openrlhf.utils.deepspeed import DeepspeedStrategy
from transformers import PreTrainedTokenizerBase

from sg_rlhf.overlay.checkpoints import store
from sg_rlhf.overlay.cpu import platform
from sg_rlhf.overlay.model import adam, leaf_layers


class Strategy(DeepspeedStrategy):  # type: ignore[misc]  # upstream has no types
    """Sets up the ranks of a model and its DeepSpeed engine; saves and loads by :mod:`.store`."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(
            seed=args.train.seed,
            full_determinism=args.train.full_determinism_enable,
            max_norm=1.0,
            micro_train_batch_size=args.train.micro_batch_size,
            train_batch_size=args.train.batch_size,
            zero_stage=args.ds.zero_stage,
            args=args,
        )

    def setup_distributed(self, timeout: timedelta | None = None) -> None:
        """Join the ranks' group. One waits ``sg.collective_timeout`` for the others, then stops."""
        super().setup_distributed(timeout or timedelta(seconds=self.args.sg.collective_timeout))

    def prepare(self, *models: Any) -> Any:
        """Give the models to DeepSpeed. ZeRO-3 on GPUs takes a decoder layer as one module."""
        if not platform.is_cpu():
            leaf_layers.mark_models(self.stage, models)
        return super().prepare(*models)

    def get_ds_train_config(
        self, optim_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """DeepSpeed's settings, with torch's Adam."""
        config: dict[str, Any] = super().get_ds_train_config(adam.by_torch(optim_dict), **kwargs)
        return config

    def save_ckpt(self, *args: Any, **kwargs: Any) -> None:
        """See :func:`.store.save`."""
        store.save(self, *args, **kwargs)

    def load_ckpt(
        self, model: DeepSpeedEngine, load_dir: str, tag: str | None = None, **kwargs: Any
    ) -> Any:
        """See :func:`.store.load_newest_intact`."""
        return store.load_newest_intact(super().load_ckpt, model, load_dir, tag, **kwargs)

    def save_model(
        self,
        model: Actor,
        tokenizer: PreTrainedTokenizerBase,
        output_dir: str | Path,
        **kwargs: Any,
    ) -> None:
        """See :func:`.store.save_model`."""
        write = functools.partial(super().save_model, model, tokenizer, **kwargs)
        store.save_model(write, Path(output_dir), self.is_rank_0())
