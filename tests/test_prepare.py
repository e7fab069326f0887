"""Rows are divided among the splits in the recipe's proportions, GRPO's in their own where it names some."""

from collections import Counter

import pytest

from core.artifacts import write_manifest
from core.config import RecipeError, UserError, load_recipe
from tasks import COLUMNS, prepare

WORDS = ["--data.train", "40", "--data.val", "4", "--data.rl", "40", "--data.eval", "20"]


def rows(name: str, count: int) -> list[dict]:
    row = dict.fromkeys(COLUMNS, "") | {"task": name, "environment": "calculator", "tokens": 9, "prompt_tokens": 5}
    return [row | {"id": f"{name}-{n}", "messages": []} for n in range(count)]


@pytest.fixture
def divide(monkeypatch):
    def run(*words: str) -> dict[str, Counter]:
        recipe = load_recipe("recipes/ci.yaml", [*WORDS, *words])
        splits, _, _ = prepare.prepare(recipe, None, say=lambda line: None)
        assert not {r["id"] for r in splits["sft_val"]} & {r["id"] for r in splits["sft_train"] + splits["rl_train"]}
        return {split: Counter(r["task"] for r in found) for split, found in splits.items()}

    monkeypatch.setattr(prepare, "_task_rows", lambda recipe, name, *rest: (rows(name, 100), rows(name, 30)))
    monkeypatch.setattr(prepare, "prompt_ids", lambda *args: [0])
    return run


def test_every_split_has_the_recipes_mixture(divide):
    found = divide("--tasks", "{mini_sql: 3, mini_math: 1}")
    assert found["sft_train"] == found["rl_train"] == {"mini_sql": 30, "mini_math": 10}
    assert found["eval"] == {"mini_sql": 15, "mini_math": 5} and found["sft_val"] == {"mini_sql": 3, "mini_math": 1}


def test_grpos_prompts_may_have_a_mixture_of_their_own(divide):
    found = divide("--tasks", "{mini_sql: 1, mini_math: 1}", "--data.rl_tasks", "{mini_sql: 1, mini_math: 3}")
    assert found["rl_train"] == {"mini_sql": 10, "mini_math": 30}
    assert found["sft_train"] == {"mini_sql": 20, "mini_math": 20}
    assert divide("--data.rl_tasks", "{mini_math: 1}")["rl_train"] == {"mini_math": 40}


def test_an_empty_split_of_held_out_rows_names_its_setting(divide):
    with pytest.raises(UserError, match=r"'sft_val' is empty.* Check data.val \(1\).*mini_sql 100, mini_math 100"):
        divide("--data.val", "1", "--tasks", "{mini_sql: 1, mini_math: 1}")


@pytest.mark.parametrize("mixture", ["{spider: 1}", "{mini_math: 0}"])
def test_a_mixture_of_tasks_that_are_not_there_is_refused(mixture):
    with pytest.raises(RecipeError, match="data.rl_tasks takes weights above 0 of mini_sql, mini_math"):
        load_recipe("recipes/ci.yaml", ["--data.rl_tasks", mixture])


def test_rows_of_another_agent_are_not_trained_on(tmp_path):
    def recipe(*words):
        return load_recipe("recipes/ci.yaml", ["--data_root", str(tmp_path), *words])

    prepared = recipe("--agent.max_rows", "5")
    write_manifest(prepared.data_dir, prepared, [], 0.0)
    for same in ([], ["--agent.timeout", "9"], ["--agent.max_completion_length", "99"]):
        prepare.check_prepared(recipe("--agent.max_rows", "5", *same), "step 2")
    for words, says in (
        ([], "agent.max_rows 5, now"),
        (["--agent.max_rows", "5", "--agent.workflow", "{}"], "workflow"),
    ):
        with pytest.raises(UserError, match=says):
            prepare.check_prepared(recipe(*words), "step 2")
