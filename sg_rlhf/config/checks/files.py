"""Models, code, folders and names of a recipe: what would stop a run after Ray has started.

Each check raises ConfigError with one line: the key, the file and the remedy; MissingFile where
another machine may have the file.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from sg_rlhf.common.redaction import redact
from sg_rlhf.common.text import single_line
from sg_rlhf.config.errors import ConfigError, MissingFile
from sg_rlhf.config.recipe import Config, local_path
from sg_rlhf.data_io import model_folder
from sg_rlhf.tasks import registry

MODELS = ("actor.model_name_or_path", "reward.model_name_or_path")
#: Folders that a run writes.
WRITTEN_TO = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")
#: Key -> the name that its file must define.
CODE = {"reward.remote_url": "reward_func", "train.agent_func_path": "AgentExecutor"}


def check_models(config: Config) -> None:
    """Check every model of a recipe that is a folder here."""
    if not config.value(MODELS[0]):
        raise MissingFile(f"{MODELS[0]}: not set; give a model id or a local folder")
    trusted = config.sg.trust_remote_code
    used = [config.value(key) for key in MODELS]
    unused = [name for name in trusted if name not in used]
    # A model's auto_map may point to another repository, which is then named beside the model.
    if unused and len(unused) == len(trusted):
        raise ConfigError(
            f"sg.trust_remote_code={unused[0]}: the recipe has no such model, expected one of "
            f"{', '.join(filter(None, used))}"
        )
    for key in MODELS:
        given = str(config.value(key) or "")
        name = local_path(key, given)
        if not name:
            continue
        if not Path(name).is_dir():
            if os.path.lexists(name) or not model_folder.is_hub_id(name):
                raise MissingFile(f"{key}={name}: no Hugging Face model folder there")
            continue
        try:
            model_folder.check(Path(name), trusted=given in trusted)
        except model_folder.BringsCode as error:
            raise ConfigError(
                f"{key}={given}: {error}: sg.trust_remote_code=[{given}]; or take auto_map out of "
                "a copy's files, where transformers has the model itself"
            ) from None
        except model_folder.ModelError as error:
            raise ConfigError(f"{key}={given}: {error}") from None
        if key == MODELS[0]:
            _check_experts(config, Path(name))


def _check_experts(config: Config, folder: Path) -> None:
    """Refuse what a mixture of experts cannot be sent to the engines with.

    Upstream's weight sync sends the experts stacked. Adapters of stacked experts are not merged.
    """
    rank = config.value("ds.lora.rank")
    if rank > 0 and model_folder.has_experts(folder):
        raise ConfigError(
            f"{MODELS[0]}={folder}: a mixture of experts, not with ds.lora.rank={rank}: the "
            "engines would load other weights; use 0"
        )


def check_code(config: Config) -> None:
    """Check the files of the reward and the agent, and the reward's addresses."""
    for key, wanted in CODE.items():
        for given in str(config.value(key) or "").split(","):
            name = local_path(key, given.strip())
            if not name:
                continue
            if name.startswith(registry.PREFIX):
                _check_domain(key, name)
            elif name.endswith(".py"):
                _check_defines(key, name, wanted)
            elif key == "train.agent_func_path" or not _is_address(name):
                address = "" if key == "train.agent_func_path" else " or http://HOST..."
                raise ConfigError(f"{key}={given}: expected domain:NAME, a Python file{address}")


def _check_domain(key: str, value: str) -> None:
    try:
        domain, _ = registry.named_in(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value}: {error}") from None
    if key == "train.agent_func_path" and domain.environment is None:
        raise ConfigError(f"{key}={value}: domain {domain.name} has no environment")


def _is_address(name: str) -> bool:
    try:
        parts = urlsplit(name)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_defines(key: str, name: str, wanted: str) -> None:
    try:
        tree = ast.parse(Path(name).read_bytes())
    except OSError as error:
        kind = MissingFile if isinstance(error, FileNotFoundError) else ConfigError
        raise kind(f"{key}={name}: cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = single_line(error)
        raise ConfigError(f"{key}={name}: not Python: {why}") from None
    names = {*_names(tree)}
    if not {wanted, "*"} & names:
        raise ConfigError(f"{key}={name}: defines no {wanted}")


def _names(tree: ast.AST) -> Iterator[str]:
    """Every name that a file binds in any scope."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def check_outputs(config: Config) -> None:
    """Check that folders outside of the run directory can be written."""
    for key in WRITTEN_TO:
        given = config.value(key)
        path = Path(given or "").absolute()
        if not given or path.is_relative_to(config.sg.run_dir or path / "none"):
            continue
        there = next(p for p in (path, *path.parents) if os.path.lexists(p))
        if not there.is_dir() or not os.access(there, os.W_OK):
            why = "no folder" if not there.is_dir() else "not writable"
            raise MissingFile(f"{key}={given}: cannot write there: {there} is {why}")


def check_names(config: Config) -> None:
    """Refuse names that wandb's server would refuse after Ray has started."""
    for key, limit, refused in (
        ("logger.wandb.project", 128, "/\\#?%:"), ("logger.wandb.run_name", 128, ""),
        ("logger.wandb.group", 128, ""),
    ):  # fmt: skip
        name = str(config.value(key) or "")
        if len(name) > limit or not name.isprintable() or set(name) & set(refused):
            without = f" and none of {' '.join(refused)}" if refused else ""
            raise ConfigError(
                f"{key}={redact(key, name)!r}: expected up to {limit} characters of one line"
                f"{without}"
            )
