"""What the training scripts take for the machine's hardware, and which recipe they run on it."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sg_rlhf.config import load_config
from sg_rlhf.config.run_paths import run_dir_of
from sg_rlhf.doctor.needs import of_hardware
from sg_rlhf.machine.hardware import named
from sg_rlhf.machine.names import GPUS, SIZES, parse, size_of
from sg_rlhf.overlay.driver.arguments import upstream_arguments

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "scripts"
HARDWARE = ROOT / "configs" / "hardware"
NAMES = [
    *(f"{count}x{size}gb" for size in (24, 40, 80) for count in (1, 2, 4, 8)),
    "2x8x80gb",
    "1xgpu",
    "8xh100",
]
#: The host that the tests run on has too little memory for most recipes.
LARGE_HOST = {"SG_HOST_MEMORY_GIB": "2000"}


@dataclass(frozen=True)
class Machine:
    """What nvidia-smi says of a machine.

    ``memory`` in MiB as the driver counts it, a GPU each; ``slices``: its MIG slices' names.
    """

    memory: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    status: int = 0
    says: str = ""

    def install(self, folder: Path) -> None:
        """An nvidia-smi of this machine in ``folder``: -L and --query-gpu=memory.total with -i."""
        listing = [self.says] if self.says else []
        for i, _ in enumerate(self.memory):
            listing.append(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-{i})")
            listing += [
                f"  MIG {name}     Device  {k}: (UUID: MIG-{k})"
                for k, name in enumerate(self.slices)
            ]
        stub = folder / "nvidia-smi"
        stub.write_text(
            f"#!{sys.executable}\n"
            f"import sys\nmemory, listing = {list(self.memory)!r}, {listing!r}\n"
            "args = sys.argv[1:]\n"
            "chosen = range(len(memory))\n"
            "if '-i' in args:\n"
            "    chosen = [int(i.removeprefix('GPU-')) for i in args[args.index('-i') + 1]"
            ".split(',')]\n"
            "csv = ['--query-gpu=memory.total', '--format=csv,noheader,nounits']\n"
            "assert args == ['-L'] or args[-2:] == csv, args\n"
            "print(*(listing if args == ['-L'] else [memory[i] for i in chosen]), sep='\\n')\n"
            f"sys.exit({self.status})\n"
        )
        stub.chmod(0o755)


def gpus(count: int, mib: int) -> Machine:
    return Machine(memory=(str(mib),) * count)


#: Machine -> the name of its hardware. Memory as the drivers report it.
MACHINES = {
    "no-nvidia-smi": (Machine(status=127), "cpu"),
    "no-devices": (Machine(status=6, says="No devices found."), "cpu"),
    "no-devices-status-0": (Machine(says="No devices found."), "cpu"),
    "A10G": (gpus(1, 23028), "1x24gb"),
    "4090": (gpus(1, 24564), "1x24gb"),
    "4090x2": (gpus(2, 24564), "2x24gb"),
    "4090x4": (gpus(4, 24564), "4x24gb"),
    "4090x8": (gpus(8, 24564), "8x24gb"),
    "5090": (gpus(1, 32607), "1x24gb"),
    "L40Sx4": (gpus(4, 46068), "4x40gb"),
    "A100-40": (gpus(1, 40960), "1x40gb"),
    "A100-40x2": (gpus(2, 40960), "2x40gb"),
    "A100-40x8": (gpus(8, 40960), "8x40gb"),
    "A100-80x8": (gpus(8, 81920), "8x80gb"),
    "H100": (gpus(1, 81559), "1x80gb"),
    "H100x2": (gpus(2, 81559), "2x80gb"),
    "H100x4": (gpus(4, 81559), "4x80gb"),
    "H100x8": (gpus(8, 81559), "8x80gb"),
    "H200x8": (gpus(8, 143771), "8x80gb"),
    "B200x8": (gpus(8, 183359), "8x80gb"),
    "H100-in-two-slices": (Machine(("81559",), ("3g.40gb", "3g.40gb")), "1x40gb"),
    "A100-one-whole-slice": (Machine(("81920",), ("7g.80gb",)), "1x80gb"),
    "unequal": (Machine(("81559", "24564")), "2x24gb"),
    "unequal-smallest-last-but-not-least": (Machine(("81559", "100000")), "2x80gb"),
}


def sourced(folder: Path, machine: Machine, **variables: str) -> subprocess.CompletedProcess[str]:
    machine.install(folder)
    kept = {k: v for k, v in os.environ.items() if k not in ("SG_HARDWARE", "CUDA_VISIBLE_DEVICES")}
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail\nsource '{SCRIPTS / 'common.sh'}'\necho $hardware"],
        env=kept | {"PATH": f"{folder}:{os.environ['PATH']}", **LARGE_HOST, **variables},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_hardware_is_chosen_by_count_and_memory(tmp_path: Path, name: str) -> None:
    machine, hardware = MACHINES[name]
    found = sourced(tmp_path, machine)
    assert (found.returncode, found.stdout.strip(), found.stderr) == (0, hardware, "")


@pytest.mark.parametrize(("count", "used"), [(3, 2), (5, 4), (6, 4), (7, 4), (10, 8), (16, 8)])
def test_gpus_that_no_batch_divides_over_stay_unused_and_that_is_said(
    tmp_path: Path, count: int, used: int
) -> None:
    found = sourced(tmp_path, gpus(count, 81559))
    assert (found.returncode, found.stdout.strip()) == (0, f"{used}x80gb")
    assert found.stderr.startswith(f"using {used} of {count} GPUs: ")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (gpus(1, 16384), "the smallest GPU has 16384 MiB"),
        (Machine(("81559", "11264")), "the smallest GPU has 11264 MiB"),
        (Machine(("81559",), ("1g.10gb",) * 7), "the smallest GPU has 10000 MiB"),
        (Machine(("81559",), ("3g.40gb", "1g.10gb+me", "1c.2g.20gb")), "has 10000 MiB"),
        (Machine(("[N/A]",)), "nvidia-smi does not tell the GPUs' memory (it says '[N/A]')"),
    ],
)
def test_gpus_that_hold_no_recipe_are_refused_in_one_line(
    tmp_path: Path, machine: Machine, words: str
) -> None:
    found = sourced(tmp_path, machine)
    assert found.returncode == 2 and found.stdout == ""
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: ") and words in line and "SG_HARDWARE=" in line
    # The way out that the line names.
    assert sourced(tmp_path, machine, SG_HARDWARE="cpu").stdout.strip() == "cpu"
    assert sourced(tmp_path, machine, SG_HARDWARE="1xgpu").stdout.strip() == "1xgpu"


@pytest.mark.parametrize(
    ("visible", "hardware"),
    [("", "cpu"), ("-1", "cpu"), ("-1,0", "cpu"), ("0,-1,1", "1x80gb"), ("0", "1x80gb"),
     ("2", "1x24gb"), ("0,1", "2x80gb"), ("GPU-1,GPU-2", "2x24gb")],
)  # fmt: skip
def test_gpus_that_are_hidden_do_not_count(tmp_path: Path, visible: str, hardware: str) -> None:
    machine = Machine(("81559", "81559", "24564"))
    found = sourced(tmp_path, machine, CUDA_VISIBLE_DEVICES=visible)
    assert (found.returncode, found.stdout.strip()) == (0, hardware), found.stderr


def test_the_name_that_is_given_counts_whatever_is_there(tmp_path: Path) -> None:
    for name in ("cpu", *NAMES):
        found = sourced(tmp_path, gpus(8, 81559), SG_HARDWARE=name)
        assert (found.returncode, found.stdout.strip()) == (0, name)
    for name in ("0x80gb", "8x80", "h100", "2x4x80gb", "8x24gb ", "8xtpu"):
        found = sourced(tmp_path, gpus(8, 81559), SG_HARDWARE=name)
        assert found.returncode == 2 and "expected cpu, COUNTx{24,40,80}gb" in found.stderr


@pytest.mark.parametrize(
    ("name", "settings"),
    [("cpu", "cpu"), ("1xgpu", "1xgpu"), ("8xh100", "8xh100"), ("2x8x80gb", "2x8x80gb"),
     ("3x80gb", "2x80gb"), ("2x8xh200", "2x8x80gb"), ("16x40gb", "8x40gb"), ("8xH200", "8x80gb"),
     *((f"4x{name}", parse(f"4x{name}").settings_name) for name in GPUS),
     *((f"{count}x{size}gb", f"{count}x{size}gb") for count in (1, 2, 4, 8) for size in SIZES)],
)  # fmt: skip
def test_every_tool_reads_a_name_of_hardware_alike(
    tmp_path: Path, name: str, settings: str
) -> None:
    found = sourced(tmp_path, gpus(8, 81559), SG_HARDWARE=name)
    assert (found.returncode, found.stdout.strip()) == (0, settings), found.stderr
    assert (HARDWARE / f"{settings}.yaml").is_file()
    planned, needed = named(name), of_hardware(name)
    assert (planned.nodes, planned.gpus_per_node) == (needed.nodes, needed.gpus)
    if needed.gpus:
        usable = planned.gpu_memory_gib * 1024
        assert needed.gpu_gb == size_of(usable + 700)  # CUDA gives less than nvidia-smi reports


def test_a_file_of_hardware_is_there_for_each_name_and_replaces_any_other_whole() -> None:
    keys = {frozenset(load_config(HARDWARE / f"{name}.yaml").values) for name in NAMES}
    assert len(keys) == 1
    shared = {"gpus.yaml", "of_24gb.yaml", "of_40gb.yaml", "of_80gb.yaml", "cpu.yaml"}
    assert {path.name for path in HARDWARE.iterdir()} == {f"{n}.yaml" for n in NAMES} | shared


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The repository as the scripts see it: no set-up, and data that are there already.

    Set-up and data need a network; what is run here is the choice and the training command, which
    is written to ``trained`` (with --dry-run it is run too).
    """
    (tmp_path / "scripts").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    shutil.copytree(SCRIPTS, tmp_path / "examples" / "scripts")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for path, script in {
        "scripts/bootstrap.sh": "",
        ".venv/bin/python": (
            'echo "$@" >> called\n'
            'case "$2 $*" in\n'
            f'  "sg_rlhf.train "*--dry-run*) PYTHONPATH={ROOT} SG_PLATFORM=cpu '
            f'exec {sys.executable} "$@" ;;\n'
            "esac\n"
        ),
    }.items():
        (tmp_path / path).write_text(f"#!/bin/sh\n{script}")
        (tmp_path / path).chmod(0o755)
    return tmp_path


