"""Where a recipe's parts are: its files, ``algorithm:NAME``, ``hardware:NAME``.

``sg_rlhf/configs`` is a link to the repository's ``configs`` in a checkout, and a folder of its own
in an installed package.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

from sg_rlhf.machine import names

CONFIGS = Path(__file__).parents[1] / "configs"
#: Parts of a recipe that are not files.
ALGORITHM, HARDWARE = "algorithm:", "hardware:"
#: The recipes of one model, which train with GRPO.
BASELINE = "grpo_"


def recipe_path(given: str | Path) -> Path:
    """A recipe's file as named, or, where there is none, the shipped one of this name.

    The name is that in a checkout: ``configs/kk/grpo_sg_tiny_cpu.yaml``.
    """
    path = Path(given)
    if path.exists() or path.is_absolute() or path.parts[:1] != ("configs",):
        return path
    shipped = CONFIGS.joinpath(*path.parts[1:])
    return shipped if shipped.is_file() else path


def nearest(path: Path) -> str:
    """ ", did you mean FILE?" for a recipe that is not there; "" if none has a similar name.

    Looks at the shipped recipes, and at the YAML files in the folder that was named.
    """
    known = {str(file): file for file in path.parent.glob("*.yaml")}
    known |= {f"configs/{file.relative_to(CONFIGS)}": file for file in CONFIGS.rglob("*.yaml")}
    short = {name: "/".join(file.parts[-2:]) for name, file in known.items()}
    near = difflib.get_close_matches("/".join(path.parts[-2:]), short.values(), n=1, cutoff=0.8)
    found = [name for name, file in short.items() if file in near]
    return f"; did you mean {found[0]}?" if found else ""


def algorithms() -> list[str]:
    """The names of the shipped algorithms."""
    return sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.yaml"))


def algorithm(name: str) -> str:
    """``algorithm:NAME``, the part of a recipe."""
    known = algorithms()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
        raise ValueError(f"{name}: no such algorithm; {hint}")
    return ALGORITHM + name


def hardware(name: str) -> str:
    """``hardware:NAME``, the part of a recipe."""
    names.parse(name)
    return HARDWARE + name


def hardware_of(part: str | Path) -> str | None:
    """The name in ``hardware:NAME``, or of a file ``hardware/NAME.yaml``; None for another part.

    Most such files no longer exist. A file of the user's own is not one of them.
    """
    text = str(part)
    if text.startswith(HARDWARE):
        return text.removeprefix(HARDWARE)
    path = Path(text)
    if path.parent.name != "hardware" or path.suffix != ".yaml":
        return None
    shipped = CONFIGS / "hardware" / path.name
    if path.exists() and not (shipped.exists() and path.samefile(shipped)):
        return None
    try:
        names.parse(path.stem)
    except ValueError:
        return None
    return path.stem


def model_and_algorithm(path: Path) -> list[str | Path]:
    """The parts that ``ALGORITHM_MODEL.yaml`` stands for; [] for any other name.

    ``configs/kk/grpo_sg_qwen2.5-3b.yaml`` is ``configs/kk/grpo_qwen2.5-3b.yaml`` with
    ``algorithm:grpo_sg``.
    """
    for name in sorted(algorithms(), key=len, reverse=True):
        if path.stem.startswith(f"{name}_"):
            model = path.with_name(BASELINE + path.name.removeprefix(f"{name}_"))
            if recipe_path(model).is_file():
                return [recipe_path(model), ALGORITHM + name]
    return []


def short_name(part: str | Path) -> str:
    """A part's name in the name of a run: the file's stem, or what ``algorithm:`` names."""
    text = str(part)
    named = text.startswith((ALGORITHM, HARDWARE))
    return text.partition(":")[2] if named else Path(text).stem


def words(parts: Sequence[str]) -> list[str]:
    """The parts as options of a command line."""
    flags = {ALGORITHM: "--algorithm", HARDWARE: "--hardware"}
    found = []
    for part in parts:
        kind = next((kind for kind in flags if part.startswith(kind)), "")
        found += [flags[kind], part.removeprefix(kind)] if kind else ["--config", part]
    return found


def add_arguments(
    parser: argparse.ArgumentParser, *, required: bool = False, hardware_too: bool = True
) -> None:
    """Add overrides, and ``--config``, ``--algorithm``, ``--hardware``, which append to ``config``.

    Parse them with ``parse_intermixed_args``: overrides may come before and after options.
    """
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys to override")
    parser.add_argument(
        "--config",
        required=required,
        action="append",
        metavar="FILE",
        help="recipe (YAML); repeat it to put files on top, key by key",
    )
    parser.add_argument(
        "--algorithm",
        dest="config",
        action="append",
        type=_checked(algorithm),
        metavar="NAME",
        help="algorithm to put on top, such as grpo_sg (`sg-rlhf recipes` lists them)",
    )
    if hardware_too:
        parser.add_argument(
            "--hardware",
            dest="config",
            action="append",
            type=_checked(hardware),
            metavar="NAME",
            help="settings of other hardware to put on top: cpu, or [NODESx]COUNTx and a size or a "
            "type of GPU, such as 4x40gb, 2x8xh100",
        )


def _checked(part: Callable[[str], str]) -> Callable[[str], str]:
    def checked(name: str) -> str:
        try:
            return part(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked
