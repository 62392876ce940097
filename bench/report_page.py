"""The report page of a long run: how long it takes to make, how large it is, how fast it opens.

    python bench/report_page.py --out bench/results/report_page.json

Writes a run of invented numbers (350 rollouts, 500 samples of 300 tokens, as a paper recipe makes
them), builds its page with the command that users call, and opens it in headless Chromium a few
times, each with an empty profile. Times are the browser's own, from the start of the navigation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# Some installed package has a top-level "tests" of its own: ours must come first.
sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.integration.browser import NO_BROWSER, executable, opened
from tests.unit.report.synthetic import write_run

ROLLOUTS, SAMPLES_PER_ROLLOUT, TOKENS, SAMPLES = 350, 4, 300, 500
AIM_SECONDS = 2.0

#: Waits for the next frame after an action, so that drawing counts.
FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def build(run_dir: Path) -> float:
    """Seconds of ``python -m sg_rlhf.report``, imports included."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "sg_rlhf.report", str(run_dir), "--samples", str(SAMPLES)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - started


def open_once(file: Path) -> dict[str, float]:
    """Milliseconds until the page is loaded and drawn, and of what a reader does then."""
    with tempfile.TemporaryDirectory() as profile, opened(file, Path(profile)) as found:
        page = found.page

        def timed(action: str) -> float:
            body = f"const t = performance.now(); {action}; await {FRAME}"
            return float(page.evaluate(f"async () => {{ {body}; return performance.now() - t; }}"))

        page.wait_for_selector("#sample .tokens .t")
        navigation = "performance.getEntriesByType('navigation')[0]"
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
        press = (
            "document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'j', bubbles: true }))"
        )
        search = (
            "const f = document.getElementById('f-text'); f.value = 'oliver'; "
            "f.dispatchEvent(new Event('input', { bubbles: true }))"
        )
        result = {
            "first_paint_ms": float(page.evaluate(paint)),
            "loaded_ms": float(page.evaluate(f"{navigation}.loadEventEnd")),
            "next_sample_ms": timed(press),
            "first_search_ms": timed(search),
        }
        assert not found.complaints, found.complaints
        return result


def main() -> None:
    """Write the JSON and say what it found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=7, help="how often the page is opened")
    arguments = parser.parse_args()
    if executable() is None:
        sys.exit(NO_BROWSER)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = write_run(
            Path(folder) / "run", rollouts=ROLLOUTS, samples_per_step=SAMPLES_PER_ROLLOUT,
            tokens=TOKENS,
        )  # fmt: skip
        build_seconds = [build(run_dir) for _ in range(3)]
        file = run_dir / "report.html"
        megabytes = file.stat().st_size / 1e6
        measured = [open_once(file) for _ in range(arguments.times)]
    names = list(measured[0])
    browser = subprocess.run(
        [str(executable()), "--version"], check=True, capture_output=True, text=True
    )
    result: dict[str, Any] = {
        "command": "python bench/report_page.py " + " ".join(sys.argv[1:]),
        "run": {"rollouts": ROLLOUTS, "samples": SAMPLES, "tokens_per_sample": TOKENS},
        "aim_seconds": AIM_SECONDS,
        "build_seconds_median": statistics.median(build_seconds),
        "page_megabytes": megabytes,
        "median": {name: statistics.median(m[name] for m in measured) for name in names},
        "worst": {name: max(m[name] for m in measured) for name in names},
        "opened": arguments.times,
        "load_average_at_end": os.getloadavg()[0],
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "versions": {
            "browser": browser.stdout.strip(),
            **{name: metadata.version(name) for name in ("matplotlib", "playwright", "wordcloud")},
        },
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({**result["median"], "page_megabytes": megabytes}))


if __name__ == "__main__":
    main()
