"""Choose recipe, hardware settings, data and run directory of a domain for a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sg_rlhf.common import resources
from sg_rlhf.config import load_config
from sg_rlhf.config.builtin_recipes import ALGORITHM, CONFIGS, HARDWARE, short_name
from sg_rlhf.launch import data_commands
from sg_rlhf.machine import names
from sg_rlhf.machine.gpus import detect, hardware_name
from sg_rlhf.machine.names import TINY, UP_TO_1B, UP_TO_3B, UP_TO_8B, Layout

#: Domain -> the largest models that fit -> the recipe; a smaller key's where one is missing.
RECIPES = {
    "kk": {TINY: "tiny_cpu", UP_TO_1B: "1xgpu", UP_TO_3B: "qwen2.5-3b-instruct"},
    "math": {TINY: "tiny_cpu", UP_TO_1B: "1xgpu", UP_TO_8B: "dsr_qwen2.5-7b"},
    "search": {TINY: "tiny_cpu", UP_TO_1B: "1xgpu", UP_TO_3B: "qwen2.5-3b"},
    "arithmetic": {TINY: "smollm2-135m_cpu", UP_TO_1B: "smollm2-135m"},
}
#: Domain -> the algorithm where none is asked for; "" for the recipe's own, GRPO. The weight is
#: outside the clip: inside it the published constants cost accuracy (lab/experiments/forks_part2).
ALGORITHMS = dict.fromkeys(RECIPES, "grpo_sg_outside") | {"arithmetic": ""}
#: Model of a recipe -> its name for `sg-rlhf data model`, and the folder that is made of it.
MODEL_FOLDERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("smollm2-135m", "data/smollm2-135m"),
}


class ChoiceError(ValueError):
    """Nothing fits, or a wrong value; the message is one line for the user."""


@dataclass(frozen=True)
class Request:
    """What the user asks for; "" where nothing is said."""

    domain: str  # a key of RECIPES
    config: str = ""  # a recipe instead of the machine's
    algorithm: str = ""  # "" for that of ALGORITHMS, or for what ``config`` has
    hardware: str = ""  # a name instead of what is detected
    run_dir: str = ""
    overrides: Sequence[str] = ()  # key=value of the recipe
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment


@dataclass(frozen=True)
class Choice:
    """What is run."""

    parts: tuple[str, ...]  # of the recipe
    run_dir: str
    data: tuple[str, ...]  # arguments of sg-rlhf data; () if the data is the user's own
    model: tuple[str, ...]  # the same for the model; () if nothing is made for it
    remarks: tuple[str, ...]  # for the user
    retriever: bool  # whether the run starts one, over the corpus of the data

    @property
    def folder(self) -> Path:
        """The folder of the data that is made."""
        return _folder(self.data)

    @property
    def model_overrides(self) -> list[str]:
        """The override that names the model's folder, once it is there."""
        if not self.model or not _folder(self.model).is_dir():
            return []
        return [f"actor.model_name_or_path={_folder(self.model)}"]


def _folder(arguments: Sequence[str]) -> Path:
    return Path(arguments[arguments.index("--out") + 1])


def detected_layout(variables: Mapping[str, str]) -> tuple[Layout, list[str]]:
    """This machine's GPUs, and remarks: GPUs that stay unused, a driver that does not work.

    Raises:
        ChoiceError: they are too small for every recipe.
    """
    found = detect(variables)
    gpus, problem = found.gpus, found.gpu_problem
    if not gpus:
        return Layout(), [f"without a GPU: {problem}"] if problem else []
    name = hardware_name(gpus)
    if not name:
        smallest = min(gpu.memory_mib for gpu in gpus)
        raise ChoiceError(
            f"the smallest GPU has {smallest:.0f} MiB, and the smallest recipe is made for 24 GB: "
            "SG_HARDWARE=cpu trains a tiny model without a GPU, SG_HARDWARE=1x24gb tries the "
            "recipe for one of 24 GB, and CUDA_VISIBLE_DEVICES chooses among several"
        )
    layout = names.parse(name)
    return layout, _unused(len(gpus), layout.used)


def _unused(count: int, used: int) -> list[str]:
    if used == count:
        return []
    return [f"using {used} of {count} GPUs: a rollout's batches divide over 1, 2, 4 or 8"]


def host_memory_gib(variables: Mapping[str, str]) -> int:
    """Host memory in GiB: ``SG_HOST_MEMORY_GIB``, else this machine's or its cgroup's limit.

    Raises:
        ChoiceError: the variable is no whole number.
    """
    given = variables.get("SG_HOST_MEMORY_GIB")
    if not given:
        return resources.usable_memory() // 2**30
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise ChoiceError(f"SG_HOST_MEMORY_GIB={given}: expected a whole number of GiB")
    return int(given)


