"""The normal form of an answer, and what it decides without a parser.

`normalize` keeps the meaning and stays LaTeX; `canonical` goes further, for comparing texts.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from sg_rlhf.tasks.math.answers.rewrites import REWRITES
from sg_rlhf.tasks.math.answers.rules import Rule, rewrite
from sg_rlhf.tasks.math.answers.units import known_unit, without_units

_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
_LOOSE_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")
# "(B) 12", and what would name another choice behind it.
_NAMED_CHOICE = re.compile(r"\(([A-Z])\)(?:[:.] ?| )(?![-+*/^=<>])(.+)")
_OTHER_CHOICE = re.compile(r"\([A-Z]\)|\b(?:or|and|not)\b")
# Single letters are variable names, so "W and Z" stays case-sensitive.
_WORDS = re.compile(r"(?=.{3})[A-Za-z]{2,}(?: [A-Za-z]{2,})*|No")

_GROUPS = r"[1-9][0-9]{0,2}(?:,[0-9]{3}){1,12}"
_INTEGER = rf"[0-9]{{1,40}}|{_GROUPS}"
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<mantissa>[0-9]{1,20}(?:\.[0-9]{1,20})?)"
    r"(?:\\times|\\cdot) ?10\^(?:\{(?P<power>[+-]?[0-9]{1,3})\}|(?P<p1>[0-9]))"
    r"|(?P<before>[0-9]{0,10})\.(?P<still>[0-9]{0,10})\\(?:overline|bar)"
    r"(?:\{(?P<again>[0-9]{1,10})\}|(?P<a1>[0-9]))"
    rf"|(?P<int>{_INTEGER})|(?P<dec>(?:[0-9]{{0,20}}|{_GROUPS})\.[0-9]{{1,20}})"
    r"|\\frac(?:\{(?P<top>-?[0-9]{1,20})\}\{(?P<bottom>[0-9]{1,20})\}|(?P<t1>[0-9])(?P<b1>[0-9]))"
    r"|(?P<over>[0-9]{1,20})/(?P<under>[0-9]{1,20}))"
)
_PERCENT = re.compile(r"\s*\\?%\s*\$?\s*$")
_BASED = re.compile(r"([0-9][0-9A-Fa-f]{0,39})_\{?([0-9]{1,2})\}?")
_NAME = r"[A-Za-z](?:_[A-Za-z0-9])?(?:\([A-Za-z0-9]\))?"
_VALUE_FIRST = re.compile(rf"([^=]*)=({_NAME})")
_ASSIGNMENT = re.compile(rf"{_NAME}=([^=]*)")
_MODULUS = (
    r"\s*\(?\s*(?:\\pmod|\\p?mod|\\bmod|\\(?:text|mathrm)\s*\{\s*mod\s*\}|(?<![A-Za-z\\])mod)(?![A-Za-z])"
    r"\s*(?P<modulus>[0-9A-Za-z]+|\{[^{}]+\})\s*\)?"
)
_CONGRUENCE = re.compile(
    rf"(?:(?:(?P<name>[A-Za-z](?:_[A-Za-z0-9])?)\s*\\equiv(?![A-Za-z])\s*)(?P<value>[^=<>]+?)|(?P<number>-?[0-9]+))"
    rf"{_MODULUS}"
)
#: The largest difference of two numbers that agree to six decimals.
_ROUNDED = Fraction(2, 10**6)


@lru_cache(maxsize=4096)
def normalize(text: str) -> str:
    r"""The same answer in plainer LaTeX: no layout commands, degree signs, units or full stop.

    >>> normalize("$\\left( 1,\\, \\dfrac{1}{2} \\right)$.")
    '( 1, \\frac{1}{2} )'
    """
    text = _with_units(text)
    for rule in VALUES:
        text = rule.apply(text)
    return text.rstrip(".,; ")


@lru_cache(maxsize=4096)
def _with_units(text: str) -> str:
    for rule in REWRITES:
        text = rule.apply(_without_braces(text)).strip()
    return text


def _without_braces(text: str) -> str:
    for _ in range(3):
        if not (text.startswith("{") and text.endswith("}") and balanced(text[1:-1])):
            break
        text = text[1:-1].strip()
    return text


def balanced(text: str) -> bool:
    """Whether every brace that is opened is closed, in order; escaped ones do not count."""
    depth = 0
    for brace in re.findall(r"\\\\|\\[{}]|([{}])", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    """The normal form without spaces and text commands: equal texts mean equal answers."""
    text = normalize(text)
    for rule in CANONICAL:
        text = rule.apply(text)
    return text


@lru_cache(maxsize=4096)
def parse_number(text: str) -> tuple[Fraction, bool] | None:
    r"""The exact value of an integer, decimal, simple fraction, 3 \times 10^4 or 0.\overline{3}.

    With it, whether it is a decimal, which may be rounded. None for everything else, and beyond 40
    digits of an integer or 20 of others.
    """
    text = normalize(text)
    match = _NUMBER.fullmatch(_LOOSE_SPACE.sub("", text))
    # 32, 349 are two numbers; 32, 049 can only be one.
    if match is None or (", " in text and ", 0" not in text):
        return None
    decimal = match["mantissa"] or match["dec"] or ""
    if match["mantissa"]:
        value = Fraction(match["mantissa"]) * Fraction(10) ** int(match["power"] or match["p1"])
    elif again := match["again"] or match["a1"]:
        first = Fraction(int(f"0{match['before']}{match['still']}"), 10 ** len(match["still"]))
        period = (10 ** len(again) - 1) * 10 ** len(match["still"])
        value = first + Fraction(int(again), period)
    elif match["int"]:
        value = Fraction(int(match["int"].replace(",", "")))
    elif match["dec"]:
        value = Fraction(f"0{match['dec'].replace(',', '')}")
    else:
        top = match["top"] or match["t1"] or match["over"]
        bottom = match["bottom"] or match["b1"] or match["under"]
        if not int(bottom):
            return None
        value = Fraction(int(top), int(bottom))
    return -value if match["sign"] == "-" else value, "." in decimal


def equal_exactly(answer: str, reference: str) -> bool | None:
    """Whether two answers are equal, where spelling and exact numbers decide; else None."""
    for rule in EXACT:
        found: bool | tuple[str, str] | None = rule.apply(answer, reference)
        if isinstance(found, bool):
            return found
        if found is not None:
            answer, reference = found
    return None


def _units_differ(answer: str, reference: str) -> bool | None:
    units = known_unit(_with_units(answer)), known_unit(_with_units(reference))
    return False if None not in units and units[0] != units[1] else None


def _moduli_differ(answer: str, reference: str) -> bool | None:
    found = [_CONGRUENCE.fullmatch(_with_units(text)) for text in (answer, reference)]
    moduli = {match["modulus"].strip("{} ") for match in found if match}
    return False if len(moduli) > 1 else None


def _without_modulus(text: str) -> str:
    match = _CONGRUENCE.fullmatch(text)
    if not match:
        return text
    return match["number"] or f"{match['name']} = {match['value']}"


def _choice_with_text(answer: str, reference: str) -> bool | None:
    for letter, other in ((reference, answer), (answer, reference)):
        letter = canonical(letter)
        named = _NAMED_CHOICE.fullmatch(CANONICAL[0].apply(normalize(other)))
        if named and len(letter) == 1 and letter.isupper():
            return named[1] == letter and not _OTHER_CHOICE.search(named[2])
    return None


def _name_first(answer: str, reference: str) -> tuple[str, str] | None:
    def swapped(text: str) -> str:
        match = _VALUE_FIRST.fullmatch(canonical(text))
        return f"{match[2]}={match[1]}" if match and parse_number(match[1]) else text

    pair = swapped(answer), swapped(reference)
    return None if pair == (answer, reference) else pair


def _without_name(answer: str, reference: str) -> tuple[str, str] | None:
    value, wanted = (_ASSIGNMENT.fullmatch(canonical(text)) for text in (answer, reference))
    if value and not wanted:
        return value[1], reference
    return (answer, wanted[1]) if wanted and not value else None


def _same_text(answer: str, reference: str) -> bool | None:
    return True if canonical(answer) == canonical(reference) else None


def _numbers(answer: str, reference: str) -> bool | None:
    percent = [_PERCENT.search(text) is not None for text in (answer, reference)]
    a, r = (parse_number(_PERCENT.sub("", text)) for text in (answer, reference))
    if a is None or r is None:
        return None
    pairs = [(a[0], r[0])]
    if percent[0] is not percent[1]:
        pairs.append((a[0] / 100, r[0]) if percent[0] else (a[0], r[0] / 100))
    if any(x == y for x, y in pairs):
        return True
    # A decimal may be rounded: math-verify compares what is closer.
    return None if (a[1] or r[1]) and any(abs(x - y) <= _ROUNDED for x, y in pairs) else False


def _bases(answer: str, reference: str) -> bool | None:
    a, r = (_BASED.fullmatch(canonical(text)) for text in (answer, reference))
    if a and r:
        return a.groups() == r.groups()
    if (a and parse_number(reference)) or (r and parse_number(answer)):
        return canonical(answer).split("_")[0] == canonical(reference).split("_")[0]
    return None


def _grouped(text: str) -> str:
    return text.replace(" ", "") if _GROUPED.fullmatch(text) else text


def _letter_case(text: str) -> str:
    return text.lower() if _WORDS.fullmatch(text) else text


# fmt: off
#: Behind `REWRITES`, text -> text.
VALUES: tuple[Rule, ...] = (
    Rule("units", "Drop units behind values.", without_units, right=((r"10\text{ cm}", "10"),
        ("10 cm", r"10 \text{ cm}"), (r"60 \frac{\text{km}}{\text{h}}", "60"), ("5 USD", "5"),
        ("12 apples", "12"), ("7 gallons", "7")), near_misses=((r"5\text{ cm}+7\text{ cm}", "5"),
        ("2t", "2"), ("2ab", "2"), ("2abcs", "2"), (r"5\text{ dozen}", "5"), ("5 hundreds", "5"),
        ("5 apples 6", "5"), (r"\frac{2}{4}\text{ wrong}", r"\frac12"),
        (r"5\text{ perhaps}", "5"))),
    Rule("modulus", "Read x \\equiv 3 \\pmod 7 as x = 3.", _without_modulus,
        right=((r"x \equiv 3 \pmod 7", "3"), ("3", "3 (mod 7)"), (r"n \equiv 1, 5 \pmod 6", "1,5"),
        (r"3 \bmod 7", "3")), near_misses=((r"x \equiv 3 \pmod 7", "7"),
        (r"x \equiv 3 \pmod 7", "4"), (r"x \equiv 3 \pmod 7", r"y \equiv 3 \pmod 7"),
        (r"1 \equiv 3 \pmod 2", "1"))),
    Rule("thousands", "Drop spaces that group digits.", _grouped, right=((r"12\,345", "12345"),),
        near_misses=(("1,000", "1,0"),)),
)
#: Behind `normalize`, text -> text, for comparing texts.
CANONICAL: tuple[Rule, ...] = (
    rewrite("text commands", "Drop text and font commands around letters.",
        r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\{([^{}]*)\}", r"\1",
        right=(("Evelyn", r"\text{Evelyn}"), (r"\text{(D)}", "(D) Alina")),
        near_misses=((r"\text{odd}", r"\text{even}"),)),
    # `1 2` is not `12`.
    Rule("white space", "Drop spaces that do not separate two words or numbers.",
        lambda text: _LOOSE_SPACE.sub("", re.sub(r"\s+", " ", text).strip()),
        right=(("( 6, 31, -1 )", "(6,31,-1)"), (r"\text{red} , \text{ blue}", r"\text{red, blue}")),
        near_misses=(("1 2", "12"),)),
    rewrite("choice in brackets", "Write (C) as C.", r"^\(([A-Z])\)$", r"\1",
        right=(("C", r"\text{(C)}"), (r"\textbf{(C)}", "C"), (r"\text{I}", "(I)")),
        near_misses=(("(C) + 1", "C"),)),
    Rule("case of words", "Compare words without regard to case.", _letter_case,
        right=((r"\text{even}", "Even"), ("No", r"\text{no}")), near_misses=(("2N", "2n"),
        (r"W \text{ and } z", r"W \text{ and } Z"))),
)
#: (answer, reference) -> verdict, another pair to go on with, or None: not decided here.
EXACT: tuple[Rule, ...] = (
    Rule("another unit", "Reject a unit that differs from the reference answer's.", _units_differ,
        right=((r"15 \text{ square centimeters}", r"15\mbox{ cm}^2"),),
        near_misses=((r"5\text{ km}", r"5\text{ m}"), (r"5\text{ cm}", r"5\text{ cm}^2"),
        ("3:30 AM", r"3:30 \text{ p.m.}"))),
    Rule("another modulus", "Reject a modulus that differs from the reference answer's.",
        _moduli_differ, right=((r"x\equiv 3\pmod{7}", r"x \equiv 3 \pmod 7"),),
        near_misses=((r"x \equiv 3 \pmod 7", r"x \equiv 3 \pmod 8"),)),
    Rule("choice with its text", "Compare the letters of (B) 12 and B.", _choice_with_text,
        right=((r"\textbf{(B)}\ 12", "B"), ("D", "(D) Alina")), near_misses=(("(C) 12", "B"),
        ("(B) or (C)", "B"), ("D", "(D) or (E)"))),
    Rule("name behind its value", "Read 5 = x as x = 5.", _name_first, right=(("5=x", "x=5"),
        ("1=f(x)", "f(x)=1")), near_misses=(("5=y", "x=5"),)),
    Rule("same text", "Accept an equal text.", _same_text, right=(("t(0, 4]", "$t(0,4]$"),),
        near_misses=(("t(0, 4)", "$t(0,4]$"),)),
    Rule("value for its name", "Compare 5 with the value of x = 5.", _without_name,
        right=(("x=5", "5"), ("5", "x=5"), ("f(2)=5", "5"), ("x=4210_5", "4210_{5}")),
        near_misses=(("y=5", "x=5"),
        ("x=4,x=5", "5"))),
    Rule("exact numbers", "Compare exact numbers; a percentage equals a number either way.",
        _numbers, right=(("142", "142.0"), ("3/4", r"\frac{3}{4}"), ("52", r"52\%"),
        ("0.52", r"52\%"), (r"\frac{7}{30}", r"0.2\overline{3}"),
        ("870000000", r"8.7 \times 10^{8}")),
        near_misses=(("100000000000000000001", "100000000000000000000"),
        ("0.33", r"0.\overline{3}"), ("32, 349", "32349"),
        (r"8.8 \times 10^{8}", r"8.7 \times 10^{8}"))),
    Rule("bases", "Compare bases where both name one; else the digits.", _bases,
        right=(("4210", "4210_{5}"),), near_misses=(("4210_7", "4210_5"), ("12_{5}+x", "12+x"))),
)
# fmt: on
