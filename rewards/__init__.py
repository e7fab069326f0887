"""How an episode is scored. `REWARDS` maps the names used in recipes to TRL reward functions.

    score(row, completion) -> {"exec_match": 1.0, "executes": 1.0, ...}   every reward of the row's environment

A value is None where the judge could not tell (the infrastructure failed, gold fails); that is never counted as 0.
"""

from rewards import judge, math, medical, sql  # modules: the name rewards.exec_match belongs to the judge's module
from rewards.answers import answer_text as answer_text
from rewards.answers import first_attempt as first_attempt
from rewards.answers import vote_groups as vote_groups

BY_ENVIRONMENT = {
    "sql": (
        sql.exec_match,
        sql.exec_match_strict,
        sql.executes,
        sql.schema_linking,
        sql.sql_format,
        sql.turn_economy,
    ),
    "calculator": (math.math_accuracy, math.math_format, math.math_reasoning, math.math_brevity),
    "medical": (medical.medical_rule, medical.medical_judge),
}
# The weights that recipes start from. A wrong episode earns at most 0.3 (SQL), 0.2 (maths), a right one at
# least 1.0, 0.5: shaping breaks ties and never outweighs being right.
WEIGHTS = {
    "sql": {"exec_match": 1.0, "executes": 0.1, "schema_linking": 0.1, "sql_format": 0.1, "turn_economy": 0.05},
    "calculator": {"math_accuracy": 0.5, "math_format": 0.2, "math_reasoning": 0.2, "math_brevity": 0.1},
    "medical": {"medical_judge": 1.0, "medical_rule": 1.0},  # the rule is 0.1 by itself
}
REWARDS = {function.__name__: function for functions in BY_ENVIRONMENT.values() for function in functions}
# What the columns of step 5's table mean, by environment.
PRIMARY = {"sql": "exec_match", "calculator": "math_accuracy", "medical": "medical_judge"}
STRICT = {"sql": "exec_match_strict"}
EXECUTES = {"sql": "executes", "medical": "medical_rule"}
FORMAT = {"sql": "sql_format", "calculator": "math_format"}
ENOUGH = {"medical_judge": 0.6, "medical_rule": 0.1}  # from this value on it is a yes; 1.0 for the others


def holds(scores: dict[str, float | None], name: str | None) -> bool | None:
    """A reward as yes or no; None where it is undecided or the environment has none."""
    value = scores.get(name)
    return None if value is None else value >= ENOUGH.get(name, 1.0)


def right_reward(environment: str, names) -> str:
    """Of the rewards a recipe names, the one that means being right: the strict match stands in for the official one."""
    strict = environment == "sql" and "exec_match_strict" in names
    return "exec_match_strict" if strict else PRIMARY[environment]


def judge_of(row: dict) -> str:
    """Who judges the row's episodes, where that is more than code and data: the judge of free text, or nothing."""
    return judge.current().name if row["environment"] == "medical" else ""


def score(row: dict, completion: list[dict]) -> dict[str, float | None]:
    return score_batch([row], [completion])[0]


def score_batch(
    rows: list[dict], completions: list[list[dict]], only: set[str] | None = None
) -> list[dict[str, float | None]]:
    """One dict an episode, in order; rows of different environments may be mixed. only: these rewards, by name."""
    out: list[dict[str, float | None]] = [{} for _ in rows]
    for environment, functions in BY_ENVIRONMENT.items():
        places = [i for i, row in enumerate(rows) if row["environment"] == environment]
        if not places:
            continue
        # columns that only some tasks have are None elsewhere, as in a TRL batch
        names = {name for i in places for name in rows[i]} - {"completions"}
        columns = {name: [rows[i].get(name) for i in places] for name in names}
        for function in (f for f in functions if only is None or f.__name__ in only):
            values = function(completions=[completions[i] for i in places], **columns)
            for i, value in zip(places, values, strict=True):
                out[i][function.__name__] = value
    if unknown := {row["environment"] for row in rows} - set(BY_ENVIRONMENT):
        raise ValueError(f"environment {', '.join(sorted(unknown))}: known are {', '.join(BY_ENVIRONMENT)}")
    return out


def main_reward(environment: str, weights: dict[str, float]) -> str:
    """The heaviest of `weights` in an environment, of equal ones the first: what training takes for right."""
    known = {function.__name__ for function in BY_ENVIRONMENT[environment]}
    return max((name for name in weights if name in known), key=weights.get, default=PRIMARY[environment])


def main_scores(rows: list[dict], completions: list[list[dict]], weights: dict[str, float]) -> list[float | None]:
    main = [main_reward(row["environment"], weights) for row in rows]
    scores = score_batch(rows, completions, only=set(main))
    return [score[name] for score, name in zip(scores, main, strict=True)]


def total(scores: dict[str, float | None], environment: str) -> float:
    """The weighted sum under WEIGHTS; an undecided reward adds nothing, as in training."""
    return sum(weight * (scores[name] or 0.0) for name, weight in WEIGHTS[environment].items())
