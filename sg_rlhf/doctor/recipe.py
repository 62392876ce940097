"""What one recipe needs of the machine: out of its keys, and out of its memory plan.

Needs the recipe's packages (pydantic, omegaconf) and Python 3.11.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sg_rlhf.config import Config, local_path
from sg_rlhf.doctor.needs import Needs, compiled_with_nvcc
from sg_rlhf.plan.shapes import ModelShape, shape_of

_FILES = {".json", ".jsonl", ".parquet", ".csv"}


def needs_of(config: Config, *, cpu: bool | None = None) -> Needs:
    """The needs of a recipe.

    Args:
        cpu: whether it will run without GPUs; by default what the recipe is for.

    Raises:
        ConfigError: the model is a module that is not installed.
        ValueError: the model's ``config.json`` is unreadable or of another kind of model.
    """
    value = config.value
    model = local_path("actor.model_name_or_path", str(value("actor.model_name_or_path") or ""))
    shape = shape_of(model) if model else None
    without = value("vllm.sync_backend") == "gloo" if cpu is None else cpu
    return Needs(
        gpus=0 if without else gpus_per_node(config),
        nodes=value("actor.num_nodes"),
        recipe=True,
        nvcc_for="" if without else compiled_with_nvcc(bool(value("ds.adam_offload"))),
        model=model,
        gated=bool(shape and shape.gated),
        model_gb=_download_gb(shape),
        data=tuple(data_files(config)),
        retriever=_retriever(config),
    )


def gpus_per_node(config: Config) -> int:
    """GPUs that the recipe takes of each node: of all models and engines, or of those that share."""
    value = config.value
    actor = value("actor.num_gpus_per_node")
    if value("train.colocate_all"):
        return int(actor)
    apart = value("algo.kl.init_coef") > 0 and not value("train.colocate_actor_ref")
    reference = value("ref.num_nodes") * value("ref.num_gpus_per_node") if apart else 0
    engines = (value("vllm.num_engines") or 0) * value("vllm.tensor_parallel_size")
    return int(actor - (-(reference + engines) // value("actor.num_nodes")))


def _download_gb(shape: ModelShape | None) -> float | None:
    return None if shape is None else 2 * shape.parameters / 1e9  # bf16


def data_files(config: Config) -> list[str]:
    """Local files that the recipe names; others are ids of the hub."""
    named = [config.value("data.prompt_dataset"), config.value("eval.dataset")]
    named += [one.dataset for one in config.sg.eval_sets]
    names = [name.strip() for given in named for name in str(given or "").split(",")]
    return list(dict.fromkeys(name for name in names if Path(name).suffix in _FILES))


def _retriever(config: Config) -> str:
    if not config.value("train.agent_func_path"):
        return ""
    found: list[Any] = [getattr(s, "url", "") for s in config.sg.domains.values()]
    return next((str(url) for url in found if url), "")
