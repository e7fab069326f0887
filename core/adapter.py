"""LoRA adapters on their way out: whose base they belong to, whether they fit it, and one adapter for all that was trained.

GRPO's adapter sits on the merged result of SFT, a base that nobody else has. `combine` joins the adapters of both stages
into one on the model of the recipe: low-rank updates add up exactly when their factors are put side by side.
"""

import json
from pathlib import Path

from core.artifacts import atomic_dir, atomic_file, read_json, read_manifest
from core.config import Recipe, UserError
from core.gguf import KINDS, plan, tensor_shapes, turned
from core.models import adapter_base, model_source

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TOKENS = ".token_adapter.trainable_tokens_delta"  # PEFT: whole rows of an embedding, in place of the base's
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that it takes as --max-lora-rank


def chain(source: Path) -> list[Path]:
    """The adapters between the recipe's model and `source` (an adapter, or the merged folder beside one), oldest first."""
    found, folder = [], Path(source)
    while True:
        if folder.name == "merged":
            folder = folder.parent / "adapter"
        if not (folder / CONFIG).exists():
            raise UserError(
                f"{source} has no adapter: {folder} was trained in all its weights, or is the base. Export hf"
            )
        found.insert(0, folder)
        if Path(read_config(folder)["base_model_name_or_path"]).name != "merged":
            return found
        folder = Path(adapter_base(str(folder)))  # which knows of runs that have been moved


def check_adapter(recipe: Recipe, adapter: Path, base: Path) -> None:
    """UserError if the adapter is not whole, grew on another model than the recipe's, or does not fit `base`."""
    if not (adapter / WEIGHTS).exists():
        raise UserError(f"{adapter} is not a whole adapter: {WEIGHTS} is missing. Choose another checkpoint")
    grown_on = read_config(adapter)["base_model_name_or_path"]
    if Path(grown_on).name == "merged":
        grown_on = adapter_base(str(adapter))  # which knows of runs that have been moved
    while Path(grown_on).name == "merged" and (stage := read_manifest(Path(grown_on).parent)):
        grown_on = stage["base"]
    if (
        grown_on != recipe.model
        and Path(grown_on).resolve() != Path(model_source(recipe.model, lambda _: None)).resolve()
    ):
        raise UserError(
            f"{adapter} was trained on {grown_on}, and model: in this recipe is {recipe.model}. "
            f"Use the recipe it was trained with, or pass --model {grown_on}"
        )
    there = {name: shape for shapes in tensor_shapes(base).values() for name, shape in shapes.items()}
    there.setdefault("lm_head.weight", there.get("model.embed_tokens.weight"))
    rank = read_config(adapter)["r"]
    for name, shape in tensor_shapes(adapter, WEIGHTS)[adapter / WEIGHTS].items():
        module, part, side = _split(name)
        rows, columns = there.get(f"{module}.weight") or (0, 0)
        fits = {
            ".lora_A": shape == [rank, columns], ".lora_B": shape == [rows, rank], TOKENS: shape[-1] == columns
        }.get(part)  # fmt: skip
        if not fits:
            raise UserError(
                f"{adapter} does not fit {base}: {name} is {shape}, {module} of the base is {[rows, columns]}, r is {rank}"
                if fits is not None
                else f"{adapter}: {name} is no part of a LoRA adapter that is known here"
            )


def check_joining(adapters: list[Path]) -> None:
    """UserError if what the adapters change is not only a product of two factors."""
    for folder in adapters:
        config = read_config(folder)
        odd = [
            k for k in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save") if config.get(k)
        ]
        if odd:
            raise UserError(f"{folder} uses {', '.join(odd)}, which cannot be joined into one adapter: export hf")


def has_rows(adapter: Path) -> bool:
    """Whether whole rows of embeddings were trained beside the matrices (tokens that the base has never seen)."""
    return any(_split(name)[1] == TOKENS for name in tensor_shapes(adapter, WEIGHTS)[adapter / WEIGHTS])


def check_rows(adapters: list[Path]) -> None:
    for folder in adapters:
        if has_rows(folder):
            raise UserError(
                f"{folder} has rows of embeddings, which a GGUF adapter cannot hold: export gguf-q8_0 instead of gguf-lora"
            )


