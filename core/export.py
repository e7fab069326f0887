"""A stage as files for other programs, each of which speaks as it was trained: safetensors, GGUF, Ollama, adapters.

`export` checks everything that can be checked before it works: the folder, the adapter and its base, the architecture,
the quantisation, the disk. Every file is then whole or absent, and the manifest beside them holds their checksums.
"""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import yaml

from core.adapter import chain, check_adapter, combine, convert_adapter
from core.artifacts import atomic_dir, atomic_file, read_manifest, write_manifest
from core.chat import family_of, template_for
from core.config import FORMATS, Recipe, UserError
from core.gguf import convert, plan, weight_files
from core.models import STAGES, adapter_base, fingerprint, load_tokenizer, save_merged, stage_source
from core.ollama import write_ollama

LICENCES = {  # as the hub's cards of the recipes' bases say; the first that fits counts
    "HuggingFaceTB/SmolLM2": "apache-2.0",
    "Qwen/Qwen2.5-3B": "qwen-research",
    "Qwen/Qwen2.5-Coder-3B": "qwen-research",
    "Qwen/Qwen2.5-72B": "qwen",
    "Qwen/": "apache-2.0",
    "meta-llama/Llama-3.2": "llama3.2",
}


def chosen_stage(recipe: Recipe, stage: str, say=print) -> str:
    """`best` is the stage with the highest accuracy in the last evaluation; anything else is taken as it is."""
    if stage != "best":
        return stage
    summary = recipe.run_dir / "eval" / "summary.json"
    if not summary.exists():
        raise UserError(f"{summary} is missing, so 'best' is unknown. Run step5_eval.py, or pass --export.stage grpo")
    stages = json.loads(summary.read_text(encoding="utf-8"))["stages"]
    own = [s for s in STAGES if s in stages and stages[s]["accuracy"] is not None]  # None: nothing could be judged
    if not own:
        raise UserError(f"{summary} has no accuracy of {', '.join(STAGES)}: run step5_eval.py, or pass --export.stage")
    if stale := [s for s in own if not _measured(recipe, s)]:
        raise UserError(
            f"{summary} measured other weights of {', '.join(stale)} than there are now. Run step5_eval.py again"
        )
    best = max(own, key=lambda s: (stages[s]["accuracy"], STAGES.index(s)))  # of equal ones the later
    found = ", ".join(f"{s} {stages[s]['accuracy']:.1%}" for s in own)
    say(f"best stage of the last evaluation: {best} ({found}; {summary})")
    if missing := [s for s in STAGES if s not in own and read_manifest(recipe.run_dir / s)]:
        say(f"warning: {', '.join(missing)} is trained but not in that evaluation: python step5_eval.py measures it")
    return best


def _measured(recipe: Recipe, stage: str) -> bool:
    """Whether the last evaluation was one of the weights that the stage has now."""
    summary = recipe.run_dir / "eval" / "summary.json"
    weights = json.loads(summary.read_text(encoding="utf-8"))["weights"] if summary.exists() else {}
    return stage in weights and weights[stage] == json.loads(json.dumps(fingerprint(stage_source(recipe, stage))))


def export(recipe: Recipe, stage: str, formats: list[str], folder: Path, say=print) -> dict[str, Path]:
    """Make each of `formats` (and what it is made from) out of a stage or checkpoint folder; returns their paths."""
    source = local(stage_source(recipe, stage))
    base = local(adapter_base(str(source))) if adapter_base(str(source)) else None
    formats = _with_needs(formats)
    made_of = json.loads(json.dumps([fingerprint(str(source)), _settings(recipe)]))
    earlier = _earlier(recipe, folder)
    artifacts = _finished(folder, earlier, made_of)
    if "ollama" in formats and "ollama" in artifacts:
        file = Path(_place(recipe, _served_gguf(formats))).name
        if f"ollama/{file}" not in artifacts["ollama"]["files"]:
            del artifacts["ollama"]  # it holds another quantisation
    _check(recipe, source, base, [name for name in formats if name not in artifacts], folder)
    _remove(folder, earlier, artifacts, say)

    paths = {name: folder / _place(recipe, name) for name in formats}
    makers = {"hf": lambda target: _write_hf(recipe, stage, source, base, target)}
    makers |= {
        n: lambda target, n=n: convert(paths["hf"], target, n.removeprefix("gguf-")) for n in formats if "gguf-" in n
    }
    makers["ollama"] = lambda target: write_ollama(
        paths["hf"], paths[_served_gguf(formats)], target, _num_ctx(recipe), recipe.eval.temperature, _system(recipe)
    )
    makers["adapter"] = lambda target: combine(chain(source), recipe.model, target)
    makers["gguf-lora"] = lambda target: convert_adapter(paths["adapter"], local(stage_source(recipe, "base")), target)
    facts = {"stage": stage, "source": str(source), "made_of": made_of, "artifacts": artifacts}
    for name in formats:
        started = time.time()
        if name in artifacts:
            say(f"{paths[name]} is finished already")
            if name == "hf" and _write_card(recipe, stage, base or source, paths[name]):  # evaluated since
                artifacts[name]["files"]["hf/README.md"] = _checksum(paths[name] / "README.md")
                write_manifest(folder, recipe, [], started, **facts)
            continue
        write_manifest(folder, recipe, [], started, **facts)  # before the work too: it says whose folder this is
        makers[name](paths[name])
        files = {str(f.relative_to(folder)): _checksum(f) for f in _files(paths[name])}
        artifacts[name] = {"seconds": round(time.time() - started, 1), "files": files}
        write_manifest(folder, recipe, [], started, **facts)
        say(
            f"wrote {paths[name]} ({sum(f['bytes'] for f in files.values()) / 1e6:.0f} MB) in {time.time() - started:.0f} s"
        )
    return paths


