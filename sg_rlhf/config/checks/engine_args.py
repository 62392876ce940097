"""``vllm.engine_args``: vLLM's own arguments, checked by their names in vLLM's source."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KEY = "vllm.engine_args"
#: Arguments that the trainer sets -> the key to use instead; "" if there is none.
OF_THE_TRAINER = {
    "model": "actor.model_name_or_path", "tokenizer": "actor.model_name_or_path",
    "revision": "sg.model_revision", "code_revision": "sg.model_revision",
    "tokenizer_revision": "sg.model_revision", "trust_remote_code": "sg.trust_remote_code",
    "dtype": "ds.param_dtype", "seed": "train.seed", "max_model_len": "data.max_len",
    "enforce_eager": "vllm.enforce_eager", "enable_prefix_caching": "vllm.enable_prefix_caching",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "enable_sleep_mode": "vllm.enable_sleep", "tensor_parallel_size": "vllm.tensor_parallel_size",
    "data_parallel_size": "vllm.num_engines",
    **dict.fromkeys((
        "distributed_executor_backend", "worker_extension_cls", "worker_cls", "hf_overrides",
        "tokenizer_mode", "config_format", "load_format", "logprobs_mode", "max_logprobs",
        "disable_log_stats", "skip_tokenizer_init",
    ), ""),
}  # fmt: skip


@functools.cache
def names() -> frozenset[str]:
    """The arguments of vLLM's asynchronous engine, read without an import; empty without vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(next(iter(spec.submodule_search_locations))) / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(source.read_text())
    except (OSError, SyntaxError):
        return frozenset()
    classes = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    ]
    return frozenset(
        field.target.id
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def check_engine_args(value: Callable[[str], Any]) -> None:
    """Refuse arguments that vLLM does not have, and those that the trainer sets."""
    given: Mapping[str, Any] = value("sg.engine_args")
    for name, argument in given.items():
        key = OF_THE_TRAINER.get(name)
        if key is not None:
            remedy = f"set {key}" if key else "leave it out"
            raise ValueError(f"{KEY}: {name} is set by the trainer; {remedy}")
        if names() and name not in names():
            near = difflib.get_close_matches(name, names(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "; `vllm serve --help` lists them"
            raise ValueError(f"{KEY}: {name} is no argument of vLLM's engine{hint}")
        try:
            json.dumps(argument)
        except (TypeError, ValueError):
            raise ValueError(
                f"{KEY}: {name}={argument!r}: expected text, a number, true, false, a list or "
                "names and values"
            ) from None
