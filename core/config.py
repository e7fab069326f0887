"""Recipes: one YAML is one experiment, read by every step.

    recipe, args = load_recipe_args("step3_sft.py", __doc__)      # in a step: --config and --section.key overrides
    recipe = load_recipe("recipes/demo.yaml", ["--sft.learning_rate", "1e-4"])

The sections `sft` and `grpo` take the field names of TRL's SFTConfig and GRPOConfig as they are. Unknown keys and values
of the wrong type fail here, before any model is loaded, with the nearest valid name.
"""

import argparse
import dataclasses
import difflib
import errno
import math
import os
import shlex
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.trl_fields import OUTSIDE, trl_fields

try:
    import yaml
except ModuleNotFoundError:
    sys.exit(OUTSIDE.format("PyYAML"))


class UserError(Exception):
    """Something the user can mend. The text says what is wrong, what was found and what to do; steps exit with 1."""


class RecipeError(UserError):
    """A recipe or an override that cannot be right; steps exit with 2."""


@dataclass
class Workflow:
    """The agent that writes, checks and rewrites by separate prompts instead of calling a tool (core/workflow.py)."""

    trained_turns: str = "write|rewrite"  # regular expression: GRPO trains the turns (write, check, rewrite) it matches
    table_info_truncate: int = 2048  # characters of the schema in the prompt, instead of data.schema_tokens
    execution_truncate: int = 2048  # characters of a result that the model reads, instead of agent.max_chars


@dataclass
class Agent:
    """How an episode runs: the same in data, SFT, GRPO, evaluation and chat."""

    max_turns: int = 4  # tool rounds per episode
    max_completion_length: int = 768  # tokens of one whole episode after the prompt, tool results included
    max_rows: int = 10  # rows of a result that the model sees
    max_chars: int = 800  # characters of a result that the model sees
    timeout: float = 5.0  # seconds for one query
    workflow: Workflow | None = None  # {} or settings = the workflow agent; absent = the agent that calls tools


@dataclass
class Data:
    roots: dict[str, str] = field(default_factory=dict)  # task -> folder of its raw files; default data/raw/<task>
    hub: dict[str, str] = field(default_factory=dict)  # task -> data set id on the hub, instead of files in its folder
    train: int = 0  # SFT rows per run, 0 = all
    val: int = 100  # rows held out of train for SFT's loss and best checkpoint, at least 1
    rl: int = 0  # GRPO prompts, 0 = all
    rl_tasks: dict[str, float] = field(default_factory=dict)  # their mixture, where it is not that of `tasks`
    eval: int = 0  # evaluation rows, 0 = the whole split
    max_length: int = 2048  # longer rows (prompt + episode, in tokens) are rejected, never cut in the middle
    correction_share: float = 0.0  # share of SQL rows that show a wrong query, its real result and the rewrite
    schema_tokens: int = 1000  # budget of the schema in the prompt
    sample_values: int = 0  # example values per column in the schema
    hardness: list[str] = field(default_factory=list)  # keep only these levels; empty = all


@dataclass
class Lora:
    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    layers: list[int] = field(default_factory=list)  # only these layers; empty = all

    def __post_init__(self):
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            self.target_modules = [self.target_modules]


@dataclass
class Sft:
    lora: Lora | None = field(default_factory=Lora)  # null = train every weight
    load_in_4bit: bool = False  # QLoRA: nf4, double quantisation
    accuracy_rows: int = 0  # held-out questions played at every save: the most accurate checkpoint wins
    config: dict[str, Any] = field(default_factory=dict)  # TRL SFTConfig fields


@dataclass
class Grpo:
    lora: Lora | None = field(default_factory=Lora)
    load_in_4bit: bool = False
    accuracy_rows: int = 0  # the same during GRPO: does accuracy follow the reward?
    rewards: dict[str, float] = field(default_factory=dict)  # reward function -> weight
    rate_difficulty: int = 0  # samples per prompt that rate it first: always and never solved ones go, easy ones lead
    resample: int = 0  # extra rounds a step that replace groups without spread by groups of other prompts
    config: dict[str, Any] = field(default_factory=dict)  # TRL GRPOConfig fields


@dataclass
class Eval:
    batch_size: int = 16
    temperature: float = 0.0  # 0 = greedy


FORMATS = ("hf", "gguf-f32", "gguf-f16", "gguf-q8_0", "gguf-q4_k_m", "ollama", "adapter", "gguf-lora")


@dataclass
class Export:
    stage: str = "best"  # base, sft, grpo, or best = highest accuracy in the last evaluation
    formats: list[str] = field(default_factory=lambda: ["hf"])  # of FORMATS


