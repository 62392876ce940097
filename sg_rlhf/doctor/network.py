"""Facts about hub and cache, tokens, ports and retriever.

Only the existence of a token or key is recorded. Its value is neither kept nor printed.
"""

from __future__ import annotations

import json
import netrc
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from sg_rlhf.doctor.facts import ABSENT, CACHE, FOLDER, NOBODY, RETRIEVER, STRANGER, UNTRUSTED, Hub
from sg_rlhf.machine.probes import Question, python

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_CONNECT = """\
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()
"""
#: Posts a query as a run does. Exit status 0: a retriever answers; 1: nothing listens; 3: something
#: else answers; 4: the certificate is not trusted.
_SEARCH = """\
import http.client, json, socket, ssl, sys, urllib.parse
url, seconds = urllib.parse.urlsplit(sys.argv[1]), float(sys.argv[2])
kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
connection = kind(url.hostname, url.port, timeout=seconds)
socket.create_connection((url.hostname, connection.port), seconds).close()
body = json.dumps({"queries": ["capital of France"], "topk": 1, "return_scores": True})
path = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
try:
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    sys.exit(0 if answer.status == 200 and "result" in json.loads(answer.read()) else 3)
except ssl.SSLCertVerificationError:
    sys.exit(4)
except (OSError, http.client.HTTPException, ValueError, TypeError):
    sys.exit(3)
"""
_TRUE = ("1", "ON", "YES", "TRUE")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The download cache of huggingface_hub."""
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(named).expanduser() if named else _hub_home(environment) / "hub"


def _hub_home(environment: Mapping[str, str]) -> Path:
    if environment.get("HF_HOME"):
        return Path(environment["HF_HOME"]).expanduser()
    cache = environment.get("XDG_CACHE_HOME")
    home = Path(environment.get("HOME") or Path.home())
    return (Path(cache).expanduser() if cache else home / ".cache") / "huggingface"


def _first_line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def has_token(environment: Mapping[str, str]) -> bool:
    """Whether huggingface_hub would send a token."""
    if any(environment.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
        return True
    named = environment.get("HF_TOKEN_PATH")
    return bool(_first_line(Path(named) if named else _hub_home(environment) / "token"))


class HubProbe:
    """Probe of a connection to the hub, or to the proxy if one is set."""

    def __init__(self, environment: Mapping[str, str], ask: bool, seconds: float) -> None:
        endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
        parts = urllib.parse.urlsplit(endpoint)
        proxy = proxy_of(parts.scheme, parts.hostname or "", environment)
        self._host = parts.hostname or endpoint
        self._offline = any(
            environment.get(name, "").upper() in _TRUE
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        )
        self._token = has_token(environment)
        target = proxy or parts
        if proxy:
            self._host += f" by proxy {proxy.hostname}"
        port = target.port or {"http": 80}.get(target.scheme, 443)
        argv = python(_CONNECT, target.hostname or "", str(port), str(seconds))
        self._question = Question(argv, environment) if ask and not self._offline else None

    def facts(self, deadline: float) -> Hub:
        """The result, see `Hub`."""
        reachable = self._question.answer(deadline)[0] == 0 if self._question else None
        return Hub(self._host, reachable, self._offline, self._token)


def proxy_of(
    scheme: str, host: str, environment: Mapping[str, str]
) -> urllib.parse.SplitResult | None:
    """The proxy for a host, from ``https_proxy``, ``all_proxy`` and ``no_proxy``."""
    found = {
        name.lower()[: -len("_proxy")]: value
        for name, value in environment.items()
        if name.lower().endswith("_proxy") and value
    }
    chosen = found.get(scheme) or found.get("all")
    bypassed = urllib.request.proxy_bypass_environment(host, found)  # type: ignore[attr-defined]
    if not chosen or bypassed:
        return None
    return urllib.parse.urlsplit(chosen if "://" in chosen else f"http://{chosen}")


def models_here(names: Iterable[str], cache: Path) -> dict[str, str]:
    """Location of each model: a folder, the hub's cache (complete), or absent."""
    return {name: _place(name, cache) for name in names}


def _place(name: str, cache: Path) -> str:
    if (Path(name) / "config.json").is_file():
        return FOLDER
    if name.startswith((".", "/")) or name.count("/") > 1:
        return ABSENT
    stored = cache / ("models--" + name.replace("/", "--")) / "snapshots"
    snapshots = stored.iterdir() if stored.is_dir() else []
    return CACHE if any(_is_complete(snapshot) for snapshot in snapshots) else ABSENT


def _is_complete(snapshot: Path) -> bool:
    """Whether a snapshot has its config and all weight files."""
    if not (snapshot / "config.json").is_file():
        return False
    for index in snapshot.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        return all((snapshot / shard).is_file() for shard in shards)
    return any(f.is_file() for kind in ("*.safetensors", "*.bin") for f in snapshot.glob(kind))


def wandb(environment: Mapping[str, str], key_in_recipe: bool) -> str:
    """How a run would log to wandb: ``key``, ``offline``, ``netrc`` (a login alone) or ``none``."""
    if environment.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun"):
        return "offline"
    if key_in_recipe or environment.get("WANDB_API_KEY"):
        return "key"
    base = environment.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    host = urllib.parse.urlsplit(base).hostname or base
    file = environment.get("NETRC") or str(Path(environment.get("HOME", "/")) / ".netrc")
    try:
        return "netrc" if netrc.netrc(file).authenticators(host) else "none"
    except (OSError, netrc.NetrcParseError):
        return "none"


def ports_in_use(ports: Iterable[int]) -> list[int]:
    """The ports of this machine where something listens."""
    found = []
    for port in ports:
        with socket.socket() as trial:
            trial.settimeout(0.5)
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                found.append(port)
    return found


class RetrieverProbe:
    """Probe of the server at a recipe's ``sg.search.url``."""

    def __init__(self, url: str, environment: Mapping[str, str], seconds: float) -> None:
        self._question = Question(python(_SEARCH, url, str(seconds)), environment)

    def who(self, deadline: float) -> str | None:
        """One of the four values of `Facts.retriever`; None without an answer in time."""
        status, _ = self._question.answer(deadline)
        found = {0: RETRIEVER, 3: STRANGER, 4: UNTRUSTED, 1: NOBODY}
        return found.get(-1 if status is None else status)
