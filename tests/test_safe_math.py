"""The calculator's arithmetic: what people expect, exactness, and cost under attack."""

import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.calculator import CalculatorEnv, number_text
from envs.safe_math import MAX_LENGTH, CalcError, calculate

EXPECTED = [
    ("1 + 2 * 3", 7),
    ("(1 + 2) * 3", 9),
    ("0.1 + 0.2", 0.3),
    ("0.1 * 3", 0.3),
    ("1.1 + 2.2", 3.3),
    ("10 / 4", 2.5),
    ("4 / 2", 2),
    ("1 / 3 * 3", 1),
    ("7 // 2", 3),
    ("-7 // 2", -4),
    ("7 % 3", 1),
    ("-7 % 3", 2),
    ("7 % (3)", 1),
    ("2 ** 10", 1024),
    ("2 ^ 10", 1024),
    ("2 ** -2", 0.25),
    ("-2 ** 2", -4),
    ("2 ** 3 ** 2", 512),
    ("2 ** 0.5", 2**0.5),
    ("4 ** 0.5", 2),
    ("8 ** (1/3)", 2),
    ("sqrt(2) ** 2", 2.0),
    ("sqrt(16)", 4),
    ("sqrt(1,600)", 40),
    ("sqrt(0.25)", 0.5),
    ("round(2.5)", 3),
    ("round(-2.5)", -3),
    ("round(2.675, 2)", 2.68),
    ("round(1234.5, -2)", 1200),
    ("floor(-1.5)", -2),
    ("ceil(1.2)", 2),
    ("abs(-3)", 3),
    ("min(3, 1, 2)", 1),
    ("max(1,200)", 200),
    ("max(1,200,3)", 200),
    ("1,200*3", 3600),
    ("1,234,567.5 + 0.5", 1234568),
    ("20% of 50", 10),
    ("50*20%", 10),
    ("100% - 20%", 0.8),
    ("200 + 10%", 200.1),
    ("(10 + 10)%", 0.2),
    ("sqrt(16)%", 0.04),
    ("50%%", 0.005),
    ("5 × 3 ÷ 2", 7.5),
    ("5 − 3", 2),
    ("3 x 4", 12),
    ("$5 * 3", 15),
    ("3 + 4 =", 7),
    ("3²", 9),
    ("（1＋2）×3", 9),
    ("1e3 + 1", 1001),
    (".5 + 5.", 5.5),
    ("007", 7),
    ("--5", 5),
    ("+5", 5),
    ("2 * -3", -6),
    ("2 * pi", 6.283185307179586),
    ("123456789012345678901234567890 + 1", 123456789012345678901234567891),
    ("3 ** 200", 3**200),
]


@pytest.mark.parametrize("expression, value", EXPECTED)
def test_values_people_expect(expression, value):
    result = calculate(expression)
    assert result == value
    assert type(result) is type(value)


ERRORS = [
    ("", "empty"),
    ("   =", "empty"),
    ("1 / 0", "division by zero"),
    ("1 // 0", "division by zero"),
    ("1 % 0", "division by zero"),
    ("0 ** -1", "division by zero"),
    ("(-8) ** 0.5", "not a real number"),
    ("sqrt(-1)", "not a real number"),
    ("2(3)", "operator is missing"),
    ("2 3", "operator is missing"),
    ("(1 + 2", "without ')'"),
    ("1 + 2)", "without '('"),
    ("1 +", "not complete"),
    ("sqrt", "parentheses"),
    ("sqrt()", "takes 1 argument"),
    ("sqrt(1, 2)", "comma"),
    ("round(1, 2, 3)", "takes 1 or 2"),
    ("1,00", "comma"),
    ("3 + 4 = 7", "'='"),
    ("2 < 3", "'<'"),
    ("[1, 2]", "'['"),
    ("'a' * 5", "unexpected"),
    ("x + 1", "not complete"),
    ("abc", "unknown name 'abc'"),
    ("__import__('os').system('true')", "unknown name"),
    ("(1).__class__", "unexpected character '.'"),
    ("lambda: 1", "unknown name"),
    ("1 if 1 else 2", "unknown name"),
    ("1 and 2", "unknown name"),
    ("1 | 2", "unexpected"),
    ("5!", "unexpected"),
    ("٣ + 1", "unexpected"),
    ("1\x002", "unexpected"),
    ("1e999", "too large"),
    ("1e99999999999", "too large"),
    ("10 ** 400", "more than 400 digits"),
    ("9**9**9", "too large"),
    ("2 ** 99999", "too large"),
    ("1.5 ** 9999", "too many digits"),
    ("(1/7) ** 9999.5", "too many digits"),
    ("1e300 * 1e300 / 7", "too large"),
    ("round(1, 999)", "whole number of digits"),
    ("round(1, 0.5)", "whole number of digits"),
]


