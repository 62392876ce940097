"""Which box of a response is its answer."""

import time

import pytest

from sg_rlhf.tasks.math.answers.boxed import last_box

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


def test_a_second_box_that_is_cut_off_leaves_the_first():
    assert last_box(r"So $\boxed{5}$. To check, \boxed{5 + ") == "5"
