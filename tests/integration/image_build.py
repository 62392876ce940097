"""What ``docker build`` does with a Dockerfile of ours, without Docker: its steps in a clean root.

The root is an overlay on this machine's own, entered by ``chroot`` in a mount namespace: what a
step writes, installs or deletes goes to a folder and is gone with it. This machine's system and
Python stand for the base image. Home folders, ``/tmp`` and the checkout are empty in it, and the
environment is what the Dockerfile says, so nothing of the user's reaches a step.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]

#: Hidden in the root: homes, temporary files, and the checkout with its environment and data.
HIDDEN = ("/root", "/home", "/tmp", str(ROOT))
#: What tells a build of the network and of package indexes; ``--build-arg`` and secrets elsewhere.
PASSED_ON = re.compile(r"(PIP|UV)_\w+|\w+_proxy|\w+_PROXY|\w*SSL\w*|REQUESTS_CA_BUNDLE")

MOUNTS = """\
set -euo pipefail
mount -t overlay overlay -o lowerdir=/,upperdir={work}/upper,workdir={work}/work {root}
for name in proc dev sys; do mount --rbind /$name {root}/$name; done
for name in {hidden}; do
  if [ -d {root}/$name ]; then
    mkdir -p {work}/empty/$name
    mount --bind {work}/empty/$name {root}/$name
  fi
done
chmod 1777 {root}/tmp
mkdir -p {root}/{python}
mount --bind {python} {root}/{python}
for file in passwd group; do  # the base image has no users of its own
  awk -F: '$3 < 1000 || $3 == 65534' /etc/$file >{root}/etc/$file
done
"""


def why_not() -> str:
    """Why no root can be made here, if so."""
    if os.geteuid() != 0:
        return "only root can mount a clean root"
    probe = "mkdir u w m && mount -t overlay overlay -o lowerdir=/,upperdir=u,workdir=w m"
    tried = subprocess.run(
        ["unshare", "--mount", "bash", "-c", f"cd $(mktemp -d) && {probe}"],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"no overlay can be mounted: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Image:
    """The steps of a Dockerfile as a script, and what its last lines say about a container.

    Attributes:
        file: the Dockerfile; ``.dockerignore`` is that of the repository.
        work: a new folder on a disk with room for the image.
        steps: shell lines that build it.
        env: as ENV has left it.
        user: as USER has left it.
        workdir: as WORKDIR has left it.
        entrypoint: of the image.
    """

    file: Path
    work: Path
    steps: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("upper", "work", "empty", "context", "root"):
            (self.work / name).mkdir()
        self.env = {"PATH": f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self._make_context()
        (self.work / "pip.conf").write_text(pip_settings())
        for step in DockerfileParser(path=str(self.file)).structure:
            name, value = step["instruction"], step["value"]
            if name not in ("COMMENT", "FROM"):
                self.steps.append(f"echo {shlex.quote(f'[$SECONDS s] {name} {value[:90]}')}")
                getattr(self, f"_{name.lower()}")(value)

    @property
    def root(self) -> Path:
        """Where the root is while a script runs."""
        return self.work / "root"

    def run(self, *commands: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Build the image and run commands one after the other in a container of it."""
        script = MOUNTS.format(
            work=self.work, root=self.root, hidden=" ".join(HIDDEN), python=sys.base_prefix
        )
        script += "\n".join([*self.steps, *(self.in_root(shlex.join(c)) for c in commands)])
        # What [$SECONDS s] says is the script's own clock.
        script = script.replace("'[$SECONDS s] ", '"[$SECONDS s] "\'')
        (self.work / "script").write_text(script)
        return subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "bash", self.work / "script"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
            env={"PATH": os.environ["PATH"]},
        )  # fmt: skip

    def in_root(self, command: str, env: dict[str, str] | None = None) -> str:
        """A shell line that runs a command in the root, as the image's user in its folder."""
        home = {"HOME": "/root"} if self.user == "0:0" else {}
        words = [f"{k}={v}" for k, v in (home | (env or {}) | self.env).items()]
        inside = f"cd {self.workdir} && {command}"
        entered = ["chroot", f"--userspec={self.user}", str(self.root), "/usr/bin/env", "-i"]
        return shlex.join([*entered, *words, "/bin/bash", "-o", "pipefail", "-c", inside])

    def _make_context(self) -> None:
        """The files that git knows and `.dockerignore` lets through."""
        lines = (ROOT / ".dockerignore").read_text().splitlines()
        rules = [line for line in lines if line and not line.startswith("#")]
        assert rules[0] == "*", "this reads a list of what is let through"
        allowed = {rule[1:] for rule in rules if rule.startswith("!")}
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in listed.stdout.splitlines():
            if name.split("/")[0] in allowed and os.path.lexists(ROOT / name):
                target = self.work / "context" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", ROOT / name, target], check=True)

    # One method for each instruction; one that is missing here fails the test.

    def _run(self, value: str) -> None:
        options, command = re.fullmatch(r"((?:--\S+\s+)*)(.*)", value, re.DOTALL).groups()  # type: ignore[union-attr]
        env = {k: v for k, v in os.environ.items() if PASSED_ON.fullmatch(k)}
        for option in options.split():
            mount = dict(part.partition("=")[::2] for part in option.split("=", 1)[1].split(","))
            target = f"{self.root}{mount['target']}"
            if mount["type"] == "secret":
                assert mount["id"] == "pip"
                self.steps.append(f"touch {target} && mount --bind {self.work}/pip.conf {target}")
            else:
                assert mount["type"] == "cache"  # an empty one: the first build
        self.steps.append(self.in_root(command, env))

    def _copy(self, value: str) -> None:
        *sources, target = value.split()
        assert not target.startswith("/") and not any(s.startswith("-") for s in sources)
        to = f"{self.root}{self.workdir}/{target}"
        for source in sources:
            folder = (self.work / "context" / source).is_dir()
            if folder or target.endswith("/"):
                self.steps.append(f"mkdir -p {to}")
            # A folder's contents go into the target, as Docker has it.
            self.steps.append(
                f"cp -a --no-preserve=ownership {self.work}/context/{source}"
                f"{'/.' if folder else ''} {to}"
            )

    def _workdir(self, value: str) -> None:
        self.workdir = value
        self.steps.append(f"mkdir -p {self.root}{value}")

    def _env(self, value: str) -> None:
        for word in shlex.split(value):
            name, _, text = word.partition("=")
            self.env[name] = text.replace("$PATH", self.env["PATH"])

    def _user(self, value: str) -> None:
        assert re.fullmatch(r"\d+:\d+", value)
        self.user = value

    def _shell(self, value: str) -> None:
        assert json.loads(value) == ["/bin/bash", "-o", "pipefail", "-c"]

    def _entrypoint(self, value: str) -> None:
        self.entrypoint = json.loads(value)

    def _cmd(self, value: str) -> None:
        assert json.loads(value) == ["--help"]

    def _volume(self, value: str) -> None:
        for path in json.loads(value):
            self.steps.append(f"test -k {self.root}{path}")  # there, and open to every user


def pip_settings() -> str:
    """pip's configuration as one file: what ``--secret id=pip,src=pip.conf`` would hand over."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in ("global", "install"):
            found[key] = "\n    ".join(str(ast.literal_eval(value)).split())
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in found.items())
