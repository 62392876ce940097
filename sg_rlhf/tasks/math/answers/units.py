r"""Units behind numbers: they are not needed, but two that are known must be the same.

A unit is text behind a value: at the end, or before the next element of a list. Each of its words
must be a unit's name or sign, or the plural of what is counted (`apples`): `wrong` is none. Text
that says more than what is counted (`or`, `if`, `more than`, `million`) is none, and neither is a
letter that is a number or a name (`\mathrm{e}`, `\mathbf{j}`).
"""

from __future__ import annotations

import re

_COMMAND = r"\\(?:text(?:rm|normal|bf|it)?|mathrm|mbox)"
# Letters, and digits only as a power: "cm^2", "m/s^{2}", "miles per hour", "p.m.".
_CONTENT = (
    r"(?:[A-Za-z .~/'%()-]|\\[ ,;]|\\(?:cdot|mu|Omega)(?![A-Za-z])"
    r"|\^\s*(?:-?[0-9]|\{\s*-?[0-9]{1,3}\s*\}))*"
)
# Not a name, a constant or a vector, nor what changes the value or offers another.
_MEANING = (
    r"(?:and|or|if|when|for|where|unless|except|but|otherwise|else|not|maybe|perhaps|possibly|either|"
    r"so|is|are|about|approx|approximately|more|less|fewer|greater|least|most|than|between|below|"
    r"above|negative|minus|squared|cubed|factorial|times|to|with|dozens?|hundreds?|thousands?|"
    r"millions?|billions?|trillions?|half|halves|thirds?|quarters?|all|any|every|none|no|odd|even|"
    r"undefined|infinite|infinitely|many|solutions?|mod|base)"
)
_SINGLE = r"(?!\s*~?\s*[a-zA-Z]\s*\})|(?=\s*~?\s*[mgshlLJNWVACFHTK]\s*\})"
_GROUP = (
    rf"{_COMMAND}\s*\{{(?:{_SINGLE})(?![^{{}}]*\b{_MEANING}\b)(?=[^{{}}]*[A-Za-z%]){_CONTENT}\}}"
)
_POWER = r"(?:\s*\^\s*(?:-?[0-9]|\{\s*-?[0-9]{1,3}\s*\}))?+"
_ATOM = rf"(?:{_GROUP}|\\(?:AA|Omega|mu|degree)(?![A-Za-z])){_POWER}"
_JOIN = r"\s*+(?:(?:\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|[/~*])\s*+)?"
_FRACTION = (
    rf"\\frac\s*\{{\s*{_ATOM}(?:{_JOIN}{_ATOM})*\s*\}}\s*\{{\s*{_ATOM}(?:{_JOIN}{_ATOM})*\s*\}}"
)
# Atomic: what follows the whole of a unit decides, and a long row of them is read once.
_UNIT = rf"(?>{_FRACTION}|(?:1\s*/\s*)?{_GROUP}{_POWER}(?:{_JOIN}{_ATOM})*)"
_NEXT = r"\s*(?:$|[,;)\]]|\\\}|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?:and|or)\b)"
_TEXT_UNIT = re.compile(rf"(?<=[0-9A-Za-z)\]}}!%])[\s~]*(?P<unit>{_UNIT})(?={_NEXT})")
# What stands before a unit is a value, not text: \text{Row} \text{echelon} is no Row.
_TEXT_BEFORE = re.compile(rf"{_COMMAND}\s*\{{[^{{}}]*\}}{_POWER}\s*$")
_AND_INSIDE = re.compile(r"(\\text\s*\{[^{}]*?[A-Za-z.])\s+(and|or)\s*\}")

