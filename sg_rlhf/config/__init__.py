"""Recipes and their keys, checked; light to import: neither torch nor ray.

What is refused raises ConfigError, with one line: the file or command line, key, value and remedy.
"""

from sg_rlhf.config.errors import ConfigError
from sg_rlhf.config.recipe import (
    MODULE_KEYS,
    Config,
    load_config,
    local_path,
    set_by,
    weighting_of,
)
from sg_rlhf.config.sg_settings import EvalSet, SGSettings, sg_keys

__all__ = [
    "MODULE_KEYS",
    "Config",
    "ConfigError",
    "EvalSet",
    "SGSettings",
    "load_config",
    "local_path",
    "set_by",
    "sg_keys",
    "weighting_of",
]
