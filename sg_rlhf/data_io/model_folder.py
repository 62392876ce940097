"""Check a Hugging Face model folder: is it complete, and does it bring its own code?

The files are checked before anything loads them. An incomplete model would fail minutes later in a
worker. A model's own code would run with the user's rights.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sg_rlhf.common.text import OneLineError, single_line

#: Files that may name a model's own code (`auto_map`), which transformers and vLLM would run.
_NAMING_CODE = (
    "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
    "generation_config.json", "video_preprocessor_config.json",
)  # fmt: skip
#: A tokenizer has at least one of these; transformers writes it as the tokenizer's last file.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_WEIGHTS = ("*.safetensors", "*.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
#: Values of ``ds.param_dtype`` -> their names in torch and vLLM.
PARAM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Keys of a mixture of experts in ``config.json``: the number of its experts.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
#: Marks a folder with LoRA adapters, which need their base model.
ADAPTER_CONFIG = "adapter_config.json"
#: Says where the model of a folder came from (`sg-rlhf data model`).
SOURCE = "source.json"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?").fullmatch


class ModelError(OneLineError):
    """A model that cannot be used; the message is one line for the user."""


class BringsCode(ModelError):
    """A model with its own code, which the user did not allow."""


def is_hub_id(name: str) -> bool:
    """Whether a name may be an id on the Hugging Face hub, such as ``Qwen/Qwen2.5-3B``."""
    return bool(_HUB_ID(name)) and ".." not in name and len(name) <= 96


def source(folder: Path) -> dict[str, Any]:
    """Where the model came from, as its folder's `source.json` has it; {} without such a file."""
    try:
        found = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def described(source: Mapping[str, Any]) -> str:
    """A folder's source in words; "" where it does not say."""
    if source.get("source") == "hub":
        return f"{source['model']} from the hub, commit {source['revision'][:12]}"
    if source.get("source") == "package":
        return (
            f"{source['model']} from the package {source['package']}, weights of {source['file']}"
        )
    return ""


def check(folder: Path, *, trusted: bool = False, tokenizer: bool = True) -> None:
    """Refuse a folder that is not a complete model, or has its own code without permission.

    Args:
        trusted: the user named the model, so its own code may run.
        tokenizer: whether the folder must have a tokenizer.

    Raises:
        BringsCode: it has its own code and is not trusted.
        ModelError: another fault. The message does not contain the folder's name.
    """
    _check_config(folder)
    if not trusted:
        named = code_of(folder)
        if named:
            raise BringsCode(
                f"{named[0]} names code of the model ({named[1]}), which runs only for models "
                "that you name"
            )
    _check_weights(folder)
    if tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"no tokenizer there, expected one of {', '.join(TOKENIZER_FILES)}")
    if tokenizer:
        _check_rows(folder)


def code_of(folder: Path) -> tuple[str, str] | None:
    """(file, name) of the first code that a model's folder names; None if there is none.

    Raises:
        ModelError: one of its files is not JSON.
    """
    for name in _NAMING_CODE:
        auto_map = json_object(folder / name).get("auto_map")
        if auto_map:
            first = next(iter(auto_map.values())) if isinstance(auto_map, dict) else auto_map
            return name, str(first[0] if isinstance(first, list) and first else first)[:80]
    return None


def merge_command(folder: Path) -> str | None:
    """The command that merges a folder of LoRA adapters with its model; None for a whole model."""
    adapters = folder / ADAPTER_CONFIG
    whole = ("model*.safetensors", "pytorch_model*.bin")
    if not adapters.is_file() or any(any(folder.glob(pattern)) for pattern in whole):
        return None
    return shlex.join(["sg-rlhf", "merge", str(folder)])


def merged_folder(folder: Path) -> Path:
    """The folder that :func:`merge_command` writes for a folder of adapters."""
    folder = folder if folder.name.strip(".") else folder.resolve()
    return folder.with_name(f"{folder.name}-merged")


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer; others may read the weights, which safetensors forbids."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    usual = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(usual)


def has_experts(folder: Path) -> bool:
    """Whether a model folder's ``config.json`` is that of a mixture of experts."""
    return any(json_object(folder / "config.json").get(key) for key in EXPERT_KEYS)


def _check_config(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError("no Hugging Face model folder there")
    if not json_object(folder / "config.json").get("model_type"):
        raise ModelError("config.json has no model_type, expected a Hugging Face model's")


def _check_rows(folder: Path) -> None:
    """Refuse a token without a row in the embedding, which ends in an IndexError in a worker.

    Special tokens that no text has are left out: Gemma 3 has one for images behind its last row.
    """
    config = json_object(folder / "config.json")
    text_config = config.get("text_config")
    rows = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    if not isinstance(rows, int):
        return
    tokenizer, settings = (
        json_object(folder / name) for name in ("tokenizer.json", "tokenizer_config.json")
    )
    names = [settings.get(f"{kind}_token") for kind in ("pad", "bos", "eos", "unk")]
    named = {name.get("content") if isinstance(name, dict) else name for name in names}
    added = [token for token in tokenizer.get("added_tokens") or [] if isinstance(token, dict)]
    ids = {t.get("content"): t.get("id") for t in added if not t.get("special")}
    ids |= {t.get("content"): t.get("id") for t in added if t.get("content") in named}
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        ids |= vocabulary
    without = [(n, token) for token, n in ids.items() if isinstance(n, int) and n >= rows]
    if without:
        last = max(n for n, _ in without)
        number, token = min(without)
        raise ModelError(
            f"the tokenizer's token {token!r} has the id {number}, but the embedding has {rows} "
            f"rows (vocab_size in config.json): call resize_token_embeddings({last + 1}) and save "
            "the model, or take the token out of the tokenizer"
        )


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file.

    Raises:
        ModelError: it is something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON: {single_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is no JSON object")
    return value


def _check_weights(folder: Path) -> None:
    shards: Sequence[Path] = []
    for name in _INDEXES:
        listed = json_object(folder / name).get("weight_map")
        if isinstance(listed, dict):
            shards = [folder / str(shard) for shard in sorted({*map(str, listed.values())})]
            break
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ModelError(f"{len(missing)} of {len(shards)} weight files are missing: {missing[0]}")
    files = shards or next((f for p in _WEIGHTS if (f := sorted(folder.glob(p)))), [])
    merge = merge_command(folder)
    if merge is not None:
        raise ModelError(f"LoRA adapters without their model; merge the two first: {merge}")
    if not files:
        raise ModelError("no .safetensors or .bin weights there")
    for path in files:
        if path.suffix == ".safetensors":
            check_whole(path)


def check_whole(path: Path) -> None:
    """Refuse a truncated safetensors file: its header says where the last tensor ends."""
    torn = ModelError(f"{path.name} is truncated or no safetensors file; download it again")
    try:
        size = os.path.getsize(path)
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > min(size, 100 * 2**20):
                raise torn
            header = json.loads(file.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name[0] != "_"]
    except (OSError, ValueError, struct.error, TypeError, KeyError, AttributeError, IndexError):
        raise torn from None
    if max(ends, default=0) + 8 + length != size:
        raise torn
