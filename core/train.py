"""What SFT and GRPO have in common: trainer arguments from a recipe, one progress line a step, resume, and the end."""

import itertools
import json
import os
import shutil
import time
from pathlib import Path

from transformers import PrinterCallback, TrainerCallback, TrainerState

from core import fit
from core.artifacts import atomic_file, file_hash, read_manifest, write_manifest
from core.config import Recipe, RecipeError, UserError, nearest
from core.health import Alarms, Measure, cut_log
from core.models import compute_dtype, save_merged
from core.ranks import on_main, one_log, world


def common_arguments(recipe: Recipe, folder: Path) -> dict:
    """What every trainer of ours is told, whatever the recipe: one source for each of these values."""
    import torch

    return {
        "output_dir": str(folder),
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "bf16": compute_dtype() == torch.bfloat16,
        "use_cpu": not torch.cuda.is_available(),
        "run_name": f"{recipe.run}-{folder.name}",
        "disable_tqdm": True,
        "logging_first_step": True,
    }


DEFAULTS = {
    "logging_steps": 1,
    "report_to": "tensorboard",
    "save_total_limit": 2,
    "dataloader_pin_memory": False,
    "activation_checkpointing": True,
}


def arguments(kind, stage: str, config: dict):
    """TRL's own configuration; what it refuses is a mistake in the recipe, said before anything is touched."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        made = kind(**config)
        get_reporting_integration_callbacks(made.report_to)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise RecipeError(f"{stage}: {str(error).strip().splitlines()[0]}") from error
    if getattr(made, "loss_type", "") and stage == "grpo" and made.loss_type not in LOSS_TYPES:
        raise RecipeError(f"grpo.loss_type '{made.loss_type}'.{nearest(made.loss_type, LOSS_TYPES)}")
    return made


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")  # trl 1.16
SHOWN_OR_KEPT = ("report_to", "logging_steps", "logging_dir", "run_name", "save_total_limit")  # change no weights


def experiment(recipe: Recipe, stage: str, inputs: list, **more) -> dict:
    """What the weights of a stage hang on; files count by their content, wherever they are."""
    now = fit.whatever_fits(recipe.to_dict())
    section = {k: v for k, v in now[stage].items() if k not in SHOWN_OR_KEPT}
    if stage == "grpo" or not recipe.sft.accuracy_rows:  # which else choose SFT's checkpoint
        section = {k: v for k, v in section.items() if k not in ("accuracy_rows", "save_steps", "save_strategy")}
    model = Path(recipe.model)
    asked = {"model": str(model.resolve()) if model.exists() else recipe.model, "seed": recipe.seed}
    asked |= {"agent": now["agent"], stage: section}
    return asked | {f"{p.parent.name}/{p.name}": file_hash(p) for p in inputs} | more


@on_main
def is_finished(folder: Path, asked: dict, restart: bool = False, say=print) -> bool:
    """A stage with a manifest is whole. What was made, or begun, as another `experiment` is said and set aside.

    `experiment.json` is written when a stage begins, so that a half-done one resumes only as the same experiment.
    """
    if restart:
        shutil.rmtree(folder, ignore_errors=True)
    path, manifest = folder / "experiment.json", read_manifest(folder)
    made = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    changed = [k for k in asked if made.get(k) != asked[k]] if made is not None else []
    if changed and any(p != path for p in folder.iterdir()):  # a start that was refused has left nothing to keep
        aside = next(p for n in itertools.count(1) if not (p := folder.with_name(f"{folder.name}.before-{n}")).exists())
        say(f"{folder} was made with another {', '.join(changed)}: set aside as {aside}, starting anew")
        folder.rename(aside)
    elif manifest is not None:
        say(f"{folder} is finished already (made in {manifest['seconds']:.0f} s); --restart makes it again")
        return True
    if made is None or changed:
        with atomic_file(path) as f:
            json.dump(asked, f, indent=1, ensure_ascii=False)
    return False


def train(trainer, folder: Path) -> None:
    """trainer.train() from the newest checkpoint; where that holds the last step already, it is read and no step is made."""
    checkpoint = last_checkpoint(folder)
    if checkpoint and world() == 1 and 0 < trainer.args.max_steps:
        state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
        if state.global_step >= trainer.args.max_steps:
            trainer._load_from_checkpoint(checkpoint)  # transformers would make one step before it looks
            trainer.state = state
            if trainer.args.load_best_model_at_end and state.best_model_checkpoint:
                trainer._load_best_model()
            return
    trainer.train(resume_from_checkpoint=checkpoint)


@on_main
def last_checkpoint(folder: Path, say=print) -> str | None:
    """The newest checkpoint that is whole. One that a crash cut short is removed, and said."""
    numbered = [p for p in folder.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
    found = sorted(numbered, key=lambda p: int(p.name.split("-")[1]), reverse=True)
    for checkpoint in found:
        processes = len(list(checkpoint.glob("rng_state*.pth")))  # one file for each
        if processes not in (0, world()) and not any(len(list(c.glob("rng_state*.pth"))) == world() for c in found):
            raise UserError(
                f"{checkpoint} was written by {processes} process{'es' if processes > 1 else ''}, this run has {world()}: "
                f"go on with the same number. If the run died while writing it: rm -r {checkpoint}"
            )
        if _is_whole(checkpoint):
            say(f"resuming from {checkpoint}")
            return str(checkpoint)
        say(f"{checkpoint} is not whole (the run died while writing it): removed, trying the one before")
        shutil.rmtree(checkpoint)
    return None


def _is_whole(checkpoint: Path) -> bool:
    """Weights, optimizer and random state readable: the trainer writes `trainer_state.json` before the last of them."""
    import torch
    from safetensors import safe_open

    weights = list(checkpoint.glob("*.safetensors"))
    state = ["rng_state.pth"] if world() == 1 else [f"rng_state_{n}.pth" for n in range(world())]
    if (checkpoint / "latest").exists():  # DeepSpeed writes it after the shards of all processes
        return all((checkpoint / name).exists() for name in (*state, "trainer_state.json"))
    optimizer = "optimizer.bin" if (checkpoint / "optimizer.bin").exists() else "optimizer.pt"  # the former by FSDP
    names = ("trainer_state.json", optimizer, "scheduler.pt", *state)
    if not weights or not all((checkpoint / n).exists() for n in names):
        return False
    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
        for file in weights:
            with safe_open(file, "pt") as f:
                f.keys()
        for name in names[1:]:
            torch.load(checkpoint / name, map_location="cpu", weights_only=False, mmap=name == optimizer)
    except Exception:  # any unreadable file, however it fails, is what this function reports
        return False
    return True


def trackers(folder: Path, report_to) -> None:
    """Weights & Biases goes online if there is a key, and else writes into the stage's folder (`wandb sync` sends it later)."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    if not {"wandb", "all"} & set(names):
        return
    netrc = Path.home() / ".netrc"
    key = os.environ.get("WANDB_API_KEY") or (netrc.exists() and "wandb" in netrc.read_text())
    os.environ.setdefault("WANDB_MODE", "online" if key else "offline")
    os.environ.setdefault("WANDB_PROJECT", "sixstep")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_DIR", str(folder))


