"""When a Ray of ours gets a token; what that does is in tests/integration/test_ray_token.py."""

from __future__ import annotations

import sys

import pytest

from sg_rlhf.ray_session import auth_token


@pytest.fixture(autouse=True)
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that what `make` writes is taken back.
    for name in (auth_token.MODE, auth_token.TOKEN, "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_each_process_makes_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = set()
    for _ in range(2):
        monkeypatch.delenv(auth_token.MODE, raising=False)
        auth_token.set_auth_token()
        assert auth_token.os.environ[auth_token.MODE] == "token"
        tokens.add(auth_token.os.environ[auth_token.TOKEN])
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)


@pytest.mark.parametrize("name", [auth_token.MODE, "RAY_ADDRESS", "ray"])
def test_nothing_changes_where_the_user_chose_or_it_is_too_late(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ray":
        monkeypatch.setitem(sys.modules, "ray", sys)
    else:
        monkeypatch.setenv(name, "theirs")
    auth_token.set_auth_token()
    assert auth_token.TOKEN not in auth_token.os.environ
