"""The table of bench/sampling.py: what rating writes is counted."""

import json

import pytest

from bench.sampling import figures, rating_tokens
from core.config import load_recipe


@pytest.fixture
def recipe():
    return load_recipe("recipes/ci.yaml", ["--grpo.gradient_accumulation_steps", "1"])  # 2 groups of 4 a step


def test_tokens_of_the_rating_are_counted_and_spread(recipe):
    log = {"reward": 0.5, "resample/useful": 0.5, "completions/mean_length": 100, "step_time": 2.0}
    cells = [c.strip() for c in figures("both", [log, log], recipe, rating=6400, own=8).strip("|").split("|")]
    assert cells[:6] == ["both", "50% of 4", "1.25", "5.0", "1600", "2.0"]  # the steps alone, as ever
    assert cells[6:] == ["6400", "0.25, 1.0", "0.62, 2.5"]  # 2 / 8.0k tokens, 2 / (1.6k + 6.4k x 2/8)
    plain = figures("as it is", [log, log], recipe, rating=0, own=8)
    assert plain.endswith("| 0 | 1.25, 5.0 | 1.25, 5.0 |")


def test_the_newest_rating_of_the_prompts_that_there_are(tmp_path):
    (tmp_path / "rl_train.jsonl").write_text("".join(json.dumps({"id": i}) + "\n" for i in "abc"))
    ratings = [
        {"id": "a", "tokens": 1},
        {"id": "a", "tokens": 30},
        {"id": "b", "tokens": 12},
        {"id": "gone", "tokens": 9},
    ]
    file = tmp_path / "difficulty.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in ratings) + '{"id": "c", "tok')
    assert rating_tokens(tmp_path) == 42
    file.write_text(json.dumps({"id": "a"}) + "\n")
    assert str(rating_tokens(tmp_path)) == "nan"  # from before tokens were written down: unknown, not none