def choose(request: Request) -> Choice:
    """The recipe, its data and its run directory.

    Raises:
        ChoiceError: nothing fits, or a value is wrong.
        ConfigError: the recipe is wrong.
    """
    variables = request.variables
    if request.hardware:
        try:
            layout = names.parse(request.hardware)
        except ValueError as error:
            raise ChoiceError(f"SG_HARDWARE={error}") from None
        remarks = _unused(layout.gpus, layout.used) if layout.gpus else []
        models = names.largest_models(layout)  # the host may be another machine's
    else:
        layout, remarks = detected_layout(variables)
        models, more = _models_that_fit(layout, host_memory_gib(variables))
        remarks += more
    parts, name = _parts(request, models)
    if _takes_hardware(request, parts[0]) and layout.gpus:
        parts.append(HARDWARE + layout.settings_name)
        remarks.append(f"hardware: {layout.settings_name}; recipe: {' + '.join(parts[:-1])}")
    if not request.config and parts[0].endswith("_1xgpu.yaml"):
        remarks.append("the paper's model does not fit: this is a reduced recipe (docs/running.md)")
    if request.algorithm and len(parts) == 1:
        published = f"--config {parts[0].replace('grpo_sg_', 'grpo_')} --algorithm grpo_sg"
        remarks.append(f"grpo_sg with U = 1.2 for the tiny model; the published 1.4: {published}")
    config = load_config(parts, request.overrides)
    chosen_here = not (request.config or request.algorithm)
    if chosen_here and config.sg.weighting.get("placement") == "outside":
        remarks.append("the weight is outside the clip; the paper's: sg.weighting.placement=inside")
    prompts = str(config.value("data.prompt_dataset") or f"data/{request.domain}/train.jsonl")
    data = data_commands.COMMANDS.get(str(Path(prompts).parent), "").split()
    # Shipped recipes have the address of a retriever that this command starts.
    retriever = request.domain == "search" and _is_shipped(config.origin.get("sg.search.url", ""))
    if retriever and not data:
        raise ChoiceError(
            "name a search engine: sg.search.url=http://HOST:PORT/retrieve; `sg-rlhf serve` is one"
        )
    known = MODEL_FOLDERS.get(str(config.value("actor.model_name_or_path")))
    model = ("model", known[0], "--out", known[1]) if known else ()
    return Choice(
        parts=tuple(parts), run_dir=request.run_dir or f"runs/{name}", data=tuple(data),
        model=model, remarks=tuple(remarks), retriever=retriever,
    )  # fmt: skip


def _models_that_fit(layout: Layout, host_gib: int) -> tuple[str, list[str]]:
    sizes, models, remarks = list(names.MODELS), names.largest_models(layout), []
    fitting = names.largest_models(layout, host_gib)
    while models != fitting:
        remarks.append(
            f"host memory: {host_gib} GiB, and {models.upper()} parameters on {layout.used} GPU(s) "
            f"need about {names.host_needed(models, layout)}"
        )
        models = sizes[sizes.index(models) - 1]
    return models, remarks


def _parts(request: Request, models: str) -> tuple[list[str], str]:
    """Recipe and algorithm, and the name of the run."""
    domain, algorithm = request.domain, request.algorithm
    if request.config:
        parts = [request.config, *([ALGORITHM + algorithm] if algorithm else [])]
        return parts, "_".join([domain, *map(short_name, parts)])
    known, sizes = RECIPES[domain], list(names.MODELS)
    fitting = sizes[: sizes.index(models) + 1]
    model = next(known[size] for size in reversed(fitting) if size in known)
    if model == "tiny_cpu" and algorithm in ("", "grpo_sg"):  # its weighting is not the paper's
        return [f"configs/{domain}/grpo_sg_{model}.yaml"], f"{domain}_grpo_sg_{model}"
    algorithm = algorithm or ALGORITHMS[domain]
    name = f"{domain}_{algorithm or 'grpo'}_{model}"
    recipe = f"configs/{domain}/grpo_{model}.yaml"
    return [recipe, *([ALGORITHM + algorithm] if algorithm else [])], name


def _is_shipped(part: str) -> bool:
    """Whether a recipe's file is a shipped one, also in a clone from whose folder this runs."""
    folders = [folder.resolve() for folder in (CONFIGS, Path("configs"))]
    names = [Path(part).relative_to(f) for f in folders if Path(part).is_relative_to(f)]
    return any((CONFIGS / name).is_file() for name in names)


def _takes_hardware(request: Request, recipe: str) -> bool:
    """A recipe of the user's own brings its hardware, unless one is asked for."""
    if recipe.endswith("_cpu.yaml"):
        return False
    return recipe.startswith(("configs/", "./configs/")) or bool(request.hardware)
