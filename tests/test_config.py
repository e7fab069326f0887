"""Recipes: what is wrong in one is said at once, with the nearest valid name."""

import pytest
import yaml

from core.config import RecipeError, load_recipe

BASE = {"run": "t", "model": "m", "tasks": {"mini_sql": 1}}


@pytest.fixture
def recipe(tmp_path):
    def make(overrides=(), **sections):
        path = tmp_path / "r.yaml"
        path.write_text(yaml.safe_dump(BASE | sections))
        return load_recipe(path, overrides)

    return make


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"agnet": {}}, "Did you mean 'agent'"),
        ({"agent": {"max_turn": 3}}, "Did you mean 'max_turns'"),
        ({"sft": {"learning_rte": 1e-4}}, "Did you mean 'learning_rate'"),
        ({"grpo": {"num_generation": 4}}, "Did you mean 'num_generations'"),
        ({"agent": {"max_turns": "three"}}, "expected int, found 'three'"),
        ({"sft": {"learning_rate": "fast"}}, "found 'fast'"),
        ({"sft": {"lora": {"rank": 4}}}, "unknown key 'rank'"),
        ({"grpo": {"max_completion_length": 5}}, "agent.max_completion_length"),
        ({"grpo": {"num_generations": 3, "per_device_train_batch_size": 8}}, "does not divide into groups"),
        ({"grpo": {"num_generations": 1}}, "at least 2"),
        ({"data": {"correction_share": 2.0}}, "a share of 0 to 1"),
        ({"tasks": {}}, "tasks needs at least one"),
        ({"run": "a/b"}, "plain folder name"),
    ],
)
def test_mistakes_are_said(recipe, sections, says):
    with pytest.raises(RecipeError, match=says):
        recipe(**sections)


def test_overrides(recipe):
    made = recipe(["--seed", "7", "--sft.learning_rate", "1e-4", "--max_turns=9", "--sft.lora", "null"])
    assert (made.seed, made.agent.max_turns, made.sft.lora) == (7, 9, None)
    assert made.sft.config == {"learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--learning_rate", "1e-4"], "--sft.learning_rate, --grpo.learning_rate"),
        (["--max_trns", "3"], "Did you mean 'max_turns'"),
        (["--seed"], "needs a value"),
        (["seed", "3"], "unexpected argument"),
    ],
)
def test_bad_overrides(recipe, words, says):
    with pytest.raises(RecipeError, match=says):
        recipe(words)


def test_saved_recipe_runs_again(recipe, tmp_path):
    made = recipe(["--grpo.learning_rate", "2e-5"], grpo={"rewards": {"exec_match": 1}, "num_generations": 4})
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(made.to_dict()))
    assert load_recipe(again) == made


def test_missing_recipe_names_the_nearest():
    with pytest.raises(RecipeError, match="Did you mean recipes/demo.yaml"):
        load_recipe("recipes/dem.yaml")
