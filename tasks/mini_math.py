"""The embedded task mini_math: word problems in GSM8K's own format, made from a seed.

    build("data/raw/mini_math")  ->  train.jsonl test.jsonl build.json

A story is its text, the ranges of its numbers, and its solution, where `<t=a*b>` becomes "347 * 28 = <<347*28=9716>>9716"
and `$<...>` a sum of money. Numbers are drawn until every step comes out exact, positive and, but for money, whole; they
are large, so that a small model needs the calculator. Test problems take other names and other numbers than any train
problem of their story; the stories marked HELD_OUT are met in test only.
"""

import json
import random
import re
from fractions import Fraction
from pathlib import Path

from tasks.mini_sql import version, write_folder
from tasks.mini_stories import STORIES, Story
from tasks.mini_words import spin_words

ROOT = "data/raw/mini_math"
SIZES = {"train": 1200, "eval": 300}
SOURCES = ("mini_math.py", "mini_stories.py", "mini_words.py")
HELD_OUT_SHARE = 0.12
NAMES = {  # she, he
    "train": (
        "Amara/Bianca/Chloe/Dalia/Erin/Farah/Gina/Hana/Iris/Jana/Kira/Leila",
        "Adam/Boris/Cesar/Diego/Emil/Felix/Goran/Hamid/Ivo/Jamal/Karl/Luca",
    ),
    "test": ("Mona/Noor/Olga/Petra/Rhea/Salma", "Milo/Nils/Oscar/Pavel/Rafael/Samir"),
}
TRIES = 20_000


def build(root: str | Path = ROOT, seed: int = 42, sizes: dict[str, int] | None = None) -> Path:
    """Write the folder unless the same version, seed and sizes already stand there."""
    sizes = SIZES | (sizes or {})
    return write_folder(
        Path(root),
        {"version": version(SOURCES), "seed": seed, "sizes": sizes},
        lambda folder: _write(folder, seed, sizes),
    )


def _write(folder: Path, seed: int, sizes: dict[str, int]) -> None:
    known: dict[int, set] = {i: set() for i in range(len(STORIES))}  # the numbers each story has used
    told = set()
    for split, name in (("train", "train.jsonl"), ("eval", "test.jsonl")):
        rng = random.Random(f"{seed}/mini_math/{split}")
        usual = [i for i, story in enumerate(STORIES) if not story.held_out]
        rare = [i for i, story in enumerate(STORIES) if story.held_out] if split == "eval" else []
        n_rare = round(sizes[split] * HELD_OUT_SHARE) if rare else 0
        order = [usual[i % len(usual)] for i in range(sizes[split] - n_rare)] + [
            rare[i % len(rare)] for i in range(n_rare)
        ]
        rng.shuffle(order)
        rows = []
        for i in order:
            row = problem(STORIES[i], rng, "train" if split == "train" else "test", known[i])
            while {row["question"], sums(row)} & told:
                row = problem(STORIES[i], rng, "train" if split == "train" else "test", known[i])
            told |= {row["question"], sums(row)}
            rows.append(row)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sums(row: dict) -> tuple:
    """The calculations of a problem: no two problems share them, whatever their stories."""
    return tuple(sorted(re.findall(r"<<[^>]+>>", row["answer"])))


def problem(story: Story, rng: random.Random, split: str, known: set) -> dict:
    """One problem with numbers that no problem of this story had."""
    for _ in range(TRIES):
        numbers, words = draw(story.draws, rng)
        drawn = tuple(sorted(numbers.items()))
        if drawn not in known and (lines := solve(story.solution, numbers)):
            break
    else:
        raise RuntimeError(f"no further numbers for the story {story.text[:60]!r}; widen its ranges")
    known.add(drawn)
    words |= people(rng, split) | {k: number(v, money="$" in story.text) for k, v in drawn}
    steps, last = lines
    question = spin_words(fill(story.text, words), rng)
    return {"question": question, "answer": f"{spin_words(fill(steps, words), rng)}\n#### {number(last)}"}


def draw(draws: str, rng: random.Random) -> tuple[dict[str, Fraction], dict[str, str]]:
    numbers, words = {}, {}
    for item in draws.split():
        name, options = item.split("=")
        if ".." not in options:
            words[name] = rng.choice(options.split("|")).replace("_", " ")
            continue
        span, _, step = options.partition("/")
        low, high = (Fraction(x) for x in span.split(".."))
        step = Fraction(step or "1")
        numbers[name] = low + step * rng.randrange(int((high - low) / step) + 1)
    return numbers, words


def people(rng: random.Random, split: str) -> dict[str, str]:
    she = rng.random() < 0.5
    names = [n for group in NAMES[split] for n in group.split("/")]
    first = rng.choice(NAMES[split][0 if she else 1].split("/"))
    second, third = rng.sample([n for n in names if n != first], 2)
    pronouns = {"she": "she", "her": "her", "She": "She"} if she else {"she": "he", "her": "his", "She": "He"}
    return pronouns | {"name": first, "Name": first, "other": second, "Other": second, "third": third, "Third": third}


def fill(text: str, words: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda m: words[m[1]], text)


def solve(solution: str, numbers: dict[str, Fraction]) -> tuple[str, Fraction] | None:
    """The solution with its steps worked out, and the last result; None if a step is not exact or not positive."""
    values, last = dict(numbers), None

    def step(match: re.Match) -> str:
        nonlocal last
        money, name, formula = match.groups()
        terms = re.findall(r"[a-z]|[\d.]+|[-+*/]", formula)
        shown = [number(values[t]) if t.isalpha() else t for t in terms]
        values[name] = last = evaluate([values.get(t, t) for t in terms])
        if last <= 0 or (last * (100 if money else 1)).denominator != 1:
            raise ArithmeticError("not exact")
        return f"{' '.join(shown)} = {money}<<{''.join(shown)}={number(last)}>>{number(last)}"

    try:
        text = re.sub(r"(\$?)<(\w)=([^>]*)>", step, solution)
    except ArithmeticError:
        return None
    return text, last


def evaluate(terms: list) -> Fraction:
    """Left to right; a formula mixes no sums with products."""
    value = Fraction(terms[0])
    for sign, term in zip(terms[1::2], map(Fraction, terms[2::2]), strict=True):
        value = {"+": value.__add__, "-": value.__sub__, "*": value.__mul__, "/": value.__truediv__}[sign](term)
    return value


def number(value: Fraction, money: bool = False) -> str:
    """9716, 12.5; a price in a text has its cents: 12.50."""
    if value.denominator == 1:
        return str(value)
    return f"{float(value):.2f}" if money else f"{float(value):.2f}".rstrip("0")
