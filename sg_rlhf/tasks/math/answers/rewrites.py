r"""Rules that rewrite a text, applied in order to answers and to reference answers alike.

`REWRITES` bring what people write in many ways to one spelling; braces around the whole text go
before each. `SYMBOLS` are for the parser: it takes dx/dt for 0, y' for y, I for i, and E_1 or
L_{\odot} for nothing that it knows, so each becomes a plain symbol.
"""

from __future__ import annotations

import re

from sg_rlhf.tasks.math.answers.rules import Rule, rewrite

_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta",
    "η": "eta", "θ": "theta", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "χ": "chi", "ψ": "psi",
    "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Σ": "Sigma",
    "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "µ": "mu", "ϕ": "phi",
}  # fmt: skip
_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "－": "-", "×": r"\times ", "·": r"\cdot ",
    "⋅": r"\cdot ", "÷": "/", "∞": r"\infty ", "°": r"^\circ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ",
    "≈": r"\approx ", "∅": r"\emptyset ", "…": r"\ldots ", "½": r"\frac{1}{2}",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "Å": " angstrom",
    "\u212b": " angstrom",
}  # fmt: skip
_UNICODE = str.maketrans({**_SIGNS, **{letter: f"\\{name} " for letter, name in _GREEK.items()}})
# A raised or lowered number of several digits is one number.
_RAISED, _LOWERED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_DIGITS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", "+-01234567890123456789")
# The full-width forms of ASCII. Not of digits and letters, which nobody writes in LaTeX.
_FULL_WIDTH = str.maketrans(
    {chr(ord(sign) + 0xFEE0): sign for sign in "!%()+,./:;<=>[]{|}"} | {"、": ",", "。": "."}
)
_DISPLAY = "aligned|align|alignedat|gathered|gather|split|equation|displaymath|multline"
_ENVIRONMENT = re.compile(
    rf"\\begin\s*\{{((?:{_DISPLAY})\*?)\}}((?:(?!\\begin)(?!\\end).)*)\\end\s*\{{\1\}}", re.DOTALL
)
_ROW_END = re.compile(r"\\\\(?:\s*\[[^\]]*\])?(?![A-Za-z])")
_ANSWER = r"\s*(?i:(?:(?:the|final|my)\s+)*answer)\s*(?:is\s*:?|:)\s*"
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf)|mbox)\s*"
_STYLES = "large|Large|LARGE|huge|Huge|small|normalsize|displaystyle|textstyle|scriptstyle|bf|rm|it"
_WHERE = "(?:for|where|with|if|when|provided(?: that)?|assuming)"
_ORDINAL = "(?:st|nd|rd|th)"


def _plain_digits(text: str) -> str:
    text = _RAISED.sub(lambda m: f"^{{{m[0].translate(_DIGITS)}}}", text)
    return _LOWERED.sub(lambda m: f"_{{{m[0].translate(_DIGITS)}}}", text)


def _without_display(text: str) -> str:
    return _ENVIRONMENT.sub(lambda match: _one_line(match[2]), text)


def _one_line(rows: str) -> str:
    r"""x &= 1 + 2 \\ &= 3 as x = 1 + 2 = 3; other rows with commas."""
    line = ""
    for row in _ROW_END.split(rows):
        row = row.replace("&", " ").strip()
        line += ("" if not line or not row else " " if row.startswith("=") else ", ") + row
    return line


