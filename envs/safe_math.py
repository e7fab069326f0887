"""A calculator for untrusted text: arithmetic on exact fractions, no eval, every cost bounded before it is paid.

`calculate("1,200 * 20%")` -> 240. The text is tokenised and normalised (thousands separators, percentages, × ÷ − ^),
parsed with `ast`, and walked over a whitelist: + - * / // % **, parentheses, sqrt round min max abs floor ceil, pi.
All arithmetic is on fractions, so 0.1 + 0.2 is 0.3 and integers stay exact; only irrational results (sqrt(2), 2**0.5)
are rounded, to 50 digits. `round` rounds halves away from zero, as people do.

Percent or modulo: `%` is modulo when an operand follows it directly (`7 % 3`), else percent (`50 * 20%`, `20% of 50`,
`100% - 20%`). `200 + 10%` is 200.1, as written. Not covered: variables, units, equations, implicit multiplication.
"""

import ast
import decimal
import math
import operator
import re
from fractions import Fraction

MAX_LENGTH = 500  # characters of an expression
MAX_NESTING = 40  # parentheses within parentheses
MAX_DIGITS = 400  # of a result, so that it can be printed into a small context
MAX_BITS = 4096  # of any numerator or denominator on the way
MAX_EXPONENT = 10_000

_SYMBOLS = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/", "⁄": "/", "−": "-", "–": "-", "—": "-", "^": "**"}
    | {"²": "**2", "³": "**3", "π": "pi", "（": "(", "）": ")", "＋": "+", "－": "-", "％": "%", "，": ",", "\xa0": " "}
    | {"$": "", "€": "", "£": "", "¥": ""}
)
_TOKEN = re.compile(
    r"(?P<space>[ \t\r\n]+)"
    r"|(?P<grouped>\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?)"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]+)"
    r"|(?P<mark>\*\*|//|[-+*/%(),])",
    re.ASCII,
)
_CONTEXT = decimal.Context(
    prec=50, Emax=1300, Emin=-1300, traps=[decimal.InvalidOperation, decimal.Overflow, decimal.Underflow]
)
_PI = Fraction("3.14159265358979323846264338327950288419716939937511")


class CalcError(ValueError):
    """What is wrong with an expression, in words for the one who wrote it."""


def calculate(expression: str) -> int | float:
    """The value of an arithmetic expression: an exact int where it is whole, else the nearest float."""
    if not isinstance(expression, str):
        raise CalcError(f"the expression must be text, not {type(expression).__name__}")
    if len(expression) > MAX_LENGTH:
        raise CalcError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed")
    source, numbers = _normalise(expression.translate(_SYMBOLS))
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CalcError("the expression is not complete arithmetic; write it like (12 + 3) * 4") from error
    try:
        value = _Walk(numbers).value(tree.body)
    except RecursionError as error:
        raise CalcError("the expression is nested too deeply") from error
    return _plain(value)


def _normalise(text: str) -> tuple[str, dict[str, Fraction]]:
    """Python source in which every number is a name, and the values of those names (so decimals stay exact)."""
    out: list[str] = []
    numbers: dict[str, Fraction] = {}
    calls: list[bool] = []  # for each open parenthesis: does a comma inside it separate arguments?
    text = text.strip().removesuffix("=").rstrip()
    if not text:
        raise CalcError("the expression is empty")
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CalcError(f"unexpected character {text[position]!r} at position {position + 1}")
        kind, word = match.lastgroup, match.group()
        if kind == "grouped" and calls and calls[-1]:  # max(1,200): two arguments
            match = re.compile(r"\d+(?P<number>)").match(text, position)
            kind, word = "number", match.group()
        position = match.end()
        if kind in ("grouped", "number"):
            if out and (out[-1] in numbers or out[-1] == ")"):
                raise CalcError(f"an operator is missing before {word[:20]}")
            name = f"n{len(numbers)}"
            numbers[name] = _literal(word.replace(",", ""))
            out.append(name)
        elif kind == "name":
            out.append(_word(word))
        elif word == "%" and not _operand_follows(text, position):
            _percent(out, numbers)
        elif kind == "mark":
            if word == "(":
                if out and (out[-1] in numbers or out[-1] in (")", "pi")):
                    raise CalcError("an operator is missing before '('; write 2 * (3 + 4)")
                calls.append(bool(out) and out[-1] in ("min", "max", "round"))
                if len(calls) > MAX_NESTING:
                    raise CalcError(f"more than {MAX_NESTING} parentheses inside each other")
            elif word == ")":
                if not calls:
                    raise CalcError("')' without '(' before it")
                calls.pop()
            elif word == "," and not (calls and calls[-1]):
                raise CalcError("a comma is allowed in 1,200 and between the arguments of min, max and round")
            out.append(word)
    if calls:
        raise CalcError("'(' without ')' after it")
    return " ".join(out), numbers


def _word(word: str) -> str:
    word = word.lower()
    if word in ("x", "of"):
        return "*"
    if word in _FUNCTIONS or word == "pi":
        return word
    raise CalcError(f"unknown name {word[:20]!r}; numbers, + - * / // % ** and {', '.join(_FUNCTIONS)} are allowed")