@dataclass
class Recipe:
    run: str
    model: str
    tasks: dict[str, float]
    seed: int = 42
    agent: Agent = field(default_factory=Agent)
    data: Data = field(default_factory=Data)
    sft: Sft = field(default_factory=Sft)
    grpo: Grpo = field(default_factory=Grpo)
    eval: Eval = field(default_factory=Eval)
    export: Export = field(default_factory=Export)

    data_root: str = "data"
    checkpoint_root: str = "checkpoints"

    @property
    def data_dir(self) -> Path:
        return Path(self.data_root) / self.run

    @property
    def run_dir(self) -> Path:
        return Path(self.checkpoint_root) / self.run

    def to_dict(self) -> dict:
        """The recipe as its YAML: saved beside every result, and runnable again as it is."""
        out = dataclasses.asdict(self)
        for section in ("sft", "grpo"):
            out[section].update(out[section].pop("config"))
        if self.agent.workflow is None:
            del out["agent"]["workflow"]
        return out


TURNS = ("write", "check", "rewrite")  # of the workflow agent

# Decided elsewhere: one source for a value.
_OWNED = {
    "max_completion_length": "agent.max_completion_length",
    "max_tool_calling_iterations": "agent.max_turns",
    "reward_weights": "grpo.rewards (name: weight)",
    "max_length": "data.max_length",
    "output_dir": "run (checkpoints/<run>/<stage>)",
    "seed": "seed",
    "assistant_only_loss": "nothing: loss is on assistant turns, always",
    "gradient_checkpointing": "activation_checkpointing, its name in transformers 5",
    "resume_from_checkpoint": "nothing: every step resumes by itself",
}


def load_recipe(path: str | Path, overrides: list[str] | tuple = ()) -> Recipe:
    """The checked recipe of `path` with `--section.key value` overrides."""
    path = Path(path)
    if not path.is_file():
        known = sorted(str(p) for p in Path("recipes").glob("*.yaml"))
        hint = difflib.get_close_matches(str(path), known, 1, 0.3)
        raise RecipeError(
            f"no recipe '{path}'. {f'Did you mean {hint[0]}? ' if hint else ''}There are: {', '.join(known)}"
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    if isinstance(raw, dict) and isinstance(raw.get("recipe"), dict):
        raw = raw["recipe"]  # a manifest: what has been run can be run again
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} holds {type(raw).__name__}, expected sections such as 'run:', 'model:', 'tasks:'")
    for key, value in _parse_overrides(overrides):
        _assign(raw, key, value)
    recipe = _build(Recipe, raw, str(path))
    recipe.model = os.path.expanduser(recipe.model)
    from core.recipe_checks import check_recipe

    check_recipe(recipe, path)
    return recipe


def load_recipe_args(doc: str, add_arguments=None, default=None) -> tuple[Recipe, argparse.Namespace]:
    """Command line of a step: --config (or default(args)), its own flags, and any recipe key as --section.key VALUE."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", required=not default, metavar="R", help="a recipe, e.g. recipes/demo.yaml")
    if add_arguments:
        add_arguments(parser)
    parser.epilog = "Any recipe key can be overridden: --seed 1 --agent.max_turns 5 --sft.learning_rate 1e-4"
    args, overrides = parser.parse_known_args()
    args.words = shlex.join(
        ["--config", args.config or str(default(args)), *overrides]
    )  # for the next command in errors
    return load_recipe(args.config or default(args), overrides), args


def run_step(main) -> None:
    """Run a step's main(): a user's mistake ends in one line and exit code 1 (2 for usage), not in a traceback."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, RecipeError) else 1)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {_again()} to go on from here", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not _says_disk_full(error):
            if not isinstance(error, OSError) or not error.filename:
                raise
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            sys.exit(1)
        where = getattr(error, "filename", None) or error
        print(f"error: no space left on device ({where}): free some, then {_again()} to go on", file=sys.stderr)
        sys.exit(1)


def _again() -> str:
    """Said to someone whose work is kept: --restart would throw it away."""
    return "run it again without --restart" if "--restart" in sys.argv else "run the same command again"


def positive(text: str) -> int:
    """For argparse: how many of something."""
    if not text.isdecimal() or text == "0":
        raise argparse.ArgumentTypeError(f"a whole number above 0 is needed, found '{text}'")
    return int(text)


def _says_disk_full(error: Exception) -> bool:
    """Python, safetensors and torch each say it in their own way; torch names only the write that fell short."""
    text = str(error)
    return (
        getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or "No space left" in text
        or "PytorchStreamWriter failed" in text
    )


def _parse_overrides(words) -> list[tuple[str, Any]]:
    pairs, words = [], list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise RecipeError(f"unexpected argument '{word}'; an override reads --section.key VALUE")
        key, eq, text = word[2:].partition("=")
        if not eq:
            if not words or words[0].startswith("--"):
                raise RecipeError(f"--{key} needs a value")
            text = words.pop(0)
        pairs.append((key, _yaml_value(text)))
    return pairs


