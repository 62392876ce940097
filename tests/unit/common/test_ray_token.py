"""When a Ray of ours gets a token; what that does is in tests/integration/test_ray_token.py."""

from __future__ import annotations

import sys

import pytest

from sg_rlhf.common import ray_token


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that what `make` writes is taken back.
    for name in (ray_token.MODE, ray_token.TOKEN, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_each_process_makes_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = set()
    for _ in range(2):
        monkeypatch.delenv(ray_token.MODE, raising=False)
        ray_token.make()
        assert ray_token.os.environ[ray_token.MODE] == "token"
        tokens.add(ray_token.os.environ[ray_token.TOKEN])
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize("name", [ray_token.MODE, "RAY_ADDRESS", "ray"])
def test_nothing_changes_where_the_user_chose_or_it_is_too_late(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ray":
        monkeypatch.setitem(sys.modules, "ray", sys)
    else:
        monkeypatch.setenv(name, "theirs")
    ray_token.make()
    assert ray_token.TOKEN not in ray_token.os.environ
