"""A server with the calls of the Hugging Face hub's API that an upload makes, on a real socket."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" * 6 + "c0ff"


class HubServer(ThreadingHTTPServer):
    """What the client has sent.

    Attributes:
        repositories: the bodies of the calls that create one.
        validated: the cards that the client had validated.
        files: the content of each committed path, by branch.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: list[dict[str, Any]] = []
        self.validated: list[str] = []
        self.files: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.refuse = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, value: Any, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self._answer({"sha": COMMIT, "id": "me/a", "siblings": [], "private": False})

    def do_PUT(self) -> None:
        data = self._body()
        self.server.blobs[hashlib.sha256(data).hexdigest()] = data
        self._answer({})

    def do_POST(self) -> None:
        body, hub, parts = self._body(), self.server, self.path.strip("/").split("/")
        if hub.refuse:
            self._answer({"error": "You don't have the rights to create a model here"}, 403)
        elif self.path == "/api/repos/create":
            hub.repositories.append(json.loads(body))
            self._answer({"url": f"{hub.url}/me/a", "id": "me/a"})
        elif self.path == "/api/validate-yaml":
            hub.validated.append(json.loads(body)["content"])
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "shouldIgnore": False, "oid": None, "uploadMode":
                 "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in json.loads(body)["files"]
            ]  # fmt: skip
            self._answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}", "header": {}}}}
                for o in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            files = hub.files.setdefault(parts[-1], {})
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.blobs[value["oid"]]
            self._answer({"commitOid": COMMIT, "commitUrl": f"{hub.url}/me/a/commit/{COMMIT}"})
        else:
            self._answer({})


@contextmanager
def serving() -> Iterator[HubServer]:
    """The server, until the block ends."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