# fmt: off
REWRITES: tuple[Rule, ...] = (
    Rule("raised and lowered digits", "Write ² as a power and ₂ as an index.", _plain_digits,
        right=(("x²", "x^2"), ("15,000 kcal m⁻² yr⁻¹", "15000")), near_misses=(("x³", "x^2"),)),
    Rule("Unicode signs", "Write Unicode signs and Greek letters as LaTeX.",
        lambda t: t.translate(_UNICODE), right=(("−4", "-4"), ("θ", r"\theta"), ("½", "0.5")),
        near_misses=(("ϕ", r"\theta"),)),
    rewrite("final stop", "Drop a full stop, comma or semicolon at the end.", r"(?<!\\)[.,;]+\s*$",
        "", right=(("5.", "5"), ("6e13.", "6e13")), near_misses=((".5", "5"),)),
    Rule("full-width punctuation", "Write full-width signs of punctuation as ASCII.",
        lambda text: text.translate(_FULL_WIDTH), right=(("（1，2）", "(1,2)"), ("50％", "50")),
        near_misses=(("（2，1）", "(1,2)"), ("［0，1］", "[0,1)"), ("５", "5"))),
    rewrite("currency signs", "Drop signs and codes of currencies.",
        r"[€£¥￥₹₩]|\\(?:pounds|euro|texteuro|textsterling|yen)(?![A-Za-z])"
        r"|^\s*(?:US|USD|EUR|GBP|Rs\.?)\s*(?=\\?\$?\s*[0-9])", "", right=(("5€", "5"),
        ("¥500", "500"), (r"\pounds 5", "5"), ("Rs. 50", "50"), ("US$5", "5")),
        near_misses=(("5€", "5000"),)),
    rewrite("number of an equation", "Drop \\tag and \\notag.",
        r"\\tag\*?\s*\{[^{}]*\}|\\(?:notag|nonumber)(?![A-Za-z])", "", right=((r"5 \tag{1}", "5"),),
        near_misses=((r"5 \tag{6}", "6"),)),
    Rule("display environment", "Write the rows of aligned and the like on one line.",
        _without_display, right=((r"\begin{aligned} x &= 5 \end{aligned}", "5"),
        (r"\begin{align*} x &= 2+3 \\ &= 5 \end{align*}", "5"),
        (r"\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}", "x=1,y=2")),
        near_misses=((r"\begin{aligned} x &= 5 \\ &= 6 \end{aligned}", "6"),
        (r"\begin{aligned} x &= 4 \\ y &= 5 \end{aligned}", "5"))),
    rewrite("leftover of a row", "Drop an end of a row at the end, and an & at an end or a sign =.",
        r"\s*\\\\(?:\s*\[[^\]]*\])?\s*$|^\s*&|(?<!\\)&\s*$|(?<!\\)&\s*(?==)|(?<==)\s*&", "",
        right=(("5 \\\\", "5"), ("& 5", "5"), ("x &= 5", "5")), near_misses=((r"5 \\ 6", "5"),
        ("5 & 6", "56"), ("5 & 600", "5600"))),
    rewrite("answer in text", "Drop Answer: in a text command before the answer.",
        rf"^{_TEXT}\{{{_ANSWER}\}}\s*(?=\S)", "", right=((r"\text{Answer: } 5", "5"),
        (r"\textbf{Answer:} \frac12", "0.5"), (r"\text{The answer is } 5", "5")),
        near_misses=((r"\text{Answer: } 4", "5"), (r"\text{Answer: not } 5", "5"),
        (r"\text{Not the answer: } 5", "5"))),
    rewrite("answer and value in text", "Drop Answer: before the answer inside a text command.",
        rf"^({_TEXT}\{{){_ANSWER}(?=[^{{}}\s])", r"\1", right=((r"\text{Answer: 5}", "5"),
        (r"\text{Answer: A}", "A")), near_misses=((r"\text{Answer: 5 or 6}", "5"),
        (r"\text{Answer: 5}, 6", "5"))),
    rewrite("natural logarithm", "Write \\log_e as \\ln.",
        r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*(?:e|\\mathrm\s*\{e\})\s*\})", r"\\ln ",
        right=((r"\log_e 2", r"\ln 2"), (r"\log_{\mathrm{e}}(x+1)", r"\ln(x+1)")),
        near_misses=((r"\log_2 x", r"\ln x"), (r"\log_{10} 2", r"\ln 2"),
        (r"\log_{ex} 2", r"\ln 2"))),
    rewrite("left and right", "Drop \\left and \\right.",
        r"\\(?:left|right)(?![A-Za-z])(?:\.(?!\d))?", "",
        right=((r"\left[0,\infty\right)", r"[0,\infty)"),
        (r"\left(\frac12, 0.5\right)", r"(\frac{1}{2},\frac{1}{2})"),
        (r"\left\{1,2\right\}", r"\{2,1\}")),
        near_misses=((r"\left[0,1\right)", "[0,1]"),)),
    rewrite("size and style", "Drop commands for size and style.", rf"\\(?:{_STYLES})(?![A-Za-z])",
        "", right=((r"\large 5", "5"),), near_misses=((r"\large 6", "5"),)),
    rewrite("colour", "Drop a colour.", r"\\(?:textcolor|color)\s*\{[A-Za-z!0-9]+\}", "",
        right=((r"\color{red}{5}", "5"),), near_misses=((r"\color{red}{6}", "5"),)),
    # The group stays, or 2\boldsymbol{3} would be 23.
    rewrite("bold", "Drop bold and underlining.", r"\\(?:boldsymbol|bm|underline|mathbf)\s*(?=\{)",
        "", right=((r"\boldsymbol{5}", "5"), (r"\underline{5}", "5")),
        near_misses=((r"2\boldsymbol{3}", "23"),)),
    rewrite("empty set", "Write \\varnothing as \\emptyset.", r"\\varnothing(?![A-Za-z])",
        r"\\emptyset", right=((r"\varnothing", r"\emptyset"),),
        near_misses=((r"\{0\}", r"\emptyset"),)),
    rewrite("approximately", "Drop \\approx at the start.", r"^\s*\\(?:approx|simeq)(?![A-Za-z])",
        "", right=((r"\approx 5", "5"),), near_misses=((r"4 \approx 5", "4,5"),)),
    rewrite("percent in words", "Write percent as %.",
        r"\\text\s*\{\s*(?:percent(?:age)?|pct)\s*\}|(?<=[0-9])\s*(?:percent|pct)(?![A-Za-z])",
        r"\\%", right=(("0.175", r"17.5 \text{ percent}"),),
        near_misses=(("175", r"17.5 \text{ percent}"),)),
    rewrite("ordinal in text", "Drop the th of 12^{\\text{th}}.",
        rf"(?<=[0-9])\s*(?:\^\s*)?(\{{\s*)?\\(?:text|mathrm)\s*\{{\s*{_ORDINAL}\s*\}}(?(1)\s*\}})",
        "", right=((r"12^{\text{th}} \text{ grade}", "12"),),
        near_misses=((r"2^{\text{nd}}+1", "2"),)),
    rewrite("minutes of arc", "Drop the signs of minutes and seconds of arc.",
        r"(?<=[0-9])\s*\^\s*(\{\s*)?(?:\\prime\s*){1,2}(?(1)\})(?![0-9A-Za-z])", "",
        right=((r"0.003 \text{ arcseconds}", r"0.003^{\prime\prime}"),),
        near_misses=((r"0.003^{\prime\prime}", "0.03"),)),
    rewrite("million", "Write 5 million in text as a power of ten.",
        r"^([0-9][0-9.]*)\s*\\text\s*\{\s*million\b", r"\1 \\times 10^{6} \\text{",
        right=((r"5 \text{ million dollars}", "5000000"),),
        near_misses=((r"5\text{ million}", "5"),)),
    rewrite("condition on a value", "Drop words behind an answer that exclude a value.",
        rf",?\s*\\text\s*\{{\s*,?\s*{_WHERE}\s*\}}[^,;=<>]{{1,40}}\\neq?(?![A-Za-z])[^,;=<>]{{1,40}}$",
        "", right=((r"\frac{1}{4 - w^2}, \quad \text{for } w^2 \neq 4", r"\frac{1}{4-w^{2}}"),),
        near_misses=((r"x = 5, \text{ for } x \neq 3", "3"), (r"4 \text{ for } x = 2", "4"))),
    rewrite("for all", "Drop words behind an answer that say it holds for all values.",
        rf",?\s*\\text\s*\{{\s*,?\s*(?:{_WHERE} )?(?:for )?(?:all|any|every|each)\b"
        r"[a-z ]*\}\s*[A-Za-z]?(?:\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?(?:[\^_]\{?[+*]?\}?)?)?$", "",
        right=((r"f(x)=2x \text{ for all } x \in \mathbb{R}", "f(x)=2x"),),
        near_misses=((r"5 \text{ is wrong, } 6", "6"),)),
    rewrite("root sign", "Write √3 as \\sqrt{3}.", r"√\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}",
        right=(("2√3", r"2\sqrt{3}"),), near_misses=(("√23", r"3\sqrt{2}"),)),
    rewrite("bare sqrt", "Write sqrt(x) and √(x) as \\sqrt{x}.",
        r"(?:√|(?<![\\A-Za-z])sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}",
        right=(("-1 + sqrt(3)", r"-1+\sqrt{3}"),), near_misses=(("sqrt(3)", "3"),)),
    rewrite("bare pi", "Write pi as \\pi.", r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ",
        right=(("2pi", r"2\pi"),), near_misses=(("2pix", r"2\pi"),)),
    rewrite("kinds of fraction", "Write \\dfrac, \\tfrac and \\cfrac as \\frac.",
        r"\\[dtc]frac(?![A-Za-z])", r"\\frac", right=((r"\dfrac{3}{4}", r"\frac34"),
        (r"\dfrac{dx}{dt}=kx", r"\frac{dx}{dt}=kx")),
        near_misses=((r"\dfrac{4}{3}", r"\frac34"),)),
    rewrite("base of a logarithm", "Set the base of \\log_2 8 in braces.",
        r"\\log\s*_\s*([0-9]+)\s+(?=[0-9])", r"\\log_{\1} ", right=((r"\log_2 8", "3"),),
        near_misses=((r"\log_2 8", "4"),)),
    rewrite("negative space in thousands", "Drop the space of 1,\\! 000.", r",\s*\\!\s*", ",",
        right=((r"11,\! 111,\! 111,\! 100", "11111111100"), (r"\$32,\!348", "32348")),
        near_misses=((r"32,\ 349", "32349"),)),
    rewrite("delimiters", "Drop dollar signs, negative spaces and math delimiters.",
        r"(?<!\\)\\!|\\?\$|(?<!\\)\\[()\[\]]", "", right=(("$5$", "5"),
        (r"\(69$,$84\)", "$69$,$84$"), (r"\[x+1\]", "1+x")), near_misses=((r"\$6", "5"),)),
    rewrite("spaces", "Write every kind of space as a space.",
        r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])", " ", right=((r"12\,345", "12345"),),
        near_misses=((r"5 \quad 6", "30"), (r"\ ", "5"))),
    rewrite("degrees Celsius", "Drop degrees with the letter of a scale.",
        r"\^\s*(\{\s*)?\\circ\s*(?(1)\}\s*)(?:[CF]|\\(?:text|mathrm)\s*\{\s*[CF]\s*\})$", "",
        right=(("25 °C", "25"),), near_misses=(("25 °C", "52"),)),
    rewrite("degree signs", "Drop degree signs.",
        r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degrees?(?![A-Za-z])", "",
        right=(("35", r"35^\circ"), ("60,90", r"$90^{\circ}$,$60^{\circ}$"), (r"45\degree", "45")),
        near_misses=(("53", r"35^\circ"),)),
    rewrite("one space", "Write several spaces as one.", r"\s+", " ", right=(("10  000", "10000"),),
        near_misses=(("1  2", "12"),)),
    rewrite("E notation", "Write 1e5 as a power of ten, which the parser would take for 1 * e * 5.",
        r"^([+-]?[0-9]+(?:\.[0-9]+)?)[eE]\+?(-?[0-9]{1,3})$", r"\1 \\times 10^{\2}",
        right=(("3e8", r"3 \times 10^{8}"), ("{1e-5}", "1e-5")),
        near_misses=(("3e8", r"3 \times 10^{7}"),)),
    rewrite("mixed number",
        "Write 1 1/2 as 1\\frac{1}{2}, which the parser would take for a product.",
        r"^([+-]?[0-9]+) ([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}", right=(("1 1/2", "1.5"),),
        near_misses=(("1 2", "12"),)),
    rewrite("digits in text", "Read text that holds a digit as mathematics.",
        r"^\\(?:text|mathrm|mbox)\s*\{([^{}]*[0-9][^{}]*)\}$", r"\1",
        right=((r"\text{3 and 5}", "3,5"),), near_misses=((r"\text{3 and 5}", "3"),)),
)
# fmt: on


