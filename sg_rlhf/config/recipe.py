"""Recipes: YAML files with ``extends:``, dotted overrides, and every key checked.

A recipe's keys are upstream's flags with the dots as nesting (``actor.adam.lr`` is
``--actor.adam.lr``), plus one section of our own, ``sg``. Relative ``extends`` paths are relative
to the file that names them; later files and overrides win. Nothing heavy is imported: checking a
recipe takes milliseconds and needs neither torch nor ray.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from yaml import YAMLError

from sg_rlhf.config.upstream_flags import Flag, flags
from sg_rlhf.tasks.search.settings import SearchSettings

if TYPE_CHECKING:
    from sg_rlhf.algo.shaping import TokenWeightConfig

#: ``module:NAME`` means the file (or the folder) of that installed module, on any machine.
MODULE_PREFIX = "module:"
MODULE_KEYS = ("reward.remote_url", "train.agent_func_path", "actor.model_name_or_path")


class ConfigError(ValueError):
    """A recipe or an override is wrong; the message is one line for the user."""


class EvalSet(BaseModel):
    """One held-out set with settings of its own; upstream has one temperature and n for all."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", description="its name in the metrics")
    dataset: str = Field(min_length=1, description="JSONL file, or what eval.dataset takes")
    temperature: float = Field(ge=0.0, description="0 is greedy")
    n_samples_per_prompt: int = Field(1, ge=1, description="16 for avg@16 and pass@16")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    max_new_tokens: int | None = Field(None, ge=1, description="default: rollout.max_new_tokens")
    limit: int | None = Field(None, ge=1, description="only the first prompts")

    @model_validator(mode="after")
    def _greedy_once(self) -> EvalSet:
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            raise ValueError("temperature 0 gives the same response n times: set it above 0 or n=1")
        return self


