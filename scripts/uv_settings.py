"""pip's configuration (files and PIP_* variables) as shell lines for uv, which reads neither.

    eval "$(python scripts/uv_settings.py)"

What pip is told of indexes and the network counts for uv too; a variable of uv's own that is set
already wins. pip prefers no index to another, and so does uv with the strategy set here.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys

#: pip's setting -> (uv's variable, what separates several values).
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
    "keyring-provider": ("UV_KEYRING_PROVIDER", ""),
    "cert": ("SSL_CERT_FILE", ""),
    "client-cert": ("SSL_CLIENT_CERT", ""),
    "proxy": ("ALL_PROXY", ""),
}
#: The later one wins, as it does for `pip install`.
SECTIONS = ("global", "install", ":env:")


def pip_settings(listing: str) -> dict[str, str]:
    """The settings that ``pip config list`` names and `pip install` would use."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        name, equals, value = line.partition("=")
        section, _, key = name.partition(".")
        if equals and section in found:
            found[section][key] = str(ast.literal_eval(value))
    return {key: value for section in SECTIONS for key, value in found[section].items()}


def shell_lines(settings: dict[str, str]) -> list[str]:
    """The lines to evaluate: exports, and `uv_options` for what has no variable."""
    wanted = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_PROGRESS": "1"}
    for key, (variable, separator) in VARIABLES.items():
        values = settings.get(key, "").split()
        if values:
            wanted[variable] = separator.join(values)
    lines = [f"export {k}={shlex.quote(v)}" for k, v in wanted.items() if k not in os.environ]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        lines.append("uv_options+=(--no-index)")
    return lines


def main() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    print("\n".join(shell_lines(pip_settings(listing.stdout))))


if __name__ == "__main__":
    main()