def vllm_line(adapter: Path, model: str, name: str) -> str:
    """How vLLM serves the adapter on its base, or why it does not."""
    rank = next((r for r in VLLM_RANKS if r >= read_config(adapter)["r"]), None)
    if has_rows(adapter) or rank is None:
        why = "has rows of embeddings" if rank else f"has a rank above {VLLM_RANKS[-1]}"
        return f"not this adapter, which {why}: serve the format hf"
    return (
        f"vllm serve {model} --enable-lora --max-lora-rank {rank} --lora-modules {name}={adapter} "
        f"--chat-template {adapter / 'chat_template.jinja'} --enable-auto-tool-choice --tool-call-parser hermes"
    )


def combine(adapters: list[Path], base: str, target: Path) -> Path:
    """One PEFT folder on `base`, with rank and effect of all `adapters` together."""
    import torch
    from safetensors.torch import load_file, save_file

    check_joining(adapters)
    configs = [read_config(folder) for folder in adapters]
    parts = [load_file(folder / WEIGHTS) for folder in adapters]
    joined, rows = {}, {}
    for name in sorted({name for part in parts for name in part}):
        module, kind, _ = _split(name)
        if kind == TOKENS:
            continue
        pieces = []
        for config, part in zip(configs, parts, strict=True):
            like = next(p[name] for p in parts if name in p)
            shape = (config["r"], like.shape[1]) if kind == ".lora_A" else (like.shape[0], config["r"])
            piece = part.get(name, torch.zeros(shape, dtype=like.dtype))
            pieces.append(piece * (config["lora_alpha"] / config["r"]) if kind == ".lora_B" else piece)
        joined[name] = torch.cat(pieces, dim=0 if kind == ".lora_A" else 1).contiguous()
    for config, part in zip(configs, parts, strict=True):  # whole rows: the later stage's replace the earlier's
        for name, module, ids in _token_rows(config, part):
            rows.setdefault((name, module), {}).update(zip(ids, part[name], strict=True))
    for (name, _), found in rows.items():
        joined[name] = torch.stack([found[i] for i in sorted(found)])
    rank = sum(config["r"] for config in configs)
    layers = [config.get("layers_to_transform") for config in configs]
    config = configs[0] | {
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({_split(name)[0].rsplit(".", 1)[-1] for name in joined if _split(name)[1] != TOKENS}),
        "layers_to_transform": None if None in layers else sorted({i for some in layers for i in some}),
        "trainable_token_indices": {module: sorted(found) for (_, module), found in rows.items()} or None,
        "inference_mode": True,
    }
    with atomic_dir(target) as tmp:
        save_file(joined, tmp / WEIGHTS, metadata={"format": "pt"})
        (tmp / CONFIG).write_text(json.dumps(config, indent=2))
    return target


def convert_adapter(adapter: Path, base: Path, target: Path) -> Path:
    """The adapter as a GGUF file that llama.cpp adds to the GGUF of `base` (its option --lora)."""
    import gguf
    from safetensors.torch import load_file

    parts, config = load_file(adapter / WEIGHTS), read_config(adapter)
    check_rows([adapter])
    model = plan(base, next(iter(KINDS)))
    places = {tensor.source: tensor for tensor in model.tensors}
    with atomic_file(target, "wb") as out:
        writer = gguf.GGUFWriter(out.name, gguf.MODEL_ARCH_NAMES[model.architecture])
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_name(target.stem)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
        for name, values in sorted(parts.items()):
            module, side, _ = _split(name)
            place = places[f"{module}.weight"]
            if side == ".lora_B":
                values = turned(values, place.head_rows)
            writer.add_tensor(place.name + side.lower(), values.float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target


def read_config(adapter: Path) -> dict:
    return read_json(adapter / CONFIG)


def _split(name: str) -> tuple[str, str, str]:
    """Module of the base, which part of its adapter, the rest."""
    name = name.removeprefix("base_model.model.")
    for part in (".lora_A", ".lora_B", TOKENS):
        if part in name:
            return name.partition(part)
    return name, "", ""


def _token_rows(config: dict, part: dict) -> list[tuple[str, str, list[int]]]:
    """Each tensor of whole rows: its name, the name of its module, and the ids that its rows are for, in their order."""
    indices = config.get("trainable_token_indices") or {}
    if isinstance(indices, list):
        indices = {"embed_tokens": indices}
    found = []
    for name in part:
        if name.endswith(TOKENS):
            module = _split(name)[0].split(".")[-1]
            found.append((name, module, indices[module]))
    return found