# -- Plain symbols for the parser ---------------------------------------------------------------

_GREEK_COMMAND = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|"
    r"xi|rho|sigma|tau|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|"
    r"Omega|hbar|ell)(?![A-Za-z])"
)
_INDEX = r"(?:_\s*(?P<brace>\{\s*)?(?P<index>[A-Za-z0-9])(?(brace)\s*\}))?"
_DERIVATIVE_FRACTION = re.compile(
    r"\\frac\s*\{\s*(?:d|\\partial)\s*(?:\^\s*\{?(?P<n>[0-9])\}?)?\s*(?P<of>\\?[A-Za-z]+)\s*"
    rf"{_INDEX}\s*(?:\(\s*[A-Za-z]\s*\))?\s*\}}"
    r"\s*\{\s*(?:d|\\partial)\s*(?P<by>[A-Za-z])\s*(?:\^\s*\{?(?P<m>[0-9])\}?)?\s*\}"
)
_DOTTED = re.compile(
    r"\\(?P<dots>d?)dot\s*(?:\{\s*(?P<of>\\?[A-Za-z]+)\s*\}|(?P<of1>[A-Za-z](?![A-Za-z])))"
    rf"{_INDEX}(?:\s*\(\s*t\s*\))?"
)
_PRIMES = re.compile(r"(?<![\\A-Za-z])([A-Za-z])('+)")
_DERIVATIVE = re.compile(r"D_\{[0-9]Q(\w+)Q(\w*)\}")
_SUBSCRIPT = re.compile(
    rf"(?P<base>{_GREEK_COMMAND}|(?<![\\A-Za-z])[A-Za-z](?![A-Za-z]))\s*_\s*"
    r"(?:\{(?P<index>(?:[^{}]|\{[^{}]*\})*)\}|(?P<one>[A-Za-z0-9]|\\[A-Za-z]+))"
)
_LETTER_I = re.compile(r"(\\text\s*\{[^{}]*\}|\\[A-Za-z]+|\b[DZ]_\{[^{}]*\})|I")
_STYLE = re.compile(r"\\(?:text|mathrm|mbox|rm|mathit|operatorname)(?![A-Za-z])")


