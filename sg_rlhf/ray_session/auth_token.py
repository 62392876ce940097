"""A Ray that one run starts for itself takes orders from that run alone.

Ray's processes listen on every address of the machine, whatever they are told, and run what they
are sent. With a token whoever lacks it is refused. Ray reads the variables at its import, so that
nothing is imported here.
"""

from __future__ import annotations

import os
import secrets
import sys

MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


def set_auth_token() -> None:
    """Have the Ray that this process will start ask for a token of its own.

    Nothing is changed where the user chose a mode, joins a cluster (`RAY_ADDRESS`), or where Ray
    is imported already and would not see it.
    """
    if MODE in os.environ or "RAY_ADDRESS" in os.environ or "ray" in sys.modules:
        return
    os.environ[MODE] = "token"
    os.environ[TOKEN] = secrets.token_hex(32)