class SGSettings(BaseModel):
    """The ``sg`` section: what GRPO-SG and the overlay add to upstream's flags."""

    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)

    shaping: str = Field("grpo_sg", description="token weighting by its registry name")
    form: Literal["product", "quotient"] = Field(
        "product", description="sigmoid(tau*p), or sigmoid(p/tau) as Eq. 19 is printed"
    )
    alpha: float = Field(2.0, description="scale of the weight, Eq. 19")
    mu: float = Field(0.25, description="shift of the weight, Eq. 19")
    tau: float = Field(9.0, description="temperature of the weight, Eq. 19")
    lower: float = Field(1.0, description="L, lower clip of the weight")
    upper: float = Field(1.4, description="U, upper clip of the weight")
    placement: Literal["inside", "outside"] = Field(
        "inside", description="weight inside the PPO clip (Eq. 13) or outside it"
    )
    normalize: Literal["batch_mean"] | None = Field(
        None, description="batch_mean divides by the rollout's mean weight, under its own policy"
    )
    allow_constant: bool = Field(
        False, description="allow a weighting whose attainable weight is one value (plain GRPO)"
    )
    random_spread: float = Field(0.5, description="s of shaping=random: w is in [1 - s, 1 + s]")
    random_seed: int = Field(0, description="seed of shaping=random")
    ar_alpha: float = Field(
        0.3, description="a of shaping=ar (0.3 for Knights & Knaves, 0.1 for mathematics)"
    )
    stapo_prob: float = Field(0.002, description="shaping=stapo masks tokens less likely than this")
    stapo_entropy: float = Field(
        0.5, description="... where the policy's entropy is below this, in nats, and A > 0"
    )
    update: Literal["together", "lopti"] = Field(
        "together", description="lopti: the unlikely tokens of a rollout first, then the rest"
    )
    lopti_threshold: float = Field(
        0.5, ge=0.0, description="update=lopti: a token below this probability is unlikely"
    )
    advantage_std: Literal["sample", "population"] = Field(
        "sample", description="std of Eq. 4 with group_norm; upstream's is the sample std"
    )
    run_dir: str | None = Field(None, description="where metrics, samples and plots are written")
    eval_at_start: bool = Field(True, description="evaluate before the first update")
    eval_at_end: bool = Field(True, description="evaluate after the last update")
    eval_sets: list[EvalSet] = Field(
        [],
        description="held-out sets with settings of their own, instead of eval.dataset: "
        "a list of {name, dataset, temperature, n_samples_per_prompt, ...}",
    )
    samples_per_step: int = Field(4, ge=0, description="rollouts kept in samples.jsonl per step")
    sync_check_every: int = Field(
        0,
        ge=0,
        description="compare engine and trainer log-probs after every Nth weight sync; "
        "0 checks only the first",
    )
    sync_check_tolerance: float = Field(
        0.05,
        gt=0,
        description="largest mean absolute log-prob difference that passes as bf16 rounding",
    )
    rotary_fp32: bool = Field(
        True, description="keep rotary frequencies in float32 under ZeRO-3, as vLLM has them"
    )
    wandb: Literal["auto", "disabled"] = Field(
        "auto", description="auto: online with a key, else an offline run in the run directory"
    )
    verbose: bool = Field(False, description="print the workers' output instead of a progress bar")
    search: SearchSettings | None = Field(
        None, description="dialogues with a search engine: sg.search.topk and further keys"
    )

    @field_validator("eval_sets", mode="before")
    @classmethod
    def _from_command_line(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("eval_sets")
    @classmethod
    def _distinct_names(cls, sets: list[EvalSet]) -> list[EvalSet]:
        names = [s.name for s in sets]
        if len(set(names)) < len(names):
            raise ValueError(f"two sets have the same name: {', '.join(names)}")
        return sets


#: The keys of `sg`; those of `sg.search` are keys of their own, like upstream's flags.
SG_KEYS = {
    **{f"sg.{name}": info for name, info in SGSettings.model_fields.items() if name != "search"},
    **{f"sg.search.{name}": info for name, info in SearchSettings.model_fields.items()},
}


def sg_settings(values: dict[str, Any]) -> SGSettings:
    """The settings of dotted keys without their "sg.".

    Raises:
        pydantic.ValidationError: a value that its key does not take.
    """
    return SGSettings(**_nest(values))


@dataclass(frozen=True)
class Config:
    """A checked recipe.

    Attributes:
        values: every key that the recipe or an override sets, dotted, in upstream's types.
        sg: the ``sg`` section with its defaults.
        sources: the files it was made of, base first.
    """

    values: dict[str, Any]
    sg: SGSettings
    sources: tuple[str, ...] = ()

    def value(self, key: str) -> Any:
        """The value of a dotted key: the recipe's, else upstream's or ``sg``'s default."""
        if key.startswith("sg.search."):
            return getattr(self.sg.search or SearchSettings(), key.removeprefix("sg.search."))
        if key.startswith("sg."):
            return getattr(self.sg, key.removeprefix("sg."))
        value = self.values.get(key)
        # null gives no flag, so upstream takes its default.
        return flags()[key].default if value is None else value

    def clip_range(self) -> tuple[float, float]:
        """(eps_low, eps_high) of the PPO clip, as upstream derives it from its two flags."""
        low, high = self.value("actor.eps_clip_low_high") or [self.value("actor.eps_clip")] * 2
        return low, high

    def with_values(self, extra: dict[str, Any]) -> Config:
        """A copy with further keys set (checked like overrides)."""
        return _check({**_flat_sg(self), **self.values, **extra}, {}, self.sources)

    def to_yaml(self) -> str:
        """The resolved recipe; feeding it back gives the same configuration."""
        flat = {**self.values, **_flat_sg(self)}
        return OmegaConf.to_yaml(OmegaConf.create(_nest(flat)))

    def to_argv(self) -> list[str]:
        """The exact upstream command line, ``sg.*`` flags last."""
        argv: list[str] = []
        for key, value in self.values.items():
            argv += _flag_argv(flags()[key], value)
        for key, value in _flat_sg(self).items():
            if value not in (None, []):
                argv += [f"--{key}", _text(value)]
        return argv


def _flat_sg(config: Config) -> dict[str, Any]:
    own = config.sg.model_dump()
    search = own.pop("search") or {}
    flat = {f"sg.{k}": v for k, v in own.items()}
    return flat | {f"sg.search.{k}": v for k, v in search.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def validation_message(error: ValidationError) -> tuple[str, str]:
    """The ``sg`` key of a pydantic error, and one line about it."""
    first = error.errors()[0]
    key = "sg." + ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return key, f"{key}: not set"
    return key, f"{key}={first.get('input')!r}: {first['msg'].removeprefix('Value error, ')}"


def _flag_argv(flag: Flag, value: Any) -> list[str]:
    if value is None:
        return []
    if flag.kind == "switch":
        if value:
            return [flag.option]
        return [flag.off_option] if flag.default and flag.off_option else []
    if flag.dest in MODULE_KEYS:
        value = local_path(flag.dest, str(value))
    items = value if flag.kind == "list" else [value]
    return [flag.option, *map(_text, items)]


def local_path(key: str, value: str) -> str:
    """``value``, or for ``module:NAME`` the module's file or folder, without importing it.

    Raises:
        ConfigError: no such module is installed.
    """
    if not value.startswith(MODULE_PREFIX):
        return value
    try:
        spec = importlib.util.find_spec(value.removeprefix(MODULE_PREFIX))
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ConfigError(f"{key}={value}: no such module is installed")
    if spec.origin and not spec.origin.endswith("__init__.py"):
        return spec.origin
    return str(next(iter(spec.submodule_search_locations or [])))


def token_weight_config(config: Config, *, allow_constant: bool | None = None) -> TokenWeightConfig:
    """The token weighting that the recipe's ``sg`` section describes (imports torch).

    Raises:
        ConfigError: a value that the weighting does not take.
    """
    from sg_rlhf.algo.shaping import TokenWeightConfig

    changes = {} if allow_constant is None else {"allow_constant": allow_constant}
    try:
        return TokenWeightConfig.from_settings(config.sg, **changes)
    except ValueError as error:
        raise ConfigError(f"sg: {error}") from error


def load_config(
    path: str | Path | Sequence[str | Path] | None, overrides: list[str] | tuple[str, ...] = ()
) -> Config:
    """Read a recipe, several of which the later wins, or none; then apply ``key=value`` overrides.

    Raises:
        ConfigError: one line naming the file, the key, the value and what was expected.
    """
    flat: dict[str, Any] = {}
    origin: dict[str, str] = {}
    sources: list[str] = []
    paths = [path] if isinstance(path, (str, Path)) else path or []
    for recipe in paths:
        for file, tree in _read_chain(Path(recipe), ()):
            sources.append(str(file))
            for key, value in _flatten(tree):
                flat[key], origin[key] = value, str(file)
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {item!r}: expected key=value")
        if key == "extends":
            raise ConfigError("override extends=: put `extends:` into a recipe file")
        try:
            value = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))["x"]  # type: ignore[call-overload,index]
        except (OmegaConfBaseException, YAMLError, KeyError) as error:
            raise ConfigError(f"override {item!r}: not a YAML value ({_one_line(error)})") from None
        flat[key], origin[key] = value, "command line"
    return _check(flat, origin, tuple(sources))