def _protected(order: int | str, of: str, index: str | None, by: str) -> str:
    return f" D_{{{order}Q{of.strip(chr(92))}{index or ''}Q{by}}}"


def _derivative_fraction(match: re.Match[str]) -> str:
    orders = {match["n"] or "1", match["m"] or "1"}
    if len(orders) > 1:
        return match[0].replace("frac", "badfrac")  # no derivative: the parser must not see one
    return _protected(orders.pop(), match["of"], match["index"], match["by"])


def _dotted(match: re.Match[str]) -> str:
    order = 2 if match["dots"] else 1
    return _protected(order, match["of"] or match["of1"], match["index"], "t")


def _without_arguments(text: str) -> str:
    for of, by in sorted(set(_DERIVATIVE.findall(text))):
        called = rf"(\\?{of})\s*\(\s*{by}\s*\)|(\\[A-Za-z]+)" if by else "(?!)"
        text = re.sub(called, lambda match: match[2] or f"{match[1]} ", text)
    return text


def _subscript(match: re.Match[str]) -> str:
    index = match["index"] if match["index"] is not None else match["one"]
    # n + 1 is a value, not a name.
    if _DERIVATIVE.fullmatch(match[0]) or re.search(r"[-+*=^]", index):
        return match[0]
    plain = re.sub(r"[^A-Za-z0-9]", "", _STYLE.sub("", index))
    readable = match["base"] not in ("E", "I") and re.fullmatch(r"\s*[A-Za-z0-9]+\s*", index)
    return match[0] if not plain or readable else f"Z_{{{match['base'].strip(chr(92))}{plain}}}"


