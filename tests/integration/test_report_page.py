"""The report page in a real browser: quiet, inert, filtered, by keyboard, in both themes."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.report import page as report
from sg_rlhf.run_dir import jsonl_log
from tests.integration.browser import NO_BROWSER, executable, opened
from tests.unit.report.synthetic import write_details, write_hostile_samples, write_run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(executable() is None, reason=NO_BROWSER),
]

#: Milliseconds. Ten times the aim, so that a busy machine does not fail it.
LOADED_WITHIN = 20_000


def write_page(folder: Path, *run_dirs: Path) -> Path:
    path = folder / "report.html"
    write_whole(path, report.build(*report.read_runs(list(run_dirs))))
    return path


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GRPO-SG with the published U = 1.4, so that many tokens are zeroed; and GRPO."""
    folder = tmp_path_factory.mktemp("report")
    sg = write_run(
        folder / "grpo_sg",
        rollouts=40,
        samples_per_step=4,
        overrides=("sg.weighting.upper=1.4",),
        sets=True,
    )
    grpo = write_run(folder / "grpo", rollouts=40, seed=1, recipe="grpo_tiny_cpu.yaml", sets=True)
    return write_page(folder, sg, grpo)


@pytest.fixture
def page(chromium: Browser, page_file: Path) -> Iterator[Page]:
    with opened(chromium, page_file) as found:
        yield found.page
        assert not found.complaints


def count(page: Page) -> int:
    """How many samples match, as the page says it."""
    match = re.match(r"(\d+) of 240 samples", page.inner_text("#count"))
    assert match
    return int(match[1])


def test_it_loads_and_shows_everything(page: Page) -> None:
    figures = page.locator("figure:has(canvas), figure:has(table.bars)")
    expect(figures).to_have_count(len(report.catalogue.FIGURES))
    expect(page.locator("#sample .tokens .t")).to_have_count(30)
    assert count(page) == 240
    timing = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < timing < LOADED_WITHIN
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_filters_choose_samples(page: Page) -> None:
    page.fill("#f-step-min", "10")
    page.fill("#f-step-max", "12")
    assert count(page) == 18
    labels = page.locator("#list li").evaluate_all("xs => xs.map((x) => x.ariaLabel)")
    assert {re.match(r"rollout (\d+)", label)[1] for label in labels} == {"10", "11", "12"}  # type: ignore[index]
    page.select_option("#f-run", label="grpo")
    assert count(page) == 6
    page.click("button[type=reset]")
    expect(page.locator("#count")).to_have_text("240 of 240 samples")

    page.select_option("#f-correct", "1")
    correct = count(page)
    page.select_option("#f-correct", "0")
    assert 0 < correct < 240 and count(page) == 240 - correct
    page.select_option("#f-correct", "")
    page.fill("#f-reward-min", "2.9")
    assert count(page) == correct
    page.click("button[type=reset]")
    expect(page.locator("#count")).to_have_text("240 of 240 samples")

    page.fill("#f-text", "puzzle 7.")
    assert 0 < count(page) < 30
    page.locator("#sample summary").first.click()
    assert "puzzle 7." in page.locator("#sample pre").first.text_content()  # type: ignore[operator]
    page.fill("#f-text", "nothing has this")
    assert count(page) == 0
    assert "No sample matches" in page.inner_text("#sample")


def test_colours_and_tooltips_say_what_a_token_is(page: Page) -> None:
    page.select_option("#f-run", label="grpo_sg")
    page.select_option("#f-advantage", "1")
    zeroed = page.locator("#sample .tokens .t.z").first
    zeroed.hover()
    tip = page.inner_text("#tip")
    assert re.search(r"p (0\.[2-9]|1\.0|> 0\.999)", tip) and "weight 1." in tip
    assert "no policy gradient: dead zone" in tip and "advantage +" in tip
    page.select_option("#f-advantage", "-1")
    assert page.locator("#sample .tokens .t.z").count() == 0
    page.select_option("#f-advantage", "0")
    page.locator("#sample .tokens .t").first.hover()
    assert "no policy gradient: advantage 0" in page.inner_text("#tip")

    page.select_option("#f-color", "w")
    assert "w = 1.4" in page.inner_text("#sample .legend")
    page.select_option("#f-run", label="grpo")
    assert "every token has w = 1" in page.inner_text("#sample .legend")