def _literal(word: str) -> Fraction:
    exponent = re.search(r"[eE]([+-]?\d+)$", word)
    if exponent and (len(exponent[1]) > 5 or abs(int(exponent[1])) > MAX_DIGITS):
        raise CalcError(f"the exponent of {word[:20]} is too large")
    return Fraction(word.rstrip(".") if not exponent else word)


def _operand_follows(text: str, position: int) -> bool:
    rest = text[position:].lstrip()
    return bool(re.match(r"[\d.(]|(?!of\b|x\b)[A-Za-z]", rest, re.ASCII | re.IGNORECASE))


def _percent(out: list[str], numbers: dict) -> None:
    """Wrap the operand just written as (operand / 100)."""
    if not out or not (out[-1] in numbers or out[-1] in (")", "pi")):
        raise CalcError("'%' without a number before it")
    if out[-1] in numbers:
        numbers[out[-1]] /= 100
        return
    if out.count("100") == MAX_NESTING:
        raise CalcError(f"more than {MAX_NESTING} percent signs after parentheses")
    start = len(out) - 1
    if out[-1] == ")":
        open_count = 0
        for start in range(len(out) - 1, -1, -1):
            open_count += (out[start] == ")") - (out[start] == "(")
            if open_count == 0:
                break
        if start and out[start - 1] in _FUNCTIONS:
            start -= 1
    out.insert(start, "(")
    out.extend(["/", "100", ")"])


class _Walk:
    """Evaluates the whitelisted nodes of one expression; anything else is an error."""

    def __init__(self, numbers: dict[str, Fraction]):
        self.numbers = numbers

    def value(self, node: ast.expr) -> Fraction:
        match node:
            case ast.Name(id=name) if name in self.numbers:
                return self.numbers[name]
            case ast.Name(id="pi"):
                return _PI
            case ast.Constant(value=100):  # only from _percent
                return Fraction(100)
            case ast.UnaryOp(op=ast.USub()):
                return -self.value(node.operand)
            case ast.UnaryOp(op=ast.UAdd()):
                return self.value(node.operand)
            case ast.BinOp(op=ast.Pow()):
                return _power(self.value(node.left), self.value(node.right))
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return self.combine(_OPERATORS[type(node.op)], self.value(node.left), self.value(node.right))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return _bounded(_FUNCTIONS[name](*self.arguments(name, args)))
            case ast.Name(id=name):
                raise CalcError(f"{name} needs parentheses: {name}(...)")
        raise CalcError("the expression is not complete arithmetic; write it like (12 + 3) * 4")

    def arguments(self, name: str, args: list[ast.expr]) -> list[Fraction]:
        least, most = _ARITY[name]
        if not least <= len(args) <= most:
            wanted = str(least) if least == most else f"{least} or more" if most > 2 else f"{least} or {most}"
            raise CalcError(f"{name} takes {wanted} argument{'s' if wanted != '1' else ''}, not {len(args)}")
        return [self.value(a) for a in args]

    @staticmethod
    def combine(function, left: Fraction, right: Fraction) -> Fraction:
        try:
            return _bounded(Fraction(function(left, right)))
        except ZeroDivisionError as error:
            raise CalcError("division by zero") from error


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalcError("a number on the way has too many digits")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise CalcError("division by zero")
    if abs(exponent) > MAX_EXPONENT:
        raise CalcError(f"the exponent is too large (at most {MAX_EXPONENT})")
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base not in (0, 1, -1) and (bits - 1) * abs(exponent.numerator) > MAX_BITS:
            raise CalcError("the power has too many digits")
        return _bounded(base**exponent.numerator)
    if base < 0:
        raise CalcError("a negative number to a fractional power is not a real number")
    if exponent == Fraction(1, 2):
        return _sqrt(base)
    try:
        return _bounded(Fraction(_CONTEXT.power(_decimal(base), _decimal(exponent))))
    except decimal.DecimalException as error:
        raise CalcError("the power has too many digits") from error


def _decimal(value: Fraction) -> decimal.Decimal:
    return _CONTEXT.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator))


def _sqrt(value: Fraction) -> Fraction:
    if value < 0:
        raise CalcError("the square root of a negative number is not a real number")
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return Fraction(top, bottom)
    return Fraction(_CONTEXT.sqrt(_decimal(value)))


def _round(value: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    if digits.denominator != 1 or abs(digits) > MAX_DIGITS:
        raise CalcError("round takes a whole number of digits")
    scale = Fraction(10) ** digits.numerator
    whole = math.floor(abs(value) * scale + Fraction(1, 2))
    return whole / scale if value >= 0 else -whole / scale


def _plain(value: Fraction) -> int | float:
    if value.denominator == 1:
        if abs(value.numerator) >= 10**MAX_DIGITS:
            raise CalcError(f"the result has more than {MAX_DIGITS} digits")
        return value.numerator
    try:
        return float(value)
    except OverflowError as error:
        raise CalcError("the result is too large") from error


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS = {
    "sqrt": _sqrt,
    "round": _round,
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
}
_ARITY = {
    "sqrt": (1, 1),
    "round": (1, 2),
    "min": (1, 99),
    "max": (1, 99),
    "abs": (1, 1),
    "floor": (1, 1),
    "ceil": (1, 1),
}
