"""JSON that every reader takes: null for what is not finite, and strings as they are."""

from __future__ import annotations

import json
import math

import numpy as np

from sg_rlhf.data_io import strict_json


def test_what_is_not_finite_is_null_and_strings_stay() -> None:
    value = {
        "NaN": ["NaNometre, Infinity", math.nan, -math.inf, (1, 2.5)],
        3: {"array": np.array([1.0, math.nan]), "number": np.float64("inf"), "flag": True},
        "none": None,
    }

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(strict_json.dumps(value), parse_constant=refuse) == {
        "NaN": ["NaNometre, Infinity", None, None, [1, 2.5]],
        "3": {"array": [1.0, None], "number": None, "flag": True},
        "none": None,
    }
    assert strict_json.dumps({"a": math.nan}, indent=1) == '{\n "a": null\n}'