def test_everything_is_reached_by_keyboard(page: Page) -> None:
    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.className"))

    reached = []
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.append(focused())
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached[-1]
        if "t b" in reached[-1]:
            break
    assert reached[0] == "skip"
    for element in ("theme", "f-step-min", "f-correct", "f-text", "f-color", "list"):
        assert element in reached
    assert "t b" in reached[-1], "the tokens"

    assert "p " in page.inner_text("#tip")
    before = page.evaluate("document.activeElement.dataset.k")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.k") == str(int(before) + 1)
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")

    heading = page.locator("#sample h3")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(heading).to_have_text("Sample 3 of 240")
    page.keyboard.press("k")
    expect(heading).to_have_text("Sample 2 of 240")
    page.focus("#list")
    page.keyboard.press("End")
    expect(heading).to_have_text("Sample 240 of 240")
    expect(page.locator("#page-now")).to_have_text("201 to 240")
    page.keyboard.press("/")
    assert focused() == "f-text"
    page.keyboard.type("jk")  # typed, not obeyed
    assert page.input_value("#f-text") == "jk"


def test_a_group_is_compared_side_by_side(chromium: Browser, tmp_path: Path) -> None:
    run_dir = write_run(
        tmp_path / "run", rollouts=8, overrides=("sg.weighting.upper=1.4", "sg.correction=icepop")
    )
    write_details(run_dir)
    with opened(chromium, write_page(tmp_path, run_dir)) as found:
        page = found.page
        group = page.locator("#sample .group")
        assert "4 responses to this prompt" in group.inner_text()
        assert "standard deviation 2.517" in group.inner_text()
        spread = group.locator(".spread span")
        assert spread.all_inner_texts() == ["-3.00", "-1.00 ×2", "+3.00"]
        expect(group.locator(".spread .own")).to_have_text("+3.00")
        texts = [text.replace("↵", "") for text in group.locator(".mate .tokens").all_inner_texts()]
        rows = jsonl_log.read(run_dir / jsonl_log.SAMPLES)
        assert [t.split() for t in texts] == [row["response"].split() for row in rows[:2]]
        group.locator(".mate button").nth(1).click()
        expect(page.locator("#sample h3")).to_have_text("Sample 2 of 16")
        expect(group.locator(".spread .own")).to_have_text("-1.00 ×2")
        group.locator("summary").click()  # closed, it stays closed
        page.keyboard.press("j")
        assert page.locator("#sample .group").get_attribute("open") is None

        flat = page.locator("#list li", has_text="no spread in its group")
        expect(flat).to_have_count(4)
        flat.first.click()
        page.locator("#sample .group summary").click()
        assert "No spread" in page.locator("#sample .group .warning").inner_text()
        assert "30 advantage 0" in page.inner_text("#sample dl")
        assert not found.complaints


