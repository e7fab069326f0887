"""What goes beside exported weights: the model card, with results and licence, and the texts of the licence itself."""

import json
from pathlib import Path

import yaml

from core.artifacts import atomic_file, read_json, read_manifest
from core.config import Recipe, UserError
from core.models import STAGES, fingerprint, stage_source

LICENCES = {  # as the hub's cards of the recipes' bases say; the first that fits counts
    "HuggingFaceTB/SmolLM2": "apache-2.0",
    "Qwen/Qwen2.5-3B": "qwen-research",
    "Qwen/Qwen2.5-Coder-3B": "qwen-research",
    "Qwen/Qwen2.5-72B": "qwen",
    "Qwen/": "apache-2.0",
    "meta-llama/Llama-3.2": "llama3.2",
}
TEXTS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def measured(recipe: Recipe, stage: str) -> bool:
    """Whether the last evaluation was one of the weights that the stage has now."""
    summary = recipe.run_dir / "eval" / "summary.json"
    weights = read_json(summary).get("weights", {}) if summary.exists() else {}  # older evaluations do not name them
    return stage in weights and weights[stage] == json.loads(json.dumps(fingerprint(stage_source(recipe, stage))))


def licence_folder(recipe: Recipe, otherwise: Path) -> Path:
    """Where card and licence of the recipe's model stand: its folder, or the hub's, of which only these are fetched."""
    try:
        source = stage_source(recipe, "base", say=lambda _: None)
    except UserError:
        return otherwise
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["README.md", *TEXTS]))
    except OSError:  # not reachable, and not in the cache
        return otherwise


def licence_of(model: str, base: Path) -> str:
    """From the card in the base's folder, else from the list above."""
    card = base / "README.md"
    if card.exists() and (parts := card.read_text(encoding="utf-8").split("---\n", 2))[0] == "" and len(parts) == 3:
        head = yaml.safe_load(parts[1]) or {}
        if head.get("license"):
            return head.get("license_name") or head["license"]
    return next((name for prefix, name in LICENCES.items() if model.startswith(prefix)), f"see {model}")


def trainings(source: Path) -> dict[str, dict]:
    """The manifests of what led to the weights in `source`, oldest first; empty for a base."""
    found, folder = {}, source
    while (made := read_manifest(folder.parent)) and "steps" in made:
        name = folder.parent.name if folder.name == "merged" else f"{folder.parent.name}/{folder.name}"
        found = {name: made} | found
        sibling = folder.parent.parent / "sft" / "merged"  # of a run that has been moved
        folder = Path(made["base"])
        if folder.name == "merged" and not folder.exists() and sibling.exists():
            folder = sibling
    return found


def write_card(recipe: Recipe, stage: str, source: Path, base: Path, folder: Path, library: str) -> bool:
    """Whether there was something to write."""
    file, text = folder / "README.md", model_card(recipe, stage, source, base, library)
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return False
    with atomic_file(file) as out:
        out.write(text)
    return True


def model_card(recipe: Recipe, stage: str, source: Path, base: Path, library: str = "transformers") -> str:
    """The results, the licence of the base, and how the model was made. `base` holds card and licence of the recipe's model."""
    report = recipe.run_dir / "eval" / "report.md"
    known = stage in STAGES and measured(
        recipe, stage
    )  # what a checkpoint or a folder of another run does is not known
    results = report.read_text(encoding="utf-8") if report.exists() and known else "Not evaluated.\n"
    how, made_by = [], recipe.to_dict()
    for name, made in trainings(source).items():
        versions = ", ".join(f"{p} {v}" for p, v in made["versions"].items())
        how.append(f"- {name}: {made['steps']} steps in {made['seconds']:.0f} s on {made['device']}, seed {made['seed']}, "
                   f"commit {made['commit'][:12] or 'unknown'}{' (changed)' if made['dirty'] else ''}; {versions}")  # fmt: skip
        made_by = made["recipe"]
    trained = f" trained with SixStep on {', '.join(made_by['tasks'])}" if how else ""
    licence = licence_of(recipe.model, base)
    head = {"base_model": recipe.model, "pipeline_tag": "text-generation", "library_name": library}
    head |= (
        {"license": licence}
        if licence in ("apache-2.0", "mit", "llama3.2")
        else {"license": "other", "license_name": licence}
    )
    return (
        f"---\n{yaml.safe_dump(head)}---\n\n# {recipe.run} ({stage})\n\n"
        f"{recipe.model}{trained}. The licence of the base holds: {licence}.\n"
        "Turns and tool calls (`<tool_call>` with JSON) are those of `chat_template.jinja`, which renders what was trained.\n\n"
        f"## Results\n\n{results}\n## How it was made\n\n" + "\n".join(how or ["- not trained here"]) + "\n\n"
        f"```yaml\n{yaml.safe_dump(made_by, sort_keys=False, allow_unicode=True)}```\n"
    )
