"""Recipes: YAML files with ``extends:``, dotted overrides, and every key checked.

A recipe is a list of parts: files, ``algorithm:NAME`` (a file of configs/algorithms) and
``hardware:NAME`` (configs/hardware and :func:`sg_rlhf.machine.names.settings`).

A recipe's keys are upstream's flags with the dots as nesting (``actor.adam.lr`` is
``--actor.adam.lr``), plus one section of our own, ``sg``. Relative ``extends`` paths are relative
to the file that names them; ``configs/...`` is also found as ``--config`` finds it. Later files and
overrides win. Nothing heavy is imported: checking a recipe takes milliseconds and needs neither
torch nor ray.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from sg_rlhf.algo.weightings import WEIGHTINGS, Weighting
from sg_rlhf.common import module_paths
from sg_rlhf.common.redaction import HIDDEN, redact, redact_text
from sg_rlhf.common.text import removed as removed_line
from sg_rlhf.common.text import single_line
from sg_rlhf.config import builtin_recipes, domain_settings, old_names, removed
from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.sg_settings import (
    ALIASES,
    SGSettings,
    apply_correction,
    sg_keys,
    validation_message,
)
from sg_rlhf.config.upstream_flags import KL_ESTIMATORS, POLICY_LOSS_TYPES, flags
from sg_rlhf.config.weighting_resolution import (
    COMMAND_LINE,
    OBJECTIVE,
    WEIGHTING,
    WeightingResolver,
    built_weighting,
)
from sg_rlhf.machine import names

YAML = (".yaml", ".yml")
#: Keys whose value is a mapping.
_MAPPINGS = (WEIGHTING, OBJECTIVE, "sg.chat_template_kwargs", "sg.engine_args")
#: Characters of a library's message that an error shows at most.
MAX_MESSAGE = 300
#: Keys whose value may be ``module:NAME``, an installed module's file or folder.
MODULE_KEYS = ("reward.remote_url", "train.agent_func_path", "actor.model_name_or_path")


@dataclass(frozen=True)
class Config:
    """A checked recipe."""

    values: dict[str, Any]  # every key that is set, dotted, in upstream's types
    sg: SGSettings  # the ``sg`` section with its defaults
    sources: tuple[str, ...] = ()  # names of its parts, base first
    #: Key -> the last part that sets it; COMMAND_LINE for an override.
    origin: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def hardware(self) -> str:
        """The last hardware name of its parts, such as ``8x80gb``; "" without one."""
        named = [builtin_recipes.hardware_of(part) for part in self.sources]
        return next((name for name in reversed(named) if name), "")

    def value(self, key: str) -> Any:
        """The value of a dotted key: the recipe's, else upstream's or ``sg``'s default."""
        if (domain_key := domain_settings.parse_key(key)) is not None:
            name, field = domain_key
            settings = self.sg.domains.get(name) or domain_settings.settings_class(name)()
            return getattr(settings, field)
        if key.startswith(f"{WEIGHTING}.") or key.startswith(f"{OBJECTIVE}."):
            _, section, name = key.split(".", 2)
            return getattr(self.sg, section)[name]
        if key.startswith("sg."):
            return getattr(self.sg, key.removeprefix("sg."))
        return self.values[key] if key in self.values else flags()[key].default

    def clip_range(self) -> tuple[float, float]:
        """(eps_low, eps_high) of the PPO clip, as upstream derives it from its two flags."""
        low, high = self.value("actor.eps_clip_low_high") or [self.value("actor.eps_clip")] * 2
        return low, high

    def to_yaml(self) -> str:
        """The resolved recipe. Read again, it gives the same configuration, except for secrets.

        Keys that are secrets are omitted. Passwords in addresses are hidden.
        """
        flat = {k: redact(k, v) for k, v in self.flat().items()}
        public = {k: v for k, v in flat.items() if v != HIDDEN}
        return OmegaConf.to_yaml(OmegaConf.create(nested(public)))

    def flat(self) -> dict[str, Any]:
        """Every key that is set, and all of ``sg`` that the run reads, dotted."""
        settings = self.sg.model_dump()
        domains = settings.pop("domains")
        flat = self.values | {f"sg.{k}": v for k, v in settings.items()}
        loss, kl = self.value("actor.policy_loss_type"), self.value("algo.kl.estimator")
        if loss not in POLICY_LOSS_TYPES and kl not in KL_ESTIMATORS:
            del flat[WEIGHTING]  # no token has a weight
        for name, section in domains.items():
            flat |= {f"sg.{name}.{k}": v for k, v in section.items()}
        return flat