def _yaml_value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(raw: dict, key: str, value: Any) -> None:
    """`sft.learning_rate` or, where only one section can mean it, `learning_rate`."""
    parts = key.replace("-", "_").split(".")
    if len(parts) == 1 and parts[0] not in {f.name for f in dataclasses.fields(Recipe)}:
        known = {s: _section_keys(s) for s in ("agent", "data", "sft", "grpo", "eval", "export")}
        homes = [s for s, keys in known.items() if parts[0] in keys]
        if len(homes) > 1:
            options = ", ".join(f"--{s}.{parts[0]}" for s in homes)
            raise RecipeError(f"--{key} could mean {options}: name one")
        if not homes:
            names = {f.name for f in dataclasses.fields(Recipe)}.union(*known.values())
            raise RecipeError(f"unknown option --{key}.{nearest(parts[0], names)}")
        parts = [homes[0], *parts]
    node = raw
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if node is None or not isinstance(node, dict):
            raise RecipeError(f"--{key}: '{part}' is not a section")
    node[parts[-1]] = value


def _section_keys(section: str) -> set[str]:
    hints = typing.get_type_hints(Recipe)
    keys = {f.name for f in dataclasses.fields(hints[section])} - {"config"}
    return keys | set(trl_fields(section)) if section in ("sft", "grpo") else keys


def nearest(name: str, names) -> str:
    names = sorted(set(names))
    if close := difflib.get_close_matches(name, names, 1, 0.6):
        return f" Did you mean '{close[0]}'?"
    few = len(names) <= 40
    return (
        f" Known: {', '.join(names)}" if few else f" Nearest: {', '.join(difflib.get_close_matches(name, names, 5, 0))}"
    )


def _build(cls, raw: dict, where: str):
    """A dataclass from a mapping, every key and type checked; TRL's own fields go into `config`."""
    if not isinstance(raw, dict):
        raise RecipeError(f"{where}: expected a mapping, found {raw!r}")
    hints, known = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    section = {Sft: "sft", Grpo: "grpo"}.get(cls)
    extra = trl_fields(section) if section else {}
    values, config = {}, {}
    for key, value in raw.items():
        if section and key in _OWNED:
            raise RecipeError(f"{where}.{key}: set by {_OWNED[key]}")
        if key in known and key != "config":
            values[key] = _check_value(hints[key], value, f"{where}.{key}")
        elif key in extra:
            config[key] = _check_trl_value(extra[key], value, f"{where}.{key}")
        else:
            raise RecipeError(
                f"{where}: unknown key '{key}'.{nearest(str(key), [k for k in known if k != 'config'] + list(extra))}"
            )
    if section:
        values["config"] = config
    missing = [
        n
        for n, f in known.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise RecipeError(f"{where}: missing key '{missing[0]}'")
    return cls(**values)


def _check_value(hint, value, where: str):
    if dataclasses.is_dataclass(hint):
        return _build(hint, {} if value is None else value, where)
    if isinstance(hint, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        inner = next((o for o in options if dataclasses.is_dataclass(o)), None)
        if inner:
            return _build(inner, value, where)
        if any(isinstance(value, typing.get_origin(o) or o) for o in options):
            return value
        raise RecipeError(f"{where}: expected {hint}, found {value!r}")
    origin = typing.get_origin(hint)
    if origin is dict:
        inner = typing.get_args(hint)[1]
        if not isinstance(value, dict):
            raise RecipeError(f"{where}: expected a mapping such as {{name: value}}, found {value!r}")
        return {str(k): _check_value(inner, v, f"{where}.{k}") for k, v in value.items()}
    if origin is list:
        items = value if isinstance(value, list) else [value]
        return [_check_value(typing.get_args(hint)[0], v, where) for v in items]
    if hint is Any:
        return value
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{where}: a finite number is needed, found {value}")
    if type(value) is not hint:
        raise RecipeError(f"{where}: expected {hint.__name__}, found {value!r}")
    return value


def _check_trl_value(annotation: str, value, where: str):
    """What the annotation text allows to check; the rest is checked by TRL's own constructor."""
    allowed = {part.strip().split("[")[0] for part in annotation.replace("Optional[", "").replace("]", "").split("|")}
    if isinstance(value, str) and "float" in allowed and "str" not in allowed:
        value = _yaml_value(value)
    names = {bool: {"bool"}, int: {"int", "float"}, float: {"float"}, str: {"str"}, type(None): {"None"}}
    if allowed <= {"bool", "int", "float", "str", "None"} and type(value) in names and not names[type(value)] & allowed:
        raise RecipeError(f"{where}: expected {annotation}, found {value!r}")
    return value