# fmt: off
#: Text -> text, before a single value is parsed.
SYMBOLS: tuple[Rule, ...] = (
    Rule("derivative as a fraction", "Name \\frac{dx}{dt} by a symbol.",
        lambda t: _DERIVATIVE_FRACTION.sub(_derivative_fraction, t),
        right=((r"\frac{dx}{dt}=-a+kx", r"\frac{dx}{dt} = kx - a"),),
        near_misses=(("kx=a", r"\frac{dx}{dt} = kx - a"),
        (r"\frac{d^2y}{dt^2}=k", r"\frac{dy}{dt}=k"),
        (r"\frac{d^{2} v}{d t^{7}}=k", r"\frac{d^{2} v}{d t^{2}}=k"))),
    Rule("derivative as a dot", "Name \\dot{x} by a symbol.", lambda t: _DOTTED.sub(_dotted, t),
        right=((r"\frac{\dot{x}_0}{a}\sin t", r"\sin(t) \frac{\dot{x}_{0}}{a}"),
        (r"\dot{x}=2", r"\frac{dx}{dt}=2")),
        near_misses=(("mv = f - bv", r"m \dot{v}+b v=f"),)),
    Rule("argument of the unknown", "Write x for x(t) where its derivative occurs.",
        _without_arguments, right=((r"\frac{dx}{dt} = kx(t) - a", r"\frac{dx}{dt} = kx - a"),),
        near_misses=((r"\frac{dx}{dt} = kx(t) - a", r"\frac{dx}{dt} = kt - a"),)),
    Rule("derivative as a prime", "Name y' by a symbol.",
        lambda t: _PRIMES.sub(lambda m: _protected(len(m[2]), m[1], None, ""), t),
        right=(("y'=2x", "y' = 2x"),), near_misses=(("y=2x+y", "y'=2x+y"),)),
    Rule("subscripts", "Name a letter with an index that is not read by a symbol.",
        lambda t: _SUBSCRIPT.sub(_subscript, t), right=(("E_2, E_1", "E_{1},E_{2}"),
        ("n^2-n-1", r"m_{\max }=n^{2}-n-1")), near_misses=(("E_1", "E_2"), (r"L_{\odot}", "L"),
        (r"m_{\min} = n^2", r"m_{\max} = n^2"))),
    # A current or a moment; the parser takes it for the number i.
    Rule("letter I", "Name the letter I by a symbol.",
        lambda t: _LETTER_I.sub(lambda m: m[1] or " Z_{I}", t), right=(("I^2R", "RI^2"),),
        near_misses=(("I", "i"), ("-1", "I^2"), ("3+4I", "3+4i"))),
)
# fmt: on
