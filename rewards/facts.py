"""The offline judge: what a free-text answer states of the facts it should state. Deterministic, no network.

A numeric fact is stated where the answer holds an equal number, any other where it holds the fact's words side by side.
Numbers that neither the question, the reference nor the facts know, more than two short phrases that hold nothing known, and
length far beyond the reference divide it all, so that listing everything does not pay; where a number is asked for, no right
number means no accuracy. Facts that the question itself holds do not count. Not covered: negation ("it is not aspirin"),
paraphrase, style, a guess of two or three.
"""

import re
import unicodedata
from dataclasses import dataclass

from rewards.math import math_equal, read_value, values_in


@dataclass(frozen=True)
class Case:
    question: str
    reference: str
    facts: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Scores:
    accuracy: float  # each 0..1
    completeness: float
    clarity: float
    professionalism: float

    @property
    def overall(self) -> float:
        """Substance, of which bad manners take at most a fifth: style cannot pay for a wrong answer."""
        substance = (2 * self.accuracy + self.completeness) / 3
        return substance * (0.8 + 0.1 * self.clarity + 0.1 * self.professionalism)


MAX_ANSWER = 4000  # characters of an answer that are judged
NOTHING = Scores(0.0, 0.0, 0.0, 0.0)

_COMMON = (
    "a an the of in on at to for from by with and or not is are was were be has have had it its this that these those"
    " there as than then which who what when where how many much all each patient patients answer"
)


def words(text: str) -> list[str]:
    """Words of a text; Chinese and Japanese, which do not part them, character by character."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(
        r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+(?:['.-][^\W_\u3040-\u9fff]+)*",
        text,
    )


def offline_scores(case: Case) -> Scores:
    answer = case.answer[:MAX_ANSWER]
    facts = [f for f in case.facts if f.strip()] or _facts_of(case.reference)
    asked = values_in(case.question), _spoken(case.question)
    facts = [f for f in facts if not _states(f, *asked)] or facts  # to repeat the question is no answer
    numbers, spoken = values_in(answer), _spoken(answer)
    stated = [fact for fact in facts if _states(fact, numbers, spoken)]
    if not stated:
        return NOTHING
    numeric = [read_value(fact) is not None for fact in facts]
    missed = any(numeric) and not any(read_value(fact) is not None for fact in stated)  # another number than asked for
    known = values_in(" ; ".join([case.question, case.reference, *facts]))
    invented = sum(not any(math_equal(n, k) for k in known) for n in numbers[:200]) + _alternatives(case, answer, facts)
    # room to speak: three times the reference and a few sentences
    excess = max(1.0, len(words(answer)) / (3 * len(words(case.reference)) + 40))
    precision = len(stated) / (len(stated) + invented)
    accuracy = 0.0 if missed else precision / excess
    completeness = len(stated) / len(facts) * precision / excess
    return Scores(accuracy, completeness, 1 / excess, 1.0)


def _alternatives(case: Case, answer: str, facts: list[str]) -> int:
    """Phrases of a list that state nothing, beyond two: to name everything that could be meant is no answer."""
    known = set(words(f"{case.question} {case.reference} {' '.join(facts)}")) | set(_COMMON.split())
    parts = re.split(r"[,;/|\n、，；]|\b(?:or|and)\b", answer.casefold())
    idle = sum(0 < len(found := words(part)) <= 4 and not known & set(found) and not values_in(part) for part in parts)
    return max(0, idle - 2)


def _spoken(text: str) -> str:
    return f" {' '.join(words(text))} "


def _states(fact: str, numbers: list[str], spoken: str) -> bool:
    if read_value(fact) is not None:
        return any(math_equal(fact, number) for number in numbers)
    phrase = " ".join(words(fact))
    return bool(phrase) and f" {phrase} " in spoken


def _facts_of(reference: str) -> list[str]:
    """Without given facts: the reference's numbers and its words that carry meaning."""
    found = values_in(reference) + [w for w in words(reference) if w not in _COMMON.split() and not re.search(r"\d", w)]
    return list(dict.fromkeys(found))