def quiet() -> None:
    """Leave out what the user cannot act on: the libraries' notes to themselves and a second set of progress lines."""
    import logging
    import warnings

    from transformers.utils import logging as transformers_logging

    one_log()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers|trl|peft")
    transformers_logging.disable_progress_bar()
    # a step without episodes of an environment has no mean of its rewards; tensorboard's writer complains of each
    board = logging.getLogger("transformers.integrations.integration_utils")
    board.addFilter(lambda record: "attempting to log a value of" not in record.getMessage())


def speak(trainer, folder: Path, columns: dict[str, str], held_out_rows: int = 0) -> None:
    """Our one line a step, with alarms, instead of the trainer's dictionaries."""
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Measure(trainer))
    trainer.add_callback(Progress(folder, columns | HEALTH, Alarms(held_out_rows)))


HEALTH = {"tokens_per_second": "tokens/s", "memory_gib": "GiB"}


class Progress(TrainerCallback):
    """One compact line a logging step with an estimate of the end, the same numbers in metrics.jsonl, and the alarms."""

    def __init__(self, folder: Path, columns: dict[str, str], alarms: Alarms):
        self.path, self.columns, self.alarms = folder / "metrics.jsonl", columns, alarms
        self.began, self.first = time.time(), 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.first = time.time(), state.global_step
        if state.is_world_process_zero:
            for record in cut_log(self.path, state.global_step):
                self.alarms.update(record)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        alarms = self.alarms.update(logs)
        record = {"step": state.global_step, "time": round(time.time(), 1), **logs}
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(record | ({"alarms": alarms} if alarms else {})) + "\n")
        shown = [
            f"{label} {logs[key]:.3g}" for key, label in self.columns.items() if isinstance(logs.get(key), int | float)
        ]
        if shown:
            done = max(1, state.global_step - self.first)
            left = (time.time() - self.began) / done * (state.max_steps - state.global_step)
            print(f"  step {state.global_step}/{state.max_steps}  {'  '.join(shown)}  {left:.0f} s left", flush=True)
        for line in alarms:
            print(line, flush=True)


def finish(
    recipe: Recipe, folder: Path, trainer, tokenizer, source: str, inputs: list, started: float, ids: list[int], **facts
) -> None:
    """Save the adapter, merge it into the unquantised base, check that on the real row `ids`, and write the manifest last."""
    facts |= {"processes": trainer.accelerator.num_processes, "memory": fit.compared(recipe, folder.name)}
    adapter = hasattr(trainer.model, "peft_config")
    trainer.save_model(str(folder / ("adapter" if adapter else "trained")))  # by all: sharded weights are put together
    facts["steps"] = trainer.state.global_step
    _publish(recipe, folder, tokenizer, source, adapter, inputs, started, ids, **facts)


@on_main
def _publish(
    recipe: Recipe, folder: Path, tokenizer, source: str, adapter: bool, inputs: list, started: float, ids, **facts
) -> None:
    if adapter:
        facts |= save_merged(source, folder / "adapter", tokenizer, folder / "merged", ids)
        print(f"merged into {source}: mean |log-probability| gap to base plus adapter {facts['merge_gap']:.2g}, "
              f"to the base alone {facts['merge_moved']:.2g}")  # fmt: skip
        if not facts["merge_moved"]:
            print("WARNING: nothing was learnt: the adapter is as it was at the start (no step had a gradient)")
    else:
        facts |= save_merged(str(folder / "trained"), None, tokenizer, folder / "merged", ids)
        shutil.rmtree(folder / "trained")
    write_manifest(folder, recipe, inputs, started, base=source, **facts)
    print(f"wrote {folder}/merged and {folder}/manifest.json in {time.time() - started:.0f} s")
