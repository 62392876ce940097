"""`sg-rlhf launch KIND`: what is printed, that schedulers take it, that nothing else is printed.

Of the schemas of KubeRay and SkyPilot only the fields that we write are here (`schemas/`).
With the whole ones at hand the same files are held to them as well:

    kubectl get crd rayjobs.ray.io -o yaml > crd.yaml
    SG_KUBERAY_CRD=crd.yaml pytest tests/unit/launch
    SG_SKYPILOT_PYTHON=/path/to/venv/bin/python pytest tests/unit/launch
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from sg_rlhf.config import load_config
from sg_rlhf.launch import data_commands, job
from sg_rlhf.launch.command import main
from sg_rlhf.machine.hardware import of_gpus
from sg_rlhf.plan.of_recipe import plan_of
from sg_rlhf.train import main as train

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
EXAMPLES = sorted(p for p in (ROOT / "examples" / "launch").iterdir() if p.suffix != ".md")
SCHEMAS = Path(__file__).parent / "schemas"
KK = "configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml"
CPU = "configs/kk/grpo_sg_tiny_cpu.yaml"
TWO_NODES = ["actor.num_nodes=2", "ref.num_nodes=2", "vllm.num_engines=16"]
#: Recipes, overrides and flags whose job files differ in every branch of the templates.
CASES = {
    "eight": [KK],
    "two_nodes": [KK, *TWO_NODES],
    "cpu": [CPU],
    "cpu_two_nodes": [CPU, "actor.num_nodes=2", "ref.num_nodes=2", "vllm.num_engines=2"],
    "no_data_command": [KK, "data.prompt_dataset=mine/train.jsonl", "eval.dataset=null"],
    "hub_data": [KK, "data.prompt_dataset=org/set", "eval.dataset=null"],
    "image": [KK, "--image", "registry.example:5000/team/sg-rlhf:1"],
    "sif": [KK, *TWO_NODES, "--image", "/images/sg-rlhf.sif"],
    "quotes": [KK, "logger.wandb.group='a \"b\" $(touch /tmp/x) `c` \\ d'"],
}
#: SC2016 is for `$x` in single quotes, which is where an override of the user must stay.
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
#: Long options that `sbatch --help` of SLURM 22.05 lists, of which we may use these.
SBATCH = {
    "account", "cpus-per-task", "exclusive", "gpus-per-node", "job-name", "mem", "nodes",
    "ntasks-per-node", "open-mode", "output", "partition", "propagate", "requeue", "signal", "time",
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def printed(kind: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([kind, "--config", *words]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words, "--config", KK]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    return err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_what_their_command_prints(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = re.findall(r"^#   (sg-rlhf launch .*)$", path.read_text(), re.MULTILINE)
    assert main(shlex.split(command)[2:]) == 0
    again = f"run it again: {command} > {path.relative_to(ROOT)}"
    assert capsys.readouterr().out == path.read_text(), again


@pytest.mark.parametrize("case", CASES)
def test_sbatch_is_a_script_that_bash_and_shellcheck_read(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "job.sbatch"
    file.write_text(printed("sbatch", CASES[case], capsys))
    checks = [["bash", "-n", str(file)]]
    if found := shutil.which("shellcheck", path=TOOLS):
        checks.append([found, "--exclude=SC2016", str(file)])
    for check in checks:
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_sbatch_directives_stand_first_and_are_known(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLURM reads directives up to the first command and no further."""
    lines = printed("sbatch", CASES[case], capsys).splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    where = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert lines[0] == "#!/usr/bin/env bash" and max(where) < first
    given = [re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", lines[i]) for i in where]
    assert all(given) and {match[1] for match in given if match} <= SBATCH


def test_sbatch_asks_for_the_recipes_machines(capsys: pytest.CaptureFixture[str]) -> None:
    two = printed("sbatch", CASES["two_nodes"], capsys)
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --exclusive",
        "#SBATCH --job-name=kk-grpo-sg-qwen2-5-3b-instruct", "#SBATCH --requeue",
    ):  # fmt: skip
        assert f"\n{line}\n" in two
    assert "ray start" in two and "waits until all machines" in two
    flags = ["--partition", "gpu", "--account", "team", "--time", "2-00:00:00"]
    one = printed("sbatch", [KK, *flags], capsys)
    assert "\n#SBATCH --nodes=1\n" in one and "ray start" not in one and "--exclusive" not in one
    assert "\n#SBATCH --partition=gpu\n#SBATCH --account=team\n" in one
    assert "\n#SBATCH --time=2-00:00:00\n" in one
    assert "--gpus-per-node" not in printed("sbatch", CASES["cpu"], capsys)


