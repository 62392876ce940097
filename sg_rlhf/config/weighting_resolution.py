"""The token weighting and the objective of a recipe, from its files and overrides.

``sg.weighting: {type: NAME, ...}`` with a type replaces all that earlier files set of the
weighting. Without a type, and as ``sg.weighting.KEY=...``, it changes single parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sg_rlhf.algo.objectives import OBJECTIVES, Objective, make_objective
from sg_rlhf.algo.objectives.ppo import WeightedPPO
from sg_rlhf.algo.parameters import ParameterError
from sg_rlhf.algo.weightings import Weighting, make_weighting, weighting_class
from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.upstream_flags import POLICY_LOSS_TYPES

WEIGHTING = "sg.weighting"
OBJECTIVE = "sg.objective"
COMMAND_LINE = "command line"
#: Upstream's flag value -> the objective that it stands for; the others are upstream's own losses.
OBJECTIVE_OF_LOSS = {
    name: name if name in OBJECTIVES else WeightedPPO.name for name in POLICY_LOSS_TYPES
}


@dataclass(frozen=True)
class _Setting:
    key: str
    value: Any
    source: str


@dataclass
class WeightingResolver:
    """Collects what files and overrides set of the weighting and the objective; the later wins."""

    type: _Setting = _Setting("sg.weighting.type", "grpo_sg", "default")
    parameters: dict[str, _Setting] = field(default_factory=dict)
    objective: dict[str, _Setting] = field(default_factory=dict)

    def apply(self, key: str, value: Any, source: str) -> bool:
        """Take a dotted key if it belongs to one of them; False for any other key."""
        setting = _Setting(key, value, source)
        if key == WEIGHTING:
            self._whole(value, source)
        elif key == f"{WEIGHTING}.type":
            self.type, self.parameters = setting, {}
        elif key.startswith(f"{WEIGHTING}."):
            self.parameters[key.removeprefix(f"{WEIGHTING}.")] = setting
        elif key == OBJECTIVE:
            self.objective = {
                f"{key}.{name}": _Setting(f"{key}.{name}", item, source)
                for name, item in _mapping(setting).items()
            }
        elif key.startswith(f"{OBJECTIVE}."):
            self.objective[key] = setting
        else:
            return False
        return True

    def _whole(self, value: Any, source: str) -> None:
        if isinstance(value, str):
            settings: dict[str, Any] = {"type": value}
        else:
            settings = _mapping(_Setting(WEIGHTING, value, source))
        if "type" in settings or not settings:
            name = settings.pop("type", "grpo_sg")
            self.apply(f"{WEIGHTING}.type", name, source)
        for name, item in settings.items():
            self.apply(f"{WEIGHTING}.{name}", item, source)

    def weighting(self) -> dict[str, Any]:
        """``type`` and all parameters. A constant weight is accepted here and refused later."""
        try:
            weighting_class(self.type.value)
        except ParameterError as error:
            key = self.type.key
            raise ConfigError(
                f"{self.type.source}: {key}={error.value!r}: expected {error.expected}"
            ) from None
        values = {name: given.value for name, given in self.parameters.items()}
        try:
            made = make_weighting(self.type.value, {**values, "allow_constant": True})
            allowed = values.get("allow_constant", False)
            if not isinstance(allowed, bool):
                raise ParameterError("allow_constant", allowed, "true or false")
        except ParameterError as error:
            raise _refused(error, self.parameters.get(error.name, self.type), WEIGHTING) from None
        except ValueError as error:
            raise ConfigError(f"{self.type.source}: {WEIGHTING}: {error}") from None
        return {"type": self.type.value, **made.parameters(), "allow_constant": allowed}

    def objective_for(self, loss: str) -> dict[str, Any]:
        """The parameters of the objective that ``actor.policy_loss_type`` stands for."""
        if not self.objective:
            return {}
        name = OBJECTIVE_OF_LOSS.get(loss)
        first = next(iter(self.objective.values()))
        if name is None:
            raise ConfigError(
                f"{first.source}: {first.key}={first.value!r}: actor.policy_loss_type={loss} is "
                f"upstream's own loss, expected one of {', '.join(OBJECTIVE_OF_LOSS)}"
            )
        by_name = {key.removeprefix(f"{OBJECTIVE}."): g for key, g in self.objective.items()}
        try:
            made = make_objective(name, {key: given.value for key, given in by_name.items()})
        except ParameterError as error:
            raise _refused(error, by_name.get(error.name, first), OBJECTIVE) from None
        return made.parameters()


def _mapping(setting: _Setting) -> dict[str, Any]:
    if setting.value is None:
        return {}
    if not isinstance(setting.value, dict):
        raise ConfigError(
            f"{setting.source}: {setting.key}={setting.value!r}: expected a mapping such as "
            "{type: grpo_sg, tau: 9.0}"
        )
    return {str(name): value for name, value in setting.value.items()}


def _refused(error: ParameterError, setting: _Setting, section: str) -> ConfigError:
    return ConfigError(
        f"{setting.source}: {section}.{error.name}={error.value!r}: expected {error.expected}"
    )


def built_weighting(settings: dict[str, Any], *, allow_constant: bool | None = None) -> Weighting:
    """The weighting of a resolved ``sg.weighting``.

    Raises:
        ValueError: the weight is the same for every token, unless that is allowed.
    """
    parameters = {key: value for key, value in settings.items() if key != "type"}
    if allow_constant is not None:
        parameters["allow_constant"] = allow_constant
    return make_weighting(settings["type"], parameters)


def built_objective(loss: str, settings: dict[str, Any]) -> Objective:
    """The objective of ``actor.policy_loss_type`` and a resolved ``sg.objective``."""
    return make_objective(OBJECTIVE_OF_LOSS[loss], settings)


def check_update(update: str, loss: str) -> None:
    """Refuse ``sg.update=lopti`` with a loss of upstream, which has no passes."""
    if update == "lopti" and loss not in POLICY_LOSS_TYPES:
        raise ConfigError(
            f"actor.policy_loss_type={loss}: expected one of {', '.join(POLICY_LOSS_TYPES)} with "
            "sg.update=lopti (weighting uniform is GRPO)"
        )