def _read_chain(path: Path, seen: tuple[Path, ...]) -> Iterator[tuple[Path, dict[str, Any]]]:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(p.name for p in seen)}")
    if not path.is_file():
        by = f" (extended by {seen[-1]})" if seen else ""
        raise ConfigError(f"{path}: no such recipe{by}")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a valid YAML recipe: {_one_line(error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    parents = tree.pop("extends", None) or []
    for parent in [parents] if isinstance(parents, str) else parents:
        yield from _read_chain(path.parent / str(parent), (*seen, path))
    yield path, {str(k): v for k, v in tree.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _check(flat: dict[str, Any], origin: dict[str, str], sources: tuple[str, ...]) -> Config:
    table = flags()
    values: dict[str, Any] = {}
    sg: dict[str, Any] = {}
    for key, value in flat.items():
        where = origin.get(key, "recipe")
        if key in SG_KEYS:
            sg[key.removeprefix("sg.")] = value
        elif key in table:
            values[key] = _checked_value(table[key], value, where)
        else:
            raise ConfigError(_unknown_key(key, where, [*table, *SG_KEYS]))
    try:
        settings = sg_settings(sg)
    except ValidationError as error:
        key, message = validation_message(error)
        depth = 3 if key.startswith("sg.search.") else 2
        section = ".".join(key.split(".")[:depth])
        raise ConfigError(f"{origin.get(section, 'recipe')}: {message}") from None
    if settings.eval_sets and values.get("eval.dataset"):
        raise ConfigError(
            f"{origin.get('eval.dataset', 'recipe')}: eval.dataset={values['eval.dataset']}: "
            "not used beside sg.eval_sets; set one of them to null or []"
        )
    return Config(values=values, sg=settings, sources=sources)


def _unknown_key(key: str, where: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    if not near:  # e.g. `kl` alone: look at the last part
        near = [k for k in known if k.split(".")[-1] == key.split(".")[-1]][:1]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{where}: unknown key {key!r}{hint}"


def _checked_value(flag: Flag, value: Any, where: str) -> Any:
    def fail() -> ConfigError:
        return ConfigError(f"{where}: {flag.dest}={value!r}: expected {flag.describe()}")

    if value is None:
        return None
    if flag.kind == "switch":
        if not isinstance(value, bool):
            raise fail()
        return value
    if flag.kind == "list":
        items = value if isinstance(value, list) else [value]
        if isinstance(flag.nargs, int) and len(items) != flag.nargs:
            raise fail()
        return [_scalar(flag, item, fail) for item in items]
    return _scalar(flag, value, fail)


def _scalar(flag: Flag, value: Any, fail: Any) -> Any:
    if isinstance(value, bool) and flag.choices and "off" in flag.choices:
        value = "on" if value else "off"  # YAML reads the bare words as booleans
    if isinstance(value, (list, dict)) or (isinstance(value, bool) and flag.type is not str):
        raise fail()
    if flag.type is int and not (isinstance(value, int) or _is_whole(value)):
        raise fail()
    try:
        typed = flag.type(value)
    except (TypeError, ValueError):
        raise fail() from None
    if isinstance(typed, float) and math.isnan(typed):
        raise fail()
    if flag.choices is not None and typed not in flag.choices:
        raise fail()
    return typed


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