def schema(name: str) -> Draft202012Validator:
    return Draft202012Validator(yaml.safe_load((SCHEMAS / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("case", CASES)
def test_rayjob_has_the_fields_of_its_kind(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("kuberay", CASES[case], capsys)
    job = yaml.safe_load(text)
    schema("rayjob").validate(job)
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    pods = [group["template"]["spec"] for group in groups]
    assert len(pods) == (2 if "nodes" in case or case == "sif" else 1)
    for pod in pods:
        (container,) = pod["containers"]
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        assert limits.get("nvidia.com/gpu") == (None if "cpu" in case else 8)
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]


@pytest.mark.parametrize("case", CASES)
def test_skypilot_task_has_the_fields_of_its_kind(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load(printed("skypilot", CASES[case], capsys))
    schema("skypilot").validate(task)
    assert task.get("num_nodes", 1) == (2 if "nodes" in case or case == "sif" else 1)
    for script in (task["setup"], task["run"]):
        bash_reads(script)


def bash_reads(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if found := shutil.which("shellcheck", path=TOOLS):
        check = [found, "--shell=bash", "--exclude=SC2016", "-"]
        done = subprocess.run(check, input=script, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", job.TEMPLATES)
def test_every_kind_runs_the_very_command(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever stands in an override reaches the run as it is, and nothing of it is carried out."""
    text = printed(kind, CASES["quotes"], capsys)
    if kind == "sbatch":
        (line,) = [x for x in text.splitlines() if "sg-rlhf train" in x and x[:1] != "#"]
        words = shlex.split(line)[1:-1]  # "${inside[@]}" before it, & behind it
    else:
        document = yaml.safe_load(text)
        shell = document["run"] if kind == "skypilot" else document["spec"]["entrypoint"]
        words = shlex.split(shell[shell.rindex("sg-rlhf train") :])
    run_dir = "runs/kk_grpo_sg_qwen2.5-3b-instruct"
    assert words == [
        "sg-rlhf", "train", "--config", KK, "--run-dir", run_dir, CASES["quotes"][1],
    ]  # fmt: skip


def test_flags_that_do_not_fit_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no place for it" in refused(["skypilot", "--time", "01:00:00"], capsys)
    assert "expected HH:MM:SS" in refused(["sbatch", "--time", "24h"], capsys)
    assert "more than no time" in refused(["sbatch", "--time", "00:00:00"], capsys)
    assert refused(["kuberay", "actor.num_nodes=0"], capsys) == (
        "error: command line: actor.num_nodes=0: expected an integer, 1 or more\n"
    )
    assert "without spaces" in refused(["sbatch", "--account", "a\n#SBATCH b"], capsys)
    assert "unknown key" in refused(["sbatch", "actor.nodes=2"], capsys)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--dry-run", "--print", "sbatch"], "`sg-rlhf launch sbatch|kuberay|skypilot`"),
        (["--time=1:00:00"], "`sg-rlhf launch sbatch|kuberay|skypilot`"),
        (["--replay", "step_1.pt"], "`python -m lab.measure minibatch-gradients`"),
    ],
)
def test_train_names_the_command_that_has_an_option_now(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(["--config", KK, *words])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1
    assert ": removed, because " in err and remedy in err


def test_time_becomes_the_deadline_of_a_rayjob(capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(printed("kuberay", [KK, "--time", "1-02:03:04"], capsys))
    assert job["spec"]["activeDeadlineSeconds"] == 93784


@functools.cache
def whole_rayjob() -> Draft202012Validator:
    definition = yaml.safe_load(Path(os.environ["SG_KUBERAY_CRD"]).read_text())
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    whole = closed(version["schema"]["openAPIV3Schema"])
    whole["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(whole)


def closed(node: Any) -> Any:
    """An OpenAPI schema of Kubernetes that refuses unknown fields, as a strict apply does."""
    if isinstance(node, dict):
        node = {key: closed(value) for key, value in node.items()}
        if node.pop("x-kubernetes-int-or-string", False):
            node.pop("pattern", None)
        if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
            node.setdefault("additionalProperties", False)
    return [closed(item) for item in node] if isinstance(node, list) else node


@pytest.mark.skipif("SG_KUBERAY_CRD" not in os.environ, reason="SG_KUBERAY_CRD names no CRD")
@pytest.mark.parametrize("case", CASES)
def test_the_whole_definition_of_kuberay_takes_it(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_rayjob().validate(yaml.safe_load(printed("kuberay", CASES[case], capsys)))


@pytest.mark.skipif("SG_SKYPILOT_PYTHON" not in os.environ, reason="SG_SKYPILOT_PYTHON not set")
@pytest.mark.parametrize("case", CASES)
def test_skypilot_itself_takes_it(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    reader = "import sys, yaml, sky; sky.Task.from_yaml_config(yaml.safe_load(sys.stdin))"
    done = subprocess.run(
        [os.environ["SG_SKYPILOT_PYTHON"], "-c", reader],
        input=printed("skypilot", CASES[case], capsys), capture_output=True, text=True,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


# -- what a job asks for -------------------------------------------------------------------------

RECIPES = sorted(
    path
    for folder in ("kk", "math", "search", "arithmetic")
    for path in (CONFIGS / folder).glob("grpo_*.yaml")
)


def kk(*overrides: str) -> tuple[int, int]:
    recipe = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
    return job.machines(load_config(recipe, overrides))


def test_machines_hold_every_model_that_has_gpus_of_its_own() -> None:
    assert kk() == (1, 8)
    assert kk("actor.num_nodes=4", "ref.num_nodes=4", "vllm.num_engines=32") == (4, 8)
    apart = ["train.colocate_all=false", "actor.num_gpus_per_node=4", "ref.num_gpus_per_node=4"]
    assert kk(*apart, "train.colocate_actor_ref=true", "vllm.num_engines=4") == (1, 8)
    assert kk(*apart, "vllm.num_engines=2", "vllm.tensor_parallel_size=4") == (2, 8)
    without = "algo.kl.init_coef=0"
    assert kk(*apart, without, "vllm.num_engines=1") == (1, 5)
    assert kk(*apart, "actor.num_nodes=2", without, "vllm.num_engines=2") == (2, 5)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("grpo_sg_qwen2.5-3b-instruct", "grpo-sg-qwen2-5-3b-instruct"),
        ("7B run", "run-7b-run"),
        ("Ä", "run"),
        ("a" * 60, "a" * 47),
        ("x" * 46 + ".b", "x" * 46),
    ],
)
def test_names_are_labels_of_dns(text: str, name: str) -> None:
    assert job.name_of(text) == name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_data_of_a_shipped_recipe_is_made_or_left_to_the_user(recipe: Path) -> None:
    command = data_commands.command_for(load_config(recipe))
    by_user = recipe.parent.name == "search" and not recipe.stem.endswith("_cpu")
    assert bool(command) == (not by_user)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_amounts_are_the_plans_and_a_margin(recipe: Path) -> None:
    config = load_config(recipe)
    nodes, ranks = job.machines(config)
    plan = plan_of(config, hardware=of_gpus("h100", nodes=nodes, gpus_per_node=ranks))
    assert plan is not None
    memory, disk, estimate = job.resources(config, 80, nodes, ranks)
    assert 1.2 * plan.memory.host_gib < memory < 1.3 * plan.memory.host_gib + 16
    assert plan.memory.disk_gb + 50 <= disk < 1.3 * plan.memory.disk_gb + 100
    assert ("s a rollout" in estimate) == (plan.time is not None)


def test_a_model_of_unknown_size_gets_what_a_large_one_needs() -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
    config = load_config(recipe, ["actor.model_name_or_path=someone/model"])
    assert job.resources(config, 80, 1, 8) == (512, 1000, "")


@pytest.mark.parametrize(
    ("hardware", "size"),
    [("8x40gb", 40), ("2x8x80gb", 80), ("1x24gb", 24), ("8xh100", 80), ("cpu", 80)],
)
def test_gpus_are_those_of_the_hardware(hardware: str, size: int) -> None:
    recipe = CONFIGS / "kk" / "grpo_sg_qwen2.5-3b-instruct.yaml"
    config = load_config([recipe, CONFIGS / "hardware" / f"{hardware}.yaml"])
    assert job.gpu_memory(config) == size
