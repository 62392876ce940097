"""Recipe keys that are gone."""

from __future__ import annotations

import pytest

from sg_rlhf.config import ConfigError, load_config
from sg_rlhf.config.removed import ACCEPTED, KEYS


def test_a_key_that_is_gone_is_refused_unless_it_has_the_value_of_every_run() -> None:
    assert ACCEPTED.keys() <= KEYS.keys()
    plain = load_config(None, [])
    for key, values in ACCEPTED.items():
        for value in values:
            assert load_config(None, [f"{key}={value}"]) == plain
    for key in KEYS:
        with pytest.raises(ConfigError, match=rf"^command line: {key}: removed, because "):
            load_config(None, [f"{key}=7"])
