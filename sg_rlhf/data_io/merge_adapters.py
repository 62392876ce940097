"""Merge LoRA adapters with their base model into a Hugging Face folder: ``sg-rlhf merge``.

The sum of base and adapters is computed in float32 and rounded once, to the dtype of --dtype. The
command prints how far training moved the weights and how far the rounding moved them. In bfloat16
the rounding can undo most of a short or careful training; --dtype float32 keeps all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sg_rlhf.common import module_paths, resources
from sg_rlhf.common.argument_types import OneLineParser, path
from sg_rlhf.common.atomic_io import disk_full_context
from sg_rlhf.common.text import format_bytes, single_line
from sg_rlhf.data_io import model_folder
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.model_folder import ADAPTER_CONFIG, PARAM_DTYPES, ModelError
from sg_rlhf.data_io.run_config import run_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

DTYPES = tuple(PARAM_DTYPES.values())
#: What a merged folder was made from, and the figures.
RECORD = "merge.json"
#: Share of the training that the rounding may move before a notice is printed.
_NOTICE = 0.1

EXAMPLES = """\
examples:
  beside the run's adapters, in checkpoints/final-merged
    sg-rlhf merge runs/lora/checkpoints/final
  all of the training, in twice the space
    sg-rlhf merge runs/lora/checkpoints/final --dtype float32 --out out/merged
"""


class Figures(NamedTuple):
    """How far the adapted weights moved, as shares of their norm.

    Attributes:
        training: norm of what the adapters add.
        rounding: norm of the difference between the saved weights and the float32 sum.
        undone: share of the weights that training changed and rounding set back to the base's.
    """

    training: float
    rounding: float
    undone: float

    def line(self, dtype: str) -> str:
        """The figures, for people."""
        text = (
            f"training moved the adapted weights by {self.training:.2e} of their norm; rounding to "
            f"{dtype} moved them by {self.rounding:.2e}, and {self.undone:.1%} of the changed "
            "weights are the base's again"
        )
        if self.rounding > _NOTICE * self.training:
            text += "\nnotice: the rounding hides part of the training; --dtype float32 keeps it"
        return text


def merge(folder: Path, out: Path, base: str | None = None, dtype: str | None = None) -> Figures:
    """Write the merged model to ``out``, or nothing.

    Args:
        folder: the adapters, as a run saves them.
        out: a folder that does not exist yet.
        base: folder, hub id or ``module:NAME``; default: the model that the adapters name.
        dtype: of the saved weights, one of `DTYPES`; default: the run's ``ds.param_dtype``, and
            the base's own for adapters of no run.

    Raises:
        ModelError: one of the two is no such model, they do not fit each other, or ``out`` exists.
        OSError: the disk is full or refuses.
    """
    settings = _settings(folder)
    if out.exists():
        raise ModelError(f"{out} exists; delete it, or give another --out")
    base = _base(settings, base)
    run_dtype = _run_dtype(folder)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    with _one_line(base):
        model = _load(base, run_dtype, settings)
        saved = dtype or run_dtype or str(model.dtype).removeprefix("torch.")
        model.float()
    has_tokenizer = any((folder / name).is_file() for name in model_folder.TOKENIZER_FILES)
    with _one_line(str(folder)):
        tokenizer = AutoTokenizer.from_pretrained(
            folder if has_tokenizer else base, trust_remote_code=False
        )
        merged, figures = _merged(model, folder, saved)
    record = {**_made_from(folder, base, saved), **figures._asdict()}
    out.parent.mkdir(parents=True, exist_ok=True)
    written = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with disk_full_context(out):
            model_folder.save(merged, tokenizer, written)
            (written / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            written.rename(out)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return figures


def merged_copy(folder: Path, dtype: str | None) -> Path:
    """The merged model beside a folder of adapters; it is made unless it is there already.

    Args:
        dtype: as for `merge`; by default that of an earlier merged model is kept.

    Raises:
        ModelError: as `merge`, or the folder's name is taken by something else.
        OSError: the disk is full or refuses.
    """
    base = _base(_settings(folder), None)
    out = model_folder.merged_folder(folder)
    if dtype not in (None, _run_dtype(folder)):
        out = out.with_name(f"{out.name}-{dtype}")
    if out.exists():
        print(f"LoRA adapters: evaluating {out}, where they are merged with their base", flush=True)
    else:
        print(f"LoRA adapters: merging them with {base} into {out}", flush=True)
        merge(folder, out, dtype=dtype)
    record = model_folder.json_object(out / RECORD)
    saved = record.get("dtype")
    if saved != (dtype or saved) or not _made_from(folder, base, saved).items() <= record.items():
        raise ModelError(f"{out} is no merged model of these adapters; delete it, then repeat")
    print(Figures(*(record[name] for name in Figures._fields)).line(str(saved)), flush=True)
    return out


def _settings(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    settings = model_folder.json_object(folder / ADAPTER_CONFIG)
    if not settings:
        raise ModelError(f"{folder}: no {ADAPTER_CONFIG} there, expected a folder of LoRA adapters")
    if settings.get("peft_type") != "LORA":
        raise ModelError(
            f"{folder}: {ADAPTER_CONFIG}: peft_type={settings.get('peft_type')}: expected LORA"
        )
    if not _weights(folder):
        raise ModelError(f"{folder}: no adapter_model.safetensors or adapter_model.bin there")
    for file in folder.glob("adapter_model.safetensors"):
        model_folder.check_whole(file)
    return settings


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("adapter_model.*"))


def _base(settings: dict[str, Any], base: str | None) -> str:
    name = base or settings.get("base_model_name_or_path")
    if not name:
        raise ModelError(f"{ADAPTER_CONFIG} names no base model; give it with --base")
    try:
        name = module_paths.resolve(str(name))
    except ModuleNotFoundError:
        raise ModelError(f"--base {name}: no such module is installed") from None
    if Path(name).is_dir():
        try:
            model_folder.check(Path(name), tokenizer=False)
        except ModelError as error:
            raise ModelError(f"--base {name}: {error}") from None
    elif not model_folder.is_hub_id(name):
        raise ModelError(f"--base {name}: no such folder; give the adapters' base model")
    return name


def _run_dtype(folder: Path) -> str | None:
    """The dtype of the run that a checkpoint is of; None for adapters of no run."""
    run = run_of(folder)
    return None if run is None else PARAM_DTYPES.get(str(run.get("ds.param_dtype")))


def _load(base: str, dtype: str | None, settings: dict[str, Any]) -> Any:
    """The base in the dtype in which the adapters were trained on it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    revision = settings.get("revision") if not Path(base).is_dir() else None
    config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=False)
    with torch.device("meta"):
        needed = 4 * AutoModelForCausalLM.from_config(config).num_parameters()
    if needed > (usable := resources.usable_memory()):
        raise ModelError(
            f"--base {base}: merging in float32 takes {format_bytes(needed)} of memory, "
            f"{format_bytes(usable)} are usable"
        )
    return AutoModelForCausalLM.from_pretrained(
        base, revision=revision, dtype=dtype or "auto", trust_remote_code=False
    )