# --------------------------------------------------------------------------------------------------------- before work


def local(source: str) -> Path:
    """The folder of a model, brought from the hub if it is not here."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", "*.md", "LICENSE*"],
                                  ignore_patterns=["original/*"]))  # fmt: skip


def _with_needs(formats: list[str]) -> list[str]:
    """The formats in the order in which they are made, with those that others are made from."""
    wanted = set(formats)
    if "ollama" in wanted and not any(_served(name) for name in wanted):
        wanted.add("gguf-q8_0")
    if "ollama" in wanted or any(_served(name) for name in wanted):
        wanted.add("hf")
    if "gguf-lora" in wanted:
        wanted.add("adapter")
    return [name for name in FORMATS if name in wanted]


def _served(name: str) -> bool:
    return name.startswith("gguf-") and name != "gguf-lora"


def _served_gguf(formats: list[str]) -> str:
    """Ollama gets the smallest of the GGUF files."""
    return [name for name in formats if _served(name)][-1]


def _place(recipe: Recipe, name: str) -> str:
    return f"gguf/{recipe.run}-{name.removeprefix('gguf-')}.gguf" if name.startswith("gguf-") else name


def _settings(recipe: Recipe) -> dict:
    """What the files depend on beside the weights."""
    templates = [template_for(family, training=False) for family in ("chatml", "llama3")]
    digest = hashlib.sha256("".join(templates).encode()).hexdigest()[:16]
    return {
        "template": digest,
        "temperature": recipe.eval.temperature,
        "num_ctx": _num_ctx(recipe),
        "system": _system(recipe),
    }


def _num_ctx(recipe: Recipe) -> int:
    return recipe.data.max_length + recipe.agent.max_completion_length


def _system(recipe: Recipe) -> str:
    """The system message of this run's prompts, where all have the same."""
    file, found = recipe.data_dir / "eval.jsonl", set()
    if file.exists():
        with open(file, encoding="utf-8") as lines:
            found = {m["content"] for line in lines for m in json.loads(line)["prompt"] if m["role"] == "system"}
    return found.pop() if len(found) == 1 else ""


def _earlier(recipe: Recipe, folder: Path) -> dict:
    """The manifest of an earlier export in `folder`; files that are not of this run are a UserError."""
    manifest = read_manifest(folder)
    if manifest is None or "artifacts" not in manifest:
        if there := sorted(p.name for p in folder.glob("*")):
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


def _finished(folder: Path, earlier: dict, made_of: list) -> dict:
    """What an earlier call has made from the same weights and settings, and is whole."""
    return {
        name: artifact
        for name, artifact in earlier["artifacts"].items()
        if earlier["made_of"] == made_of
        and all((folder / f).exists() and _checksum(folder / f) == was for f, was in artifact["files"].items())
    }


def _remove(folder: Path, earlier: dict, artifacts: dict, say) -> None:
    """Files that would stand beside the new ones as if they were of the same training, and what a crash has left."""
    for left in [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]:
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    if old := [name for name in earlier["artifacts"] if name not in artifacts]:
        say(f"{folder}: {', '.join(old)} of {earlier['source']} are of another stage or settings, or damaged: removed")
    for name in old:
        for file in earlier["artifacts"][name]["files"]:
            (folder / file).unlink(missing_ok=True)


def _check(recipe: Recipe, source: Path, base: Path | None, todo: list[str], folder: Path) -> None:
    """Every reason to stop that can be known before anything is written."""
    if source.name.startswith("checkpoint-") and not (source / "trainer_state.json").exists():
        raise UserError(f"{source} is unfinished: the run died while writing it. Choose another checkpoint")
    if base:
        check_adapter(recipe, source, base)
    if "adapter" in todo:
        chain(source)
    plans = [plan(base or source, n.removeprefix("gguf-")) for n in todo if _served(n)]
    weights = sum(f.stat().st_size for f in weight_files(base or source))
    need = sum(p.nbytes for p in plans)
    if "hf" in todo and (base or not _same_disk(source, folder)):
        need += weights
    free = shutil.disk_usage(_existing(folder)).free
    if need * 1.05 > free:
        raise UserError(
            f"the export needs {need * 1.05 / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free there"
        )


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.absolute().parent)


def _same_disk(source: Path, folder: Path) -> bool:
    return source.stat().st_dev == _existing(folder).stat().st_dev


# ---------------------------------------------------------------------------------------------------------------- work


