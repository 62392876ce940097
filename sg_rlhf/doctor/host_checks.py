"""Checks of the host: memory, shared memory, disks, Python, compiler, cores, limits, ports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sg_rlhf.doctor.check import FAILED, OK, SKIPPED, WARNING, Check
from sg_rlhf.doctor.facts import CACHE, FOLDER, NONE
from sg_rlhf.doctor.gpu_checks import used

if TYPE_CHECKING:
    from sg_rlhf.doctor.facts import Disk, Facts
    from sg_rlhf.doctor.needs import Needs

#: A run of the tiny model peaks at 4.1 GB (experiments/kk_cpu); the rest is the system's.
CPU_HOST_GIB = 8
#: Disk for the packages and pip's temporary files, GB, as in scripts/bootstrap.sh.
CPU_INSTALL_GB, CUDA_INSTALL_GB = 6, 30
#: NCCL's shared-memory transport takes a segment of 9.2 MiB (its log: "size 9637888") for each
#: channel of a pair: at least 2 channels a GPU, and 2 communicators (DeepSpeed's, the weight
#: sync's).
NCCL_SHM_MIB_PER_GPU = 2 * 2 * 9637888 / 2**20
#: Ray puts its object store (30 % of the memory, at most 10 GB then) below /tmp where shared memory
#: cannot hold it (_private/services.py, determine_plasma_store_config). A private one of a run
#: without GPUs has 512 MiB.
RAY_SHARE, RAY_SHM_MIB, RAY_CPU_SHM_MIB = 0.3, 1e10 / 2**20, 512
#: CPUs for Ray's controllers, in addition to one per GPU.
CONTROLLER_CPUS = 2
#: The plan estimates the worst case. A shortage below this share is only a warning.
SLACK = 0.05
OPEN_FILES, OPEN_FILES_GOOD = 4096, 65536


def checks(facts: Facts, needs: Needs) -> list[Check]:
    """All checks of the host."""
    return [
        *where(facts),
        memory(facts, needs),
        shared_memory(facts, needs),
        *disks(facts, needs),
        python(facts),
        compiler(facts),
        cores(facts, needs),
        open_files(facts),
        *ports(facts, needs),
    ]


def where(facts: Facts) -> list[Check]:
    """Say whether this is a container or a job, which has its own limits."""
    inside = [facts.container] if facts.container not in (None, NONE) else []
    if facts.slurm:
        inside.append("a SLURM job")
    found = " in ".join(str(name) for name in inside)
    return (
        [Check("inside", OK, found, remark="its limits count, not the machine's")] if found else []
    )


def memory(facts: Facts, needs: Needs) -> Check:
    """Host memory, or the cgroup's limit if it is lower."""
    have = facts.memory_gib
    on_gpus = bool(used(facts, needs) or needs.gpus)
    least = needs.host_gib or (None if on_gpus else CPU_HOST_GIB)
    needed = f"{least:,.0f} GiB" if least is not None else ""
    if have is None:
        return Check("host memory", SKIPPED, "unknown", needed)
    found = f"{have:,.0f} GiB"
    limited = facts.cgroup_memory_gib == have and facts.host_memory_gib not in (None, have)
    if limited:
        found += f" (the cgroup's limit, of {facts.host_memory_gib:,.0f})"
    if least is None or have >= least:
        return Check("host memory", OK, found, needed)
    remedy = "ask the container or job for more" if limited else "a machine with more"
    status = FAILED if on_gpus and have < least * (1 - SLACK) else WARNING
    return Check("host memory", status, found, needed, f"{remedy}, or a smaller model")


def shared_memory(facts: Facts, needs: Needs) -> Check:
    """/dev/shm: for NCCL's segments between GPUs and Ray's object store."""
    gpus = needs.gpus or len(used(facts, needs))
    nccl = NCCL_SHM_MIB_PER_GPU * gpus if gpus > 1 else 0
    ray = RAY_SHM_MIB
    if not gpus:
        ray = RAY_CPU_SHM_MIB
    elif facts.memory_gib is not None:
        ray = min(ray, RAY_SHARE * facts.memory_gib * 1024)
    needed = f"{ray:,.0f} MiB for Ray" + (f", {nccl:,.0f} for NCCL" if nccl else "")
    have = facts.dev_shm_mib
    if have is None:
        return Check("/dev/shm", SKIPPED, "unknown", needed)
    found = f"{have:,.0f} MiB free"
    if have >= max(nccl, ray):
        return Check("/dev/shm", OK, found, needed)
    more = {
        "kubernetes": "mount an emptyDir with medium: Memory there",
        "docker": "docker run --shm-size=16g",
        "podman": "podman run --shm-size=16g",
    }.get(facts.container or "", "as root: mount -o remount,size=16g /dev/shm")
    if have < nccl:
        return Check("/dev/shm", FAILED, found, needed, more)
    return Check(
        "/dev/shm", WARNING, found, needed, f"Ray keeps objects below /tmp instead; {more}"
    )


