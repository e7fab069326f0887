"""What is read as a maths answer, what equals what, and what the dimensions pay."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import CalculatorEnv
from rewards import score, total
from rewards.math import LONG, final_answer, math_equal, read_value


def say(content, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def play(*expressions: str, final: str | None = "<answer>12</answer>", tool: str = "calculator") -> list[dict]:
    env, out = CalculatorEnv(max_turns=50), []
    for expression in expressions:
        function = {"name": tool, "arguments": {"expression": expression}}
        out.append(say("", tool_calls=[{"type": "function", "function": function}]))
        out.append({"role": "tool", "name": tool, "content": env.calculator(expression)})
    return out if final is None else [*out, say(final)]


READ = [
    ("<answer>72</answer>", "72"),
    ("It is <answer> 72 </answer>.", "72"),
    ("<ANSWER>72</ANSWER>", "72"),
    ("<answer>$1,200.50</answer>", "$1,200.50"),
    ("<answer>18 dollars</answer>", "18 dollars"),
    ("<answer>**18**</answer>", "18"),
    ("<answer>\\boxed{18}</answer>", "18"),
    ("<answer>\\frac{3}{4}</answer>", "3/4"),
    ("<answer>72</answer> so <answer>72.0</answer>", "72"),
    ("The answer is 5. <answer>6</answer> #### 7", "6"),  # the protocol's form comes first
    ("#### 72", "72"),
    ("We get 5.\n#### 1,200", "1,200"),
    ("#### $18\n", "$18"),
    ("So \\boxed{42}.", "42"),
    ("So $\\boxed{\\dfrac{3}{4}}$", "3/4"),
    ("\\boxed{\\text{yes}}", "yes"),
    ("\\boxed{1{,}200}", "1,200"),
    ("\\boxed{1}, no, \\boxed{2}", "2"),
    ("The answer is 72.", "72"),
    ("The answer is: 72", "72"),
    ("The final answer is **72**.", "72"),
    ("Therefore, the answer is $18 per day.", "$18 per day"),
    ("The answer is 3 + 4 = 7.", "7"),
    ("The answer is that Janet makes 18 dollars.", "18"),
    ("The correct answer is 3 1/2 cups", "3 1/2 cups"),
    ("The answer to the question is 12 hours.", "12 hours"),
    ("Answer: 72", "72"),
    ("**Answer:** 72", "72"),
    ("Final Answer:\n\n72 apples", "72 apples"),
    ("answer = -3/4", "-3/4"),
    ("The answer is \\(42\\)", "42"),
    ("The answer is 20%.", "20%"),
    ("The answer is 1.5 × 10^3.", "1.5 × 10^3"),
    ("The answer would be about 3.5", "about 3.5"),
    ("The answer is 18. Wait, the answer is 20.", "20"),
    ("答案是72。", "72"),
    ("最终答案：1,200元", "1,200元"),
    ("正确的答案应为：-8", "-8"),
    ("结果为 3.5", "3.5"),
    ("答：小明有5个苹果。", "5"),
    ("所以答案等于 20％", "20％"),
    ("72", "72"),
    ("72 apples", "72 apples"),
    ("$18", "$18"),
    ("<think>maybe 5</think><answer>6</answer>", "6"),
    ("maybe <answer>5</answer></think><answer>6</answer>", "6"),
]
UNREAD = [
    "",
    "   ",
    "I think we need 72 of them",  # a number, but no answer
    "First 5, then 7, so 12 in all.",
    "Janet makes $18 every day.",
    "<answer></answer>",
    "<answer>5</answer> or <answer>6</answer>",
    "<answer>5</answer>" * 3 + "<answer>6</answer>",
    "<answer>5",
    "5</answer>",
    "<think><answer>5</answer></think>",
    "<think><answer>5</answer>",
    "The answer is 5 or 6.",
    "The answer is between 5 and 6.",
    "The answer is 5, 6",
    "The answer is not 5 but 6.",
    "The answer is unknown.",
    "The answer is in the table above.",
    "\\boxed{}",
    "\\boxed{5",
    "####",
    "答案是5或6",
]


@pytest.mark.parametrize("text, answer", READ)
def test_answers_are_read(text, answer):
    assert math_equal(final_answer(text), answer)


@pytest.mark.parametrize("text", UNREAD)
def test_what_states_no_single_answer_has_none(text):
    assert final_answer(text) is None


@pytest.mark.parametrize("value", [None, 5, ["5"]])
def test_only_text_has_an_answer(value):
    assert final_answer(value) is None


EQUAL = [
    ("72", "72"),
    ("72", "72.0"),
    ("72", " 72 "),
    ("007", "7"),
    ("1,200", "1200"),
    ("1,234,567.50", "1234567.5"),
    ("$18", "18"),
    ("18 dollars", "$18"),
    ("18 dollars per day", "18"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("US$ 5", "5"),
    ("€5", "5"),
    ("1,200元", "1200"),
    ("minus 5", "-5"),
    ("−5", "-5"),
    ("负5", "-5"),
    ("5 apples", "5"),
    ("3 times", "3"),
    ("5个", "5"),
    ("10 cm²", "10"),
    ("10 m^2", "10"),
    ("72°", "72"),
    ("5 km/h", "5"),
    ("3/4", "0.75"),
    ("6/8", "3/4"),
    ("\\frac{3}{4}", "0.75"),
    ("3 1/2", "3.5"),
    ("-3 1/2", "-3.5"),
    ("3½", "3.5"),
    ("½", "0.5"),
    ("50%", "0.5"),
    ("50%", "50"),
    ("50%", "50 percent"),
    ("12.5％", "1/8"),
    ("1.2e3", "1200"),
    ("1.2×10^3", "1200"),
    ("1.2 \\times 10^{3}", "1200"),
    ("1.2 * 10**3", "1200"),
    ("10^3", "1000"),
    ("5e-3", "0.005"),
    ("2 million", "2,000,000"),
    ("1.5k", "1500"),
    ("3万", "30000"),
    ("3.14", "3.14159"),
    ("0.667", "2/3"),
    ("33.33", "33.3333333333"),
    ("0.1", "0.10"),
    ("about 5", "5"),
    ("≈ 5", "5"),
    ("**5**", "5"),
    ("5.", "5"),
    ("5 km", "5 kilometers"),
    ("yes", "Yes"),
    ("x + 1", "x + 1"),
]
DIFFERENT = [
    ("72", "73"),
    ("72", "-72"),
    ("72", "72.001"),
    ("1000000", "1000001"),
    ("123456789012345678", "123456789012345679"),
    ("0", "0.0000001"),
    ("3.14", "3.15"),
    ("3.1", "3.14159"),
    ("0.7", "2/3"),
    ("0.01", "0.014"),
    ("50%", "0.05"),
    ("50", "0.5"),
    ("2", "2 million"),
    ("12", "12 13"),
    ("12", "12 or 13"),
    ("12", "12-13"),
    ("12", "> 12"),
    ("12", "<= 12"),
    ("12", "not 12"),
    ("12", "12 or more"),
    ("12", "12 and a half"),
    ("12", "12 + 0"),
    ("12", "x = 12"),
    ("12", "(12)"),
    ("12", "12:30"),
    ("12", "12/0"),
    ("12", "1,2"),
    ("1234", "12,34"),
    ("5 km", "5 m"),
    ("5 hours", "5 minutes"),
    ("12", "twelve"),
    ("12", ""),
    ("", ""),
    ("5", "inf"),
    ("5", "nan"),
    ("5", "1e999999999"),
    ("9" * 5000, "9" * 5001),
]


@pytest.mark.parametrize("a, b", EQUAL)
def test_equal(a, b):
    assert math_equal(a, b) and math_equal(b, a)


@pytest.mark.parametrize("a, b", DIFFERENT)
def test_different(a, b):
    assert not math_equal(a, b) and not math_equal(b, a)


def test_numbers_are_compared_as_they_print():
    assert math_equal(12, "12") and math_equal(12.0, 12) and math_equal(0.5, "50%")


@given(
    st.integers(-(10**15), 10**15),
    st.sampled_from(["{}", "${}", "{} apples", "<answer>{}</answer>", "{}.00", "{:,}", "**{}**"]),
)
def test_an_integer_equals_itself_in_every_dress_and_no_neighbour(n, dress):
    text = dress.format(n) if "$" not in dress or n >= 0 else f"-${-n}"
    answer = final_answer(text)
    assert answer is not None and math_equal(answer, str(n))
    assert not math_equal(answer, str(n + 1)) and not math_equal(answer, f"{n}.5")


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_equality_is_symmetric_and_exact_on_fractions(a, b):
    assert math_equal(str(a), str(a))
    assert math_equal(str(a), str(b)) == math_equal(str(b), str(a)) == (a == b)


@given(st.text(max_size=300) | st.text("0123456789 ,./%$e-+<>answer#\\boxed{}答案是*×10^½", max_size=300))
@settings(max_examples=1000, deadline=None)
def test_any_text_is_read_without_an_error(text):
    answer = final_answer(text)
    assert answer is None or answer
    if read_value(text) is not None:
        assert math_equal(text, text)


REPEATED = [
    "1",
    "1,",
    "1 ",
    "1/",
    " ",
    "-",
    "- ",
    "$ ",
    "answer is ",
    "answer:",
    "答案是",
    "<answer>",
    "</answer>",
    "<think>",
]
REPEATED += ["#### ", "\\boxed{", "{", "\\frac{1}{", "*", "10^", "1x10^", "½", "1½", "\n", "."]


@pytest.mark.parametrize("unit", REPEATED)
def test_time_is_linear_on_repetitions(unit):
    text = (unit * 100_000)[:100_000]
    started = time.perf_counter()
    final_answer(text)
    final_answer("The answer is " + text)
    math_equal(text, "5")
    assert time.perf_counter() - started < 3  # a quadratic pattern takes minutes here


# ---------------------------------------------------------------------------------------------------------- rewards


def test_a_right_answer_earns_everything(math_row):
    completion = play("12 + 6", "18 * 2 / 3", final="Ann keeps two thirds. <answer>12</answer>")
    scores = score(math_row, completion)
    assert scores == {"math_accuracy": 1.0, "math_format": 1.0, "math_reasoning": 1.0, "math_brevity": 1.0}
    assert total(scores, "calculator") == pytest.approx(1.0)


@pytest.mark.parametrize(
    "completion, accuracy, form, reasoning",
    [
        (play(final="<answer>12</answer>"), 1, 1, 0),  # right, but nothing worked out
        (play("12", final="<answer>12</answer>"), 1, 1, 0),  # a bare number is no arithmetic
        (play("12 + 6", final="<answer>12</answer>"), 1, 1, 0.5),
        (play("1 / 0", final="<answer>12</answer>"), 1, 1, 0),
        (play("6 + 6", final="The answer is 12."), 1, 0, 1),
        (play("6 + 6", final="<answer>13</answer>"), 0, 1, 0),
        (play("6 + 6", final="<answer>twelve</answer>"), 0, 0, 0),
        (play("6 + 6", final="<answer>12</answer><answer>12</answer>"), 1, 0, 1),
        (play("6 + 6", final="<answer>12</answer><answer>13</answer>"), 0, 0, 0),
        (play("6 + 6", final="12 is what I get"), 0, 0, 0),
        (play("6 + 6", final=None), 0, 0, 0),
        (play("6 + 6", final="<think>x</think><answer>12</answer>"), 1, 1, 1),
        (play("6 + 6", final="<tool_call></tool_call><answer>12</answer>"), 1, 0, 1),
        (play("6 + 6", final="<answer>12</answer>", tool="python"), 1, 0, 0),
        ([say("<answer>12</answer>"), say("Done.")], 0, 0, 0),
        ([say("", reasoning_content="<answer>12</answer>")], 0, 0, 0),
        ([], 0, 0, 0),
    ],
)
def test_dimensions(math_row, completion, accuracy, form, reasoning):
    scores = score(math_row, completion)
    assert (scores["math_accuracy"], scores["math_format"], scores["math_reasoning"]) == (accuracy, form, reasoning)
    if not accuracy:
        assert scores["math_brevity"] == 0 and total(scores, "calculator") <= 0.2
    else:
        assert total(scores, "calculator") >= 0.5


def test_brevity_counts_all_that_the_model_writes(math_row):
    answer = "<answer>12</answer>"
    assert score(math_row, [say("x" * 500 + answer)])["math_brevity"] == 1.0
    assert 0 < score(math_row, [say("x" * 1500 + answer)])["math_brevity"] < 1
    assert score(math_row, [say("x" * LONG + answer)])["math_brevity"] == 0.0
    assert score(math_row, [say(answer, reasoning_content="x" * LONG)])["math_brevity"] == 0.0
    assert score(math_row, play(*["1 + 1" * 100] * 6, final=answer))["math_brevity"] == 0.0


def test_real_answers_of_gsm8k(shared_data):
    """Every gold answer is read from the usual phrasings of it, and differs from the next integer."""
    lines = (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        solution = json.loads(line)["answer"]
        gold = solution.split("####")[1].strip()
        for text in (
            solution,
            f"<answer>${gold}</answer>",
            f"So the answer is {gold}.",
            f"\\boxed{{{gold}}}",
            f"答案是{gold}。",
        ):
            assert math_equal(final_answer(text), gold), text
        assert not math_equal(str(int(gold.replace(",", "")) + 1), gold)
    assert len(lines) > 500
