"""Write one HTML page about one or several runs: figures, differing settings, samples.

The page needs no network and no server. Open it in any browser, or send it to somebody. Runs that
differ only in their seed are drawn as one line with the range of the seeds. With --follow the page
is served on this machine and updates itself while the runs train; nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sg_rlhf.common.argument_types import OneLineParser, port, positive_int
from sg_rlhf.common.atomic_io import real_path, write_whole
from sg_rlhf.report.runs import RunError

EXAMPLES = """\
examples:
  a run, finished or still training: writes runs/a/report.html
    sg-rlhf report runs/a
  two algorithms, three seeds each
    sg-rlhf report runs/grpo_sg_s* runs/grpo_s? --out comparison.html
  watch a run, from its start; on another machine: ssh -L 8002:127.0.0.1:8002 MACHINE
    sg-rlhf report --follow runs/a
  the figures for a paper, as PNG and SVG
    sg-rlhf report runs/grpo_sg_s* runs/grpo_s? --figures figures/

docs/metrics.md says how to read the page.
"""

#: Of --follow; `serve` has 8000 and `serve-env` 8001.
PORT = 8002
FORMATS = ("png", "svg", "pdf")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="sg-rlhf report",
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", type=Path)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="the page (default: RUN_DIR/report.html for one run, else ./report.html)",
    )
    parser.add_argument(
        "--samples",
        metavar="N",
        type=positive_int,
        help="samples in the page, over all runs (default: up to 500 that keep it below 1 MB)",
    )
    parser.add_argument(
        "--figures", metavar="DIR", type=Path, help="write every figure as a file too"
    )
    parser.add_argument(
        "--format",
        metavar="F",
        action="append",
        choices=FORMATS,
        help="of --figures: png, svg or pdf; may be repeated (default: png and svg)",
    )
    parser.add_argument(
        "--follow", action="store_true", help="serve the page and update it; Ctrl-C ends it"
    )
    parser.add_argument(
        "--port",
        type=port,
        metavar="P",
        help="of --follow, on 127.0.0.1; 0: any free (default: 8002)",
    )
    return parser.parse_args(argv)


def _check(arguments: argparse.Namespace) -> None:
    seen: dict[Path, Path] = {}
    for path in arguments.run_dirs:
        try:
            found = real_path(path, "")
        except ValueError as error:
            raise RunError(str(error)) from None
        if found in seen:
            raise RunError(f"{path}: given twice (also as {seen[found]}); name it once")
        seen[found] = path
    if arguments.format and not arguments.figures:
        raise RunError("--format: only with --figures DIR")
    if arguments.follow and (arguments.out or arguments.figures):
        raise RunError("--follow writes no file; leave out --out and --figures")
    if arguments.port is not None and not arguments.follow:
        raise RunError("--port: only with --follow")
    if arguments.out is not None and arguments.out.is_dir():
        raise RunError(f"--out {arguments.out}: a folder; name a file in it")


def main(argv: list[str] | None = None) -> int:
    """The command; 0, or 2 after one line on stderr."""
    arguments = parse_arguments(argv)
    one = len(arguments.run_dirs) == 1
    out = arguments.out or (arguments.run_dirs[0] if one else Path()) / "report.html"
    doing = "reading"
    try:
        _check(arguments)
        if arguments.follow:
            return _follow(arguments)
        from sg_rlhf.report import catalogue, page

        runs, groups = page.read_runs(arguments.run_dirs)
        text = page.build(runs, groups, arguments.samples)
        doing = f"--out {out}"
        write_whole(out, text)
        print(f"report: {out} ({len(text.encode()) / 1e6:.1f} MB); open it in a browser")
        if one:
            print("  several RUN_DIRs are compared; --figures DIR writes the plots as files")
        if arguments.figures:
            doing = f"--figures {arguments.figures}"
            formats = tuple(arguments.format or ("png", "svg"))
            written = catalogue.write_all(groups, arguments.figures, formats)
            print(f"figures: {arguments.figures} ({len(written)} files)")
    except RunError as error:
        return _fail(str(error))
    except BrokenPipeError:  # what reads the output has ended; `sg-rlhf` ends quietly
        raise
    except OSError as error:
        return _fail(f"{doing}: cannot be written: {error.strerror or error}")
    return 0


def _follow(arguments: argparse.Namespace) -> int:
    from sg_rlhf.report import follow

    port = PORT if arguments.port is None else arguments.port
    try:
        follow.serve(arguments.run_dirs, port, arguments.samples)
    except OSError as error:
        return _fail(f"--port {port}: {error.strerror or error}; take another one, or 0")
    return 0


def _fail(message: str) -> int:
    print(f"sg-rlhf report: {' '.join(message.split())}", file=sys.stderr)
    return 2
