"""What is judged of facts: the described machines, and each threshold by itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sg_rlhf.doctor import gpu_checks, host_checks, run_checks
from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check, exit_status
from sg_rlhf.doctor.checks import check
from sg_rlhf.doctor.facts import Disk, Facts, Gpu, Hub, Python, read
from sg_rlhf.doctor.needs import Needs, of_hardware
from sg_rlhf.doctor.recipe import DOWNLOAD, PROCESSES, judge, load
from sg_rlhf.doctor.report import table
from sg_rlhf.machine.hardware import named as named_hardware
from sg_rlhf.plan.memory import memory_plan
from sg_rlhf.plan.run_shape import run_shape

ROOT = Path(__file__).parents[3]
MACHINES = Path(__file__).parent / "machines"
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559, "9.0", 1)
EIGHT = read(MACHINES / "h100x8.json")


def checks_of(machine: Facts, config: str = "", *overrides: str) -> list[Check]:
    if not config:
        return check(machine, of_hardware(""))
    recipe = load([str(ROOT / "configs" / config)], overrides, "runs/first")
    needs, more = judge(recipe, machine)
    return [*check(machine, needs), *more]


def named(checks: list[Check], status: str) -> list[str]:
    return [one.name for one in checks if one.status == status]


@pytest.mark.parametrize(
    ("machine", "failed", "warned"),
    [
        ("h100x8", [], []),
        ("a100-80x8", [], []),
        ("b200x8", [], []),
        ("a100-40x8", [], []),
        ("h100x1", [], []),
        ("4090x1", [], []),
        ("cpu-2cores", [], []),
        ("driver-550", ["driver"], []),
        ("toolkit-12.8", [], ["CUDA toolkit"]),
        ("toolkit-13.1", [], []),
        ("shm-64mb", ["/dev/shm"], []),
        ("disk-100gb", [], []),
        ("host-128gb", [], []),
    ],
)
def test_machines_in_general(machine: str, failed: list[str], warned: list[str]) -> None:
    checks = checks_of(read(MACHINES / f"{machine}.json"))
    assert (named(checks, FAILED), named(checks, WARNING)) == (failed, warned)


SEVEN = "kk/grpo_sg_qwen2.5-7b-instruct-1m.yaml"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ("h100x4", "GPUs"),
        ("4090x1", "memory plan"),
        ("driver-550", "driver"),
        ("shm-64mb", "/dev/shm"),
        ("disk-100gb", "disk"),
        ("host-128gb", "host memory"),
        ("cpu-2cores", "GPUs"),
    ],
)
def test_why_the_papers_7b_recipe_cannot_run(machine: str, reason: str) -> None:
    checks = checks_of(read(MACHINES / f"{machine}.json"), SEVEN)
    assert reason in named(checks, FAILED) and exit_status(checks) == 2


@pytest.mark.parametrize("machine", ["h100x8", "a100-80x8", "b200x8", "toolkit-13.1"])
def test_where_the_papers_7b_recipe_runs(machine: str) -> None:
    checks = checks_of(read(MACHINES / f"{machine}.json"), SEVEN)
    assert named(checks, FAILED) == []


def test_the_small_model_runs_without_gpus_and_beside_bad_ones() -> None:
    for machine in ("cpu-2cores", "driver-550", "toolkit-12.8", "h100x8"):
        checks = checks_of(read(MACHINES / f"{machine}.json"), "kk/grpo_sg_tiny_cpu.yaml")
        assert exit_status(checks) == 0, machine
        assert next(one for one in checks if one.name == "GPUs").status == SKIPPED


def test_the_table_in_the_page() -> None:
    subprocess.run([sys.executable, "docs/make_doctor_table.py", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("driver", "speaks", "status"),
    [
        ("580.65.06", "13.0", OK),
        ("590.44.01", None, OK),
        ("575.57.08", "12.9", FAILED),
        ("550.163.01", None, FAILED),
        ("550.163.01", "13.0", OK),  # with cuda-compat-13
        (None, None, SKIPPED),
        ("none", None, FAILED),
    ],
)
def test_driver(driver: str | None, speaks: str | None, status: str) -> None:
    found = gpu_checks.driver(replace(EIGHT, driver=driver, driver_cuda=speaks))
    assert found.status == status
    assert status != FAILED or driver == "none" or "SG_HARDWARE=cpu" in found.remedy


@pytest.mark.parametrize(
    ("toolkit", "compiled", "status"),
    [
        ("13.0", "flash-attn", OK),
        ("13.4", "flash-attn", OK),
        ("12.8", "flash-attn", FAILED),
        ("none", "flash-attn", FAILED),
        ("12.8", "", WARNING),
        ("none", "", OK),
        (None, "flash-attn", SKIPPED),
    ],
)
def test_a_toolkit_matters_where_something_is_compiled(
    toolkit: str | None, compiled: str, status: str
) -> None:
    found = gpu_checks.toolkit(replace(EIGHT, cuda_toolkit=toolkit), Needs(nvcc_for=compiled))
    assert found.status == status


def test_flash_attn_is_compiled_only_where_it_is_wanted_and_missing() -> None:
    old = replace(EIGHT, cuda_toolkit="12.8")
    wanted = "ds.attn_implementation=flash_attention_2"
    assert "CUDA toolkit" in named(checks_of(old, SEVEN, wanted), FAILED)
    ring = checks_of(old, SEVEN, "ds.attn_implementation=sdpa", "ds.ring_attn_size=2")
    assert "CUDA toolkit" in named(ring, FAILED)
    there = replace(old, flash_attn=True)
    assert "CUDA toolkit" in named(checks_of(there, SEVEN, wanted), WARNING)
    assert "CUDA toolkit" in named(checks_of(old, SEVEN, "ds.attn_implementation=sdpa"), WARNING)


@pytest.mark.parametrize(
    ("least", "status"), [("7.5", FAILED), ("8.0", OK), ("8.6", OK), ("12.0", OK), (None, SKIPPED)]
)
def test_compute_capability(least: str | None, status: str) -> None:
    gpus = [H100, replace(H100, compute_capability=least)] if least else [Gpu("H100", 81559)]
    assert gpu_checks.capability(Facts(gpus=gpus), Needs()).status == status


def test_names_of_hardware() -> None:
    assert of_hardware("cpu").gpus == 0
    two = of_hardware("2x8x80gb")
    assert (two.nodes, two.gpus, two.gpu_gb) == (2, 8, 80)
    assert of_hardware("cuda").gpus is None and of_hardware("").gpus is None
    with pytest.raises(ValueError, match="^SG_HARDWARE=8x80: no such hardware"):
        of_hardware("8x80")


def test_hardware_by_name_asks_for_so_many_of_such_a_size() -> None:
    four = read(MACHINES / "h100x4.json")
    assert named(check(four, of_hardware("8x80gb")), FAILED) == ["GPUs"]
    assert named(check(four, of_hardware("4x80gb")), FAILED) == []
    forty = read(MACHINES / "a100-40x8.json")
    (found,) = [one for one in check(forty, of_hardware("8x80gb")) if one.status == FAILED]
    assert found.name == "GPU memory" and "SG_HARDWARE=8x40gb" in found.remedy


def test_gpus_that_stay_idle_are_a_remark() -> None:
    one = gpu_checks.count(EIGHT, Needs(gpus=1))
    assert one.status == OK and "7 stay idle; SG_HARDWARE=8x80gb" in one.remark
    assert gpu_checks.count(EIGHT, Needs(gpus=8)).remark == ""


def test_gpus_in_use_and_unequal_ones() -> None:
    gpus = [H100, replace(H100, used_mib=41000)]
    found = gpu_checks.busy(gpus)
    assert found is not None and found.found == "1 of 2 in use, up to 40 GiB"
    assert gpu_checks.busy([H100, replace(H100, used_mib=1500)]) is None
    mixed = Facts(gpus=[H100, Gpu("NVIDIA A100", 40960)])
    assert gpu_checks.memory(mixed, Needs()).found == "40 GiB in the smallest"


@pytest.mark.parametrize(
    ("links", "status"), [("all", OK), ("some", WARNING), ("none", WARNING), (None, SKIPPED)]
)
def test_nvlink(links: str | None, status: str) -> None:
    found = check(replace(EIGHT, nvlink=links), of_hardware(""))
    assert [one.status for one in found if one.name == "NVLink"] == [status]
    alone = check(read(MACHINES / "h100x1.json"), of_hardware(""))
    assert "NVLink" not in {one.name for one in alone}


@pytest.mark.parametrize(
    ("gpus", "free", "memory", "status"),
    [
        (8, 64, 2015, FAILED),
        (2, 64, 2015, FAILED),
        (2, 80, 2015, WARNING),  # NCCL's 74 MiB are there, Ray's 10 GB are not
        (8, 290, 2015, FAILED),
        (8, 9_000, 2015, WARNING),
        (8, 9_600, 2015, OK),
        (8, 2_500, 8, OK),  # Ray takes 30 % of the memory
        (1, 64, 226, WARNING),
        (0, 64, 16, WARNING),
        (0, 512, 16, OK),
    ],
)
def test_shared_memory(gpus: int, free: float, memory: float, status: str) -> None:
    facts = Facts(gpus=[H100] * gpus, dev_shm_mib=free, host_memory_gib=memory)
    assert host_checks.shared_memory(facts, Needs()).status == status


@pytest.mark.parametrize(
    ("container", "remedy"),
    [("docker", "--shm-size"), ("kubernetes", "emptyDir"), ("none", "remount"), (None, "remount")],
)
def test_more_shared_memory_where_it_is_asked_for(container: str | None, remedy: str) -> None:
    facts = Facts(gpus=[H100] * 8, dev_shm_mib=64, container=container)
    assert remedy in host_checks.shared_memory(facts, Needs()).remedy


def test_disk_of_an_installation_is_what_bootstrap_asks_for() -> None:
    script = (ROOT / "scripts" / "bootstrap.sh").read_text()
    for name, gb in (("cpu", host_checks.CPU_INSTALL_GB), ("cuda", host_checks.CUDA_INSTALL_GB)):
        assert f" {name}_disk_gb={gb}" in script


def test_disks_are_summed_by_file_system() -> None:
    needs = Needs(gpus=8, recipe=True, model="a/b", model_gb=15, run_gb=500)
    together = Facts(gpus=[H100] * 8, disks=[Disk(["environment", "models", "run"], "/", 540)])
    (found,) = host_checks.disks(together, needs)
    assert found.status == FAILED
    assert found.needed == "30 GB for the packages + 15 GB for the model + 500 GB for checkpoints"
    assert host_checks.disks(replace(together, installed=True), needs)[0].status == OK
    assert host_checks.disks(replace(together, models={"a/b": "cache"}), needs)[0].status == OK
    resumed = replace(together, written_gb=100)
    assert host_checks.disks(resumed, needs)[0].status == OK
    apart = [Disk(["environment"], "/", 40), Disk(["models"], "/home", 5), Disk(["run"], "/x", 600)]
    assert [c.status for c in host_checks.disks(replace(together, disks=apart), needs)] == [
        OK, FAILED, OK,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("have", "limit", "status"),
    [(256, None, OK), (190, None, WARNING), (189, None, FAILED), (2015, 128, FAILED)],
)
def test_host_memory(have: float, limit: float | None, status: str) -> None:
    facts = Facts(gpus=[H100], host_memory_gib=have, cgroup_memory_gib=limit)
    found = host_checks.memory(facts, Needs(gpus=1, host_gib=199.5))
    assert found.status == status
    assert ("cgroup" in found.found) == (limit is not None)


def test_little_memory_without_gpus_is_a_warning() -> None:
    assert host_checks.memory(Facts(gpus=[], host_memory_gib=4), Needs(gpus=0)).status == WARNING
    assert host_checks.memory(Facts(gpus=[], host_memory_gib=8), Needs(gpus=0)).status == OK


@pytest.mark.parametrize(
    ("python", "status"),
    [
        (Python("3.11.7", "", True, True), OK),
        (Python("3.12.1", "", True, True), FAILED),
        (Python("3.1.1", "", True, True), FAILED),
        (Python("3.11.7", "", False, True), FAILED),
        (Python("3.11.7", "", True, False), FAILED),
        (None, SKIPPED),
    ],
)
def test_python(python: Python | None, status: str) -> None:
    assert host_checks.python(Facts(python=python)).status == status


@pytest.mark.parametrize(
    ("gpus", "cores", "status"),
    [(8, 10, OK), (8, 9, FAILED), (1, 3, OK), (1, 2, FAILED), (0, 2, OK), (0, 1, WARNING)],
)
def test_cores(gpus: int, cores: int, status: str) -> None:
    assert host_checks.cores(Facts(gpus=[H100] * gpus, cores=cores), Needs()).status == status


def test_limits_ports_and_a_compiler() -> None:
    assert host_checks.open_files(Facts(ulimit_nofile=1024)).status == WARNING
    assert host_checks.open_files(Facts(ulimit_nofile=4096)).status == OK
    assert host_checks.open_files(Facts()).status == SKIPPED
    (port,) = host_checks.ports(Facts(ports_in_use=[6379]), Needs())
    assert port.status == WARNING and port.found == "6379 in use"
    assert host_checks.compiler(Facts(compiler="none")).status == FAILED


HERE = Hub(reachable=True, token=False)


@pytest.mark.parametrize(
    ("place", "hub", "gated", "status", "said"),
    [
        ("folder", None, True, OK, "a local folder"),
        ("cache", Hub(offline=True), True, OK, "in the hub's cache"),
        ("absent", HERE, False, OK, "a download, 15 GB"),
        ("absent", HERE, True, FAILED, "gated, and no token here"),
        ("absent", replace(HERE, token=True), True, OK, "a download"),
        ("absent", Hub(reachable=False), False, FAILED, "no answer from huggingface.co"),
        ("absent", Hub(offline=True), False, FAILED, "the hub is off (HF_HUB_OFFLINE)"),
        ("absent", Hub(), False, SKIPPED, "the hub was not queried"),
    ],
)
def test_model(place: str, hub: Hub | None, gated: bool, status: str, said: str) -> None:
    needs = Needs(recipe=True, model="org/name", gated=gated, model_gb=15)
    found = run_checks.model(Facts(models={"org/name": place}, hub=hub), needs)
    assert found is not None and found.status == status and said in found.found


def test_a_folder_that_is_none() -> None:
    needs = Needs(recipe=True, model="/models/mine")
    found = run_checks.model(Facts(models={"/models/mine": "absent"}, hub=HERE), needs)
    assert found is not None and found.status == FAILED


@pytest.mark.parametrize(
    ("who", "status"),
    [
        ("retriever", OK),
        ("something else", FAILED),
        ("untrusted certificate", FAILED),
        ("nothing", WARNING),
        (None, SKIPPED),
    ],
)
def test_retriever(who: str | None, status: str) -> None:
    needs = Needs(recipe=True, retriever="http://127.0.0.1:8000/retrieve")
    found = run_checks.retriever(Facts(retriever=who), needs)
    assert found is not None and found.status == status


@pytest.mark.parametrize("hub", [Hub(reachable=False), Hub(offline=True), HERE])
def test_a_hub_out_of_reach_is_no_warning_of_a_machine_in_general(hub: Hub) -> None:
    """A recipe whose model is here works without; one whose model is not is refused."""
    found = run_checks.hub(Facts(hub=hub))
    assert (found.status, found.remedy) == (OK, "")
    with_recipe = Needs(recipe=True, model="org/name")
    here = run_checks.checks(Facts(models={"org/name": "cache"}, hub=hub), with_recipe)
    assert exit_status(here) == 0
    absent = run_checks.checks(Facts(models={"org/name": "absent"}, hub=hub), with_recipe)
    assert exit_status(absent) == (0 if hub is HERE else 2)


def test_nothing_is_to_do_where_all_is_well(tmp_path: Path) -> None:
    for machine in sorted(MACHINES.glob("*.json")):
        for one in check(read(machine), of_hardware("")):
            assert one.status != OK or not one.remedy
    rows = table([Check("GPUs", OK, "none", "any number", remark="the small models")], colour=False)
    assert rows[1].endswith("any number  (the small models)")
    with pytest.raises(ValueError, match="ok, and yet"):
        Check("GPUs", OK, "none", remedy="buy some")


def test_data_and_wandb() -> None:
    needs = Needs(recipe=True, data=("a.jsonl", "b.jsonl"))
    found = run_checks.data(Facts(data={"a.jsonl": True, "b.jsonl": False}), needs)
    assert found is not None and (found.status, found.found) == (WARNING, "no b.jsonl")
    assert run_checks.wandb(Facts(wandb="none")) is None
    for said in ("key", "offline", "netrc"):
        wandb = run_checks.wandb(Facts(wandb=said))
        assert wandb is not None and wandb.status == OK


def test_a_model_that_no_plan_knows(tmp_path: Path) -> None:
    experts = tmp_path / "experts"
    experts.mkdir()
    (experts / "config.json").write_text('{"num_experts": 64, "hidden_size": 1}')
    for model, said in ((str(experts), "a mixture of experts"), ("org/new", "is not known here")):
        checks = checks_of(EIGHT, SEVEN, f"actor.model_name_or_path={model}")
        plan = next(one for one in checks if one.name == "memory plan")
        assert plan.status == SKIPPED and said in plan.found
        assert named(checks, FAILED) == []


def test_lines_of_the_plan_that_are_judged_apart() -> None:
    recipe = load([str(ROOT / "configs" / SEVEN)], [], None)
    shape = run_shape(recipe.config)
    assert shape is not None
    plan = memory_plan(shape, named_hardware("8x80gb"))
    assert plan.disk[DOWNLOAD] > 15e9 and PROCESSES in plan.host
    needs, _ = judge(recipe, EIGHT)
    assert needs.model_gb == pytest.approx(15.2, abs=0.1)
    assert needs.run_gb == pytest.approx(plan.disk_gb - needs.model_gb)
    cpu, _ = judge(load([str(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")], [], None), EIGHT)
    assert cpu.host_gib == host_checks.CPU_HOST_GIB


def test_a_cluster_is_not_judged_by_the_drivers_node() -> None:
    login = replace(read(MACHINES / "cpu-2cores.json"), ray_address="10.0.0.1:6379")
    checks = checks_of(login, SEVEN)
    assert checks[0].name == "machine" and checks[0].status == SKIPPED
    assert not {"GPUs", "host memory", "disk", "/dev/shm"} & {one.name for one in checks}


def test_several_nodes_need_a_cluster() -> None:
    two = [f"{model}.num_nodes=2" for model in ("actor", "ref")]
    checks = checks_of(EIGHT, SEVEN, *two, "vllm.num_engines=16")
    assert "cluster" in named(checks, WARNING) and named(checks, FAILED) == []
    gpus = next(one for one in checks if one.name == "GPUs")
    assert gpus.needed == "8 on each of 2 nodes"


def test_gpus_of_models_that_do_not_share() -> None:
    apart = ["train.colocate_all=false", "vllm.enable_sleep=false"]
    checks = checks_of(EIGHT, SEVEN, *apart, "vllm.num_engines=4", "actor.num_gpus_per_node=2",
                       "ref.num_gpus_per_node=2")  # fmt: skip
    assert next(one for one in checks if one.name == "GPUs").needed == "8"


def test_unknown_is_no_failure() -> None:
    checks = check(Facts(), of_hardware("8x80gb"))
    assert exit_status(checks) == 0 and len(named(checks, SKIPPED)) > 8
    assert exit_status(check(Facts(), of_hardware(""))) == 0


def test_before_installing_only_what_would_waste_it() -> None:
    def failed(facts: Facts, kind: str, gpus: int | None = None) -> list[str]:
        needs = replace(of_hardware("cuda"), install=kind, gpus=gpus)
        return named(check(facts, needs), FAILED)

    machine = {name: read(MACHINES / f"{name}.json") for name in ("driver-550", "shm-64mb")}
    assert failed(machine["driver-550"], "cuda") == ["driver"]
    assert failed(machine["driver-550"], "cpu", 0) == []
    assert failed(machine["shm-64mb"], "cuda") == []
    assert failed(Facts(gpus=[], driver="none", cuda_toolkit="none"), "cuda") == []  # an image
    broken = Facts(gpus=[], gpu_problem="NVIDIA-SMI has failed")
    needs = Needs(install="cpu")
    assert named(check(broken, needs), WARNING) == ["GPUs"]
    assert check(broken, replace(needs, gpus=0)) == []
