"""Recipes and their keys, checked; light to import: neither torch nor ray."""

from sg_rlhf.config.recipe import (
    MODULE_KEYS,
    SG_KEYS,
    Config,
    ConfigError,
    EvalSet,
    SGSettings,
    load_config,
    local_path,
    sg_settings,
    token_weight_config,
    validation_message,
)

__all__ = [
    "MODULE_KEYS",
    "SG_KEYS",
    "Config",
    "ConfigError",
    "EvalSet",
    "SGSettings",
    "load_config",
    "local_path",
    "sg_settings",
    "token_weight_config",
    "validation_message",
]