@pytest.mark.parametrize("expression, words", ERRORS)
def test_errors_say_what_is_wrong(expression, words):
    with pytest.raises(CalcError, match="(?s).+") as caught:
        calculate(expression)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [None, 7, b"1", ["1"]])
def test_only_text_is_an_expression(value):
    with pytest.raises(CalcError, match="must be text"):
        calculate(value)


ATTACKS = {
    "tower": "9**9**9",
    "tower in parentheses": "((9**9)**9)**9",
    "10 kB of (": "(" * 10_000,
    "10 kB of digits": "9" * 10_000,
    "10 kB of -": "-" * 10_000 + "1",
    "longest: (": "(" * MAX_LENGTH,
    "longest: minus signs": "-" * (MAX_LENGTH - 1) + "1",
    "longest: sum": "+".join(["1"] * (MAX_LENGTH // 2)),
    "longest: percent signs": "1" + "%" * (MAX_LENGTH - 1),
    "longest: percent signs after parentheses": "(" * 40 + "1" + ")%" * 40 + "%" * 300,
    "longest: powers": "**".join(["9"] * 160),
    "longest: products": "*".join(["99"] * 160),
    "longest: fractions": "+".join(f"1/{n}" for n in range(101, 181)),
    "longest: roots": "sqrt(" * 39 + "2" + ")" * 39,
    "longest: fractional powers": "**".join(["1.01"] * 80),
    "longest: digits": "9" * 200 + "*" + "9" * 200,
    "longest: decimals": "0." + "3" * 200 + "**" + "0." + "7" * 200,
    "power of a huge base": "(9**400)**9.5",
    "power near one": "1.0000001**9999.5",
    "tiny power": "(1/3)**-9999.5",
    "commas": "1" + ",111" * 120,
    "mixed": "max(" * 39 + "1,2" + ")" * 39,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_answered_within_10_ms(name):
    env, seconds = CalculatorEnv(max_turns=100), []
    for _ in range(5):
        started = time.thread_time()  # another program's turn is not its fault
        answer = env.calculator(ATTACKS[name])
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.010, answer
    assert len(answer) <= 420


numbers = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=3).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from([" + ", " - ", " * ", " / "]), inner).map(
        lambda t: f"({t[0]}{t[1]}{t[2]})"
    ),
    max_leaves=12,
)


@given(expressions)
@settings(max_examples=300, deadline=None)
def test_agrees_with_exact_fractions(expression):
    """The oracle evaluates text that this test made up itself, on Fraction objects."""
    import re

    oracle = re.sub(r"\d+(?:\.\d+)?", lambda m: f"Fraction('{m[0]}')", expression)
    try:
        wanted = eval(oracle, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(CalcError, match="division by zero"):
            calculate(expression)
        return
    got = calculate(expression)
    assert got == (wanted.numerator if wanted.denominator == 1 else float(wanted))
    assert isinstance(got, int) == (wanted.denominator == 1)


@given(st.text(max_size=600) | st.text("0123456789+-*/%^(),. xeofsqrtmindaxp×÷", max_size=600))
@example("0" * 500)
@example("%" * 300)
@example("1" + "²" * 240)
@settings(max_examples=1500, deadline=None)
def test_any_text_gives_a_number_or_an_error(text):
    seconds = []
    while not seconds or (seconds[-1] >= 0.1 and len(seconds) < 3):  # a pause of the machine does not come three times
        started = time.thread_time()  # another program's turn is not its fault
        answer = CalculatorEnv().calculator(text)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.1  # generous: the machine is shared; the attacks above hold 10 ms
    assert isinstance(answer, str) and 0 < len(answer) < 600
    if not answer.startswith("Error: "):
        float(answer)  # what is no error reads as a number
        assert "\n" not in answer


@given(st.integers(-(10**300), 10**300) | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_written_so_that_they_read_back(value):
    assert float(number_text(value)) == pytest.approx(value, rel=1e-11, abs=1e-300)


@pytest.mark.parametrize(
    "value, text",
    [
        (72, "72"),
        (0.3, "0.3"),
        (2.0, "2"),
        (10 / 3, "3.33333333333"),
        (1.234e-6, "0.000001234"),
        (1e22 / 7, "1.42857142857e+21"),
    ],
)
def test_number_text(value, text):
    assert number_text(value) == text


def test_real_annotations_of_gsm8k(shared_data):
    """Every <<expression=value>> of the data set gives the value that its authors wrote (they round to two decimals)."""
    import json
    import re

    seen = 0
    for line in (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines():
        for expression, value in re.findall(r"<<([^=>]*)=([^>]*)>>", json.loads(line)["answer"]):
            result, seen = calculate(expression), seen + 1
            assert abs(result - calculate(value)) <= 0.011 * max(1, abs(result)), expression
    assert seen > 1000
