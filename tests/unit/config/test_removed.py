"""Recipe keys that are gone."""

from __future__ import annotations

import pytest

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.removed import KEYS, SAME


def test_a_key_that_is_gone_is_refused_unless_it_has_the_value_of_every_run() -> None:
    assert SAME.keys() <= KEYS.keys()
    config = load_config(None, [f"{key}={value}" for key, value in SAME.items()])
    assert config == load_config(None, [])
    for key in KEYS:
        with pytest.raises(ConfigError, match=rf"^command line: {key}: removed, because "):
            load_config(None, [f"{key}=7"])
