"""Recipes: what is wrong in one is said at once, with the nearest valid name."""

import contextlib

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
        ({"grpo": {"temperature": 0}}, "grpo.temperature is 0"),
        ({"grpo": {"rewards": {"math_accuracy": float("nan")}}}, "finite number"),
        ({"grpo": {"max_grad_norm": float("inf")}}, "finite number"),
        ({"tasks": {"mini_math": float("nan")}}, "finite number"),
        ({"sft": {"learning_rate": -1.0}}, "cannot be below 0"),
        ({"sft": {"lora": {"dropout": 2}}}, "lora.dropout is 2"),
        ({"grpo": {"per_device_train_batch_size": 2, "steps_per_generation": 3}}, "x steps_per_generation.* groups of"),
        ({"grpo": {"steps_per_generation": 0}}, "steps_per_generation is a whole number above 0"),
        ({"grpo": {"generation_batch_size": 12, "num_generations": 4}}, "no multiple of .*batch_size .8."),
        ({"grpo": {"generation_batch_size": 16, "steps_per_generation": 2}}, "leave one of them out"),
        ({"data": {"val": 0}}, "data.val is 0, the least that makes sense is 1, as SFT needs held-out rows"),
        ({"data": {"correction_share": 2.0}}, "a share of 0 to 1"),
        ({"tasks": {}}, "tasks needs at least one"),
        ({"run": "a/b"}, "plain folder name"),
    ],
)
def test_mistakes_are_said(recipe, sections, says):
    with pytest.raises(RecipeError, match=says):
        recipe(**sections)


GROUPS = [  # rows, accumulation, steps_per_generation, generation_batch_size, num_generations, processes
    (2, 1, 2, None, 4, 1), (2, 2, 1, None, 4, 1), (2, 2, 1, None, 4, 2), (8, 3, None, None, 8, 1), (4, 1, None, None, 8, 1),
    (4, 1, None, None, 8, 2), (2, 1, None, 8, 4, 1), (2, 1, None, 6, 4, 1), (4, 1, None, 12, 4, 2), (2, 1, 4, 8, 4, 1),
]  # fmt: skip


@pytest.mark.slow  # importing TRL
@pytest.mark.parametrize(("rows", "accumulation", "steps", "whole", "group", "processes"), GROUPS)
def test_a_generation_batch_is_refused_where_trl_refuses_it(
    recipe, monkeypatch, rows, accumulation, steps, whole, group, processes
):
    from trl import GRPOConfig

    config = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation,
              "steps_per_generation": steps, "generation_batch_size": whole, "num_generations": group}  # fmt: skip
    monkeypatch.setattr(GRPOConfig, "world_size", processes)
    try:
        GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **config)
        refused = contextlib.nullcontext()
    except ValueError:
        refused = pytest.raises(RecipeError)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with refused:
        recipe(grpo=config)


def test_steps_per_generation_counts_where_it_is_given(recipe):
    grpo = {"per_device_train_batch_size": 2, "num_generations": 4}
    assert recipe(grpo=grpo | {"steps_per_generation": 2})
    with pytest.raises(RecipeError, match="generation batch of 2 .*x gradient_accumulation_steps"):
        recipe(grpo=grpo)


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