def _merged(model: Any, folder: Path, dtype: str) -> tuple[Any, Figures]:
    """The merged model in ``dtype``, and how far its adapted weights moved."""
    import torch
    from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

    config = PeftConfig.from_pretrained(str(folder))
    config.base_model_name_or_path = None  # only for a warning about another name of the base
    adapted = get_peft_model(model, config).float()
    weights = load_peft_weights(str(folder), device="cpu")
    loaded: Any = set_peft_model_state_dict(adapted, weights)
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    if missing or loaded.unexpected_keys:
        which = "has none for" if missing else "has adapters for unknown"
        name = (missing or loaded.unexpected_keys)[0]
        raise ModelError(f"{folder}: does not fit the base model: it {which} {name}")
    to, sums = getattr(torch, dtype), dict.fromkeys(("norm", "moved", "rounded"), 0.0)
    changed = undone = 0
    for layer in (module for module in adapted.modules() if isinstance(module, LoraLayer)):
        base: Any = layer.get_base_layer()
        before = base.weight.detach().clone()
        layer.merge(safe_merge=True)
        after = base.weight.detach()
        sums["norm"] += _square(before)
        sums["moved"] += _square(after - before)
        sums["rounded"] += _square(after.to(to).float() - after)
        differs = after != before
        changed += int(differs.sum())
        undone += int((differs & (after.to(to) == before.to(to))).sum())
    result = adapted.unload().to(to)
    norm = sums["norm"] or 1.0
    figures = Figures(
        (sums["moved"] / norm) ** 0.5, (sums["rounded"] / norm) ** 0.5, undone / max(changed, 1)
    )
    return result, figures


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def _made_from(folder: Path, base: str, dtype: str | None) -> dict[str, Any]:
    """What decides the content of a merged folder; a hub's base counts by its name."""
    files = [*_weights(folder), folder / ADAPTER_CONFIG]
    if Path(base).is_dir():
        files += sorted(f for p in ("*.safetensors", "*.bin") for f in Path(base).glob(p))
    return {"base": base, "dtype": dtype, "sha256": [sha256_of(file) for file in files]}


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn what the libraries raise for a model that they cannot read into one line."""
    try:
        yield
    except ModelError:
        raise
    # torch, peft and safetensors raise errors of many types for a damaged file.
    except Exception as error:
        if isinstance(error, (ImportError, MemoryError)):
            raise
        raise ModelError(f"{name}: {single_line(error)[:300]}") from None


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 2 for wrong input or a full disk."""
    parser = OneLineParser(prog="sg-rlhf merge", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("folder", metavar="ADAPTERS", type=path, help="folder of LoRA adapters")
    parser.add_argument(
        "--base", metavar="MODEL",
        help="folder or hub id of the base model (default: the one that the adapters name)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", type=path, help="the new folder (default: ADAPTERS-merged)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES,
        help="of the saved weights (default: ds.param_dtype of the run, or the base's own)",
    )  # fmt: skip
    args: argparse.Namespace = parser.parse_args(argv)
    out = args.out or model_folder.merged_folder(args.folder)
    try:
        figures = merge(args.folder, out, args.base, args.dtype)
    except (ModelError, OSError) as error:
        print(f"error: {single_line(error)}", file=sys.stderr)
        return 2
    print(figures.line(json.loads((out / RECORD).read_text())["dtype"]))
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
