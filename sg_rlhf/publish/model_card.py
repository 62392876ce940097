"""The model card of a run: ``checkpoints/final/README.md``, made from the run directory alone.

The header follows the hub's metadata (https://huggingface.co/docs/hub/model-cards). No path of
this machine and no secret is in it: of a file the card shows its name and its SHA-256.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from omegaconf import OmegaConf

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.text import table_head, table_row
from sg_rlhf.data_io.model_folder import described, is_hub_id, merge_command
from sg_rlhf.report.evaluations import held_out_accuracy
from sg_rlhf.report.runs import Run, RunError, json_object, read_run
from sg_rlhf.report.weighting import weighting_of
from sg_rlhf.run_dir.final_model import final_checkpoint, final_checkpoint_complete

CARD = "README.md"
#: Where a run's files are on this machine says nothing to a reader of the card.
NOT_SHOWN = (
    "sg.run_dir", "ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir", "logger.wandb.key",
    "logger.wandb.run_name", "sg.wandb", "sg.verbose",
)  # fmt: skip


class CardError(ValueError):
    """A card cannot be made; one line for the user."""


@dataclass(frozen=True)
class Score:
    """One score of the model: a share in [0, 1] with its 95 % interval."""

    dataset: str
    metric: str
    value: float
    low: float
    high: float
    questions: int


def write(run_dir: Path, results: Sequence[Path] = ()) -> Path:
    """Write the card into the folder of the final model, with the scores of `results`."""
    if not final_checkpoint_complete(run_dir):
        raise CardError(f"{run_dir}: no complete final model in it; let the run end first")
    try:
        run = read_run(run_dir)
    except RunError as error:
        raise CardError(str(error)) from None
    started = json_object(run_dir / "started_with.json")
    path = final_checkpoint(run_dir) / CARD
    write_whole(path, card(run, started, [s for file in results for s in read_scores(file)]))
    return path


def card(run: Run, started: Mapping[str, Any], scores: Sequence[Score] = ()) -> str:
    """The text of the card of a run."""
    # A folder of `sg-rlhf data model` says which model it has.
    made_from = run.environment.get("model") or {}
    base = str(made_from.get("model") or run.setting("actor.model_name_or_path"))
    scores = [*_held_out(run), *scores]
    header = ModelCardData(
        model_name=run.name,
        base_model=base if _from_hub(base) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "rlvr", "sg_rlhf"],
        eval_results=[_eval_result(score) for score in scores] or None,
    )
    return "\n".join(
        [
            f"---\n{header.to_yaml()}\n---",
            f"# {run.name}\n",
            f"`{_model(base)}` after reinforcement learning with verifiable rewards: "
            f"{run.rollouts} rollout steps of sg_rlhf, seed {run.seed}.\n",
            f"Loss: {weighting_of(run).label}. "
            "`sg-rlhf weights` describes it; GRPO-SG is arXiv 2511.00066.\n",
            "## Scores\n",
            *_scores_table(scores),
            "\n## Data and start model\n",
            *_files_table(run, started),
            *([f"\nStart model: {said}."] if (said := described(made_from)) else []),
            "\n## Versions\n",
            *_versions_table(run),
            "\n## Train it again\n",
            "Save the recipe below as `recipe.yaml`. Training runs are bit-identical on one "
            "machine without GPUs; elsewhere scores differ by the noise of sampling.\n",
            "```bash\nsg-rlhf train --config recipe.yaml\n```\n",
            f"```yaml\n{_recipe(run)}```",
            "\n## Use\n",
            *_use(run),
        ]
    )


def read_scores(path: Path) -> list[Score]:
    """The scores of a ``results.json``, or of the folder that has it."""
    file = path / "results.json" if path.is_dir() else path
    found = []
    try:
        for name, benchmark in json.loads(file.read_text())["benchmarks"].items():
            if benchmark.get("limited"):
                continue
            for metric, score in benchmark["scores"].items():
                low, high = score["ci95"]
                questions = int(score["n_questions"])
                found.append(Score(name, metric, float(score["value"]), low, high, questions))
    except OSError as error:
        raise CardError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CardError(f"{file}: not the results.json of an evaluation") from None
    return found


def _held_out(run: Run) -> Iterable[Score]:
    for point in held_out_accuracy(run)[-1:]:
        half = point.half_width
        low, high = max(0.0, point.accuracy - half), min(1.0, point.accuracy + half)
        questions = 0 if math.isnan(point.prompts) else int(point.prompts)
        yield Score("held-out prompts", "accuracy", point.accuracy, low, high, questions)


def _eval_result(score: Score) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=score.dataset.replace(" ", "-"),
        dataset_name=score.dataset,
        metric_type="accuracy",
        metric_name=score.metric,
        metric_value=round(score.value, 4),
    )


def _scores_table(scores: Sequence[Score]) -> list[str]:
    if not scores:
        return ["The model was not evaluated."]
    return [
        *table_head(["data set", "score", "value", "95 % interval", "questions"]),
        *(
            table_row(
                [s.dataset, s.metric, f"{s.value:.3f}", f"{s.low:.3f} to {s.high:.3f}", s.questions]
            )
            for s in scores
        ),
    ]


def _files_table(run: Run, started: Mapping[str, Any]) -> list[str]:
    files = started.get("files") or {}
    return [
        *table_head(["recipe key", "file", "SHA-256"]),
        *(
            table_row([f"`{key}`", _model(str(run.setting(key))), f"`{digest}`"])
            for key, digest in files.items()
        ),
    ]


def _versions_table(run: Run) -> list[str]:
    versions = {"python": run.environment.get("python") or "?"}
    versions |= run.environment.get("versions") or {}
    return [*table_head(["package", "version"]), *map(table_row, versions.items())]


def _recipe(run: Run) -> str:
    """The resolved recipe as YAML, without secrets; of a path its last part."""
    tree = OmegaConf.create()
    for key, value in run.settings.items():
        if key not in NOT_SHOWN and value is not None:
            is_path = isinstance(value, str) and Path(value).is_absolute()
            OmegaConf.update(tree, key, _model(value) if is_path else value, force_add=True)
    return OmegaConf.to_yaml(tree)


def _use(run: Run) -> list[str]:
    if merge_command(final_checkpoint(run.path)) is not None:
        return ["The folder holds LoRA adapters; load them with peft on the start model.\n"]
    return [
        "```bash\nvllm serve THIS_REPOSITORY\n```",
        "The prompts must have the form of the training data: see the recipe's `data.*` keys.\n",
    ]


def _from_hub(name: str) -> bool:
    return is_hub_id(name) and "/" in name and not Path(name).exists()


def _model(name: str) -> str:
    """A hub id as it is, of a path the last part."""
    return name if _from_hub(name) or name.startswith("module:") else Path(name).name
