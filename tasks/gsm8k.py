"""GSM8K: grade-school word problems solved step by step with a calculator.

    data/raw/gsm8k/   train.jsonl test.jsonl   (or train*.parquet, test*.parquet) with question and answer

A solution such as `48/2 = $<<48/2=24>>24 in May.` becomes a turn: the reasoning up to the annotation, a call of
`calculator("48/2")`, its real result, and the reasoning goes on with "$24 in May.". The last turn states
`<answer>72</answer>`, which must equal the answer behind `####`. A wrong annotation is repaired when the calculator's
value, carried through the rest of the solution, still ends in that answer; else the solution is rejected (the question
stays good for RL).
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.safe_math import CalcError, calculate
from tasks.base import Rejected, Task, call, judged, locate, result, say

SYSTEM = (
    "You solve math word problems step by step. Use the calculator tool for every calculation."
    " Finish with the final number as <answer>NUMBER</answer>."
)
HINT = (
    "Get train.jsonl and test.jsonl of GSM8K (github.com/openai/grade-school-math, or the hub data set openai/gsm8k as"
    " parquet) and pass their folder as --data.roots.gsm8k, or put them in data/raw/gsm8k. To see every step work"
    " without them: recipes/demo.yaml."
)
FILES = {
    "train": ("train.jsonl", "train.parquet"),
    "eval": ("test.jsonl", "test.parquet"),
}
ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?|\.\d+")
TERM = r"\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
EQUATION = re.compile(  # a sum in plain numbers, "=", its result; nothing algebraic or a per cent sign on either side
    rf"(?<![\w.)%*/+×-])({TERM}(?:\s*[-+*/×÷–−]\s*{TERM})+)\s*=\s*({TERM})(?![\w%*/+×(]|\s*[-*/+×–−=]|[.,]\d)"
)
SIGNS = str.maketrans("×÷–−", "*/--")
LEVELS = {2: "easy", 3: "medium", 5: "hard"}  # up to so many steps; "extra" beyond


@dataclass
class Step:
    text: str  # reasoning before the call
    expression: str
    stated: str  # the annotation's result


def load(
    split: str,
    root: str,
    *,
    seed: int = 42,
    limit: int | None = None,
    hub_id: str | None = None,
    name: str = "gsm8k",
    levels: dict[int, str] = LEVELS,
) -> Iterator[dict | Rejected]:
    """Rows of a split in file order; `limit` draws that many by `seed`; `hub_id`: a hub data set (or local folder)."""
    raw = _hub_rows(split, hub_id) if hub_id else _file_rows(split, root)
    raw = list(enumerate(raw))
    if limit is not None and limit < len(raw):
        raw = [raw[i] for i in sorted(random.Random(seed).sample(range(len(raw)), limit))]
    prefix = f"{name}-{'train' if split == 'train' else 'test'}"
    for i, item in raw:
        yield _row(f"{prefix}-{i}", item["question"], item["answer"], name, levels)


def _hub_rows(split: str, hub_id: str) -> list[dict]:
    from datasets import load_dataset

    configuration = None if Path(hub_id).is_dir() else "main"
    return list(load_dataset(hub_id, configuration, split="train" if split == "train" else "test"))


def _file_rows(split: str, root: str) -> list[dict]:
    folder = locate(root, "gsm8k", FILES[split], HINT)
    path = next(folder / f for f in FILES[split] if (folder / f).exists())
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            lines = path.read_text(encoding="utf-8").split("\n")
            rows = [_parsed(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not whole: {error}.\nDownload it again; {HINT}"
        ) from error
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{path} holds {str(row)[:60]!r} where a row with question and answer is expected. {HINT}")
        if wrong := [k for k in ("question", "answer") if k in row and not isinstance(row[k], str)]:
            raise ValueError(f"{path}: {wrong[0]} is no text in {str(row)[:100]}. {HINT}")
        if missing := {"question", "answer"} - set(row):
            raise ValueError(f"{path}: a row has no {', '.join(sorted(missing))}; its columns are {', '.join(row)}")
    if not rows:
        raise ValueError(f"{path} is empty. {HINT}")
    return rows


def _parsed(line: str, number: int) -> dict:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}: {error.msg}") from error


def _row(id_: str, question: str, answer: str, name: str, levels: dict[int, str]) -> dict | Rejected:
    raw = {"id": id_, "question": question, "answer": answer}
    solution, mark, final = answer.rpartition("####")
    final = final.strip().replace(",", "").lstrip("$")
    if not mark or not re.fullmatch(r"-?\d+(\.\d+)?", final):
        return Rejected(raw, "no number behind ####")
    steps = max(len(ANNOTATION.findall(solution)), 1)
    return {
        "id": id_,
        "task": name,
        "environment": "calculator",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question.strip()},
        ],
        "question": question.strip(),
        "gold": final,
        "db_id": "",
        "db_path": "",
        "hardness": next((level for most, level in levels.items() if steps <= most), "extra"),
        "difficulty": min((steps - 1) / 7, 1.0),
        "facts": [],
        "solution": solution.strip(),  # for the trajectory only: prepare() drops it
    }


def trajectory(row: dict, env) -> list[dict]:
    """The annotated solution with every calculation made by the calculator; must be judged 1.0."""
    env.reset(**{k: v for k, v in row.items() if k != "solution"})
    steps, tail = split_steps(row["solution"])
    if not steps:
        raise Rejected(row, "no calculation in the solution", sft_only=True)
    completion, carried, text = [], {}, ""
    for step in steps:
        text += _replace(step.text, carried)
        expression = _replace(step.expression, carried)
        answer = env.calculator(expression)
        value = number(answer)
        if value is None:
            raise Rejected(row, _refusal(expression, answer, len(steps)), sft_only=True)
        if not agrees(value, number(step.stated)):
            carried[step.stated.strip()] = answer.strip()
        completion += [
            call("calculator", {"expression": expression}, tidy(text)),
            result("calculator", answer),
        ]
        text = _currency(text)
    tail = _replace(tail, carried)
    text += tail
    values = [number(m["content"]) for m in completion if m["role"] == "tool"]
    if not _supported(row["gold"], values, tail):
        reason = "annotation wrong" if carried else "final answer is not a result of the solution"
        raise Rejected(row, reason, sft_only=True)
    completion.append(say(f"{tidy(text)}\n<answer>{row['gold']}</answer>".strip()))
    if judged(row, completion) != 1.0:
        raise Rejected(row, "gold is not judged correct")
    return completion


def _refusal(expression: str, answer: str, calls: int) -> str:
    try:
        calculate(expression)
    except CalcError:
        return f"calculator fails: {expression} gives {answer[:80]}"
    return f"more calls than the environment allows: needs {calls}"


def split_steps(solution: str) -> tuple[list[Step], str]:
    """The calculations of a solution in order, each with the reasoning before it, and the text behind the last one.

    Equations in plain numbers that the annotators left unmarked ("so 75 - 55 = $20 is left") count as well.
    """
    steps, at = [], 0
    marked = [(m.start(), m.end(), m[1], m[2]) for m in ANNOTATION.finditer(solution)]
    for begin, end, expression, stated in sorted(marked + _unmarked(solution)):
        steps.append(Step(solution[at:begin], expression.strip(), stated.strip()))
        at = end
    return steps, solution[at:]


def _unmarked(solution: str) -> list[tuple[int, int, str, str]]:
    """Places of true equations without an annotation: the call stands where an annotation would, before the result."""
    found = []
    for m in EQUATION.finditer(ANNOTATION.sub(lambda m: "\0" * len(m[0]), solution)):
        expression = re.sub(r"[$,\s]", "", m[1]).translate(SIGNS)
        try:
            true = agrees(calculate(expression), number(m[2]))
        except CalcError:
            continue
        if true:  # "8 * 5% = 40%" and the like stay text
            found.append((m.start(2), m.start(2), expression, m[2]))
    return found


def number(text: str) -> float | None:
    try:
        return float(text.strip().replace(",", "").lstrip("$"))
    except ValueError:
        return None


def agrees(value: float, stated: float | None) -> bool:
    """Equal, or the value rounded or cut to a number that fits a sentence (a third as 0.33, 10/3 boxes as 3 or 4)."""
    if stated is None:
        return False
    if abs(value - stated) <= 1e-6 * max(1.0, abs(value)):
        return True
    text = f"{stated:.10f}".rstrip("0")
    decimals = len(text.split(".")[1])
    return abs(value - stated) < 10.0**-decimals


def _replace(text: str, carried: dict[str, str]) -> str:
    """The text with every number that a wrong annotation introduced replaced by the calculator's."""
    return NUMBER.sub(lambda m: carried.get(m[0], m[0]), text) if carried else text


def _supported(gold: str, values: list[float], tail: str) -> bool:
    """The last result is the answer, or an earlier one is that the closing words pick, or they state it themselves."""
    said = [number(n) for n in NUMBER.findall(tail)]
    return any(abs(v - float(gold)) <= 1e-6 * max(1.0, abs(v)) for v in [*values, *said] if v is not None)


def _currency(text: str) -> str:
    """A currency sign in front of an annotation belongs to the result that follows the call."""
    return "$" if text.rstrip().endswith("$") else ""


def tidy(text: str) -> str:
    text = text.rstrip()
    text = text[:-1] if text.endswith("$") else text
    return re.sub(r"[ \t]+", " ", text).strip()


def source(root: str) -> None:
    locate(root, "gsm8k", FILES["train"] + FILES["eval"], HINT)


GSM8K = Task("gsm8k", "calculator", load, trajectory, source)