def local_path(key: str, value: str) -> str:
    """``value``, or for ``module:NAME`` the module's file or folder, without importing it."""
    try:
        return module_paths.resolve(value)
    except ModuleNotFoundError:
        raise ConfigError(f"{key}={value}: no such module is installed") from None


def weighting_of(config: Config, *, allow_constant: bool | None = None) -> Weighting:
    """The token weighting of a recipe; its bounds are computed, with torch."""
    try:
        return built_weighting(config.sg.weighting, allow_constant=allow_constant)
    except ValueError as error:
        raise ConfigError(f"{WEIGHTING}: {error}") from error


def set_by(config: Config) -> list[str]:
    """A line for each part of a recipe: its keys in which the run differs from base.yaml.

    A recipe that does not extend base.yaml is compared with the defaults.
    """
    folder = builtin_recipes.CONFIGS.resolve()
    base = str(folder / "base.yaml")
    plain = load_config(base if base in config.sources else None)
    keys: dict[str, list[str]] = {part: [] for part in (*config.sources, COMMAND_LINE)}
    for key, part in config.origin.items():
        whole = key.startswith((WEIGHTING, OBJECTIVE))
        if part != base and (whole or config.value(key) != plain.value(key)):
            keys[part].append(key)
    return [
        f"{part.replace(f'{folder}/', 'configs/')}: {', '.join(keys[part])}"
        for part in keys
        if keys[part]
    ]


def load_config(
    path: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = ()
) -> Config:
    """Read a recipe's parts, of which the later wins; then apply ``key=value`` overrides."""
    flat: dict[str, Any] = {}
    origin: dict[str, str] = {}
    sources: list[str] = []
    resolver = WeightingResolver()

    def set_key(key: str, value: Any, source: str) -> None:
        key = ALIASES.get(key, key)
        origin.pop(key, None)  # to the end
        origin[key] = source
        if not resolver.apply(key, value, source):
            flat[key] = value

    paths = [path] if isinstance(path, (str, Path)) else path or []
    for recipe in paths:
        for part, tree in _read_part(recipe, Path(), ()):
            sources.append(part)
            for key, value in _flatten(tree):
                set_key(key, value, part)
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator or not key:
            hint = f"; write a recipe as --config {item}" if item.endswith(YAML) else ""
            raise ConfigError(f"override {item!r}: expected key=value{hint}")
        if key == "extends":
            raise ConfigError("override extends=: put `extends:` into a recipe file")
        set_key(key, parsed_value(key, text), COMMAND_LINE)
    return _check(flat, origin, tuple(sources), resolver)


def parsed_value(key: str, text: str) -> Any:
    """The value of ``key=text``, read as YAML."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore[call-overload,index]
    except (OmegaConfBaseException, YAMLError, KeyError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"override {f'{key}={redact(key, text)}'!r}: not a YAML value ({_one_line(error)})"
        ) from None


def _read_part(
    part: str | Path, folder: Path, seen: tuple[Path, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, content) of a part and of the parts that it extends, base first.

    Args:
        folder: of the file that names the part.
        seen: the files that extend it, to refuse a cycle.
    """
    text = str(part)
    if text.startswith(builtin_recipes.ALGORITHM):
        yield from _read_part(_algorithm_file(text), Path(), seen)
        return
    relative = folder / part
    is_builtin = seen and text.startswith("configs/") and not relative.exists()
    path = builtin_recipes.recipe_path(part if is_builtin or not seen else relative)
    hardware = builtin_recipes.hardware_of(text) or builtin_recipes.hardware_of(path)
    if hardware:
        yield from _read_hardware(hardware)
        return
    # ALGORITHM_MODEL.yaml stands for two parts.
    parts = [] if path.is_file() else builtin_recipes.model_and_algorithm(path)
    for both in parts:
        yield from _read_part(both, Path(), seen)
    if not parts:
        yield from _read_chain(path, seen)


def _algorithm_file(part: str) -> Path:
    name = part.removeprefix(builtin_recipes.ALGORITHM)
    try:
        builtin_recipes.algorithm(name)
    except ValueError as error:
        raise ConfigError(f"{builtin_recipes.ALGORITHM}{error}") from None
    return builtin_recipes.CONFIGS / "algorithms" / f"{name}.yaml"


