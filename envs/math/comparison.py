r"""Whether an answer is the right one: by its text, by its value as a number, and last by algebra, in a worker.

Invariants: what is done in this process is linear in the length of the text and makes no large number.
"""

import re
import unicodedata
from fractions import Fraction

from .intervals import as_intervals
from .workers import equal

__all__ = ["is_right", "normal", "number"]

_LONGEST = 1000
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|boldsymbol|bold|bm|mbox|boxed|fbox|underline)"
    r"\s*\{([^{}]*)\}")
_UNIT = r"\\(?:text|mathrm)\s*\{[A-Za-z ]+\}(?:\^\{?[23]\}?)?"
_NO_MEANING = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|bf|rm|degree|textdollar|[bB]igg?[lr]?)(?![A-Za-z])"
    r"|(?<!\\)\\[!,;: ()\[\]]|\\?\$|(?:\^\s*\{?\s*\\circ\s*\}?|\u00b0)(?:\s*[CF](?![A-Za-z]))?"
    rf"|\\[dt]?frac\s*\{{{_UNIT}\}}\s*\{{{_UNIT}\}}"
    r"|\\(?:text|mathrm)\s*\{\s*(?:rad|radians?|(?:square |sq\. |cubic )?units?)\s*\}(?:\s*\^\s*\{?[23]\}?)?"
    r"|[\u00a2\u00a3\u00a5\u200b\u20ac\u20b9]"
)
_POWER_OF_UNIT = re.compile(r"(\\(?:text|mathrm)\s*\{[\s~]*(?:[a-z]{2,}|m)\s*\})\s*\^\s*\{?[23]\}?\s*$")
_CHARACTERS = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u221e": r"\infty ", "\u222a": r"\cup ", "\u2208": r"\in ", "\u00b7": r"\cdot ",
    "\u00a0": " ", "\u2044": "/", "\u2248": r"\approx "} | {0xFEE0 + code: code for code in range(0x21, 0x7F)})
_SMALL = re.compile("([\u00bc-\u00be\u2150-\u215e])|([\u00b2\u00b3\u00b9\u2070-\u207b]+)|([\u2080-\u2089]+)")
_ROOT = re.compile(r"\u221a\s*([0-9.]+|[A-Za-z]|\([^()]*\))")
_EXPONENT = re.compile(r"(?<=[0-9.])[eE]\+?(-?[0-9]{1,2})(?![0-9A-Za-z])")
_SPELLED = [(re.compile(pattern), latex) for pattern, latex in (
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "), (r"(?<![A-Za-z\\])(?:inf(?:ty|inity)?|oo)(?![A-Za-z])", r"\\infty "),
    (r"(?<![A-Za-z\\])sqrt(?=\s*\{)", r"\\sqrt"), (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"),
    (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "), (r"\\[dtc]frac", r"\\frac"), (r"\\varnothing", r"\\emptyset"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"), (r"\^\s*(\\frac\{[^{}]*\}\{[^{}]*\})", r"^{\1}"),
    (r"(?<=[0-9])\s+(?=i(?![A-Za-z]))", ""), (r"\\langle(?![A-Za-z])", "("), (r"\\rangle(?![A-Za-z])", ")"))]
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_FACTOR = re.compile(r"(?<=[0-9])(?:\*|\\cdot(?![A-Za-z])|\\times(?![A-Za-z]))(?=[A-Za-z])")
_CAPITAL = re.compile(r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])")
_CHOICE = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s*\(?[A-Z]\b|\(?[A-Z]\s*[).:])")
_DIGITS = r"(?:[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:[ ][0-9]{3})+)|[0-9]++)"
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_VALUE = re.compile(
    rf"""(?:(?:(?!.*(?:\\n|\bnot\b))[A-Za-z\\{{}}|+ ]+
         (?:_[0-9A-Za-z]|_\{{[0-9A-Za-z]+\}}|\^\{{-1\}})?(?:\([^()=<>]*\))?\s*)?
       (?:=|\\(?:approx|sim)(?![A-Za-z]))\s*)?  (?P<sign>[-+]?)\s*
    (?: (?P<whole>[0-9]+)?\s*\\frac\s*(?:\{{\s*(?P<top>-?{_DIGITS})\s*\}}|(?P<t>[0-9]))
        \s*(?:\{{\s*(?P<bottom>-?{_DIGITS})\s*\}}|(?P<b>[0-9]))
      | (?:(?P<mixed>[0-9]+)\s+)?(?P<over>{_DIGITS})\s*/\s*(?P<under>{_DIGITS})
      | (?P<plain>{_DIGITS}?(?:(?<=[0-9])\.|\.(?=[0-9])|(?<=[0-9]))[0-9]*)
        (?:\\(?:overline|bar|dot)\s*\{{?(?P<repeated>[0-9]+)\}}?)?
        (?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?(?P<power>-?[0-9]{{1,2}})\}}?)?
    )
    (?:\s*(?P<percent>\\?%|percent\b))?  (?:\s*(?P<scale>{"|".join(_SCALES)})\b)?
    (?:(?:\s+|\b(?=[A-Za-z]{{2}})|(?=(?:[cdkmn]m|[km]g|ft|in|yd|mi|hrs?|min|sec|ms|mph|lbs?|oz|m[lL])\b))
       # Words that do something to the number, and letters that are rather variables, are no units.
       (?!.*\b(?:is|are|or|and|no|not|minus|plus|times|less|more|than|least|most|mod|pi|sqrt|root|squared
                          |cubed|factorial|dozen|a(?![ ]+[a-z])|[b-fi-kn-ru-zBDEG-IMO-UX-Z])\b)
       [A-Za-z](?:[A-Za-z ./]|\\cdot|\^\s*\{{?-?[1-3]\}}?)*)?""",
    re.VERBOSE,
)
_BASE = re.compile(r"(?<=[0-9])_([0-9]+)")
_OPERATION = re.compile(r"(?<=[\w)}\]!%])\s*(?:[-+*/(]|\\(?:times|cdot|div)(?![A-Za-z]))")


