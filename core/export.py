"""The winner as files that other programs load: a plain Hugging Face folder that speaks as it was trained."""

import json
import shutil
import time
from pathlib import Path

from core.artifacts import atomic_dir, write_manifest
from core.chat import family_of, template_for
from core.config import Recipe, UserError
from core.models import STAGES, load_tokenizer, stage_source


def chosen_stage(recipe: Recipe, stage: str) -> str:
    """`best` is the stage with the highest accuracy in the last evaluation."""
    if stage != "best":
        if stage not in STAGES:
            raise UserError(f"export.stage is '{stage}'; it can be best, {', '.join(STAGES)}")
        return stage
    summary = recipe.run_dir / "eval" / "summary.json"
    if not summary.exists():
        raise UserError(f"{summary} is missing, so 'best' is unknown. Run step5_eval.py, or pass --export.stage grpo")
    stages = json.loads(summary.read_text())["stages"]
    own = [s for s in STAGES if s in stages]
    if not own:
        raise UserError(f"{summary} holds {', '.join(stages)}, none of {', '.join(STAGES)}: pass --export.stage")
    return max(own, key=lambda s: (stages[s]["accuracy"] or 0.0, STAGES.index(s)))


def export_hf(recipe: Recipe, stage: str, target: Path) -> Path:
    """The stage's merged weights with the template as other engines read it (without the markers for the loss)."""
    started, source = time.time(), stage_source(recipe, stage)
    tokenizer = load_tokenizer(source)
    if not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        source = snapshot_download(source)
    tokenizer.chat_template = template_for(family_of(tokenizer), training=False)
    with atomic_dir(target) as tmp:
        for file in sorted(Path(source).iterdir()):
            if file.name.endswith((".safetensors", ".index.json")) or file.name in (
                "config.json",
                "generation_config.json",
            ):
                shutil.copy2(file, tmp / file.name)
        tokenizer.save_pretrained(tmp)
        _write_legacy_keys(tmp)
        (tmp / "README.md").write_text(model_card(recipe, stage), encoding="utf-8")
        write_manifest(tmp, recipe, [], started, stage=stage, source=str(source))
    return target


def _write_legacy_keys(folder: Path) -> None:
    """Servers on transformers 4 read rope_theta at the top and know no 'TokenizersBackend': write the old keys too."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters")
    if rope and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False))


def model_card(recipe: Recipe, stage: str) -> str:
    report = recipe.run_dir / "eval" / "report.md"
    table = report.read_text(encoding="utf-8") if report.exists() else "Not evaluated.\n"
    return (
        f"---\nbase_model: {recipe.model}\npipeline_tag: text-generation\n---\n\n# {recipe.run} ({stage})\n\n"
        f"{recipe.model} trained with SixStep on {', '.join(recipe.tasks)}. The licence of the base model applies.\n"
        "Turns are ChatML, tools are called as `<tool_call>` JSON; `chat_template.jinja` renders exactly what was trained.\n\n"
        f"{table}\nmanifest.json holds the recipe, versions and inputs of this run.\n"
    )
