"""Rewards of the calculator tasks, and what counts as the answer of a text and as equal to another.

The answer is read from the model's final message only, from the first of these forms that the message has: `<answer>72
</answer>`, `#### 72`, `\\boxed{72}`, "the answer is 72" / "Answer: 72" / "答案是72", or a message that is nothing but a
value. Never "the last number anywhere". Several different `<answer>` tags are no answer (a guess at each would be paid
otherwise); of the other forms the last one counts.

Equal: the same value after thousands separators, currency signs, units, percent signs, fractions, mixed numbers,
scientific notation and multipliers ("2 million") are read. Where one side is whole the other must be exactly that. Else
both agree within 1e-6 of the larger, or when rounded to the decimals of the shorter one if that has at least 3
significant digits (3.14 for 3.14159, 0.667 for 2/3; not 0.7 for 2/3). A percentage equals the bare number (gold answers
leave the sign out) and its hundredth. Units are ignored unless both sides name well-known ones that differ.

Not covered: expressions ("3 + 4" is no value), number words, intervals, symbolic algebra.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from rewards import episode

MAX_TEXT = 10_000  # characters of a message that are read, from its end
MAX_PHRASES = 5  # times a message may say "the answer is"; earlier ones are not read
MAX_DIGITS = 60
RELATIVE = Fraction(1, 10**6)

BRIEF, LONG = (600, 2400)  # characters of text: full brevity up to BRIEF, none from LONG on
MAX_FINAL = 2000  # characters of a well-formed final message

_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"^[ \t>*]*####[ \t]*([^\n#]+)", re.MULTILINE)
_PHRASE = re.compile(
    r"(?:final answer|correct answer|answer)(?:\s{1,3}(?:to|for)\s[^.\n:]{1,80}?)?\s{0,3}\*{0,3}\s{0,3}(?:is|are|was|would be|equals|[:=])"
    r"|(?:(?:最终|最后|正确)?的?(?:答案|结果)\s{0,3}(?:就?是|应?为|等于|[:：=])|(?:^|(?<=[\s。，；]))答\s{0,3}[:：])",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[。！？；\n]|[.!?;](?=\s|$|\*)")

# Blanks are bounded everywhere: unbounded neighbours (\s*\s*) take quadratic time on a message of blanks.
_POWER = r"10\s{0,2}(?:\^|\*\*)\s{0,2}(?:\{\s?[+-]?\d+\s?\}|\(\s?[+-]?\d+\s?\)|[+-]?\d+)"
_NUMBER = (
    rf"(?:{_POWER}"  # 10^3
    r"|(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"  # 1,200.50 or 1200.5 or .5
    rf"(?:\s{{0,2}}(?:[x×*·]|\\times|\\cdot)\s{{0,2}}{_POWER}|[eE][+-]?\d+)?)"
)
_HALVES = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_VALUE = re.compile(
    r"(?:(?P<sign>[-+]|minus\s|negative\s|负)\s{0,3})?(?:(?P<currency>[$€£¥₹]|US\$|RMB|USD|EUR)\s{0,3})?(?P<sign2>-\s?)?"
    rf"(?:(?P<whole>\d+)\s{{1,3}}(?P<top>\d+)\s?/\s?(?P<bottom>\d+)"
    rf"|(?P<number>{_NUMBER})(?:\s?/\s?(?P<under>{_NUMBER}))?)"
    r"(?P<times>\s?(?:thousand|million|billion|trillion|k\b|千|万|亿))?"
    r"(?P<percent>\s?(?:%|％|percent\b|per cent\b))?",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r"(?!.*\b(?:or|and|not|but|is|are|was|x)\b)"  # words that make it more than a unit
    r"(?:\s{0,3}[^\W\d_°%][^\d=+*<>|]{0,60}(?:(?<=m)\^?[23])?|\s*°\s*[CFcf]?|\s*[$€£¥₹元])"
)
_TIMES = {"thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TIMES |= {"千": 10**3, "万": 10**4, "亿": 10**8}
_UNITS = {
    "km": "kilometer kilometers kilometre kilometres 千米 公里",
    "m": "meter meters metre metres 米",
    "cm": "centimeter centimeters centimetre centimetres 厘米",
    "mm": "millimeter millimeters 毫米",
    "mile": "miles mi",
    "foot": "feet ft",
    "inch": "inches in",
    "kg": "kilogram kilograms 千克 公斤",
    "g": "gram grams 克",
    "pound": "pounds lb lbs",
    "hour": "hours h hr hrs 小时",
    "minute": "minutes min mins 分钟",
    "second": "seconds s sec secs 秒",
    "day": "days 天",
    "week": "weeks 周",
    "month": "months 个月",
    "year": "years 年",
    "dollar": "dollars $ usd",
    "cent": "cents",
    "liter": "liters litre litres l 升",
    "ml": "milliliter milliliters 毫升",
}
_UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in [unit, *names.split()]}


@dataclass(frozen=True)
class Value:
    exact: Fraction
    decimals: int | None  # written decimals; None for fractions, which are exact
    digits: int  # significant digits written
    percent: bool
    unit: str  # canonical name of a well-known unit, else ""


def final_answer(text: str) -> str | None:
    """The answer that a final message states, as it is written there; None where it states none, or several."""
    if not isinstance(text, str):
        return None
    text = episode.without_thoughts(text)[-MAX_TEXT:]
    tagged = tagged_answers(text)
    if tagged:
        return tagged[0] if tagged[0] and all(_same(t, tagged[0]) for t in tagged) else None
    if hashed := _HASHES.findall(text):
        return _clean(hashed[-1]) or None
    if boxed := _boxed(text):
        return _clean(boxed[-1]) or None
    for phrase in reversed(list(_PHRASE.finditer(text))[-MAX_PHRASES:]):
        start = phrase.end() + len(re.match(r"[\s*]*", text[phrase.end() :])[0])  # "Answer:" on a line of its own
        end = _SENTENCE_END.search(text, start)
        if (found := _stated(text[start : end.start() if end else len(text)])) is not None:
            return found
    whole = _clean(text)
    return whole if len(whole) <= 80 and read_value(whole) is not None else None


def tagged_answers(text: str) -> list[str]:
    return [_clean(t) for t in _ANSWER.findall(text)]


def _same(a: str, b: str) -> bool:
    return a == b or math_equal(a, b)


def _boxed(text: str) -> list[str]:
    """Contents of \\boxed{...}, braces balanced."""
    found = []
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        depth = 1
        for at in range(match.end(), min(len(text), match.end() + 500)):
            depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                found.append(text[match.end() : at])
                break
    return found


def _stated(rest: str) -> str | None:
    """The value in what follows "the answer is": right there, after its last "=", or the only one of the sentence."""
    rest = _clean(rest[:400].rsplit("=", 1)[-1])
    if read_value(rest) is not None:
        return rest
    values = list(_VALUE.finditer(rest))
    if not values:
        return None
    distinct = {_number(v) for v in values}
    if len(distinct) == 1 and None not in distinct:
        return values[0].group().strip()
    return None


def _clean(text: str) -> str:
    """Without markup: bold, LaTeX delimiters and spacing, quotes, a final full stop."""
    text = re.sub(rf"[{_HALVES}]", lambda m: f" {unicodedata.normalize('NFKC', m[0])}", text)
    text = text.replace("⁄", "/")
    text = text.replace("\\$", "$").replace("\\%", "%").replace("−", "-").replace("–", "-").replace("，", ",")
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2", text)
    text = re.sub(r"\\(?:boxed|fbox)\s?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[(),;!\[\]: ]|\\(?:left|right|displaystyle|quad)\b|`|\{,\}", "", text)
    text = re.sub(r"(?<![\d*])\*{2,3}|\*{2,3}(?![\d*])", "", text)  # bold, but not 10**3
    text = re.sub(r"^\$([^$]*)\$$", r"\1", text.strip())
    return text.strip().strip("\"'“”「」*_ ").rstrip("。.!:：").strip()


def values_in(text: str) -> list[str]:
    """Every value that a text mentions, as written."""
    return [m.group().strip() for m in _VALUE.finditer(text) if _number(m) is not None]


def read_value(text: str) -> Value | None:
    """The one value that a text is, with at most a currency sign and a unit around it; None for anything else."""
    text = re.sub(
        r"^(?:about|approximately|around|roughly|exactly|only|约|大约|共|一共|≈|~|=)\s*",
        "",
        _clean(text),
        flags=re.IGNORECASE,
    )
    match = _VALUE.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    if rest.strip() and not _UNIT.fullmatch(rest):
        return None
    exact = _number(match)
    if exact is None:
        return None
    plain = match["number"] is not None and match["under"] is None
    mantissa = re.split(r"[eEx×*·\\]", match["number"])[0].replace(",", "") if plain else ""
    decimals = len(mantissa.partition(".")[2]) if plain and mantissa == match["number"].replace(",", "") else None
    if match["times"]:
        decimals = None
    unit = _UNIT_OF.get(rest.strip().lower().rstrip("."), "") or _UNIT_OF.get((match["currency"] or "").lower(), "")
    digits = len(mantissa.replace(".", "").lstrip("0"))
    return Value(exact, decimals, digits, bool(match["percent"]), unit)


def _number(match: re.Match) -> Fraction | None:
    """The exact value of a match of _VALUE, its percent sign left out; None where it is too long or divides by zero."""
    if len(match.group()) > MAX_DIGITS:
        return None
    if match["whole"] is not None:
        if int(match["bottom"]) == 0:
            return None
        value = int(match["whole"]) + Fraction(int(match["top"]), int(match["bottom"]))
    else:
        value = _literal(match["number"])
        under = _literal(match["under"]) if match["under"] else Fraction(1)
        if value is None or not under:
            return None
        value /= under
    value *= _TIMES[match["times"].strip().lower()] if match["times"] else 1
    negative = bool(match["sign2"]) or (match["sign"] or "").strip().lower() in ("-", "minus", "negative", "负")
    return -value if negative else value


def _literal(text: str) -> Fraction | None:
    power = re.search(r"(?:^|[x×*·]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)(.*)|[eE](.*)", text)
    exponent = int((power[1] or power[2]).strip(" {}()")) if power else 0
    mantissa = text[: power.start()].replace(",", "").strip() if power else text.replace(",", "")
    return Fraction(mantissa or 1) * Fraction(10) ** exponent if abs(exponent) <= 400 else None


def math_equal(a, b) -> bool:
    """Whether two answers are the same value (see the module's docstring); texts that are no values compare as text."""
    a, b = str(a), str(b)
    left, right = read_value(a), read_value(b)
    if left is None or right is None:
        words = [" ".join(_clean(t).casefold().split()) for t in (a, b)]
        return left is None and right is None and bool(words[0]) and words[0] == words[1]
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if left.percent != right.percent:
        scaled = Value(
            (left if left.percent else right).exact / 100, None, (left if left.percent else right).digits, False, ""
        )
        if _close(scaled, right if left.percent else left):
            return True
    return _close(left, right)


def _close(a: Value, b: Value) -> bool:
    if a.exact.denominator == 1 or b.exact.denominator == 1:
        return a.exact == b.exact
    if abs(a.exact - b.exact) <= RELATIVE * max(abs(a.exact), abs(b.exact)):
        return True
    written = [v for v in (a, b) if v.decimals is not None]
    if not written:
        return False
    short = min(written, key=lambda v: v.decimals)
    other = b if short is a else a
    return short.digits >= 3 and abs(short.exact - other.exact) <= Fraction(1, 2 * 10**short.decimals)


# The rewards. Defaults of the GSM8K recipe: math_accuracy 0.5, math_format 0.2, math_reasoning 0.2, math_brevity 0.1.
# Reasoning and brevity are paid only for a right answer, so a wrong one earns at most 0.2 and a right one at least 0.5.


def math_accuracy(completions, environment, gold, **columns) -> list[float | None]:
    """1.0 where the final message's answer equals the gold by value."""
    return _each(completions, environment, gold, lambda c, g: float(_right(c, g)))


def math_format(completions, environment, gold, **columns) -> list[float | None]:
    """1.0 for the protocol kept: valid calls only, a short final message with exactly one <answer> that holds a value."""
    return _each(completions, environment, gold, lambda c, g: float(_well_formed(c)))


def math_reasoning(completions, environment, gold, **columns) -> list[float | None]:
    """For right answers: 0.5 for arithmetic done with the calculator, 0.5 more where a result of it is the answer."""
    return _each(completions, environment, gold, lambda c, g: _worked(c) if _right(c, g) else 0.0)


def math_brevity(completions, environment, gold, **columns) -> list[float | None]:
    """For right answers: 1.0 up to 600 characters written, 0.0 from 2400 on."""
    return _each(completions, environment, gold, lambda c, g: _brevity(c) if _right(c, g) else 0.0)


def _each(completions, environment, gold, function) -> list[float | None]:
    rows = zip(completions, environment, gold, strict=True)
    return [function(c, g) if e == "calculator" else None for c, e, g in rows]


def _right(completion: list[dict], gold: str) -> bool:
    final = episode.final_message(completion)
    answer = final_answer(final) if final else None
    return answer is not None and math_equal(answer, gold)


def _well_formed(completion: list[dict]) -> bool:
    final = episode.final_message(completion)
    if not final or len(final) > MAX_FINAL or episode.has_stray_tags(completion):
        return False
    tags = re.findall(r"</?answer>", final, re.IGNORECASE)
    tagged = _ANSWER.findall(final)
    if len(tags) != 2 or len(tagged) != 1 or read_value(tagged[0]) is None:
        return False
    return all(episode.argument(c, "calculator", "expression") is not None for c in episode.calls(completion))


def _worked(completion: list[dict]) -> float:
    answer = final_answer(episode.final_message(completion) or "")
    results = []
    for call in episode.calls(completion):
        expression = episode.argument(call, "calculator", "expression")
        if expression and call.result and not call.result.startswith("Error") and read_value(expression) is None:
            results.append(call.result)
    if not results or answer is None:
        return 0.0
    return 1.0 if any(math_equal(r, answer) for r in results) else 0.5


def _brevity(completion: list[dict]) -> float:
    spoken = episode.written(completion)
    thought = "".join(m["reasoning_content"] for m in completion if isinstance(m.get("reasoning_content"), str))
    asked = sum(len(str(c.arguments)) for c in episode.calls(completion))
    length = len(spoken) + len(thought) + asked
    return min(1.0, max(0.0, (LONG - length) / (LONG - BRIEF)))
