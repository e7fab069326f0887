"""A stage as files for other programs, each of which speaks as it was trained: safetensors, GGUF, Ollama, adapters.

`export` checks everything that can be checked before it works (core/export_checks.py): the folder, the adapter and its
base, architecture, tokenizer, disk. Every file is then whole or absent, and the manifest beside them holds their checksums.
"""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

from core.adapter import chain, combine, convert_adapter, vllm_line
from core.artifacts import atomic_dir, read_manifest, write_manifest
from core.card import TEXTS, licence_folder, measured, trainings, write_card
from core.chat import FAMILIES, family_of, template_for
from core.config import FORMATS, Recipe, UserError
from core.export_checks import (
    check,
    check_folder,
    checksum,
    clear_leftovers,
    earlier_export,
    finished,
    freed_bytes,
    is_model,
    local,
    outdated,
    remove_outdated,
    tokenizer_folder,
)
from core.gguf import convert, weight_files
from core.llama_server import NUM_CTX
from core.models import STAGES, adapter_base, fingerprint, load_tokenizer, save_merged, stage_source
from core.ollama import modelfile, write_ollama

FILES = 2  # what a folder holds; counted up, so that folders of an older version of this step are made again
LIBRARIES = {"hf": "transformers", "adapter": "peft"}  # formats with a card, and what loads them


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
    if stale := [s for s in own if not measured(recipe, s)]:
        raise UserError(
            f"{summary} measured other weights of {', '.join(stale)} than there are now. Run step5_eval.py again"
        )
    best = max(own, key=lambda s: (stages[s]["accuracy"], STAGES.index(s)))  # of equal ones the later
    found = ", ".join(f"{s} {stages[s]['accuracy']:.1%}" for s in own)
    say(f"best stage of the last evaluation: {best} ({found}; {summary})")
    if missing := [s for s in STAGES if s not in own and read_manifest(recipe.run_dir / s)]:
        say(f"warning: {', '.join(missing)} is trained but not in that evaluation: python step5_eval.py measures it")
    return best


def export(recipe: Recipe, stage: str, formats: list[str], folder: Path, say=print) -> dict[str, Path]:
    """Make each of `formats` (and what it is made from) out of a stage or checkpoint folder; returns their paths."""
    source = local(stage_source(recipe, stage))
    base = local(adapter_base(str(source))) if adapter_base(str(source)) else None
    formats, settings = _with_needs(formats), _settings(recipe)
    made_of = json.loads(json.dumps([fingerprint(str(source)), settings]))
    check_folder(folder)
    earlier = earlier_export(recipe, folder)
    clear_leftovers(folder)
    artifacts = finished(folder, earlier, made_of)
    if "ollama" in formats and "ollama" in artifacts:
        file = Path(_place(recipe, _served_gguf(formats))).name
        if f"ollama/{file}" not in artifacts["ollama"]["files"]:
            del artifacts["ollama"]  # it holds another quantisation
    todo = [name for name in formats if name not in artifacts]
    check(recipe, source, base, todo, folder, freed_bytes(outdated(folder, earlier, artifacts)), settings)
    remove_outdated(folder, earlier, artifacts, formats, say)
    if (own := trainings(source)) and (run := list(own.values())[-1]["recipe"]["run"]) != recipe.run:
        say(f"warning: {source} is of run '{run}', and is exported under the name of run '{recipe.run}'")

    paths = {name: folder / _place(recipe, name) for name in formats}
    card = (stage, source, licence_folder(recipe, base or source))
    makers = {"hf": lambda target: _write_hf(recipe, card, base, target)}
    makers |= {
        n: lambda target, n=n: convert(paths["hf"], target, n.removeprefix("gguf-")) for n in formats if "gguf-" in n
    }
    makers["ollama"] = lambda target: write_ollama(
        paths["hf"], paths[_served_gguf(formats)], target, num_ctx(recipe), recipe.eval.temperature, settings["system"]
    )
    makers["adapter"] = lambda target: _write_adapter(recipe, card, base, target)
    makers["gguf-lora"] = lambda target: convert_adapter(paths["adapter"], local(stage_source(recipe, "base")), target)
    facts = {"stage": stage, "source": str(source), "made_of": made_of, "artifacts": artifacts}
    for name in formats:
        started = time.time()
        if name in artifacts:
            say(f"{paths[name]} is finished already")
            if name in LIBRARIES and write_card(recipe, *card, paths[name], LIBRARIES[name]):  # evaluated since
                artifacts[name]["files"][f"{name}/README.md"] = checksum(paths[name] / "README.md")
                write_manifest(folder, recipe, [], started, **facts)
            continue
        write_manifest(folder, recipe, [], started, **facts)  # before the work too: it says whose folder this is
        makers[name](paths[name])
        files = {str(f.relative_to(folder)): checksum(f) for f in _files(paths[name])}
        artifacts[name] = {"seconds": round(time.time() - started, 1), "files": files}
        write_manifest(folder, recipe, [], started, **facts)
        say(
            f"wrote {paths[name]} ({sum(f['bytes'] for f in files.values()) / 1e6:.0f} MB) in {time.time() - started:.0f} s"
        )
    return paths


# --------------------------------------------------------------------------------------------------------- before work


