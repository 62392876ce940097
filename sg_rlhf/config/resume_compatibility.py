"""Which settings may change when a run is resumed.

Another learning rate, data set or model would be another experiment. Where the run is placed, what
it writes and how often it is evaluated may change.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.redaction import redact
from sg_rlhf.config.recipe import Config, load_config, local_path
from sg_rlhf.data_io.dataset_writer import sha256_of

#: In the run directory: fingerprints of the files that the run was started with.
FILE = "started_with.json"
#: Settings that change rounding alone (how log-probs are computed, how weights are sent), and
#: those that decide when a run stops.
NUMERICS_ONLY = (
    "sg.fused_logprobs", "sg.share_prompts", "sg.collective_timeout",
    "sg.engine_timeout", "sg.engine_restarts", "sg.on_nonfinite",
    "sg.trust_remote_code",
    "sg.engine_args",
)  # fmt: skip
#: Keys, or patterns of them, that may change: places, layout, what is logged and when. Of
#: ``ds.zero_stage`` 1 and 2 are alike; 3 has other files, which the driver refuses.
MUTABLE = (
    "ckpt.*", "logger.*", "eval.*", "vllm.*", "*.num_nodes", "*.num_gpus_per_node", "*.offload",
    "*.micro_batch_size", "*.max_tokens_per_gpu", "train.colocate_*", "train.dynamic_batch_enable",
    "train.full_determinism_enable", "actor.gradient_checkpoint*", "ds.zero_stage", "ds.packing_*",
    "ds.attn_implementation", "ds.enable_sleep", "ds.adam_offload", "ds.overlap_comm", "ds.zpg",
    "ds.ring_attn_*", "ds.deepcompile", "ds.use_liger_kernel",
    "ds.grad_accum_dtype", "ds.use_universal_ckpt", "data.dataloader_num_workers", "local_rank",
    "sg.run_dir", "sg.eval_*", "sg.samples_per_*", "sg.sync_check_*", "sg.verbose", "sg.wandb",
    "sg.trackio",
    *NUMERICS_ONLY,
    # Of a server that an environment asks: where it is and how patient its client is.
    "sg.*.url", "sg.*.timeout_s",
)  # fmt: skip
#: Keys whose files are compared instead of their names, wherever both are known.
FINGERPRINTED = ("actor.model_name_or_path", "data.prompt_dataset", "reward.model_name_or_path")
#: Of a model's folder what decides how it reads and what it is; of its weights the sizes.
_OF_A_MODEL = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.bin")
_LARGE = (".safetensors", ".bin")
#: Characters of a value in a message.
LONGEST = 100


class Change(NamedTuple):
    """A key whose value differs from when the run was started."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.key}: other contents"
        before, after = self.old, self.new
        if isinstance(before, dict) and isinstance(after, dict):  # what differs of it
            keys = [k for k in {**before, **after} if before.get(k) != after.get(k)]
            before, after = ({k: d[k] for k in keys if k in d} for d in (before, after))
        was, now = (str(redact(self.key, value)) for value in (before, after))
        return f"{self.key}: was {_brief(was)}, now {_brief(now)}"


def _brief(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}...{text[-half:]}"


def fingerprints(config: Config) -> dict[str, str]:
    """A hash of the contents for each key of :data:`FINGERPRINTED` whose files are here."""
    found = {}
    for key in FINGERPRINTED:
        names = str(config.value(key) or "")
        parts = [_contents(local_path(key, name.strip())) for name in names.split(",") if name]
        if parts and None not in parts:
            found[key] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return found


def _contents(name: str) -> Any:
    path = Path(name)
    if path.is_file():
        return sha256_of(path)
    if not path.is_dir():
        return None
    files = sorted({file for pattern in _OF_A_MODEL for file in path.glob(pattern)})
    return [
        [file.name, file.stat().st_size if file.suffix in _LARGE else sha256_of(file)]
        for file in files
    ]


def save_fingerprints(config: Config, run_dir: Path) -> None:
    """Write the fingerprints of the run's files."""
    write_whole(run_dir / FILE, json.dumps({"files": fingerprints(config)}, indent=1) + "\n")


def changes(config: Config, run_dir: Path) -> list[Change]:
    """Settings and files that differ from when the run was started and are not :data:`MUTABLE`."""
    recipe = run_dir / "config.yaml"
    if not recipe.is_file():
        return []
    before = load_config(recipe)
    old, new = before.flat(), config.flat()
    same, other = _compared_files(config, run_dir)
    found = [Change(key, before.value(key), config.value(key)) for key in other]
    for key in sorted({*old, *new} - same - {*other}):
        if key.startswith("sg."):
            was, now = old.get(key), new.get(key)
        else:  # upstream's default where a recipe does not set it
            was, now = before.value(key), config.value(key)
        if was != now and not _free(key, was, now):
            found.append(Change(key, was, now))
    return found


def _free(key: str, was: Any, now: Any) -> bool:
    # The same service at another address.
    served = all(str(value).startswith(("http://", "https://")) for value in (was, now))
    return served or any(fnmatch.fnmatch(key, pattern) for pattern in MUTABLE)


def _compared_files(config: Config, run_dir: Path) -> tuple[set[str], list[str]]:
    """The keys whose files are known from then and now: as they were, and not."""
    try:
        old = json.loads((run_dir / FILE).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return set(), []
    now = fingerprints(config)
    both = sorted({*old} & {*now})
    return {key for key in both if old[key] == now[key]}, [k for k in both if old[k] != now[k]]