def is_right(answer: str, gold: str, *, strict: bool = False, seconds: float = 5.0) -> bool | None:
    """Compares an answer with the right one.

    Equal texts are equal, but for space, text and size commands, and signs of currency and degree. Numbers are equal
    if their values are, exactly; a unit behind one does not count, nor what it is the value of ("x = 5", "P(A) = 5") or
    its base where one side leaves that out, and "50%" is .5, or 50 where the other side leaves the sign out. Where the
    right one is a capital, "(B) 5" and "option B" are B. Inequalities with "or" between them are a union of intervals.
    What is left is decided by math-verify. An answer of more than 1,000 characters is wrong, and so is one with sums,
    differences or products left to do where the right one is a number.

    Args:
        answer: what `find_answer` found.
        gold: the right answer.
        strict: the answer must have the form of the right one: a number be written as one, and an expression have no
            more operations. Else an answer that repeats the question is right wherever algebra can answer it.
        seconds: the limit on math-verify.

    Returns:
        None: no verdict within the limits of time and memory; it does not count as right.

    Raises:
        EnvFailure: reason "grader": no worker could be had, or one died by no fault of the answer.
    """
    if len(answer) > max(_LONGEST, 2 * len(gold)):
        return False
    ours, theirs = normal(answer), normal(gold)
    if ours == theirs or (len(ours) > 1 and ours.isalpha() and ours.casefold() == theirs.casefold()):
        return True
    if min(len(ours), len(theirs)) > 2 and (ours + theirs).isalpha():
        return False  # algebra takes words for products, in which the order of letters does not matter
    if len(theirs) == 1 and theirs.isupper() and _CHOICE.match(_plain(answer)):
        return _CAPITAL.findall(_plain(answer)) == [theirs]
    bases = [_BASE.findall(re.sub("[{}]", "", text)) for text in (ours, theirs)]
    if all(bases) and bases[0] != bases[1]:
        return False  # algebra takes no notice of them
    value, right = number(answer), number(gold)
    if right is not None and (value is not None or strict):
        return value is not None and _same(value, right) and len({_name(ours), _name(theirs)} - {""}) < 2
    if (right is not None or strict) and _operations(ours) > _operations(theirs) * strict:
        return False
    return equal(_spelled_out(gold), _spelled_out(answer), seconds)


