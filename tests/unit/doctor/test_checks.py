"""What is judged of facts: the described machines, and each threshold by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sg_rlhf.doctor import checks as machine_checks
from sg_rlhf.doctor import preflight
from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check, exit_status
from sg_rlhf.doctor.checks import Needs, check, of_hardware
from sg_rlhf.doctor.command import table
from sg_rlhf.doctor.recipe import judge
from sg_rlhf.machine.facts import Disk, Facts, Gpu
from sg_rlhf.machine.hardware import named as named_hardware
from sg_rlhf.plan.load import load_fitted
from sg_rlhf.plan.memory import MemoryPlan
from sg_rlhf.plan.phases import DOWNLOAD, PROCESSES
from sg_rlhf.plan.run_shape import run_shape
from tests.unit.doctor.described import NAMES, described

ROOT = Path(__file__).parents[3]
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559, "9.0", 1)
EIGHT = described("h100x8")


def checks_of(machine: Facts, config: str = "", *overrides: str) -> list[Check]:
    if not config:
        return check(machine, of_hardware(""))
    run = load_fitted([str(ROOT / "configs" / config)], overrides)
    needs, more = judge(run, machine, cached=False)
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
        ("shm-64mb", ["/dev/shm"], []),
        ("disk-100gb", [], []),
        ("host-128gb", [], []),
    ],
)
def test_machines_in_general(machine: str, failed: list[str], warned: list[str]) -> None:
    checks = checks_of(described(machine))
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
    checks = checks_of(described(machine), SEVEN)
    assert reason in named(checks, FAILED) and exit_status(checks) == 2


@pytest.mark.parametrize("machine", ["h100x8", "a100-80x8", "b200x8"])
def test_where_the_papers_7b_recipe_runs(machine: str) -> None:
    checks = checks_of(described(machine), SEVEN)
    assert named(checks, FAILED) == []


def test_the_small_model_runs_without_gpus_and_beside_bad_ones() -> None:
    for machine in ("cpu-2cores", "driver-550", "h100x8"):
        checks = checks_of(described(machine), "kk/grpo_sg_tiny_cpu.yaml")
        assert exit_status(checks) == 0, machine
        assert next(one for one in checks if one.name == "GPUs").status == SKIPPED


@pytest.mark.parametrize(
    ("driver", "speaks", "status"),
    [
        ("580.65.06", "13.0", OK),
        ("590.44.01", None, OK),
        ("575.57.08", "12.9", FAILED),
        ("550.163.01", None, FAILED),
        ("550.163.01", "13.0", OK),  # with cuda-compat-13
    ],
)
def test_driver(driver: str, speaks: str | None, status: str) -> None:
    found = preflight.driver(driver, speaks)
    assert found.status == status
    assert status != FAILED or "SG_HARDWARE=cpu" in found.remedy


@pytest.mark.parametrize(
    ("least", "status"), [("7.5", FAILED), ("8.0", OK), ("8.6", OK), ("12.0", OK)]
)
def test_compute_capability(least: str, status: str) -> None:
    def found(*gpus: Gpu) -> list[str]:
        checks = check(EIGHT.model_copy(update={"gpus": [*gpus]}), Needs())
        return [item.status for item in checks if item.name == "compute capability"]

    assert found(H100, replace(H100, compute_capability=least)) == [status]
    assert not found(Gpu("H100", 81559))


def test_names_of_hardware() -> None:
    assert of_hardware("cpu").gpus == 0
    two = of_hardware("2x8x80gb")
    assert (two.nodes, two.gpus, two.gpu_gb) == (2, 8, 80)
    assert of_hardware("cuda").gpus is None and of_hardware("").gpus is None
    with pytest.raises(ValueError, match="^SG_HARDWARE=8x80: no such hardware"):
        of_hardware("8x80")


def test_hardware_by_name_asks_for_so_many_of_such_a_size() -> None:
    four = described("h100x4")
    assert named(check(four, of_hardware("8x80gb")), FAILED) == ["GPUs"]
    assert named(check(four, of_hardware("4x80gb")), FAILED) == []
    forty = described("a100-40x8")
    (found,) = [one for one in check(forty, of_hardware("8x80gb")) if one.status == FAILED]
    assert found.name == "GPUs" and "SG_HARDWARE=8x40gb" in found.remedy


def test_gpus_that_stay_idle_are_a_remark() -> None:
    one = machine_checks.gpus(EIGHT, Needs(gpus=1))
    assert one.status == OK and "7 stay idle; SG_HARDWARE=8x80gb" in one.remark
    assert machine_checks.gpus(EIGHT, Needs(gpus=8)).remark == ""


def test_gpus_in_use_and_unequal_ones() -> None:
    gpus = [H100, replace(H100, used_mib=41000)]
    found = machine_checks.busy(gpus)
    assert found is not None and found.found == "1 of 2 in use, up to 40 GiB"
    assert machine_checks.busy([H100, replace(H100, used_mib=1500)]) is None
    mixed = machine_checks.gpus(Facts(gpus=[H100, Gpu("NVIDIA A100", 40960)]), Needs())
    assert mixed.found == "2 x NVIDIA A100 and NVIDIA H100 80GB HBM3, 40 GiB in the smallest"
    small = machine_checks.gpus(Facts(gpus=[Gpu("NVIDIA T4", 15360)]), Needs())
    assert small.status == WARNING


def test_a_driver_that_fails_is_quoted() -> None:
    found = machine_checks.gpus(Facts(gpus=[], gpu_problem="Driver Not Loaded"), Needs())
    assert found.status == FAILED and "Driver Not Loaded" in found.found
    assert machine_checks.gpus(Facts(gpus=[]), Needs()).status == OK


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
    assert machine_checks.shared_memory(facts, Needs()).status == status


def test_disks_are_summed_by_file_system() -> None:
    needs = Needs(gpus=8, recipe=True, download_gb=15, run_gb=500)

    def judged(*disks: Disk, written: float = 0) -> list[Check]:
        facts = Facts(gpus=[H100] * 8, driver="580.95.05", disks=list(disks), written_gb=written)
        return [one for one in check(facts, needs) if one.name == "disk"]

    together = Disk(holds=["models", "run"], path="/", free_gb=510)
    (found,) = judged(together)
    assert found.status == FAILED
    assert found.needed == "15 GB for the model + 500 GB for checkpoints"
    assert "ckpt.max_num" in found.remedy
    assert judged(together, written=100)[0].status == OK  # a resumed run
    apart = (
        Disk(holds=["models"], path="/home", free_gb=5), Disk(holds=["run"], path="/x", free_gb=600)
    )  # fmt: skip
    models, run = judged(*apart)
    assert (models.status, run.status) == (FAILED, OK) and "HF_HOME" in models.remedy


@pytest.mark.parametrize(
    ("have", "limit", "status"),
    [(256, None, OK), (190, None, WARNING), (189, None, FAILED), (2015, 128, FAILED)],
)
def test_host_memory(have: float, limit: float | None, status: str) -> None:
    facts = Facts(gpus=[H100], host_memory_gib=have, cgroup_memory_gib=limit)
    found = machine_checks.memory(facts, Needs(gpus=1, host_gib=199.5))
    assert found.status == status
    assert ("cgroup" in found.found) == (limit is not None)


def test_little_memory_without_gpus_is_a_warning() -> None:
    assert machine_checks.memory(Facts(gpus=[], host_memory_gib=4), Needs(gpus=0)).status == WARNING
    assert machine_checks.memory(Facts(gpus=[], host_memory_gib=8), Needs(gpus=0)).status == OK


@pytest.mark.parametrize(
    ("gpus", "cores", "status"),
    [(8, 9, OK), (8, 8, FAILED), (1, 2, OK), (1, 1, FAILED), (0, 2, OK), (0, 1, WARNING)],
)
def test_cores(gpus: int, cores: int, status: str) -> None:
    assert machine_checks.cores(Facts(gpus=[H100] * gpus, cores=cores), Needs()).status == status


def test_a_compiler() -> None:
    assert machine_checks.compiler(Facts(compiler="none", gpus=[H100])).status == FAILED
    assert machine_checks.compiler(Facts(compiler="none", gpus=[])).status == OK
    assert machine_checks.compiler(Facts(compiler="g++", gpus=[H100])).status == OK


def test_nothing_is_to_do_where_all_is_well(tmp_path: Path) -> None:
    for machine in NAMES:
        for one in check(described(machine), of_hardware("")):
            assert one.status != OK or not one.remedy
    rows = table([Check("GPUs", OK, "none", "any number", remark="the small models")], colour=False)
    assert rows[1].endswith("any number  (the small models)")


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
    run = load_fitted([str(ROOT / "configs" / SEVEN)])
    shape = run_shape(run)
    assert shape is not None
    plan = MemoryPlan(shape, named_hardware("8x80gb"))
    assert plan.disk[DOWNLOAD] > 15e9 and PROCESSES in plan.host
    needs, _ = judge(run, EIGHT, cached=False)
    assert needs.download_gb == pytest.approx(15.2, abs=0.1)
    assert needs.run_gb == pytest.approx(plan.disk_gb - needs.download_gb)
    tiny = load_fitted([str(ROOT / "configs" / "kk" / "grpo_sg_tiny_cpu.yaml")])
    cpu, _ = judge(tiny, EIGHT, cached=False)
    assert cpu.host_gib == machine_checks.CPU_HOST_GIB


def test_a_cluster_is_not_judged_by_the_drivers_node() -> None:
    login = described("cpu-2cores").model_copy(update={"ray_address": "10.0.0.1:6379"})
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
