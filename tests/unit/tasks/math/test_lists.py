"""What counts as a list, and what its elements are."""

import time

import pytest

from sg_rlhf.tasks.math.answers.lists import equal, expand_plus_minus, read, split
from sg_rlhf.tasks.math.answers.normalize import normalize
from sg_rlhf.tasks.math.answers.units import known_unit, without_units


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


def test_elements_are_compared_in_pairs():
    seen = []

    def same(gold, answer):
        seen.append((gold, answer))
        return gold == answer

    assert equal("1,2", "2,1", same) is True
    assert seen == [("1", "2"), ("1", "1"), ("2", "2")]
    assert equal("1", "x=1", same) is None
    assert equal(",".join("1" * 41), "1,2", same) is None


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
    equal(normalize(text), "1,2", lambda a, b: False)
    assert time.process_time() - begun < 0.5