def run_script(
    tree: Path, domain: str, machine: Machine, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    machine.install(tree / "bin")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SG_", "CUDA_"))}
    if domain == "search":
        variables = {
            "SG_QA_FILES": "a.jsonl", "SG_RETRIEVER_URL": "http://127.0.0.1:9/retrieve",
        } | variables  # fmt: skip
    return subprocess.run(
        ["bash", f"examples/scripts/train_grpo_sg_{domain}.sh", *arguments],
        cwd=tree,
        env=kept | {"PATH": f"{tree}/bin:{os.environ['PATH']}", **LARGE_HOST, **variables},
        capture_output=True, text=True,
    )  # fmt: skip


def called(tree: Path, module: str) -> list[str]:
    """The one command of a module that the script called."""
    lines = [shlex.split(line) for line in (tree / "called").read_text().splitlines()]
    (found,) = [line[2:] for line in lines if line[1] == f"sg_rlhf.{module}"]
    (tree / "called").unlink()
    return found


def configs_of(command: list[str]) -> list[str]:
    return [value for flag, value in itertools.pairwise(command) if flag == "--config"]


RECIPES = {
    "tiny": {d: f"configs/{d}/grpo_sg_tiny_cpu.yaml" for d in ("kk", "math", "search")},
    "1b": {d: f"configs/{d}/grpo_sg_1xgpu.yaml" for d in ("kk", "math", "search")},
    "3b": {
        "kk": "configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml",
        "math": "configs/math/grpo_sg_1xgpu.yaml",
        "search": "configs/search/grpo_sg_qwen2.5-3b.yaml",
    },
}
RECIPES["8b"] = RECIPES["3b"] | {"math": "configs/math/grpo_sg_dsr_qwen2.5-7b.yaml"}
LARGEST = {
    "cpu": "tiny", "1x24gb": "1b", "2x24gb": "1b", "4x24gb": "3b", "8x24gb": "3b",
    "1x40gb": "3b", "2x40gb": "3b",
}  # fmt: skip


@pytest.mark.parametrize("domain", ["kk", "math", "search"])
@pytest.mark.parametrize("name", MACHINES)
def test_each_machine_gets_a_recipe_that_parses(tree: Path, name: str, domain: str) -> None:
    machine, hardware = MACHINES[name]
    found = run_script(tree, domain, machine)
    assert found.returncode == 0, found.stderr
    command = called(tree, "train")
    recipe = RECIPES[LARGEST.get(hardware, "8b")][domain]
    last = [] if hardware == "cpu" else [f"configs/hardware/{hardware}.yaml"]
    assert configs_of(command) == [recipe, *last]
    reduced = "the paper's model does not fit: this is a reduced recipe" in found.stdout
    assert reduced == recipe.endswith("_1xgpu.yaml")
    args = upstream_arguments(load_config([ROOT / path for path in (recipe, *last)]))
    size = hardware.split("x")
    assert args.actor.num_gpus_per_node == (1 if hardware == "cpu" else int(size[-2]))


@pytest.mark.parametrize("domain", ["kk", "math", "search"])
@pytest.mark.parametrize("recipe", ["grpo_sg_tiny_cpu", "grpo_sg_1xgpu"])
def test_a_run_goes_where_the_recipe_alone_goes_and_no_two_domains_meet(
    tree: Path, domain: str, recipe: str
) -> None:
    config = f"configs/{domain}/{recipe}.yaml"
    found = run_script(tree, domain, Machine(status=127), SG_CONFIG=config)
    assert found.returncode == 0, found.stderr
    command = called(tree, "train")
    run_dir = command[command.index("--run-dir") + 1]
    assert run_dir == f"runs/{domain}_{recipe}"
    assert Path(run_dir) == run_dir_of(None, [config], load_config(ROOT / config))
    # What comes next is said with the run's own name.
    assert f"  SG_RUN_DIR={run_dir}_lr1e-4 bash examples/scripts/train_grpo" in found.stdout


def test_the_retriever_writes_nothing_into_the_run_directory(tree: Path) -> None:
    """Another run may be there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    data = tree / "data" / "search_tiny"
    data.mkdir(parents=True)
    found = run_script(
        tree, "search", Machine(status=127), SG_RETRIEVER_URL="", SG_QA_FILES="", SG_PORT=str(port)
    )
    assert found.returncode == 0, found.stderr
    assert "sg_rlhf.retrieval.server" in (tree / "called").read_text()
    assert (data / f"retriever_{port}.log").exists() and not (tree / "runs").exists()


@pytest.mark.parametrize("domain", ["kk", "math", "search"])
def test_a_dry_run_prints_the_recipe_on_its_hardware(tree: Path, domain: str) -> None:
    found = run_script(tree, domain, gpus(4, 40960), "--dry-run", "actor.adam.lr=2e-6")
    assert found.returncode == 0, found.stderr
    assert "num_gpus_per_node: 4" in found.stdout and "lr: 2.0e-06" in found.stdout
    assert "  micro_batch_size: 1\n" in found.stdout
    assert not (tree / "runs").exists()


def test_a_recipe_of_the_users_own_brings_its_hardware_unless_one_is_asked_for(tree: Path) -> None:
    mine = "mine.yaml"
    (tree / mine).write_text("extends: configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml\n")
    shipped, machine = "configs/kk/grpo_qwen2.5-3b-instruct.yaml", gpus(4, 40960)
    for config, asked, last in (
        (mine, {}, []),
        (mine, {"SG_HARDWARE": "2x80gb"}, ["configs/hardware/2x80gb.yaml"]),
        (shipped, {}, ["configs/hardware/4x40gb.yaml"]),
        (shipped, {"SG_HARDWARE": "2x8x80gb"}, ["configs/hardware/2x8x80gb.yaml"]),
        (shipped, {"SG_HARDWARE": "cpu"}, []),
        ("configs/kk/grpo_tiny_cpu.yaml", {}, []),
    ):
        found = run_script(tree, "kk", machine, SG_CONFIG=config, **asked)
        assert found.returncode == 0, found.stderr
        assert configs_of(called(tree, "train")) == [config, *last]


@pytest.mark.parametrize(
    ("recipe", "variables", "model", "folder"),
    [
        ("grpo_sg_mistral-7b-instruct-v0.3", {}, "mistralai/Mistral-7B-Instruct-v0.3",
         "data/kk_mistral-7b-instruct-v0.3"),
        ("grpo_llama-3.1-8b-instruct", {}, "meta-llama/Llama-3.1-8B-Instruct",
         "data/kk_llama-3.1-8b-instruct"),
        ("grpo_sg_qwen2.5-3b", {}, None, "data/kk"),
        ("grpo_sg_qwen2.5-3b", {"SG_KK_CHAT_TEMPLATE": "org/Other"}, "org/Other", "data/kk_other"),
    ],
)  # fmt: skip
def test_puzzles_are_written_in_the_models_own_form(
    tree: Path, recipe: str, variables: dict[str, str], model: str | None, folder: str
) -> None:
    config = f"configs/kk/{recipe}.yaml"
    found = run_script(tree, "kk", gpus(8, 81559), SG_CONFIG=config, **variables)
    assert found.returncode == 0, found.stderr
    lines = (tree / "called").read_text().splitlines()
    (data,) = [shlex.split(line) for line in lines if line.startswith("-m sg_rlhf.data ")]
    given = data[data.index("--chat-template") + 1] if "--chat-template" in data else None
    assert (given, data[data.index("--out") + 1]) == (model, folder)
    assert f"data.prompt_dataset={folder}/train.jsonl" in called(tree, "train")
    if not variables:  # the recipe by itself reads the same files
        config = load_config(ROOT / config)
        assert config.value("data.prompt_dataset") == f"{folder}/train.jsonl"
        assert config.value("eval.dataset") == f"{folder}/test.jsonl"


def test_orz_is_trained_on_orz(tree: Path) -> None:
    config = "configs/math/grpo_sg_orz_qwen2.5-7b.yaml"
    assert run_script(tree, "math", gpus(8, 81559), SG_CONFIG=config).returncode == 0
    lines = (tree / "called").read_text()
    assert "sg_rlhf.data math --out data/math_orz --source orz57k --eval-dir" in lines
    assert "data.prompt_dataset=data/math_orz/train.jsonl" in called(tree, "train")


@pytest.mark.parametrize(
    ("machine", "gib", "kk", "math"),
    [
        (gpus(1, 81559), 225, "3b", "8b"),
        (gpus(1, 81559), 158, "3b", "1b"),
        (gpus(1, 81559), 64, "1b", "1b"),
        (gpus(1, 40960), 79, "1b", "1b"),
        (gpus(4, 24564), 120, "1b", "1b"),
        (gpus(8, 81559), 500, "8b", "8b"),
        (gpus(8, 81559), 300, "3b", "1b"),
        (gpus(1, 24564), 32, "1b", "1b"),
        (Machine(status=127), 4, "tiny", "tiny"),
    ],
)
def test_a_small_host_gets_a_smaller_model_and_hears_why(
    tree: Path, machine: Machine, gib: int, kk: str, math: str
) -> None:
    for domain, size in (("kk", kk), ("math", math)):
        found = run_script(tree, domain, machine, SG_HOST_MEMORY_GIB=str(gib))
        assert found.returncode == 0, found.stderr
        assert configs_of(called(tree, "train"))[0] == RECIPES[size][domain]
    said = f"host memory: {gib} GiB, and " in found.stderr
    full = run_script(tree, "math", machine)
    assert said == (full.stderr != found.stderr)
    assert configs_of(called(tree, "train"))[0] == RECIPES[largest(machine)]["math"]


def largest(machine: Machine) -> str:
    hardware = next(name for found, name in MACHINES.values() if found == machine)
    return LARGEST.get(hardware, "8b")


@pytest.mark.parametrize("wrong", ["much", "1.5", "-5"])
def test_host_memory_that_is_no_number_is_one_line(tree: Path, wrong: str) -> None:
    found = run_script(tree, "kk", gpus(1, 81559), SG_HOST_MEMORY_GIB=wrong)
    assert found.returncode == 2
    assert found.stderr == f"error: SG_HOST_MEMORY_GIB={wrong}: expected a whole number of GiB\n"


def test_the_host_is_read_where_nobody_tells_it(tmp_path: Path) -> None:
    asked = "set -euo pipefail\nsource '{}'\nhost_gib"
    found = subprocess.run(
        ["bash", "-c", asked.format(SCRIPTS / "common.sh")],
        env=os.environ | {"SG_HARDWARE": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < int(found.stdout) <= kib // 2**20
