"""The answer in a response: its box, the elements of a list."""

from __future__ import annotations

import time

import pytest

from sg_rlhf.tasks.math.answers.boxed import last_box
from sg_rlhf.tasks.math.answers.compare import _same_lists
from sg_rlhf.tasks.math.answers.lists import expand_plus_minus, read, split
from sg_rlhf.tasks.math.answers.normalize import normalize
from sg_rlhf.tasks.math.answers.units import known_unit, without_units

# -- Which box of a response is its answer -------------------------------------------------------


BOXES = {
    "no box": ("The answer is 5.", None),
    "empty response": ("", None),
    "one box": (r"So $\boxed{5}$.", "5"),
    "fbox": (r"\fbox{5}", "5"),
    "last of several": (r"\boxed{4}, no: \boxed{5}", "5"),
    "nested braces": (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    "escaped braces": (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    "lonely escaped brace": (r"\boxed{\left\{ 1 \right.} and", r"\left\{ 1 \right."),
    "row end before a brace": (r"\boxed{{1\\2\\}}", r"{1\\2\\}"),
    "row end before the box": ("a \\\\\\boxed{5}", "5"),
    "escaped once too often": (r"\\boxed{5}", "5"),
    "space before the brace": ("\\boxed {5}", "5"),
    "line break in the box": ("\\boxed{\n5\n}", "5"),
    "without braces": (r"\boxed 5", "5"),
    "without braces, in a sentence": (r"It is $\boxed -12.5$.", "-12.5"),
    "without braces, a letter": (r"\boxed A.", "A"),
    "without braces, a word": (r"\boxed answer", None),
    "other command": (r"\boxedeq{5} \myboxed{6}", None),
    "unclosed": (r"\boxed{5", None),
    "unclosed after a complete one": (r"\boxed{5} so \boxed{6", "5"),
    "complete inside an unclosed one": (r"\boxed{4 so \boxed{5} and", "5"),
    "blank line ends a box": ("\\boxed{4 and so on\n\nThen \\boxed{5}, which} was asked", "5"),
    "box in a box": (r"\boxed{\boxed{5}}", "5"),
    "boxes side by side in a box": (r"\boxed{\boxed{5}, \boxed{6}}", r"\boxed{5}, \boxed{6}"),
    "text around a box in a box": (r"\boxed{4 \boxed{5}}", r"4 \boxed{5}"),
    "empty": (r"\boxed{5}, output in \boxed{}", ""),
    "blank": (r"\boxed{ }", ""),
    "stray closing braces": (r"}}} \boxed{5} }}}", "5"),
    "stray opening braces": (r"{{{ \boxed{5}", "5"),
}  # fmt: skip


@pytest.mark.parametrize(("response", "box"), BOXES.values(), ids=BOXES)
def test_last_box(response, box):
    assert last_box(response) == box


@pytest.mark.parametrize(
    "unit",
    [
        "\\",
        "{",
        "}",
        "\\boxed{",
        "\\boxed",
        "\\boxed ",
        "\\boxed{}",
        "\\fbox{5",
        "\n ",
        "\\boxed{\\",
    ],
)
def test_time_is_linear(unit):
    short, long = unit * (100_000 // len(unit)), unit * (1_600_000 // len(unit))

    def seconds(text):
        start = time.process_time()
        last_box(text)
        return time.process_time() - start

    # 16 times the text; quadratic would be 256 times the time.
    assert seconds(long) < 60 * max(min(seconds(short) for _ in range(3)), 0.002)


def test_time_is_linear_in_boxes_that_close():
    def seconds(depth):
        text = "\\boxed{" * depth + "5" + "}" * depth
        start = time.process_time()
        assert last_box(text) is not None
        return time.process_time() - start

    assert seconds(100_000) < 60 * max(min(seconds(6_250) for _ in range(3)), 0.002)


# -- What counts as a list, and what its elements are --------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1,2", ["1", "2"]),
        (r"(1,2), x=3 \text{ or } f(4,5)", ["(1,2)", "x=3", "f(4,5)"]),
        (r"1 \quad \text{and} \quad 2", ["1", "2"]),
        (r"1, \text{ and } 2", ["1", "2"]),
        (r"\begin{cases}1,2\end{cases}", [r"\begin{cases}1,2\end{cases}"]),
        ("]1,2[", ["]1,2["]),
        ("[1,2),(3,4]", ["[1,2)", "(3,4]"]),
        ("band, order", ["band", "order"]),
    ],
)
def test_split(text, parts):
    assert split(text) == parts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("p=5,q=2;p=7,q=2", [("p", "q"), ("p", "q")]),
        ("x=1,2", [("x",), ("",)]),
        ("(x,y)=(1,2)", [("x", "y")]),
        ("1,000", [("",)]),
        (r"\{1,2\}", [("",), ("",)]),
        ("1 < x, x = 3", [("",), ("x",)]),
    ],
)
def test_names(text, names):
    assert [one.names for one in read(text).elements] == names


def test_signs_belong_together_or_are_left_alone():
    assert expand_plus_minus(r"x = \pm 2") == ["x = 2", "x = -2"]
    assert expand_plus_minus(r"1 \pm a \mp b") == ["1 +a -b", "1 -a +b"]
    assert expand_plus_minus(r"\pm 1 \pm 2") == [r"\pm 1 \pm 2"]


def test_only_lists_are_compared_as_lists():
    assert _same_lists("1,2", "2,1", set()) is True
    assert _same_lists("1,2", "2,3", set()) is False
    assert _same_lists("1", "x=1", set()) is None
    assert _same_lists(",".join("1" * 41), "1,2", set()) is None


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (r"5\text{ cm}, 7\text{ cm}", "5, 7"),
        (r"5\text{ cm}+7\text{ cm}", r"5\text{ cm}+7"),
        (r"\text{Row} \text{ echelon}", r"\text{Row} \text{ echelon}"),
        (r"x_{\text{max}}", r"x_{\text{max}}"),
        ("10 m", "10 m"),
        ("10 m/s", "10"),
        (r"12\pi cm^2", r"12\pi"),
    ],
)
def test_units_are_left_out(text, left):
    assert without_units(text) == left


def test_known_units():
    texts = (r"3 \text{ meters}", "3 sq cm", r"4 \text{ p.m.}", r"3 \text{ apples}", "3", r"3 m/s")
    assert list(map(known_unit, texts)) == ["m", "cm^2", "pm", None, None, None]


@pytest.mark.parametrize(
    "part",
    [
        "\\text{a} ",
        "\\text{a}\\cdot ",
        "1\\text{m}",
        "kcal m^{-2} ",
        " ",
        "{",
        "\\pm ",
        " or ",
        "(1,",
    ],
)
def test_reading_takes_no_time_on_long_rows(part):
    text = (f"5{part}" * 2000)[:1999]
    begun = time.process_time()
    read(normalize(text))
    assert time.process_time() - begun < 0.5
