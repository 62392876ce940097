r"""Rewrites: one spelling for what people write in many ways. The result is LaTeX for the parser.

They apply in order, to answers and to reference answers alike; braces around the whole text go
before each.
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
        lambda t: t.translate(_UNICODE), right=(("−4", "-4"), ("θ", r"\theta")),
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
        (r"\left(\frac12, 0.5\right)", r"(\frac{1}{2},\frac{1}{2})")),
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
        r"\\[dtc]frac(?![A-Za-z])", r"\\frac", right=((r"\dfrac{3}{4}", r"\frac34"),),
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
        right=(("35", r"35^\circ"), ("60,90", r"$90^{\circ}$,$60^{\circ}$")),
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
