"""Build a tiny model: a Qwen2 of 0.86 M parameters for one domain, in minutes on a CPU.

Machines without a GPU train it through the whole pipeline. The package contains one for each of its
domains (`shipped`). What it learns is the domain's own file `tiny.py` (`Domain.tiny`).

docs/results.md has their size, their warm start and their accuracy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from sg_rlhf.tasks import registry
from sg_rlhf.tasks.domain import load
from sg_rlhf.tasks.tiny import Item, Recipe, TinyModel
from sg_rlhf.tiny.sampling import sample_responses
from sg_rlhf.tiny.tokenizer import build_tokenizer
from sg_rlhf.tiny.warm_start import train

MANIFEST = "manifest.json"
CONTEXT = 1024


def shipped(name: str) -> Path:
    """The checkpoint that the package ships for one of its domains; recipes name it as
    `module:sg_rlhf.tiny.NAME_tiny`.
    """
    return Path(__file__).parent / f"{name}_tiny"


def find(name: str) -> TinyModel[Any]:
    """What the tiny model of a domain learns.

    Raises:
        ValueError: no such domain, or it has none.
    """
    domain = registry.find(name)
    if domain.tiny is None:
        raise ValueError(f"domain {domain.name} has no tiny model")
    return load(domain.tiny)


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """An untrained model in fp32. Heads of 32, the smallest that vLLM's CPU attention has."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def measure(
    domain: TinyModel[Item],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Item],
    temperature: float,
    seed: int = 0,
) -> dict[str, float]:
    """Sample one response per item and grade it as the training reward does.

    Returns:
        accuracy (all, and per group), well_formed (an answer could be read), guesses (responses
        that guess, from the start or in the end), mean and longest response in tokens.
    """
    prompts = [
        tokenizer(domain.prompt(item), add_special_tokens=False)["input_ids"] for item in items
    ]
    responses = sample_responses(
        model, prompts, max_new_tokens=domain.max_new_tokens, temperature=temperature, seed=seed
    )
    texts = [tokenizer.decode(r, skip_special_tokens=False) for r in responses]
    grades = [domain.grade(text, item) for text, item in zip(texts, items, strict=True)]
    result = {
        "accuracy": _mean([grade.correct for grade in grades]),
        "well_formed": _mean([grade.format_ok for grade in grades]),
        "guesses": _mean([domain.guess in text for text in texts]),
        "mean_tokens": _mean([len(r) for r in responses]),
        "max_tokens": float(max(map(len, responses))),
    }
    for group in sorted({domain.group(item) for item in items}):
        pairs = zip(grades, items, strict=True)
        right = [grade.correct for grade, item in pairs if domain.group(item) == group]
        result[f"accuracy_{group}"] = _mean(right)
    return result


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def build(
    domain: TinyModel[Any],
    out: Path,
    recipe: Recipe,
    seed: int,
    *,
    eval_limit: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train, measure and write one checkpoint; returns its manifest.

    The same code, library versions, seed and number of threads give the same weights; another
    machine may round sums differently, which moves the accuracies by a few points.

    Args:
        out: a folder that does not exist yet or is empty; it appears only when everything is in it.
        eval_limit: measure on this many held-out items instead of all.

    Raises:
        ValueError: `out` holds something already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: exists already, expected a new or empty folder")
    tokenizer = build_tokenizer(domain)
    model = new_model(tokenizer, seed)
    started = time.monotonic()
    with tqdm(total=recipe.steps, desc="warm start", unit="step", disable=not progress) as bar:

        def on_step(step: int, loss: float) -> None:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()

        losses = train(model, tokenizer, recipe, seed, on_step)
    seconds = time.monotonic() - started
    # What is measured are the rounded weights that are shipped; the arithmetic stays fp32, which
    # a CPU without bf16 units does much faster.
    model = model.to(torch.bfloat16).float()
    items = domain.held_out(recipe)
    if eval_limit is not None:
        items = items[:: max(1, len(items) // eval_limit)][:eval_limit]
    manifest = {
        "what": f"Qwen2 warm-started on synthetic {domain.what} traces",
        "recipe": asdict(recipe),
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "final_loss": round(sum(losses[-50:]) / len(losses[-50:]), 4),
        "training_seconds": round(seconds),
        "threads": torch.get_num_threads(),
        "versions": {p: version(p) for p in ("torch", "transformers", "tokenizers")},
        f"held_out_{domain.items}": len(items),
        "sampled_at_0.7": measure(domain, model, tokenizer, items, 0.7),
        "greedy": measure(domain, model, tokenizer, items, 0.0),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / out.name
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        manifest["sha256"] = digests(folder)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if out.exists():
            out.rmdir()
        shutil.move(folder, out)
    return manifest


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a checkpoint but its manifest."""
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.name != MANIFEST)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def check(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are exactly those that it names.

    Raises:
        ValueError: naming the first file that is missing, additional or changed.
    """
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    found, wanted = digests(folder), manifest["sha256"]
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            state = "missing" if name not in found else "not in the manifest"
            if name in found and name in wanted:
                state = f"SHA-256 is {found[name]}, expected {wanted[name]}"
            raise ValueError(f"{folder / name}: {state}")
    return manifest