def _read_hardware(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        layout = names.parse(name)
    except ValueError as error:
        raise ConfigError(f"{builtin_recipes.HARDWARE}{error}") from None
    folder = builtin_recipes.CONFIGS / "hardware"
    yield from _read_chain(folder / ("gpus.yaml" if layout.gpus else "cpu.yaml"), ())
    if layout.gpus:
        yield builtin_recipes.HARDWARE + name, names.settings(layout)


def _read_chain(path: Path, seen: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        path = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links that end nowhere, a NUL
        raise ConfigError(f"{path}: no such recipe: {_one_line(error)}") from None
    if path in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(p.name for p in seen)}")
    if not path.is_file():
        by = f" (extended by {seen[-1]})" if seen else ""
        raise ConfigError(f"{path}: no such recipe{by}{builtin_recipes.nearest(path)}")
    try:
        # A study reads the same files hundreds of times. Interpolations are resolved each time.
        tree = OmegaConf.to_container(_parsed(path, path.read_bytes()), resolve=True)
    except Exception as error:  # of yaml, of OmegaConf, or an assertion of its reader
        why = _one_line(error) or "expected a mapping of keys to values"
        raise ConfigError(f"{path}: not a valid YAML recipe: {why}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    extends = tree.pop("extends", None) or []
    parents = [extends] if isinstance(extends, str) else extends
    if not isinstance(parents, list) or not all(isinstance(name, str) for name in parents):
        raise ConfigError(f"{path}: extends={extends!r}: expected a recipe or a list of them")
    for parent in parents:
        yield from _read_part(parent, path.parent, (*seen, path))
    yield str(path), {str(k): v for k, v in tree.items()}


@functools.cache
def _parsed(path: Path, _content: bytes) -> DictConfig | ListConfig:
    return OmegaConf.load(path)


def _one_line(error: Exception) -> str:
    text = redact_text(single_line(error))
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and ALIASES.get(name, name) not in _MAPPINGS:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """A tree of mappings for dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _check(
    flat: dict[str, Any],
    origin: dict[str, str],
    sources: tuple[str, ...],
    resolver: WeightingResolver,
) -> Config:
    table, known = flags(), sg_keys()
    values: dict[str, Any] = {}
    sg: dict[str, Any] = {}
    for key, value in flat.items():
        where = origin.get(key, "recipe")
        if key in known:
            sg[key] = value
        elif key in table:
            values[key] = table[key].checked(value, where)
        elif value in removed.ACCEPTED.get(key, ()):
            del origin[key]  # it sets nothing
        elif key in removed.KEYS:
            raise ConfigError(f"{where}: {removed_line(key, removed.KEYS[key])}")
        else:
            raise ConfigError(_unknown_key(key, where, [*table, *known]))
    loss = values.get("actor.policy_loss_type", table["actor.policy_loss_type"].default)
    settings = _sg_settings(sg, resolver, str(loss), origin)
    if settings.eval_sets and values.get("eval.dataset"):
        raise ConfigError(
            f"{origin.get('eval.dataset', 'recipe')}: eval.dataset={values['eval.dataset']}: "
            "not used together with sg.eval_sets; set one of them to null or []"
        )
    values = apply_correction(settings.correction, values, origin)
    return Config(values=values, sg=settings, sources=sources, origin=origin)


def _sg_settings(
    values: dict[str, Any], resolver: WeightingResolver, loss: str, origin: dict[str, str]
) -> SGSettings:
    """The ``sg`` section of dotted keys, with the resolved weighting and objective."""
    resolved = {"weighting": resolver.weighting(), "objective": resolver.objective_for(loss)}
    tree = nested({k.removeprefix("sg."): v for k, v in values.items()})
    domain_trees = {name: tree.pop(name) for name in domain_settings.names() if name in tree}
    domains, section = {}, "sg"
    try:
        for name, domain_tree in domain_trees.items():
            section = f"sg.{name}"
            domains[name] = domain_settings.settings_class(name)(**domain_tree)
        section = "sg"
        return SGSettings(**tree, **resolved, domains=domains)
    except ValidationError as error:
        key, message = validation_message(error, section)
        recipe_key = ".".join(key.split(".")[: section.count(".") + 2])
        raise ConfigError(f"{origin.get(recipe_key, 'recipe')}: {message}") from None


def _unknown_key(key: str, where: str, known: list[str]) -> str:
    near = (
        difflib.get_close_matches(key, known, n=1, cutoff=0.85)  # a typing error
        or _parameters_of_weightings(key)
        or old_names.ours(key)
        or difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    )
    if not near:  # e.g. `kl` alone: look at the last part
        near = [k for k in known if k.split(".")[-1] == key.split(".")[-1]][:1]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{where}: unknown key {key!r}{hint}"


def _parameters_of_weightings(key: str) -> list[str]:
    """``sg.weighting.NAME`` for a ``sg.NAME`` that some weighting has as a parameter."""
    section, _, name = key.partition(".")
    names = {name for weighting in WEIGHTINGS.values() for name in weighting.ranges()}
    return [f"{WEIGHTING}.{name}"] if section == "sg" and name in names else []
