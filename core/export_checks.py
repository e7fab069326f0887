"""Every reason why an export cannot work that can be known before it works, and what an earlier one has left in its folder."""

import hashlib
import math
import shutil
from collections import Counter
from pathlib import Path

from core.adapter import chain, check_adapter, check_joining, check_rows
from core.artifacts import read_json, read_manifest
from core.config import Recipe, UserError
from core.gguf import check_vocabulary, plan, tensor_shapes, weight_files
from core.models import compute_dtype, load_tokenizer, stage_source
from core.ollama import modelfile

REPORTS = ("verify.md", "verify.jsonl")  # of --verify, which tell of the files beside them


def check(
    recipe: Recipe, source: Path, base: Path | None, todo: list[str], folder: Path, freed: int, facts: dict
) -> None:
    """`todo`: the formats that are to be made; `freed`: bytes that the old files give back; `facts`: what they depend on."""
    if source.name.startswith("checkpoint-") and not (source / "trainer_state.json").exists():
        raise UserError(f"{source} is unfinished: the run died while writing it. Choose another checkpoint")
    if base:
        check_adapter(recipe, source, base)
    else:
        _check_model(recipe, source)
    if "adapter" in todo:
        check_joining(chain(source))
    if "gguf-lora" in todo:
        check_rows(chain(source))
        plan(local(stage_source(recipe, "base")), "f16")
    if "ollama" in todo:
        modelfile("chatml", "", facts["num_ctx"], facts["temperature"], facts["system"])
    load_tokenizer(str(tokenizer_folder(source, base)))
    plans = [plan(base or source, n.removeprefix("gguf-")) for n in todo if is_model(n)]
    if plans:
        check_vocabulary(tokenizer_folder(source, base), plans[0].config.vocab_size)
    tensor_shapes(base or source)  # every shard is there, and none was cut short
    need = sum(p.nbytes for p in plans)
    if "hf" in todo and base:
        need += merged_bytes(base)
    elif "hf" in todo and not _same_disk(source, folder):
        need += sum(f.stat().st_size for f in weight_files(source))
    free = shutil.disk_usage(existing(folder)).free + freed
    if need * 1.05 > free:
        raise UserError(
            f"the export needs {need * 1.05 / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free there"
            f"{f', {freed / 1e9:.1f} of them in old files' if freed else ''}: make room, or pass --output on another disk"
        )


def local(source: str) -> Path:
    """The folder of a model, brought from the hub if it is not here."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.md", "LICENSE*"],
                                  ignore_patterns=["original/*"]))  # fmt: skip


def is_model(name: str) -> bool:
    """Whether the format is a GGUF file of the whole model."""
    return name.startswith("gguf-") and name != "gguf-lora"


def tokenizer_folder(source: Path, base: Path | None) -> Path:
    return source if base is None or (source / "tokenizer_config.json").exists() else base


def merged_bytes(base: Path) -> int:
    """Of the merged weights, which are saved in the type that they are computed in, whatever the base's is."""
    shapes = tensor_shapes(base).values()
    return sum(math.prod(shape) for shard in shapes for shape in shard.values()) * compute_dtype().itemsize


def _check_model(recipe: Recipe, source: Path) -> None:
    """Whole weights that a step has left tell in the manifest beside them which model they grew on."""
    made = read_manifest(source.parent)
    if not made or "steps" not in made:
        return
    grown_on, run = (made["recipe"][key] for key in ("model", "run"))
    if grown_on != recipe.model and Path(grown_on).resolve() != Path(recipe.model).resolve():
        raise UserError(
            f"{source} was trained on {grown_on} (run '{run}'), and model: in this recipe is {recipe.model}. "
            f"Use the recipe of '{run}', or pass --model {grown_on}"
        )
    if Path(grown_on).is_dir() and (Path(grown_on) / "config.json").exists():
        now, was = (read_json(folder / "config.json").get("architectures") for folder in (source, Path(grown_on)))
        if now != was:
            raise UserError(
                f"{source} is a {now}, and {grown_on}, which it was trained on, a {was}: another model's files"
            )


def check_folder(folder: Path) -> None:
    if not (there := existing(folder)).is_dir():
        raise UserError(f"{folder} cannot be the export's folder: {there} is a file. Pass another --output DIR")


def existing(folder: Path) -> Path:
    return folder if folder.exists() else existing(folder.absolute().parent)


def _same_disk(source: Path, folder: Path) -> bool:
    return source.stat().st_dev == existing(folder).stat().st_dev


# ------------------------------------------------------------------------------------------------- what is there already


def earlier_export(recipe: Recipe, folder: Path) -> dict:
    """The manifest of an earlier export in `folder`; files that are not of this run are a UserError."""
    manifest = read_manifest(folder)
    if manifest is None or "artifacts" not in manifest:
        if there := sorted(p.name for p in folder.glob("*") if p not in leftovers(folder)):
            raise UserError(
                f"{folder} holds {', '.join(there)}, not written by this step: move that, or pass --output DIR"
            )
        return {"artifacts": {}, "made_of": None}
    for key in ("run", "model"):
        if manifest["recipe"][key] != getattr(recipe, key):
            raise UserError(
                f"{folder} is the export of another run ({key} {manifest['recipe'][key]}, now {getattr(recipe, key)}): "
                "pass --output DIR, or remove it"
            )
    return manifest


def finished(folder: Path, earlier: dict, made_of: list) -> dict:
    """What an earlier call has made from the same weights and settings, and is whole."""
    return {
        name: artifact
        for name, artifact in earlier["artifacts"].items()
        if earlier["made_of"] == made_of
        and all((folder / f).exists() and checksum(folder / f) == was for f, was in artifact["files"].items())
    }


def outdated(folder: Path, earlier: dict, artifacts: dict) -> list[Path]:
    """Files that would stand beside the new ones as if they were of the same training."""
    old = [files["files"] for name, files in earlier["artifacts"].items() if name not in artifacts]
    return [folder / file for files in old for file in files if (folder / file).exists()]


def leftovers(folder: Path) -> list[Path]:
    """What a killed export has left."""
    return [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]


def clear_leftovers(folder: Path) -> None:
    for left in leftovers(folder):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def freed_bytes(files: list[Path]) -> int:
    """What their removal gives back to the disk: nothing for a file that has another name elsewhere."""
    stats = [f.stat() for f in files]
    names = Counter((s.st_dev, s.st_ino) for s in stats)
    return sum({(s.st_dev, s.st_ino): s.st_size for s in stats if names[s.st_dev, s.st_ino] == s.st_nlink}.values())


def remove_outdated(folder: Path, earlier: dict, artifacts: dict, formats: list[str], say) -> None:
    if old := [name for name in earlier["artifacts"] if name not in artifacts]:
        say(f"{folder}: {', '.join(old)} of {earlier['source']} are of another stage or settings, or damaged: removed")
    for file in outdated(folder, earlier, artifacts):
        file.unlink()
    if old or any(name not in artifacts for name in formats):
        for name in REPORTS:
            (folder / name).unlink(missing_ok=True)


def checksum(path: Path) -> dict:
    with open(path, "rb") as f:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
