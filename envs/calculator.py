"""The calculator environment: one tool, `calculator(expression)`, over envs.safe_math. No state but a call counter."""

from decimal import Decimal

from envs.safe_math import CalcError, calculate


class CalculatorEnv:
    """What a maths agent acts in. Keeps nothing of the row, so the gold answer is nowhere to be found in it."""

    def __init__(self, max_turns: int = 10):
        self._max_turns = max_turns
        self._calls = 0

    def reset(self, **row) -> None:
        self._calls = 0

    def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression.

        Args:
            expression: Arithmetic such as (12 + 3) * 4 / 5 or 20% of 50.

        Returns:
            The value, or a text that starts with Error.
        """
        self._calls += 1
        if self._calls > self._max_turns:
            return f"Error: no calls left (at most {self._max_turns}); give your final answer now"
        if isinstance(expression, int | float) and not isinstance(expression, bool):
            expression = repr(expression)  # a model may write a bare number where text is meant
        try:
            return number_text(calculate(expression))
        except CalcError as error:
            return f"Error: {error}"


def number_text(value: float) -> str:
    """A number for a reader with little context: integers in full, other numbers with 12 digits and no needless zeros."""
    if isinstance(value, int):
        return str(value)
    text = f"{value:.12g}"
    return f"{Decimal(text):f}" if "e-0" in text else text
