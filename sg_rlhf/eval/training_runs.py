"""The newest checkpoint of a domain."""

from __future__ import annotations

from pathlib import Path

from sg_rlhf.data_io import run_config
from sg_rlhf.run_dir.final_model import final_checkpoint, final_checkpoint_complete
from sg_rlhf.tasks import registry

#: Default folder of training runs; those of a study are a folder deeper.
RUNS = Path("runs")
_DEPTHS = ("*", "*/*", "*/*/*")


def newest_checkpoint(domain: str, runs: Path = RUNS) -> Path | None:
    """The final checkpoint saved last among the finished runs of a domain."""
    found = []
    for folder in (path for depth in _DEPTHS for path in runs.glob(depth)):
        config = folder / run_config.CONFIG
        if final_checkpoint_complete(folder) and domain in _domains(run_config.read(config)):
            final = final_checkpoint(folder)
            saved = (final / "config.json").stat().st_mtime
            found.append((saved, final))
    return max(found)[1] if found else None


def _domains(run: run_config.TrainingRun) -> list[str]:
    """The domains of a run, from its reward or its agent's section."""
    reward, agent = (str(run.get(k) or "") for k in ("reward.remote_url", "train.agent_func_path"))
    sections = [name for name in registry.domains() if run.get(f"sg.{name}")]
    try:
        return [domain.name for domain in registry.used_by(reward, agent, sections)]
    except ValueError:  # of a domain that is not here
        return []
