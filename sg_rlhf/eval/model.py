"""The evaluated model: its fingerprint, context and tokenizer."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from sg_rlhf.common import module_paths
from sg_rlhf.data_io import model_folder
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.eval.engines import vllm
from sg_rlhf.eval.engines.base import Model
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.questions import EvalError, one_line

# What decides a response; not the README, optimizer states or a trainer's notes.
_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "*.model",
)  # fmt: skip
_WEIGHTS = ("*.safetensors", "*.bin")


def _local(name: str) -> Path:
    """The path that a model's name is, if it is one."""
    try:
        return Path(module_paths.resolve(name))
    except ModuleNotFoundError:
        raise EvalError(f"--model {name}: no such module is installed") from None


def find_model(name: str, revision: str | None) -> Model:
    """Look a model up: a folder with a `config.json`, `module:NAME`, or an id on the hub."""
    folder = _local(name)
    if folder.is_dir():
        if revision is not None:
            raise EvalError(f"--revision {revision}: {name} is a folder, which has no revisions")
        return Model(name, str(folder.resolve()), None, fingerprint(folder))
    if "/" not in name or not model_folder.is_hub_id(name):
        raise EvalError(f"--model {name}: no such folder, and not a hub id such as Qwen/Qwen2.5-7B")
    commit = _hub_commit(name, revision)
    digest = hashlib.sha256(f"{name}@{commit}".encode()).hexdigest()
    return Model(name, name, commit, digest)


def with_merged_adapters(name: str, dtype: str | None) -> str:
    """The folder that the engine loads: for LoRA adapters a merged copy in this dtype."""
    folder = _local(name)
    try:
        if model_folder.merge_command(folder) is None:
            return name
        from sg_rlhf.data_io.merge_adapters import merged_copy

        return str(merged_copy(folder, dtype))
    except model_folder.ModelError as error:
        raise EvalError(f"--model {name}: {error}") from None


def fingerprint(folder: Path) -> str:
    """SHA-256 over the contents of configuration, tokenizer and weights."""
    if not (folder / "config.json").is_file():
        raise EvalError(f"--model {folder}: no config.json there, expected a Hugging Face model")
    weights = next((found for p in _WEIGHTS if (found := sorted(folder.glob(p)))), None)
    if weights is None:
        raise EvalError(f"--model {folder}: no .safetensors or .bin weights there")
    small = {path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}
    paths = sorted(small | set(weights), key=lambda path: path.name)
    # Hashing releases the interpreter's lock: the shards of a large model are read side by side.
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(sha256_of, paths))
    listing = [[path.name, digest] for path, digest in zip(paths, hashes, strict=True)]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def _load(loader: Any, what: str, model: Model) -> Any:
    """Load a part of a model by transformers' class for it."""
    try:
        return loader.from_pretrained(
            model.location, revision=model.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise EvalError(
            f"--model {model.name}: its {what} cannot be read: {one_line(error)}"
        ) from None


def load_tokenizer(model: Model) -> Any:
    from transformers import AutoTokenizer

    try:
        if model.revision is None and Path(model.location).is_dir():
            model_folder.check(Path(model.location))
    except model_folder.ModelError as error:
        raise EvalError(f"--model {model.name}: {error}") from None
    return _load(AutoTokenizer, "tokenizer", model)


def context_length(model: Model) -> int:
    """Most tokens of prompt and response together."""
    from transformers import AutoConfig

    config = _load(AutoConfig, "config.json", model)
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise EvalError(f"--model {model.name}: config.json has no max_position_embeddings")
    return length


def _hub_commit(name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE:
        # In the cache a file lies in the folder of its commit.
        found = try_to_load_from_cache(name, "config.json", revision=revision or "main")
        if isinstance(found, str):
            return Path(found).parent.name
        wanted = f"{name}@{revision}" if revision else name
        raise EvalError(
            f"--model {wanted}: neither a folder nor in the hub's cache, and HF_HUB_OFFLINE is set"
        )
    try:
        return str(HfApi().model_info(name, revision=revision).sha)
    # ImportError: the environment names a SOCKS proxy, and socksio is not installed.
    except (HfHubHTTPError, HFValidationError, OSError, ImportError) as error:
        raise EvalError(
            f"--model {name}: not a folder, and the hub says: {one_line(error)}"
        ) from None


def cpu_only() -> bool:
    """Whether there is no CUDA device; asks torch if neither `SG_PLATFORM` nor its build says."""
    if os.environ.get("SG_PLATFORM"):
        return os.environ["SG_PLATFORM"] == "cpu"
    # torch reads OMP_NUM_THREADS when it is imported, which is to be set before.
    if metadata.version("torch").endswith("+cpu"):
        return True
    # By the driver's library: torch would initialise CUDA, and a process that vLLM then forks for
    # its engine could not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return not torch.cuda.is_available()


@dataclass(frozen=True)
class ModelHandle:
    """The model with its tokenizer and context.

    Attributes:
        context: most tokens of prompt and response; None if a server does not tell.
        tokenizer: None for a model that only a server knows.
        dtype: of the weights, as the engine gets it.
        cpu: there is no CUDA device.
        server: of `--engine openai`.
    """

    model: Model
    context: int | None
    tokenizer: Any
    dtype: str = "auto"
    cpu: bool = False
    server: Any = None

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts; empty if the server does not tell."""
        if self.tokenizer is not None:
            return chat.encode(prompts, self.tokenizer)
        found: list[list[int]] = self.server.tokenize(prompts)
        return found


def open_model(args: argparse.Namespace, name: str) -> ModelHandle:
    """Find the model and load its tokenizer, or ask the server for it."""
    if args.engine == "openai":
        return open_server(args, name)
    cpu = cpu_only()
    dtype = "float32" if cpu and args.dtype == "auto" else args.dtype
    loaded = with_merged_adapters(name, None if dtype == "auto" else dtype)
    model = replace(find_model(loaded, args.revision), name=name)
    vllm.set_environment(cpu)
    tokenizer = load_tokenizer(model)
    set_template_arguments(tokenizer, args.chat_template_kwargs)
    return ModelHandle(model, context_length(model), tokenizer, dtype, cpu)


def open_server(args: argparse.Namespace, name: str) -> ModelHandle:
    """The server of `--base-url`; if it is vLLM, with its model's tokenizer where found here."""
    from sg_rlhf.eval.engines.server import ServerEngine

    # A server does not show its weights: a local folder is fingerprinted, a name stands for itself.
    local = (Path(name) / "config.json").is_file()
    if local:
        model = find_model(name, None)
    else:
        model = Model(name, name, None, hashlib.sha256(f"served {name}".encode()).hexdigest())
    server = ServerEngine(
        args.base_url,
        model.name,
        model.location,
        args.concurrency,
        chat=args.chat_template,
        system_prompt=args.system_prompt,
        chat_template_kwargs=args.chat_template_kwargs,
    )
    if server.context is None:
        print("notice: the server does not tell its context; nothing is cut", flush=True)
    tokenizer = None
    if server.is_vllm and not args.chat_template:
        location = model.location if local else server.root
        with contextlib.suppress(EvalError):
            tokenizer = load_tokenizer(Model(name, location, None, ""))
    if tokenizer is not None:
        set_template_arguments(tokenizer, args.chat_template_kwargs)
    return ModelHandle(model, server.context, tokenizer, server=server)


def set_template_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Let the chat template get these arguments."""
    if not arguments:
        return
    try:
        tokenizer.apply_chat_template = chat.template_with(tokenizer, arguments)
    except ValueError as error:
        raise EvalError(f"--chat-template-kwargs: {error}") from None
