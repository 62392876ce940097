r"""Notation: one spelling for what is written in many ways, and what can be decided from it alone.

`normalize` keeps the meaning and stays LaTeX, for the parser; `canonical` goes further, for
comparing texts; `parse_number` reads integers, decimals and simple fractions exactly.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from sg_rlhf.tasks.math.answers.units import known_unit, without_units

_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta",
    "η": "eta", "θ": "theta", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "χ": "chi", "ψ": "psi",
    "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Σ": "Sigma",
    "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/",
        "∞": r"\infty ", "°": r"^\circ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
        "±": r"\pm ", "∓": r"\mp ", "½": r"\frac{1}{2}", "\u00a0": " ", "\u2009": " ",
        "\u202f": " ", "‐": "-", "‑": "-", "—": "-", "－": "-", "≈": r"\approx ",
        "∅": r"\emptyset ", "⋅": r"\cdot ", "∈": r"\in ", "∩": r"\cap ", "…": r"\ldots ",
        "€": "", "£": "", "Å": " angstrom", "\u212b": " angstrom",
        "µ": r"\mu ", "ϕ": r"\phi ",
        **{letter: f"\\{name} " for letter, name in _GREEK.items()},
    }
)  # fmt: skip
# A raised or lowered number of several digits is one number.
_RAISED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_DIGITS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "+-01234567890123456789")
_STYLES = "large|Large|LARGE|huge|Huge|small|normalsize|displaystyle|textstyle|scriptstyle|bf|rm|it"
_WHERE = "(?:for|where|with|if|when|provided(?: that)?|assuming)"
REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)(?![A-Za-z])(?:\.(?!\d))?", ""),
        (rf"\\(?:{_STYLES})(?![A-Za-z])", ""),
        # What only changes how the same thing looks. A group stays, or 2\boldsymbol{3} would be 23.
        (r"\\(?:textcolor|color)\s*\{[A-Za-z!0-9]+\}", ""),
        (r"\\(?:boldsymbol|bm|underline|mathbf)\s*(?=\{)", ""),
        (r"\\text\s*\{\s*OR\s*\}", r"\\text{ or }"),
        (r"\\text\s*\{\s*AND\s*\}", r"\\text{ and }"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"^\s*\\(?:approx|simeq)(?![A-Za-z])", ""),
        (
            r"\\text\s*\{\s*(?:percent(?:age)?|pct)\s*\}|(?<=[0-9])\s*(?:percent|pct)(?![A-Za-z])",
            r"\\%",
        ),
        # 12^{\text{th}} is 12.
        (
            r"(?<=[0-9])\s*(?:\^\s*)?(\{\s*)?\\(?:text|mathrm)\s*\{\s*(?:st|nd|rd|th)\s*\}(?(1)\s*\})",
            "",
        ),
        (r"(?<=[0-9])(?:\^\{(?:st|nd|rd|th)\}|(?:st|nd|rd|th)(?![A-Za-z]))", ""),
        # Minutes and seconds of arc.
        (r"(?<=[0-9])\s*\^\s*(\{\s*)?(?:\\prime\s*){1,2}(?(1)\})(?![0-9A-Za-z])", ""),
        (r"(?<=[0-9])\s*x\s*(?=10\s*\^)", r" \\times "),
        *(
            (rf"^([0-9][0-9.]*)\s*{before}{word}\b", rf"\1 \\times 10^{{{zeros}}}{after}")
            for word, zeros in (("thousand", 3), ("million", 6), ("billion", 9))
            for before, after in ((r"\\text\s*\{\s*", r" \\text{"), ("", ""))
        ),
        (r"\\text\s*\{\s*\}", ""),
        (r"(?<=[0-9A-F])_\{\s*\(\s*([0-9]{1,2})\s*\)\s*\}", r"_{\1}"),  # a base in brackets
        # What follows in words and only says where the answer holds.
        (
            rf",?\s*\\text\s*\{{\s*,?\s*{_WHERE}\s*\}}[^,;=<>]{{1,40}}\\neq?(?![A-Za-z])[^,;=<>]{{1,40}}$",
            "",
        ),
        (
            rf",?\s*\\text\s*\{{\s*,?\s*(?:{_WHERE} )?(?:for )?(?:all|any|every|each)\b"
            r"[a-z ]*\}\s*[A-Za-z]?(?:\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?(?:[\^_]\{?[+*]?\}?)?)?$",
            "",
        ),
        (r"√\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?:√|(?<![\\A-Za-z])sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\log\s*_\s*([0-9]+)\s+(?=[0-9])", r"\\log_{\1} "),
        (r",\s*\\!\s*", ","),  # how thousands are grouped
        (r"(?<!\\)\\!|\\?\$|(?<!\\)\\[()\[\]]", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\{,\}", ","),
        (r"(?<!\\)%", r"\\%"),
        (r"\^\s*(\{\s*)?\\circ\s*(?(1)\}\s*)(?:[CF]|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})$", ""),
        # math-verify drops degree signs as well.
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degrees?(?![A-Za-z])", ""),
        (r"\s+", " "),
        # 1e5 would be read as 1 * e * 5.
        (r"^([+-]?[0-9]+(?:\.[0-9]+)?)[eE]\+?(-?[0-9]{1,3})$", r"\1 \\times 10^{\2}"),
        # 1 1/2 would be read as 1 * 1/2; \frac next to a whole number is a mixed number.
        (r"^([+-]?[0-9]+) ([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}"),
    )
)
_TEXT_WITH_DIGITS = re.compile(r"^\\(?:text|mathrm|mbox)\s*\{([^{}]*[0-9][^{}]*)\}$")
# A backslash that was escaped twice; in a matrix it ends a row.
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")
_FINAL_STOP = re.compile(r"(?<!\\)[.,;]+$")
_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
_LOOSE_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\{([^{}]*)\}"
)
_BRACED_CHAR = re.compile(r"([_^])\{([A-Za-z0-9])\}")
_CHOICE = re.compile(r"\(([A-Z])\)")
# "(B) 12", and what would name another choice behind it.
_NAMED_CHOICE = re.compile(r"\(([A-Z])\)(?:[:.] ?| )(?![-+*/^=<>])(.+)")
_OTHER_CHOICE = re.compile(r"\([A-Z]\)|\b(?:or|and|not)\b")
# Not "W and Z": a letter of its own is a name.
_WORDS = re.compile(r"(?=.{3})[A-Za-z]{2,}(?: [A-Za-z]{2,})*")

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


@lru_cache(maxsize=4096)
def normalize(text: str) -> str:
    r"""The same answer in plainer LaTeX: no layout commands, degree signs, units or full stop.

    >>> normalize("$\\left( 1,\\, \\dfrac{1}{2} \\right)$.")
    '( 1, \\frac{1}{2} )'
    """
    text = without_units(_plain(text))
    if _GROUPED.fullmatch(text):
        text = text.replace(" ", "")
    return text.rstrip(".,; ")


@lru_cache(maxsize=4096)
def _plain(text: str) -> str:
    """`normalize` without the loss of units."""
    text = _RAISED.sub(lambda m: f"^{{{m[0].translate(_DIGITS)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m[0].translate(_DIGITS)}}}", text)
    text = _FINAL_STOP.sub("", text.translate(_UNICODE).strip())
    if r"\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, _without_braces(text)).strip()
    # \text{3 and 5} is 3 and 5.
    text = _TEXT_WITH_DIGITS.sub(r"\1", _without_braces(text)).strip()
    return _FINAL_STOP.sub("", text)


def _without_braces(text: str) -> str:
    for _ in range(3):
        if not (text.startswith("{") and text.endswith("}") and balanced(text[1:-1])):
            break
        text = text[1:-1].strip()
    return text


@lru_cache(maxsize=4096)
def canonical(text: str) -> str:
    r"""What two spellings of one answer have in common: equal keys mean equal answers.

    White space goes unless it separates two words or numbers (`1 2` is not `12`), text commands
    go, `_{5}` becomes `_5`, `(C)` becomes `C`, and words are compared without regard to case.
    """
    text = _WRAPPER.sub(r"\1", normalize(text))
    text = _LOOSE_SPACE.sub("", re.sub(r"\s+", " ", text).strip())
    text = _BRACED_CHAR.sub(r"\1\2", text)
    choice = _CHOICE.fullmatch(text)
    if choice:
        return choice[1]
    return text.lower() if _WORDS.fullmatch(text) or text == "No" else text


@lru_cache(maxsize=4096)
def parse_number(text: str) -> tuple[Fraction, bool] | None:
    r"""The exact value of an integer, decimal, simple fraction, 3 \times 10^4 or 0.\overline{3}.

    Beside it whether it is a decimal, which may be rounded.

    None for everything else, and beyond the digit caps (40 for integers, 20 elsewhere).
    """
    text = normalize(text)
    match = _NUMBER.fullmatch(_LOOSE_SPACE.sub("", text))
    # 32, 349 are two numbers; 32, 049 can only be one.
    if match is None or (", " in text and ", 0" not in text):
        return None
    if match["mantissa"]:
        value = Fraction(match["mantissa"]) * Fraction(10) ** int(match["power"] or match["p1"])
        return -value if match["sign"] == "-" else value, "." in match["mantissa"]
    if match["again"] or match["a1"]:
        value = _repeating(match["before"], match["still"], match["again"] or match["a1"])
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
    return -value if match["sign"] == "-" else value, bool(match["dec"])


def _name_first(text: str) -> str:
    """x=5 for 5=x."""
    match = _VALUE_FIRST.fullmatch(text)
    return f"{match[2]}={match[1]}" if match and parse_number(match[1]) is not None else text


def _repeating(before: str, still: str, again: str) -> Fraction:
    """The value of before.still with the digits of again after it for ever."""
    first = Fraction(int(f"0{before}{still}"), 10 ** len(still))
    return first + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(still))


def balanced(text: str) -> bool:
    """Whether every brace that is opened is closed, in order; escaped ones do not count."""
    depth = 0
    for brace in re.findall(r"\\\\|\\[{}]|([{}])", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def equal_exactly(answer: str, gold: str) -> bool | None:
    """Whether two answers are equal, where notation and exact numbers decide; else None.

    A decimal stands for a rounded value, as in math-verify: it equals what agrees with it to six
    decimals. Here it is told apart only from numbers that differ by more than 2e-6, which no such
    rounding can bring together; closer ones are left to math-verify, as is all other mathematics.

    Units are not needed, but two that are known must be the same: 5 m is not 5 km. 52, 52% and .52
    are equal where just one of them is a percentage.

    `12_5` has a base, which math-verify overlooks: both must name the same one, or just one of them
    names any, since the question then says which is meant.
    """
    units = known_unit(_plain(answer)), known_unit(_plain(gold))
    if None not in units and units[0] != units[1]:
        return False
    answer_key, gold_key = canonical(answer), canonical(gold)
    if answer_key == gold_key:
        return True
    for letter, other in ((gold_key, answer), (answer_key, gold)):
        named = _NAMED_CHOICE.fullmatch(_WRAPPER.sub(r"\1", normalize(other)))
        if named and len(letter) == 1 and letter.isupper():
            return named[1] == letter and not _OTHER_CHOICE.search(named[2])
    answer_key, gold_key = map(_name_first, (answer_key, gold_key))
    if answer_key == gold_key:
        return True
    # x = 5 answers "5", and 5 answers "x = 5"; but x = 5 does not answer "y = 5".
    answer_value, gold_value = _ASSIGNMENT.fullmatch(answer_key), _ASSIGNMENT.fullmatch(gold_key)
    if answer_value and not gold_value:
        answer = answer_value[1]
    elif gold_value and not answer_value:
        gold = gold_value[1]
    percent = [_PERCENT.search(text) is not None for text in (answer, gold)]
    a, g = (parse_number(_PERCENT.sub("", text)) for text in (answer, gold))
    if a is not None and g is not None:
        pairs = [(a[0], g[0])]
        if percent[0] is not percent[1]:
            pairs.append((a[0] / 100, g[0]) if percent[0] else (a[0], g[0] / 100))
        if any(x == y for x, y in pairs):
            return True
        if not (a[1] or g[1]) or all(abs(x - y) > Fraction(2, 10**6) for x, y in pairs):
            return False
    a_based, g_based = _BASED.fullmatch(answer_key), _BASED.fullmatch(gold_key)
    if a_based and g_based:
        return a_based.groups() == g_based.groups()
    if (a_based and g is not None) or (g_based and a is not None):
        return _digits(answer_key) == _digits(gold_key)
    return None


def _digits(text: str) -> str:
    return text.split("_")[0]