def disks(facts: Facts, needs: Needs) -> list[Check]:
    """Free space of each file system against everything that will be written to it."""
    if facts.disks is None:
        return [Check("disk", SKIPPED, "unknown")]
    return [_disk(disk, facts, needs) for disk in facts.disks]


def _disk(disk: Disk, facts: Facts, needs: Needs) -> Check:
    on_gpus = bool(used(facts, needs) or needs.gpus)
    install = CUDA_INSTALL_GB if on_gpus else CPU_INSTALL_GB
    download = 0 if facts.models.get(needs.model) in (FOLDER, CACHE) else needs.model_gb
    wanted = {
        "environment": (0 if facts.installed else install, "the packages"),
        "models": (download, "the model"),
        "run": (max(0, (needs.run_gb or 0) - (facts.written_gb or 0)), "checkpoints"),
    }
    parts = [wanted[name] for name in disk.holds]
    total = sum(gb for gb, _ in parts if gb)
    found = f"{disk.free_gb:,.0f} GB free at {disk.path}"
    needed = " + ".join(f"{gb:,.0f} GB for {what}" for gb, what in parts if gb)
    if disk.free_gb >= total:
        return Check("disk", OK, found, needed)
    remedies = {
        "environment": "link .venv to a folder on a larger disk",
        "models": "set HF_HOME to a larger disk",
        "run": "--run-dir on a larger disk, or lower ckpt.max_num",
    }
    largest = max(disk.holds, key=lambda name: wanted[name][0] or 0)
    return Check("disk", FAILED, found, needed, remedies[largest])


def python(facts: Facts) -> Check:
    """Python 3.11 with headers, and with venv if the environment does not exist yet."""
    found, needed = facts.python, "3.11 with headers and venv"
    if found is None:
        return Check("Python", SKIPPED, "unknown", needed)
    get = "apt-get install python3.11-venv python3.11-dev, or SG_PYTHON=/path/to/python3.11"
    if found.version.split(".")[:2] != ["3", "11"]:
        return Check("Python", FAILED, found.version, needed, get)
    if found.headers is False:
        return Check("Python", FAILED, f"{found.version} without Python.h", needed, get)
    if found.venv is False and not facts.installed:
        return Check("Python", FAILED, f"{found.version} without venv", needed, get)
    return Check("Python", OK, found.version, needed)


def compiler(facts: Facts) -> Check:
    """A C++ compiler: ``torch.compile`` and Triton build kernels at run time."""
    needed = "any, for kernels of torch.compile and Triton"
    if facts.compiler is None:
        return Check("C++ compiler", SKIPPED, "unknown", needed)
    if facts.compiler == NONE:
        return Check("C++ compiler", FAILED, NONE, needed, "apt-get install g++, or set CXX")
    return Check("C++ compiler", OK, facts.compiler, needed)


def cores(facts: Facts, needs: Needs) -> Check:
    """Ray needs one CPU per GPU and one for each of two controllers."""
    gpus = needs.gpus or len(used(facts, needs))
    least = gpus + CONTROLLER_CPUS if gpus else 2
    needed = f"{least}" if gpus else f"{least} or more"
    if facts.cores is None:
        return Check("cores", SKIPPED, "unknown", needed)
    if facts.cores >= least:
        return Check("cores", OK, f"{facts.cores}", needed)
    if gpus:
        remedy = "ask the container or job for more; Ray takes one per GPU and two"
        return Check("cores", FAILED, f"{facts.cores}", needed, remedy)
    return Check("cores", WARNING, f"{facts.cores}", needed, "trainer and engine take turns: slow")


def open_files(facts: Facts) -> Check:
    """The hard limit of open files: Ray and vLLM raise the soft limit to it, up to 65,536."""
    found, needed = facts.ulimit_nofile, f"{OPEN_FILES:,} at least, {OPEN_FILES_GOOD:,} is plenty"
    if found is None:
        return Check("open files", SKIPPED, "unlimited or unknown", needed)
    if found >= OPEN_FILES:
        return Check("open files", OK, f"{found:,}", needed)
    remedy = f"ulimit -n {OPEN_FILES_GOOD}, docker run --ulimit nofile={OPEN_FILES_GOOD}"
    return Check("open files", WARNING, f"{found:,}", needed, remedy)


def ports(facts: Facts, needs: Needs) -> list[Check]:
    """Ports of `ray start`. A run itself starts a private cluster on free ports."""
    if facts.ports_in_use is None:
        return [Check("Ray's ports", SKIPPED, "unknown")]
    if not facts.ports_in_use:
        return [Check("Ray's ports", OK, "free")]
    found = ", ".join(map(str, facts.ports_in_use)) + " in use"
    remedy = (
        "a Ray cluster here? RAY_ADDRESS joins it, `ray stop` ends it; a run starts one of its own"
    )
    return [Check("Ray's ports", WARNING, found, "free for `ray start --head`", remedy)]