def normal(text: str) -> str:
    """A text without what changes nothing of what it says."""
    text = _FACTOR.sub("", _SPACE.sub("", _plain(text)))
    if len(text) == 3 and text[0] == "(" and text[1].isalpha() and text[2] == ")":
        return text[1]
    return text.replace("{,}", ",")


def number(text: str) -> tuple[Fraction, bool] | None:
    """The exact value of a number, and whether it is in percent; None: it is none, or longer than a number is."""
    match = _VALUE.fullmatch(_plain(text).replace("{,}", ",")) if len(text) <= _LONGEST else None
    if match is None:
        return None
    part = {name: int(re.sub("[, ]", "", value)) for name, value in match.groupdict().items()
            if value and name not in ("sign", "plain", "percent", "scale")}
    if match["plain"]:
        digits, again = re.sub("[, ]", "", match["plain"]), match["repeated"]
        value, (_, point, decimals) = Fraction(digits), digits.partition(".")
        if again and not point:
            return None
        if again:
            value += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(decimals))
        value *= Fraction(10) ** part.get("power", 0)
    else:
        top, bottom = (part.get(long, part.get(short)) for long, short in (("top", "t"), ("bottom", "b")))
        top, bottom = part.get("over", top), part.get("under", bottom)
        if not bottom:
            return None
        value = Fraction(top, bottom) + part.get("whole", part.get("mixed", 0))
    value *= _SCALES.get(match["scale"], 1)
    return (-value if match["sign"] == "-" else value), bool(match["percent"])


def _plain(text: str) -> str:
    if not text.isascii():
        text = _ROOT.sub(r"\\sqrt{\1}", _SMALL.sub(_large, text).translate(_CHARACTERS))
        text = re.sub(r"\d", lambda digit: str(int(digit[0])), text)
    if "begin" not in text:  # where two backslashes end a row, and have not been escaped twice
        text = re.sub(r"\\{2,}(?=[A-Za-z])", r"\\", text)
    text = _POWER_OF_UNIT.sub(r"\1", _NO_MEANING.sub("", text.replace("~", " "))).replace(";", ", ")
    text = _EXPONENT.sub(r"\\cdot 10^{\1}", text)
    for spelling, latex in _SPELLED:
        text = spelling.sub(latex, text)
    before = ""
    for _ in range(5):
        before, text = text, _WRAPPER.sub(r" \1 ", text)
        if text == before:
            break
    text = re.sub(r"\s+", " ", text).strip(" *`").rstrip(".,;\\ ")
    return text[1:-1] if re.fullmatch(r"\{[^{}]*\}", text) else text


def _large(small: re.Match[str]) -> str:
    """A fraction, a power or an index in characters of their own, as LaTeX."""
    text = unicodedata.normalize("NFKC", small[0]).replace("\u2044", "/").replace("\u2212", "-")
    return f" {text}" if small[1] else f"^{{{text}}}" if small[2] else f"_{{{text}}}"


def _name(text: str) -> str:
    """Of what a text tells the value, such as "x" of "x=5"; "" where that is told in words."""
    name = text.rpartition("=")[0].casefold()
    return "" if re.search("[a-z]{3}", name) else name


def _spelled_out(text: str) -> str:
    """A text in which one plus-minus is a list of two, and inequalities in a set or joined by words are intervals."""
    text = _plain(text)
    first, either, rest = text.partition("\\pm")
    if either and "," not in text and "\\pm" not in rest:
        return f"{first}+{rest}, {first}-{rest}"
    return as_intervals(text)


def _same(value: tuple[Fraction, bool], right: tuple[Fraction, bool]) -> bool:
    (ours, our_sign), (theirs, their_sign) = value, right
    if our_sign == their_sign:
        return ours == theirs
    whole, percent = (theirs, ours) if our_sign else (ours, theirs)
    return percent == 100 * whole or (percent == whole and abs(whole) >= 1)


def _operations(text: str) -> int:
    return len(_OPERATION.findall(text))