# In plain letters, where the parser would read a product. A single letter is a variable.
_PLAIN = (
    r"dollars?|cents?|euros?|pounds?|degrees?|deg|radians?|rad|units?|inch(?:es)?|feet|foot|ft|"
    r"miles?|yards?|met(?:er|re)s?|(?:centi|kilo|milli)met(?:er|re)s?|cm|km|mm|nm|kg|mg|grams?|"
    r"kilograms?|lit(?:er|re)s?|ml|mL|seconds?|sec|min(?:ute)?s?|hours?|hrs?|days?|weeks?|months?|years?|"
    r"mph|kmph|km/hr?|m/s|cm/s|km/s|Hz|kHz|MHz|GHz|eV|keV|MeV|angstroms?|kJ|kcal|kPa|Pa|mol|people|students?|ways?|"
    r"[ap]\.?m\.?|[AP]\.?M\.?|"
    r"USD|EUR|GBP|yen|yuan|rupees?|pesos?|francs?|pence|tons?|tonnes?|gallons?|ounces?|oz|lbs?|"
    r"quarts?|pints?|joules?|newtons?|watts?|volts?|amp(?:ere)?s?|ohms?|kelvins?|hectares?|acres?|"
    r"decades?|centuries|persons?|"
    # The plural of a noun that is counted, but no function and no word that changes the value.
    r"(?<= )(?!(?:plus|minus|times|dozens|hundreds|thousands|[a-z]*illions|halves|thirds|quarters|"
    r"solutions)\b)[a-z]{3,}s(?<!ss)"
)
_SIGN = (
    r"(?:[yzafpnumcdhkMGTPEZY]|da)?(?:m|g|s|A|K|mol|cd|L|l|J|W|V|Pa|N|Hz|eV|C|F|T|Wb|H|S|lm|lx|Bq|Gy|Sv|"
    r"cal|pc|bar|rad|t|b|B|bit|erg|dyn|Ci|ohm)|AU|au|ly|yr|yrs|y|d|wk|h|hr|min|in|ft|yd|mi|gal|atm|rpm|"
    r"rev|ppm|dB|mmHg|psi|arcsec|arcmin|M|u|amu|[ap]m|[AP]M|[ap]|[ceAP]"
)
#: A word of a unit in text. Not the adverbs and verbs that look like the plural of a noun.
_WORD = re.compile(
    rf"{_SIGN}|per|square|cubic|sq|cu|Celsius|Fahrenheit|(?i:{_PLAIN}|moles?|atoms?|bits?|bytes?|turns?|"
    r"revolutions?|celsius|fahrenheit|percent|points?|children|women|men|mice|teeth|geese|sheep|fish|"
    r"photons?|parsecs?|grade|place|term|row|column|floor|level|light|teams?|games?|balls?|squares?|triangles?|numbers?|integers?|pairs?|"
    r"(?!(?:plus|minus|times|dozens|hundreds|thousands|[a-z]*illions|halves|thirds|quarters|solutions|"
    r"this|thus|was|has|does|yes|always|sometimes|perhaps|us|its|his|hers|theirs|ours|yours|equals|"
    r"gives|makes|means|seems|looks|besides|afterwards|towards|versus|errors|guesses|others)\b)"
    r"[a-z]{3,}s(?<!ss))"
)
_NUMERIC = r"[+-]?(?:[0-9.,:(){}+*/ -]|\\(?:frac|sqrt|pi|cdot|times)(?![A-Za-z])|\^)*[0-9)}]"
_PLAIN_UNIT = re.compile(
    rf"({_NUMERIC}|{_NUMERIC}?\s*\\pi) ?(?:(?:square|cubic|sq\.?|cu\.?) )?(?:{_PLAIN}){_POWER}"
    # Behind a word, a letter with a power is one as well: kcal m^{-2} yr^{-1}.
    rf"(?:(?: per | ?/ ?)(?:{_PLAIN}|s|h){_POWER}| [a-z]{{1,3}}\^\{{?-[0-9]\}}?)*"
)

#: What is known well enough to tell two units apart.
_NAMES = {
    word: name
    for name, words in {
        "m": "m meter meters metre metres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "inch inches",
        "ft": "ft foot feet",
        "yd": "yard yards",
        "mi": "mile miles",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "s": "s sec second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "d": "day days",
        "wk": "week weeks",
        "mo": "month months",
        "yr": "year years",
        "dollar": "dollar dollars USD",
        "euro": "euro euros EUR",
        "cent": "cent cents",
        "degree": "degree degrees deg",
        "radian": "radian radians rad",
        "am": "am AM",
        "pm": "pm PM",
    }.items()
    for word in words.split()
}
_ONE_WORD = re.compile(
    r"(?P<before>square |cubic |sq\.? |cu\.? )?(?P<word>[A-Za-z]+)(?:\^\{?(?P<power>-?[0-9])\}?)?"
)


def without_units(text: str) -> str:
    r"""The same text with every unit left out.

    >>> without_units(r"5\text{ cm}, 7\text{ cm}")
    '5, 7'
    >>> without_units(r"5\text{ cm}+7\text{ cm}")
    '5\\text{ cm}+7'
    """
    text = _AND_INSIDE.sub(r"\1}\\text{ \2 }", text)

    def replaced(match: re.Match[str]) -> str:
        words = re.findall(r"[A-Za-z]+", re.sub(r"\\[A-Za-z]+", " ", match["unit"]))
        is_unit = all(_WORD.fullmatch(word) for word in words)
        return "" if is_unit and not _TEXT_BEFORE.search(text, 0, match.start()) else match[0]

    text = _TEXT_UNIT.sub(replaced, text)
    plain = _PLAIN_UNIT.fullmatch(text)
    return plain[1] if plain else text


def known_unit(text: str) -> str | None:
    r"""The unit of an answer that is one value, in one spelling; None if it has none that is known.

    >>> known_unit(r"15 \mbox{ centimetres}^2"), known_unit("3 square cm"), known_unit("4")
    ('cm^2', 'cm^2', None)
    """
    units = _TEXT_UNIT.findall(text)
    if units:
        unit = re.sub(rf"{_COMMAND}\s*\{{([^{{}}]*)\}}", r"\1", units[0]) if len(units) == 1 else ""
    else:
        plain = _PLAIN_UNIT.fullmatch(text)
        unit = text[plain.end(1) :] if plain else ""
    unit = re.sub(r"[\s~]+", " ", unit).strip()
    match = _ONE_WORD.fullmatch(re.sub(r"^([apAP])\.\s?([mM])\.?$", r"\1\2", unit))
    if match is None or match["word"] not in _NAMES:
        return None
    powers = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
    power = match["power"] or powers.get((match["before"] or "").strip(" ."), "1")
    return _NAMES[match["word"]] + ("" if power == "1" else f"^{power}")
