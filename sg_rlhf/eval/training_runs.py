"""Training runs: the settings of a checkpoint's run, and the newest checkpoint of a domain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sg_rlhf.run_dir.final_model import final_checkpoint, final_checkpoint_complete
from sg_rlhf.tasks import registry

CONFIG = "config.yaml"
#: Default folder of training runs; those of a study are a folder deeper.
RUNS = Path("runs")
_DEPTHS = ("*", "*/*", "*/*/*")


def run_dir_of(folder: Path) -> Path | None:
    """The run directory of a checkpoint; None for any other folder."""
    for checkpoints in folder.resolve().parents:
        if checkpoints.name == "checkpoints" and (checkpoints.parent / CONFIG).is_file():
            return checkpoints.parent
    return None


def settings_of(run_dir: Path) -> dict[str, Any]:
    """A run's `config.yaml`; empty if it cannot be read."""
    import yaml

    try:
        found = yaml.safe_load((run_dir / CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def setting(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if it is not set."""
    found: Any = settings
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def domains_of(settings: Mapping[str, Any]) -> list[str]:
    """The domains of a run, from its reward or its agent's section."""
    reward, agent = (setting(settings, k) for k in ("reward.remote_url", "train.agent_func_path"))
    sections = [name for name in registry.domains() if setting(settings, f"sg.{name}")]
    try:
        found = registry.used_by(str(reward or ""), str(agent or ""), sections)
    except ValueError:  # of a domain that is not here
        return []
    return [domain.name for domain in found]


def newest_checkpoint(domain: str, runs: Path = RUNS) -> Path | None:
    """The final checkpoint saved last among the finished runs of a domain."""
    found = []
    for config in (path for depth in _DEPTHS for path in runs.glob(f"{depth}/{CONFIG}")):
        run_dir = config.parent
        if final_checkpoint_complete(run_dir) and domain in domains_of(settings_of(run_dir)):
            final = final_checkpoint(run_dir)
            saved = (final / "config.json").stat().st_mtime
            found.append((saved, final))
    return max(found)[1] if found else None
