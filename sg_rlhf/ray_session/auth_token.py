"""Authentication token of a private Ray session.

Ray's processes listen on every address of the machine and execute what they receive. With a token
they refuse other senders. Ray reads these variables when it is imported, so this module must not
import Ray.
"""

from __future__ import annotations

import os
import secrets
import sys

MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


def set_auth_token() -> None:
    """Set a new random token for the Ray session that this process will start.

    Does nothing if the user chose a mode or joins a cluster (`RAY_ADDRESS`), or if Ray is already
    imported and would not see it.
    """
    if MODE in os.environ or "RAY_ADDRESS" in os.environ or "ray" in sys.modules:
        return
    os.environ[MODE] = "token"
    os.environ[TOKEN] = secrets.token_hex(32)
