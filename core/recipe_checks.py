"""What no type says of a recipe: ranges, names, and what must fit together. All of it before any model is loaded."""

import os
import re
from pathlib import Path

from core.config import FORMATS, TURNS, Recipe, RecipeError, Workflow, nearest

LEVELS = ("easy", "medium", "hard", "extra")
LEAST = {  # the smallest value that means something
    "agent.max_turns": 1,
    "agent.max_completion_length": 8,
    "agent.max_rows": 1,
    "agent.max_chars": 200,
    "agent.timeout": 0.01,
    "data.train": 0,
    "data.val": 0,
    "data.rl": 0,
    "data.eval": 0,
    "data.max_length": 16,
    "data.schema_tokens": 16,
    "data.sample_values": 0,
    "sft.accuracy_rows": 0,
    "sft.lora.r": 1,
    "grpo.accuracy_rows": 0,
    "grpo.lora.r": 1,
    "grpo.rate_difficulty": 0,
    "grpo.resample": 0,
    "eval.batch_size": 1,
    "eval.temperature": 0,
}


def check_recipe(recipe: Recipe, path: Path) -> None:
    if not recipe.tasks or any(w <= 0 for w in recipe.tasks.values()):
        raise RecipeError(f"{path}: tasks needs at least one 'name: weight' above 0, found {recipe.tasks}")
    for name, weight in recipe.data.rl_tasks.items():
        if name not in recipe.tasks or weight <= 0:
            known = ", ".join(recipe.tasks)
            raise RecipeError(f"{path}: data.rl_tasks takes weights above 0 of {known}; found '{name}: {weight}'")
    if os.sep in recipe.run or recipe.run in ("", ".", "..", "raw"):
        raise RecipeError(f"{path}: run '{recipe.run}' must be a plain folder name")
    if not 0 <= recipe.data.correction_share <= 1:
        raise RecipeError(f"{path}: data.correction_share is a share of 0 to 1, found {recipe.data.correction_share}")
    for key, least in LEAST.items():
        value = recipe
        for part in key.split("."):
            value = getattr(value, part, None)
        if value is not None and value < least:
            raise RecipeError(f"{path}: {key} is {value}, the least that makes sense is {least}")
    for level in recipe.data.hardness:
        if level not in LEVELS:
            raise RecipeError(f"{path}: data.hardness names '{level}'.{nearest(level, LEVELS)}")
    if recipe.agent.workflow:
        _check_workflow(recipe.agent.workflow, path)
    for name in recipe.export.formats:
        if name not in FORMATS:
            raise RecipeError(f"{path}: export.formats names '{name}'.{nearest(name, FORMATS)}")
    for section in ("sft", "grpo"):
        config = getattr(recipe, section).config
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"):
            if type(value := config.get(key, 1)) is not int or value < 1:
                raise RecipeError(f"{path}: {section}.{key} is a whole number above 0, found {value!r}")
    grpo = recipe.grpo.config
    generations = grpo.get("num_generations", 8)  # TRL's default
    batch = grpo.get("generation_batch_size") or grpo.get("per_device_train_batch_size", 8) * grpo.get(
        "gradient_accumulation_steps", 1
    )
    if generations < 2:
        raise RecipeError(
            f"{path}: grpo.num_generations is {generations}; a group needs at least 2 to have an advantage"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if (batch * (1 if grpo.get("generation_batch_size") else world)) % generations:
        raise RecipeError(
            f"{path}: the generation batch of {batch} (grpo.per_device_train_batch_size x gradient_accumulation_steps) "
            f"does not divide into groups of num_generations={generations}: change one of the three"
        )


def _check_workflow(workflow: Workflow, path: Path) -> None:
    try:
        trained = [turn for turn in TURNS if re.fullmatch(workflow.trained_turns, turn)]
    except re.error as error:
        raise RecipeError(f"{path}: agent.workflow.trained_turns is no regular expression: {error}") from error
    if not trained:
        raise RecipeError(
            f"{path}: agent.workflow.trained_turns '{workflow.trained_turns}' matches none of {', '.join(TURNS)} "
            "(the whole name must match): nothing would be trained"
        )
    if workflow.table_info_truncate < 200 or workflow.execution_truncate < 200:
        raise RecipeError(
            f"{path}: agent.workflow.table_info_truncate ({workflow.table_info_truncate}) and execution_truncate "
            f"({workflow.execution_truncate}) count characters and need 200 at least"
        )
