"""Texts to unit vectors with a transformer encoder.

Pooling and prompts are those of the model's sentence-transformers files. A model without these
files is treated as E5 (arXiv 2212.03533): `query: ` or `passage: ` before the text, and the mean of
the last hidden states over the attention mask. The name of a folder decides nothing.
Vectors are L2-normalised, so an inner product is a cosine.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import cached_file

from sg_rlhf.data_io import model_folder
from sg_rlhf.data_io.dataset_writer import sha256_of

#: `--prompts`, for a model whose files name none.
PROMPTS = {
    "e5": {"query": "query: ", "passage": "passage: "},
    "none": {"query": "", "passage": ""},
}
#: An id of the hub: E5's own files do not name the prompts that its card asks for.
_E5_ID = re.compile(r"[^/]+/(?:.*[^a-z])?e5(?:[^a-z0-9].*)?", re.IGNORECASE).fullmatch
Kind = Literal["query", "passage"]
#: Texts are padded to a multiple of this many tokens and never to a neighbour's length: then a
#: vector is the same, bit for bit on a CPU, whether its text is encoded alone or in a batch.
BUCKET = {"cpu": 4, "cuda": 16}
#: Tokens of the shortest row: with AVX-512 rows of 4 tokens have other last bits in a large batch.
SHORTEST = 8
#: Texts in one forward pass.
BATCH = {"cpu": 64, "cuda": 256}
#: Numbers that the encoder computes with. `auto`: fp16 on a GPU, as Search-R1's; fp32 on a CPU.
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Encoder:
    """A transformer encoder and its tokenizer; ValueError without such a model or device.

    Args:
        name: a Hugging Face model id, or a folder.
        max_length: tokens per text, prompt and special tokens included; the rest is cut off.
        dtype: a key of `DTYPES`, or `auto`.
        prompts: of both kinds of text, or a key of `PROMPTS` for a model whose files name none.
    """

    def __init__(
        self,
        name: str,
        revision: str | None = None,
        max_length: int = 256,
        device: str | None = None,
        dtype: str = "auto",
        prompts: Mapping[str, str] | str | None = None,
    ) -> None:
        self.device = torch_device(
            "--device", device or ("cuda" if torch.cuda.is_available() else "cpu")
        )
        if dtype == "auto":
            dtype = "fp16" if self.device.type == "cuda" else "fp32"
        self.name, self.dtype, self.max_length = name, dtype, max_length
        try:
            if Path(name).is_dir():
                model_folder.check(Path(name))
            self.prompts, self._pooling = _conventions(name, revision, prompts)
            self._tokenizer = AutoTokenizer.from_pretrained(
                name, revision=revision, trust_remote_code=False, padding_side="right"
            )
            model = AutoModel.from_pretrained(
                name, revision=revision, dtype=DTYPES[dtype], trust_remote_code=False
            )
        except Exception as error:
            # Tokenizers, safetensors and transformers have errors of their own for damaged files.
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(
                f"--encoder {name}: {reason} (expected bm25, a model folder or a model id)"
            ) from None
        limit = getattr(model.config, "max_position_embeddings", max_length)
        if max_length > limit:
            raise ValueError(f"--max-length {max_length}: {name} reads at most {limit} tokens")
        self._model = model.to(self.device).eval()
        self.dimension = int(model.config.hidden_size)
        self.identity: dict[str, Any] = {
            **_identity(name, getattr(model.config, "_commit_hash", None)),
            "max_length": max_length,
            "prompts": dict(self.prompts),
        }

    def encode(self, texts: Sequence[str], kind: Kind, batch_size: int | None = None) -> np.ndarray:
        """Unit vectors, float32 [texts, dimension], in the order of `texts`."""
        if not texts:
            return np.empty((0, self.dimension), np.float32)
        tokens: Mapping[str, list[list[int]]] = self._tokenizer(
            [self.prompts[kind] + text for text in texts],
            truncation=True,
            max_length=self.max_length,
        )
        buckets: dict[int, list[int]] = defaultdict(list)
        multiple = BUCKET[self.device.type]
        for row, ids in enumerate(tokens["input_ids"]):
            padded = max(-(-len(ids) // multiple) * multiple, SHORTEST)
            buckets[min(padded, self.max_length)].append(row)
        size = batch_size or BATCH[self.device.type]
        order: list[int] = []
        parts: list[torch.Tensor] = []
        for length, rows in buckets.items():
            for start in range(0, len(rows), size):
                some = rows[start : start + size]
                batch = self._tokenizer.pad(
                    {name: [values[row] for row in some] for name, values in tokens.items()},
                    padding="max_length",
                    max_length=length,
                    return_tensors="pt",
                )
                # Left on the device, so that a GPU computes while the next batch is padded.
                parts.append(self._forward(batch.to(self.device)))
                order += some
        vectors = np.empty((len(order), self.dimension), np.float32)
        vectors[order] = torch.cat(parts).cpu().numpy()
        return vectors

    @torch.inference_mode()
    def _forward(self, batch: Any) -> torch.Tensor:
        hidden_BLD = self._model(**batch).last_hidden_state.float()
        mask_BL1 = batch["attention_mask"][..., None].float()
        if self._pooling == "mean":
            pooled_BD = (hidden_BLD * mask_BL1).sum(dim=1) / mask_BL1.sum(dim=1)
        elif self._pooling == "cls":
            pooled_BD = hidden_BLD[:, 0]
        else:
            last_B = batch["attention_mask"].sum(dim=1) - 1
            pooled_BD = hidden_BLD[torch.arange(len(last_B), device=last_B.device), last_B]
        return torch.nn.functional.normalize(pooled_BD, dim=-1)


def _conventions(
    name: str, revision: str | None, given: Mapping[str, str] | str | None
) -> tuple[Mapping[str, str], str]:
    """The prompt of each kind of text, and the pooling; ValueError for modules of other kinds."""
    modules = _card(name, revision, "modules.json")
    if modules is None:
        return (given if isinstance(given, Mapping) else PROMPTS[given or "e5"]), "mean"
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    pooling = _card(name, revision, "1_Pooling/config.json") or {}
    # Until version 5 of sentence-transformers one flag per pooling, then a name.
    flags = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    modes = [mode for mode, flag in flags.items() if pooling.get(f"pooling_mode_{flag}")]
    modes = modes or [str(pooling.get("pooling_mode"))]
    if set(kinds) - {"Transformer", "Pooling", "Normalize"} or modes not in [[f] for f in flags]:
        raise ValueError(f"modules {', '.join(kinds)} with pooling {modes} are not supported")
    if isinstance(given, Mapping):
        return given, modes[0]
    prompts = (_card(name, revision, "config_sentence_transformers.json") or {}).get("prompts")
    if prompts:
        passage = prompts.get("document", prompts.get("passage", ""))
        return {"query": prompts.get("query", ""), "passage": passage}, modes[0]
    if given is None and not Path(name).is_dir() and _E5_ID(name):
        given = "e5"
    if given is None:
        notice = f"notice: the files of encoder {name} name no prompts: none are used "
        print(notice + "(--prompts e5 puts E5's before the texts)", file=sys.stderr, flush=True)
    return PROMPTS[given or "none"], modes[0]


def _card(name: str, revision: str | None, file: str) -> Any:
    """A JSON file of a model; None if the model has no such file."""
    found = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))


def torch_device(flag: str, name: str) -> torch.device:
    """The CPU or GPU of this name; ValueError, which names the flag, without one."""
    gpus = torch.cuda.device_count()
    known = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{number}" for number in range(gpus))]
    if name not in known:
        raise ValueError(f"{flag} {name}: torch has {', '.join(known)} here")
    return torch.device(name)


def _identity(name: str, commit: str | None) -> dict[str, str]:
    """The identity of this encoder: its commit, or a fingerprint of its files."""
    if not Path(name).is_dir():
        return {"model": name, "revision": commit or "unknown"}
    digest = hashlib.sha256()
    for path in sorted(Path(name).iterdir()):
        # Weights, tokenizer and configuration; a README or another folder does not count.
        if path.is_file() and path.suffix in {".json", ".txt", ".model", ".safetensors", ".bin"}:
            digest.update(f"{path.name}\0".encode())
            digest.update(bytes.fromhex(sha256_of(path)))
    return {"model": Path(name).resolve().name, "fingerprint": digest.hexdigest()}
