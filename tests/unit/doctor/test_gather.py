"""Facts of machines that are there: this one, and one whose PATH and files a test laid out."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sg_rlhf.doctor import host, network
from sg_rlhf.doctor.facts import (
    ABSENT,
    CACHE,
    FOLDER,
    NOBODY,
    RETRIEVER,
    STRANGER,
    UNTRUSTED,
    Facts,
    parse,
)  # fmt: skip
from sg_rlhf.doctor.gather import Wanted, gather
from sg_rlhf.machine.gpus import loaded_driver, nvlink
from tests.unit.doctor.fake_programs import nvcc, nvidia_smi, path, program


def found(*folders: Path, seconds: float = 10.0, **variables: str) -> Facts:
    """The facts with these programs on the PATH."""
    environment = {"PATH": path(*folders), "HOME": "/nonexistent", **variables}
    return gather(Wanted(hub=False, seconds=seconds), environment)


def test_this_machine() -> None:
    facts = gather(Wanted(hub=False))
    assert parse(json.loads(json.dumps(facts.to_json()))) == facts
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert facts.host_memory_gib == pytest.approx(total, rel=0.02)
    assert facts.cores is not None and 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.python is not None and facts.python.version.startswith("3.11.")
    assert facts.disks and sum(len(disk.holds) for disk in facts.disks) == 3
    assert all(disk.free_gb > 0 for disk in facts.disks)
    assert facts.compiler != "none" and facts.ulimit_nofile != 0


def test_gpus_driver_links_and_toolkit(tmp_path: Path) -> None:
    nvidia_smi(tmp_path)
    nvcc(tmp_path, "13.1")
    facts = found(tmp_path)
    assert facts.gpus is not None and len(facts.gpus) == 2
    assert facts.gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert (facts.gpus[0].memory_mib, facts.gpus[0].used_mib) == (81559, 1)
    assert facts.gpus[0].compute_capability == "9.0"
    assert (facts.driver, facts.driver_cuda) == ("580.95.05", "13.0")
    assert (facts.nvlink, facts.mig, facts.cuda_toolkit) == ("all", False, "13.1")


def test_without_nvidia_smi_there_are_no_gpus(tmp_path: Path) -> None:
    program(tmp_path, "something", "exit 0")
    facts = gather(Wanted(hub=False), {"PATH": str(tmp_path)})
    assert facts.gpus == [] and facts.gpu_problem is None
    assert facts.compiler == "none"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'NVIDIA-SMI has failed because it could not'; exit 9", "NVIDIA-SMI has failed"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "Failed to"),
        ("echo 'No devices were found'; exit 6", "No devices were found"),
        ("exit 3", "no output"),
    ],
)
def test_an_nvidia_smi_that_fails_is_quoted(tmp_path: Path, script: str, problem: str) -> None:
    program(tmp_path, "nvidia-smi", script)
    facts = found(tmp_path)
    assert facts.gpus == [] and str(facts.gpu_problem).startswith(problem)


def test_a_hanging_nvidia_smi_costs_its_limit_and_no_more(tmp_path: Path) -> None:
    # As a driver in trouble: it heeds no SIGTERM, and a process of its own hangs too.
    program(tmp_path, "nvidia-smi", f"trap '' TERM; echo $$ >>{tmp_path}/pids; sleep 3600 & wait")
    facts = found(tmp_path, seconds=1.0)
    assert facts.gpus is None and facts.gpu_problem == "it gave no answer within 1 s"
    pids = (tmp_path / "pids").read_text().split()
    assert pids
    while any(is_running(pid) for pid in pids):
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_driver_too_old_for_the_question_is_asked_again(tmp_path: Path) -> None:
    real = nvidia_smi(tmp_path / "real", gpus=1, driver="470.57.02", cuda="11.4")
    script = real.read_text().replace(
        "H100 80GB HBM3, 81559, 1, 470.57.02, 9.0", "V100, 32510, 1, 470.57.02"
    )
    real.write_text(script)
    program(
        tmp_path,
        "nvidia-smi",
        f"""case $* in *compute_cap*)
  echo 'Field "compute_cap" is not a valid field to query.'; exit 2 ;; esac
