"""Every recipe in the repository parses, names what exists, fits in its own limits, and is in both READMEs."""

import dataclasses
import re
from pathlib import Path

import pytest

from core.config import load_recipe
from rewards import BY_ENVIRONMENT, PRIMARY, REWARDS
from tasks import TASKS

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(f for f in (ROOT / "recipes").glob("*.yaml") if not f.name.startswith("own-"))  # own-: made by own_db
MEASURED_ON_CPU = {"demo", "ci"}
PROMPT_FRAME = 400  # tokens of a prompt beside the schema: system, tools, question (151 at most on Spider, measured)


@pytest.fixture(params=FILES, ids=lambda f: f.stem)
def file(request) -> Path:
    return request.param


@pytest.fixture
def recipe(file):
    return load_recipe(file)


def test_there_are_the_promised_ones():
    models = {load_recipe(f).model for f in FILES}
    assert models == {
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "Qwen/Qwen2.5-Coder-3B-Instruct",
        "Qwen/Qwen3-0.6B",
        "meta-llama/Llama-3.2-1B-Instruct",
        "meta-llama/Llama-3.2-3B-Instruct",
    }


def test_is_named_as_its_file(file, recipe):
    """The run names the folders under data/ and checkpoints/: two recipes with one name would overwrite each other."""
    assert recipe.run == file.stem


def test_tasks_and_rewards_exist_and_belong_together(recipe):
    assert set(recipe.tasks) <= set(TASKS)
    assert set(recipe.grpo.rewards) <= set(REWARDS)
    environments = {TASKS[name].environment for name in recipe.tasks}
    for name in recipe.grpo.rewards:
        homes = {e for e, functions in BY_ENVIRONMENT.items() if REWARDS[name] in functions}
        assert homes & environments, f"{name} scores nothing in {environments}"
    assert {right_reward(recipe, e) for e in environments} <= set(recipe.grpo.rewards)


def right_reward(recipe, environment):
    """The reward for being right: on SQL the strict one may stand in, which an empty guess cannot earn."""
    strict = environment == "sql" and "exec_match_strict" in recipe.grpo.rewards
    return "exec_match_strict" if strict else PRIMARY[environment]


def test_being_right_outweighs_all_shaping(recipe):
    weights = recipe.grpo.rewards
    for environment in {TASKS[name].environment for name in recipe.tasks}:
        own = {f.__name__ for f in BY_ENVIRONMENT[environment]} & set(weights)
        shaping = sum(weights[name] for name in own - {right_reward(recipe, environment)})
        assert weights[right_reward(recipe, environment)] >= shaping


def test_prompt_and_episode_fit(recipe):
    sql = any(TASKS[name].environment == "sql" for name in recipe.tasks)
    prompt = PROMPT_FRAME + (recipe.data.schema_tokens if sql else 0)
    window = recipe.grpo.config.get("vllm_max_model_length")
    if window:
        assert prompt + recipe.agent.max_completion_length <= window
    if recipe.run not in MEASURED_ON_CPU:
        assert prompt < recipe.data.max_length


def test_says_what_it_is_for(file, recipe):
    head = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert head
    if recipe.run not in MEASURED_ON_CPU:
        memory = re.search(r"-(\d+)gb$", recipe.run)[1]
        assert f"one {memory} GB GPU" in head[0]
        assert "use_vllm" in recipe.grpo.config


@pytest.mark.slow  # importing TRL takes longer than everything else here
def test_trl_takes_it():
    """TRL's own constructors, which know what the recipe's check by names and types cannot."""
    from trl import GRPOConfig, SFTConfig

    for file in FILES:
        recipe = load_recipe(file)
        SFTConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **recipe.sft.config)
        weights = list(recipe.grpo.rewards.values())
        length = recipe.agent.max_completion_length
        common = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}
        made = GRPOConfig(**common, reward_weights=weights, max_completion_length=length, **recipe.grpo.config)
        assert made.generation_batch_size % made.num_generations == 0
        assert made.generation_batch_size // made.num_generations > 1, f"{file.name}: one question a step is noise"


@pytest.mark.slow
def test_peft_takes_its_adapters():
    from transformers import LlamaConfig, LlamaForCausalLM

    from core.models import lora_config

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=30, num_attention_heads=1)
    )
    for file in FILES:
        recipe = load_recipe(file)
        for lora in (recipe.sft.lora, recipe.grpo.lora):
            assert lora_config(lora, model).r == dataclasses.asdict(lora)["r"]


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_readme_names_every_recipe_and_no_other_file(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    for file in FILES:
        assert file.stem in text, f"{readme} does not name {file.name}"
    not_ours = (
        "data/",
        "checkpoints/",
        "tasks/percent.py",
        "recipes/X.yaml",
        "recipes/own-",
    )  # made by the steps; examples
    for name in set(re.findall(r"(?<![\w$/.-])[\w./-]+\.(?:py|yaml|sh|jinja|txt|toml)\b", text)):
        name = name.removeprefix("./")
        if not name.startswith(not_ours):
            assert (ROOT / name).exists(), f"{readme} names {name}, which does not exist"


def test_readmes_name_the_same_commands():
    """The two languages say the same: every line of shell in one is in the other, comments aside."""

    def commands(readme):
        blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / readme).read_text(encoding="utf-8"), re.S | re.M)
        lines = [re.sub(r"\s*#.*", "", line).strip() for block in blocks for line in block.splitlines()]
        return [line for line in lines if line]

    assert commands("README.md") == commands("README.zh-CN.md")
    assert len(commands("README.md")) > 10


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_map_has_every_module(readme):
    text = (ROOT / readme).read_text(encoding="utf-8")
    folders = ["core", "envs", "rewards", "tasks", "bench"]
    modules = [*ROOT.glob("*.py"), *(f for folder in folders for f in (ROOT / folder).glob("*.py"))]
    names = {str(f.relative_to(ROOT)) for f in modules if f.name != "__init__.py"}
    assert not {name for name in names if name not in text}, f"{readme}: one line for each in the map"


def test_commands_of_the_readme_parse():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"python (?:step\d_\w+|\$step|chat)\.py --config (\S+)(.*)", text)
    assert len(found) > 15
    for file, rest in found:
        overrides = re.findall(r"--((?:run|seed|model|\w+\.[\w.]+) \S+)", rest)
        load_recipe(ROOT / file, [word for o in overrides for word in f"--{o}".split()])


def test_the_example_task_of_the_readme_works():
    """Its code, as it stands there: rows with every column, trajectories judged 1.0 in the real environment."""
    from envs import ENVIRONMENTS
    from tasks import COLUMNS
    from tasks.base import judged

    code = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)[1]
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    task = scope["PERCENT"]
    env = ENVIRONMENTS[task.environment]()
    for split in ("train", "eval"):
        rows = list(task.load(split, "unused", limit=50))
        assert len(rows) == 50 and all(set(row) == set(COLUMNS) for row in rows)
        assert all(judged(row, task.trajectory(row, env)) == 1.0 for row in rows)
