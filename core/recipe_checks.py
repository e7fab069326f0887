"""What no type says of a recipe: ranges, names, and what must fit together. All of it before any model is loaded."""

import math
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
    "data.val": 1,
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
OR_NULL = ("generation_batch_size", "steps_per_generation")  # null: TRL works it out from the others
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", *OR_NULL)


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
            why = ", as SFT needs held-out rows for its loss and best checkpoint" if key == "data.val" else ""
            raise RecipeError(f"{path}: {key} is {value}, the least that makes sense is {least}{why}")
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
        for key in COUNTS:
            value = config.get(key, 1)
            if not (value is None and key in OR_NULL) and (type(value) is not int or value < 1):
                raise RecipeError(f"{path}: {section}.{key} is a whole number above 0, found {value!r}")
        for key, value in config.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise RecipeError(f"{path}: {section}.{key} is {value}, and a finite number is needed")
        if isinstance(rate := config.get("learning_rate", 1), int | float) and rate < 0:
            raise RecipeError(f"{path}: {section}.learning_rate is {rate}, and cannot be below 0")
        lora = getattr(recipe, section).lora
        if lora and not 0 <= lora.dropout < 1:
            raise RecipeError(f"{path}: {section}.lora.dropout is {lora.dropout}, and lies from 0 to below 1")
    if isinstance(hot := recipe.grpo.config.get("temperature", 1), int | float) and hot <= 0:
        raise RecipeError(
            f"{path}: grpo.temperature is {hot}: at 0 all episodes of a group are the same; 0.8 to 1 is usual"
        )
    _check_groups(recipe.grpo.config, path)


def _check_groups(grpo: dict, path: Path) -> None:
    """TRL's rules for the episodes of one generation batch (GRPOConfig.__post_init__)."""
    generations = grpo.get("num_generations", 8)  # TRL's defaults
    if generations < 2:
        raise RecipeError(
            f"{path}: grpo.num_generations is {generations}; a group needs at least 2 to have an advantage"
        )
    whole, steps = grpo.get("generation_batch_size"), grpo.get("steps_per_generation")
    if whole and steps:
        raise RecipeError(
            f"{path}: grpo.generation_batch_size ({whole}) and grpo.steps_per_generation ({steps}) say the same twice: "
            "leave one of them out"
        )
    rows, processes = grpo.get("per_device_train_batch_size", 8), int(os.environ.get("WORLD_SIZE", "1"))
    of_all = f" x {processes} processes" if processes > 1 else ""
    if whole:
        made_of, batch = "grpo.generation_batch_size", whole
        if whole % (rows * processes):
            raise RecipeError(
                f"{path}: grpo.generation_batch_size is {whole}, no multiple of "
                f"grpo.per_device_train_batch_size ({rows}){of_all}: change one of them"
            )
    else:
        key = "steps_per_generation" if steps else "gradient_accumulation_steps"
        made_of = f"grpo.per_device_train_batch_size x {key}{of_all}"
        batch = rows * (steps or grpo.get("gradient_accumulation_steps", 1)) * processes
    if batch % generations:
        raise RecipeError(
            f"{path}: the generation batch of {batch} ({made_of}) does not divide into groups of "
            f"num_generations={generations}: change one of these"
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