exec {real} "$@" """,
    )
    facts = found(tmp_path)
    assert facts.driver == "470.57.02" and facts.driver_cuda == "11.4"
    assert facts.gpus is not None and facts.gpus[0].compute_capability is None


@pytest.mark.parametrize(
    ("chosen", "count"),
    [("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("1,7,0", 1), ("GPU-1a8f3c52", 1), ("3", 0)],
)
def test_cuda_visible_devices_counts_as_it_does_for_cuda(
    tmp_path: Path, chosen: str, count: int
) -> None:
    nvidia_smi(tmp_path)
    facts = found(tmp_path, CUDA_VISIBLE_DEVICES=chosen)
    assert facts.gpus is not None and len(facts.gpus) == count
    assert facts.nvlink == ("all" if count == 2 else None)


def test_a_mig_slice_is_what_counts(tmp_path: Path) -> None:
    nvidia_smi(tmp_path, gpus=1, mig="\n  MIG 3g.40gb     Device  0: (UUID: MIG-1)\n"
               "  MIG 1g.10gb+me  Device  1: (UUID: MIG-2)")  # fmt: skip
    facts = found(tmp_path)
    assert facts.mig and facts.gpus is not None
    assert [(gpu.name, gpu.memory_mib) for gpu in facts.gpus] == [("MIG 1g.10gb+me", 10000)]


@pytest.mark.parametrize(("link", "said"), [("NV12", "all"), ("SYS", "none"), ("PHB", "none")])
def test_links(tmp_path: Path, link: str, said: str) -> None:
    nvidia_smi(tmp_path, link=link)
    assert found(tmp_path).nvlink == said


def test_pairs_with_a_bridge_are_some() -> None:
    matrix = (
        "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\tX\tNV4\tSYS\tSYS\nGPU1\tNV4\tX\tSYS\tSYS\n"
        "GPU2\tSYS\tSYS\tX\tNV4\nGPU3\tSYS\tSYS\tNV4\tX\n"
    )
    assert nvlink(matrix, [0, 1, 2, 3]) == "some"
    assert nvlink(matrix, [2, 3]) == "all"
    assert nvlink(matrix, [1, 2]) == "none"
    assert nvlink(matrix, [1]) is None and nvlink("", [0, 1]) is None


def test_cuda_home_decides_where_nvcc_is(tmp_path: Path) -> None:
    nvcc(tmp_path, "12.8")
    nvcc(tmp_path / "cuda" / "bin", "13.0")
    assert found(tmp_path).cuda_toolkit == "12.8"
    assert found(tmp_path, CUDA_HOME=str(tmp_path / "cuda")).cuda_toolkit == "13.0"
    assert found(tmp_path, CUDA_HOME="/no/cuda").cuda_toolkit == "none"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release Build",
    ],
)
def test_the_kernels_driver_without_nvidia_smi(tmp_path: Path, text: str) -> None:
    file = tmp_path / "proc" / "driver" / "nvidia" / "version"
    file.parent.mkdir(parents=True)
    file.write_text(text + "\nGCC version:  gcc version 12.3.0\n")
    assert loaded_driver(tmp_path) == "550.163.01"
    assert loaded_driver(tmp_path / "elsewhere") is None


def test_a_file_system_counts_once(tmp_path: Path) -> None:
    places = {"environment": tmp_path, "run": tmp_path / "not" / "yet", "models": Path("/dev/shm")}
    (ours, shm) = host.disks(places)
    assert (ours.holds, ours.path) == (["environment", "run"], str(tmp_path))
    assert shm.holds == ["models"]
    assert host.disks({"run": Path("/proc/run")}) == []


def test_what_a_run_directory_has_already(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with (tmp_path / "checkpoints" / "model").open("wb") as file:
        file.truncate(2_500_000_000)  # sparse
    assert host.size_gb(tmp_path) == 2.5
    assert host.size_gb(tmp_path / "none") == 0


def cached(cache: Path, model: str, **contents: str) -> None:
    snapshot = cache / f"models--{model.replace('/', '--')}" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for name, text in contents.items():
        (snapshot / name.replace("_", ".")).write_text(text)


def test_models_in_folders_and_in_the_hubs_cache(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    cached(tmp_path, "org/whole", config_json="{}", model_safetensors="x")
    cached(tmp_path, "org/broken", config_json="{}",
           model_safetensors_index_json='{"weight_map": {"a": "one.safetensors"}}')  # fmt: skip
    cached(tmp_path, "org/begun", config_json="{}")
    names = [str(tmp_path / "mine"), "org/whole", "org/broken", "org/begun", "org/none", "/no/such"]
    assert list(network.models_here(names, tmp_path).values()) == [
        FOLDER, CACHE, ABSENT, ABSENT, ABSENT, ABSENT,
    ]  # fmt: skip


def test_where_the_hubs_cache_is(tmp_path: Path) -> None:
    home = {"HOME": "/h"}
    assert network.hub_cache(home) == Path("/h/.cache/huggingface/hub")
    assert network.hub_cache({**home, "XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")
    assert network.hub_cache({**home, "HF_HOME": "/f"}) == Path("/f/hub")
    assert network.hub_cache({**home, "HF_HOME": "/f", "HF_HUB_CACHE": "/x"}) == Path("/x")


def test_tokens_are_noticed_and_never_kept(tmp_path: Path) -> None:
    secret = "hf_" + "s" * 8
    assert not network.has_token({"HOME": str(tmp_path)})
    token = tmp_path / ".cache/huggingface/token"
    token.parent.mkdir(parents=True)
    token.write_text(secret)
    assert network.has_token({"HOME": str(tmp_path)})
    facts = found(HF_TOKEN=secret, WANDB_API_KEY=secret)
    assert facts.hub is not None and facts.hub.token and facts.wandb == "key"
    assert secret not in json.dumps(facts.to_json())


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "none"),
        ({"WANDB_API_KEY": "x"}, "key"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline"),
        ({"NETRC": "netrc"}, "netrc"),
        ({"NETRC": "broken"}, "none"),
    ],
)
def test_wandb(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    (tmp_path / "broken").write_text('machine\n\n"')
    if "NETRC" in variables:
        variables = {"NETRC": str(tmp_path / variables["NETRC"])}
    assert network.wandb({"HOME": "/nonexistent", **variables}, key_in_recipe=False) == said


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy:3128"}, "proxy"),
        ({"HTTPS_PROXY": "http://user:word@proxy:3128"}, "proxy"),
        ({"ALL_PROXY": "proxy:3128"}, "proxy"),
        ({"http_proxy": "http://proxy:3128"}, None),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "localhost,.co"}, None),
    ],
)
def test_proxies(variables: dict[str, str], proxy: str | None) -> None:
    chosen = network.proxy_of("https", "huggingface.co", variables)
    assert (chosen and chosen.hostname) == proxy
    assert chosen is None or chosen.port == 3128


@pytest.fixture
def server():
    """An HTTP server whose /retrieve answers with what the test sets."""

    class Handler(BaseHTTPRequestHandler):
        status = 200
        answer = b'{"result": [[]]}'

        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = self.path == "/retrieve" and len(query["queries"]) == 1
            self.send_response(self.status if known else 404)
            self.end_headers()
            self.wfile.write(self.answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_hub_that_answers_and_one_that_does_not(server: HTTPServer, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}

    def reachable(**more: str) -> bool | None:
        facts = gather(Wanted(seconds=5), {**variables, **more})
        assert facts.hub is not None and "word" not in facts.hub.host
        return facts.hub.reachable

    assert reachable(HF_ENDPOINT=url) is True
    assert reachable(HF_ENDPOINT="http://127.0.0.1:9") is False
    assert reachable(HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1") is None
    (tmp_path / "config.json").write_text("{}")
    wanted = Wanted(models=(str(tmp_path),), seconds=5)
    local = gather(wanted, {**variables, "HF_ENDPOINT": url})
    assert local.hub is not None and local.hub.reachable is None  # nobody needs it
    hidden = url.replace("//", "//user:word@")
    assert reachable(HF_ENDPOINT="https://hub.invalid", https_proxy=hidden) is True


def who(url: str, **variables: str) -> str | None:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables}
    return gather(Wanted(hub=False, retriever=url, seconds=10), environment).retriever


def test_who_is_at_the_retrievers_url(server: HTTPServer) -> None:
    url = f"http://127.0.0.1:{server.server_port}/retrieve"
    handler: Any = server.RequestHandlerClass
    assert who(url) == RETRIEVER
    assert who(url + "d") == STRANGER  # as a run's queries would be
    for answer in (b"[]", b"<html>", b"3"):
        handler.answer = answer
        assert who(url) == STRANGER
    handler.answer, handler.status = b'{"result": [[]]}', 404
    assert who(url) == STRANGER
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert who(f"http://127.0.0.1:{free.getsockname()[1]}/retrieve") == NOBODY


def test_a_retriever_behind_tls(server: HTTPServer, tmp_path: Path) -> None:
    plain = f"http://127.0.0.1:{server.server_port}/retrieve"
    assert who(plain.replace("http:", "https:")) == STRANGER  # it does not speak TLS
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    handler: Any = server.RequestHandlerClass
    with HTTPServer(("127.0.0.1", 0), handler) as secure:
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        thread = threading.Thread(target=secure.serve_forever, daemon=True)
        thread.start()
        url = f"https://127.0.0.1:{secure.server_port}/retrieve"
        assert who(url, SSL_CERT_FILE=str(certificate)) == RETRIEVER
        assert who(url) == UNTRUSTED
        assert who(url.replace("https:", "http:")) == STRANGER
        secure.shutdown()
        thread.join()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private


def test_a_port_in_use() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert network.ports_in_use([port]) == [port]
    assert network.ports_in_use([port]) == []