def _write_hf(recipe: Recipe, stage: str, source: Path, base: Path | None, target: Path) -> None:
    """Merged weights, tokenizer, and the template as other engines read it (without the markers for the loss)."""
    started = time.time()
    tokenizer = load_tokenizer(str(source if (source / "tokenizer_config.json").exists() else base))
    weights, merged = source, target.with_name(".merged.tmp")
    if base:
        save_merged(str(base), source, tokenizer, merged)
        weights = merged
    tokenizer.chat_template = template_for(family_of(tokenizer), training=False)
    with atomic_dir(target) as tmp:
        for file in [*weight_files(weights), *weights.glob("*.safetensors.index.json")]:
            link_or_copy(file, tmp / file.name)
        shutil.copy2(weights / "config.json", tmp)
        for licence in [*(base or source).glob("LICENSE*")]:
            shutil.copy2(licence, tmp)
        tokenizer.save_pretrained(tmp)
        _write_generation_config(tmp, tokenizer, recipe.eval.temperature)
        _write_legacy_keys(tmp)
        _write_card(recipe, stage, base or source, tmp)
        training = {s: read_manifest(recipe.run_dir / s) for s in STAGES}
        write_manifest(tmp, recipe, [], started, stage=stage, source=str(source), training=training)
    shutil.rmtree(merged, ignore_errors=True)


def link_or_copy(file: Path, target: Path) -> None:
    """Weights are not written twice where the disk allows it; nobody changes such a file in place."""
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copy2(file, target)


def _write_generation_config(folder: Path, tokenizer, temperature: float) -> None:
    """Only what training and evaluation did: the base's own file may ask for a repetition penalty or for sampling."""
    from transformers import GenerationConfig

    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    GenerationConfig(**ids, **sampling).save_pretrained(folder)


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


def _write_card(recipe: Recipe, stage: str, base: Path, folder: Path) -> bool:
    """Whether there was something to write."""
    file, text = folder / "README.md", model_card(recipe, stage, base)
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return False
    with atomic_file(file) as out:
        out.write(text)
    return True


def model_card(recipe: Recipe, stage: str, base: Path) -> str:
    """The results, the licence of the base, and how the model was made."""
    report = recipe.run_dir / "eval" / "report.md"
    known = stage not in STAGES or _measured(recipe, stage)  # a checkpoint's card shows the stages'
    results = report.read_text(encoding="utf-8") if report.exists() and known else "Not evaluated.\n"
    how = []
    for name in STAGES:
        if made := read_manifest(recipe.run_dir / name):
            versions = ", ".join(f"{p} {v}" for p, v in made["versions"].items())
            how.append(f"- {name}: {made['steps']} steps in {made['seconds']:.0f} s on {made['device']}, seed {made['seed']}, "
                       f"commit {made['commit'][:12] or 'unknown'}{' (changed)' if made['dirty'] else ''}; {versions}")  # fmt: skip
    licence = licence_of(recipe.model, base)
    head = {"base_model": recipe.model, "pipeline_tag": "text-generation", "library_name": "transformers"}
    head |= (
        {"license": licence}
        if licence in ("apache-2.0", "mit", "llama3.2")
        else {"license": "other", "license_name": licence}
    )
    return (
        f"---\n{yaml.safe_dump(head)}---\n\n# {recipe.run} ({stage})\n\n"
        f"{recipe.model} trained with SixStep on {', '.join(recipe.tasks)}. The licence of the base holds: {licence}.\n"
        "Turns and tool calls (`<tool_call>` with JSON) are those of `chat_template.jinja`, which renders what was trained.\n\n"
        f"## Results\n\n{results}\n## How it was made\n\n" + "\n".join(how or ["- not trained"]) + "\n\n"
        f"```yaml\n{yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True)}```\n"
    )


def licence_of(model: str, base: Path) -> str:
    """From the card in the base's folder, else from the list above."""
    card = base / "README.md"
    if card.exists() and (parts := card.read_text(encoding="utf-8").split("---\n", 2))[0] == "" and len(parts) == 3:
        head = yaml.safe_load(parts[1]) or {}
        if head.get("license"):
            return head.get("license_name") or head["license"]
    return next((name for prefix, name in LICENCES.items() if model.startswith(prefix)), f"see {model}")


def how_to_use(words: str, paths: dict[str, Path], about: str) -> list[str]:
    """The commands that come next, one line a format. `about`: chat.py's option for what to talk about."""
    lines = []
    for name, path in paths.items():
        if name == "hf":
            lines.append(f"talk to it:  python chat.py {words} --stage {path} {about}")
            lines.append(f"vLLM:        vllm serve {path} --enable-auto-tool-choice --tool-call-parser hermes")
        elif name == "ollama":
            lines.append(
                f"Ollama:      ollama create {paths[_served_gguf(list(paths))].stem.lower()} -f {path / 'Modelfile'}"
            )
        elif _served(name):
            lines.append(f"llama.cpp:   python -m core.llama_server {path}")
    return lines


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _checksum(path: Path) -> dict:
    with open(path, "rb") as f:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}