def test_it_says_why_a_token_has_no_gradient(chromium: Browser, tmp_path: Path) -> None:
    run_dir = write_run(
        tmp_path / "run", rollouts=8, overrides=("sg.weighting.upper=1.4", "sg.correction=icepop")
    )
    write_details(run_dir)
    rows = jsonl_log.read(run_dir / jsonl_log.SAMPLES)
    rows[0]["log_probs"][:4] = [-0.1, -2.5, -2.5, -2.5]  # w = 1.4 in the dead zone, else w = 1
    rows[0]["engine_log_probs"][:4] = [-0.1, -2.5, -2.5, -8.0]
    rows[0]["update_log_probs"][:4] = [-0.1, -2.2, -2.5, -2.5]
    (run_dir / jsonl_log.SAMPLES).unlink()
    jsonl_log.append(run_dir / jsonl_log.SAMPLES, rows)
    with opened(chromium, write_page(tmp_path, run_dir)) as found:
        page = found.page
        page.locator("#tokens .t").first.focus()
        tips = []
        for _ in range(4):
            tips.append(page.inner_text("#tip").splitlines())
            page.keyboard.press("ArrowRight")
        assert [tip[-1].split(":")[:2] for tip in tips] == [
            ["no policy gradient", " dead zone"], ["no policy gradient", " clip"],
            ["has a policy gradient"], ["no policy gradient", " correction"],
        ]  # fmt: skip
        assert "ratio in the update 1.350" in tips[1] and "p of the engine 3.4e-4" in tips[3]

        largest = max(range(30), key=lambda k: rows[0]["entropies"][k])
        buttons = page.locator("#sample .strips button")
        expect(buttons).to_have_count(3)
        assert f", token {largest + 1}" in buttons.nth(1).inner_text()
        buttons.nth(1).click()
        assert page.evaluate("document.activeElement.dataset.k") == str(largest)
        for by, unit in (("e", "2 nats"), ("m", "0.3 in log p")):
            page.select_option("#f-color", by)
            assert unit in page.inner_text("#sample .legend")

        page.fill("#f-step-min", "4")
        environment = page.locator("#tokens .env")
        environment.first.hover()
        assert "no policy gradient: mask" in page.inner_text("#tip")
        assert environment.evaluate("e => e.previousElementSibling.dataset.k") == "9"
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert not found.complaints


def legend(page: Page, figure: str) -> list[str]:
    """The values that a figure's first panel says, those of x first."""
    page.wait_for_timeout(100)  # uPlot draws with the next frame
    rows = page.locator(f"#figure-{figure} .panel").first.locator(".u-series:not(.aside)")
    return rows.locator(".u-value").all_inner_texts()


def axis(page: Page, figure: str, name: str) -> list[float]:
    """Lowest and highest value on an axis of a figure's first panel, and 3 if it is logarithmic."""
    script = """([figure, name]) => {
      const { plot } = document.querySelector(`#figure-${figure} .plot`);
      return ["min", "max", "distr"].map((key) => plot.scales[name][key]); }"""
    page.wait_for_timeout(100)
    found: list[float] = page.evaluate(script, [figure, name])
    return found