def _with_needs(formats: list[str]) -> list[str]:
    """The formats in the order in which they are made, with those that others are made from."""
    wanted = set(formats)
    if "ollama" in wanted and not any(is_model(name) for name in wanted):
        wanted.add("gguf-q8_0")
    if "ollama" in wanted or any(is_model(name) for name in wanted):
        wanted.add("hf")
    if "gguf-lora" in wanted:
        wanted.add("adapter")
    return [name for name in FORMATS if name in wanted]


def _served_gguf(formats: list[str]) -> str:
    """Ollama gets the smallest of the GGUF files."""
    return [name for name in formats if is_model(name)][-1]


def _place(recipe: Recipe, name: str) -> str:
    return f"gguf/{recipe.run}-{name.removeprefix('gguf-')}.gguf" if name.startswith("gguf-") else name


def _settings(recipe: Recipe) -> dict:
    """What the files depend on beside the weights."""
    texts = [
        template_for(family, training=False) + modelfile(family, "", 0, recipe.eval.temperature) for family in FAMILIES
    ]
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()[:16]
    return {
        "files": FILES,
        "template": digest,
        "temperature": recipe.eval.temperature,
        "num_ctx": num_ctx(recipe),
        "system": _system(recipe),
    }


def num_ctx(recipe: Recipe) -> int:
    """Tokens of the longest conversation."""
    return recipe.data.max_length + recipe.agent.max_completion_length


def _system(recipe: Recipe) -> str:
    """The system message of this run's prompts, where all have the same."""
    file, found = recipe.data_dir / "eval.jsonl", set()
    if file.exists():
        with open(file, encoding="utf-8") as lines:
            found = {m["content"] for line in lines for m in json.loads(line)["prompt"] if m["role"] == "system"}
    return found.pop() if len(found) == 1 else ""


# ---------------------------------------------------------------------------------------------------------------- work


def _write_hf(recipe: Recipe, card: tuple, base: Path | None, target: Path) -> None:
    """Merged weights, tokenizer, template and card."""
    started, (stage, source, _) = time.time(), card
    tokenizer = load_tokenizer(str(tokenizer_folder(source, base)))
    weights, merged = source, target.with_name(".merged.tmp")
    if base:
        save_merged(str(base), source, tokenizer, merged)
        weights = merged
    with atomic_dir(target) as tmp:
        for file in [*weight_files(weights), *weights.glob("*.safetensors.index.json")]:
            link_or_copy(file, tmp / file.name)
        shutil.copy2(weights / "config.json", tmp)
        _write_generation_config(tmp, tokenizer, recipe.eval.temperature)
        _write_legacy_config(tmp)
        _write_beside(recipe, card, tokenizer, tmp, "hf")
        write_manifest(tmp, recipe, [], started, stage=stage, source=str(source), training=trainings(source))
    shutil.rmtree(merged, ignore_errors=True)


def _write_adapter(recipe: Recipe, card: tuple, base: Path | None, target: Path) -> None:
    with atomic_dir(target) as tmp:
        combine(chain(card[1]), recipe.model, tmp)
        _write_beside(recipe, card, load_tokenizer(str(tokenizer_folder(card[1], base))), tmp, "adapter")


def _write_beside(recipe: Recipe, card: tuple, tokenizer, folder: Path, name: str) -> None:
    """Tokenizer, the template as other engines read it (without the markers for the loss), licence and card."""
    tokenizer.chat_template = template_for(family_of(tokenizer), training=False)
    tokenizer.save_pretrained(folder)
    _write_legacy_tokenizer(folder)
    for text in [file for pattern in TEXTS for file in card[2].glob(pattern)]:
        shutil.copy2(text, folder)
    write_card(recipe, *card, folder, LIBRARIES[name])


def link_or_copy(file: Path, target: Path) -> None:
    """Weights are not written twice where the disk allows it; nobody changes such a file in place."""
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copy2(file, target)


def _write_generation_config(folder: Path, tokenizer, temperature: float) -> None:
    """Only what training and evaluation did: the base's own file may ask for a repetition penalty or for sampling."""
    from transformers import GenerationConfig

    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    GenerationConfig(**ids, **sampling).save_pretrained(folder)


def _write_legacy_config(folder: Path) -> None:
    """Servers on transformers 4 read rope_theta at the top: write the old key too."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters")
    if rope and "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        (folder / "config.json").write_text(json.dumps(config, indent=2))


def _write_legacy_tokenizer(folder: Path) -> None:
    """Servers on transformers 4 know no 'TokenizersBackend'."""
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False))


def how_to_use(recipe: Recipe, words: str, paths: dict[str, Path], about: str) -> list[str]:
    """The commands that come next, one line a format. `about`: chat.py's option for what to talk about."""
    lines, long = [], f" --num_ctx {num_ctx(recipe)}" if num_ctx(recipe) > NUM_CTX else ""
    for name, path in paths.items():
        if name == "hf":
            lines.append(f"talk to it:  python chat.py {words} --stage {path} {about}")
            lines.append(f"vLLM:        vllm serve {path} --enable-auto-tool-choice --tool-call-parser hermes")
        elif name == "ollama":
            lines.append(
                f"Ollama:      ollama create {paths[_served_gguf(list(paths))].stem.lower()} -f {path / 'Modelfile'}"
            )
        elif name == "adapter":
            lines.append(f"vLLM, LoRA:  {vllm_line(path, recipe.model, recipe.run)}")
        elif is_model(name):
            lines.append(f"llama.cpp:   python -m core.llama_server {path}{long}")
    return lines


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