def area(page: Page, figure: str) -> tuple[float, float, float]:
    """Left edge, width and middle height of a figure's first panel on the screen."""
    over = page.locator(f"#figure-{figure} .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    return box["x"], box["width"], box["y"] + box["height"] / 2


def test_figures_say_their_values_to_pointer_and_keyboard(page: Page) -> None:
    left, width, middle = area(page, "kl")
    page.mouse.move(left + 0.999 * width, middle)
    x, sg, grpo = legend(page, "kl")
    assert x == "40" and re.fullmatch(r"[\d.]+, here 0.01", sg) and sg == grpo
    assert legend(page, "entropy")[0] == "40"  # the same rollout
    page.mouse.move(left, middle - 400)
    assert legend(page, "kl") == ["–"] * 3

    page.locator("#figure-kl .plot").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert legend(page, "kl")[0] == "4"
    page.keyboard.press("Tab")
    assert legend(page, "kl")[0] == "–"


def test_dragging_zooms_figures_of_one_axis_and_a_double_click_resets(page: Page) -> None:
    left, width, middle = area(page, "kl")
    page.mouse.move(left + 0.25 * width, middle)
    page.mouse.down()
    page.mouse.move(left + 0.75 * width, middle, steps=3)
    page.mouse.up()
    low, high, _ = axis(page, "kl", "x")
    assert low == pytest.approx(10.75, abs=0.5) and high == pytest.approx(30.25, abs=0.5)
    assert axis(page, "entropy", "x")[:2] == pytest.approx([low, high])
    assert axis(page, "grad_norm", "x")[:2] == [1, 80]
    left, width, middle = area(page, "kl")
    page.mouse.dblclick(left + 0.5 * width, middle)
    assert axis(page, "kl", "x")[:2] == axis(page, "entropy", "x")[:2] == [1, 40]


def test_smoothing_log_axis_and_names_change_what_is_drawn(page: Page) -> None:
    picture = "document.querySelector('#figure-reward canvas').toDataURL()"
    left, width, middle = area(page, "reward")
    page.mouse.move(left + 0.999 * width, middle)
    assert ", here " in legend(page, "reward")[1]
    before = page.evaluate(picture)
    page.fill("#smoothing", "1")
    expect(page.locator("#smoothing-now")).to_have_text("none")
    page.mouse.move(left + 0.5 * width, middle)
    assert ", here " not in legend(page, "reward")[1] and page.evaluate(picture) != before

    assert axis(page, "entropy", "y")[0] < 0
    page.get_by_label("logarithmic y axis: Entropy").check()
    assert axis(page, "entropy", "y")[0] > 0 and axis(page, "entropy", "y")[2] == 3
    page.get_by_label("logarithmic y axis: Entropy").uncheck()
    assert axis(page, "entropy", "y")[0] < 0

    page.locator("#figure-grad_norm .named th").first.click()
    assert axis(page, "grad_norm", "y")[1] > 1.5
    page.locator("#figure-grad_norm .named th").last.click()
    expect(page.locator("#figure-grad_norm tr.named.u-off")).to_have_count(2)


def test_parts_of_a_stack_say_their_own_value(page: Page) -> None:
    left, width, middle = area(page, "seconds_per_rollout")
    page.mouse.move(left + 0.5 * width, middle)
    *_, longest, generation = legend(page, "seconds_per_rollout")
    assert (longest, generation) == ("12", "26")


@pytest.mark.parametrize("kind", ["one rollout", "metrics alone", "gaps"])
def test_runs_with_little_or_broken_data_are_drawn(
    chromium: Browser, tmp_path: Path, kind: str
) -> None:
    run_dir = tmp_path / "run"
    if kind == "metrics alone":
        run_dir.mkdir()
        jsonl_log.append(run_dir / jsonl_log.METRICS, [{"global_step": 1}])
    else:
        write_run(run_dir, rollouts=1 if kind == "one rollout" else 20)
    if kind == "gaps":
        rows = jsonl_log.read(run_dir / jsonl_log.METRICS)
        (run_dir / jsonl_log.METRICS).unlink()
        for row in rows[3:6]:
            row.update({key: float("nan") for key in row if key != "global_step"})
        jsonl_log.append(run_dir / jsonl_log.METRICS, rows)
    with opened(chromium, write_page(tmp_path, run_dir)) as found:
        figures = 0 if kind == "metrics alone" else 13
        assert found.page.locator("figure canvas").count() >= figures
        if kind == "gaps":
            left, width, middle = area(found.page, "reward")
            found.page.mouse.move(left + 0.999 * width, middle)
            assert legend(found.page, "reward")[0] == "20"
        assert not found.complaints


#: The tip beside the focused token, both inside the window.
TIP_AT_FOCUS = """() => {
  const tip = document.getElementById('tip');
  const t = tip.getBoundingClientRect();
  const focused = document.activeElement;
  const f = focused.getClientRects()[0];
  const inside = (box) => box.top >= 0 && box.bottom <= innerHeight && box.left >= 0
    && box.right <= innerWidth;
  const near = Math.min(Math.abs(t.top - f.bottom), Math.abs(f.top - t.bottom)) < 20;
  return !tip.hidden && t.height > 0 && inside(t) && inside(f) && near
    && focused.getAttribute('aria-describedby') === 'tip';
}"""


def test_the_tip_stays_with_the_keyboard_while_the_page_scrolls(
    chromium: Browser, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", rollouts=6, samples_per_step=1, tokens=3000)
    with opened(chromium, write_page(tmp_path, run_dir)) as found:
        page = found.page
        first = page.locator("#sample .tokens .t").first
        first.hover()  # and the pointer stays there, over other tokens when the page scrolls
        first.focus()
        for key in ("End", "ArrowUp", "Home", "ArrowDown", "End"):
            before = page.evaluate("scrollY")
            page.keyboard.press(key)
            if key in ("Home", "End"):
                page.wait_for_function("(before) => scrollY !== before", arg=before)
            # Two frames: the scroll event, and what the browser says about the resting pointer.
            page.evaluate("() => new Promise((go) => setTimeout(go, 400))")
            assert page.evaluate(TIP_AT_FOCUS), key
            k = int(page.evaluate("document.activeElement.dataset.k"))
            label = page.evaluate("document.activeElement.ariaLabel")
            assert label.startswith(f"token {k + 1}: ")
        assert k == 2999
        page.keyboard.press("Escape")
        page.mouse.wheel(0, -300)
        page.evaluate("() => new Promise((go) => setTimeout(go, 400))")
        assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") is None
        assert not found.complaints


def test_controls_have_names_of_their_own(page: Page) -> None:
    for name in ("rollout from", "rollout to", "reward from", "reward to"):
        expect(page.get_by_role("spinbutton", name=name, exact=True)).to_have_count(1)
    button = page.get_by_role("button", name=re.compile("^Use (dark|light) colours$"))
    expect(button).to_have_count(1)
    assert button.get_attribute("aria-pressed") is None


#: The contrast of every element that has text of its own (WCAG 2.1), against what is behind it.
CONTRAST = """() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.e-]+/g).map(Number);
    const scale = text.startsWith('color(') ? 1 : 255;
    return [r / scale, g / scale, b / scale, a];
  };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3]));
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      layers.push(parse(getComputedStyle(e).backgroundColor));
    }
    return layers.reverse().reduce((under, top) => over(top, under), [1, 1, 1]);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !element.checkVisibility()) continue;
    if (element.matches('script, option, :disabled')) continue;
    const color = parse(getComputedStyle(element).color);
    const a = luminance(over(color, behind(element)));
    const b = luminance(behind(element));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) low.push(`${element.outerHTML.slice(0, 90)}: ${contrast.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_themes(chromium: Browser, page_file: Path, dark: bool) -> None:
    with opened(chromium, page_file, dark=dark) as found:
        page = found.page
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == ("dark" if dark else "light")
        # Every tone of both scales, whatever the sample.
        page.evaluate(
            """() => { for (const by of ['p', 'w']) for (let b = 0; b < 10; b++) {
                 const box = document.createElement('div'); box.className = `tokens by-${by}`;
                 const part = document.createElement('span'); part.className = `t z b${b}`;
                 part.textContent = 'token'; box.append(part);
                 document.getElementById('sample').append(box); } }"""
        )
        page.locator("#sample .tokens .t").first.hover()
        assert page.evaluate(CONTRAST) == []
        page.click("#theme")
        assert page.evaluate(theme) == ("light" if dark else "dark")
        assert not found.complaints


def test_hostile_content_is_inert(chromium: Browser, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "<img src=x onerror=window.__pwned=4>")
    write_hostile_samples(run_dir)
    with opened(chromium, write_page(tmp_path, run_dir)) as found:
        page = found.page
        page.fill("#f-text", "__pwned")
        assert page.inner_text("#count").startswith("6 of ")
        for _ in range(6):
            page.locator("#sample .tokens .t").first.hover()
            page.press("#list", "j")
        assert "</script><script>window.__pwned=1</script>" in page.inner_text("#sample .tokens")
        assert "⟨U+202E⟩gnp.exe" in page.inner_text("#sample .tokens")
        assert page.evaluate("window.__pwned") is None
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2
        assert not found.complaints


def test_the_policy_forbids_scripts_and_requests_of_the_page_itself(
    chromium: Browser, page_file: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        with opened(chromium, page_file) as found:
            found.page.evaluate(
                """(port) => { const s = document.createElement('script');
                     s.textContent = 'window.__pwned = 1'; document.body.append(s);
                     const i = document.createElement('img');
                     i.src = `http://127.0.0.1:${port}/x.png`; document.body.append(i);
                     fetch(`http://127.0.0.1:${port}/y`).catch(() => {}); }""",
                server.getsockname()[1],
            )
            with pytest.raises(TimeoutError):
                server.accept()
            assert found.page.evaluate("window.__pwned") is None
            assert sum("Content Security Policy" in text for text in found.complaints) >= 3
