"""Facts that predictions start from: the sizes of models and of devices. Nothing is loaded but a config.json."""

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from core.config import RecipeError, UserError

GIB = 2**30


@dataclass(frozen=True)
class Architecture:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one block: (inputs, outputs)."""
        h, q, kv, m = self.hidden, self.queries, self.keys, self.intermediate
        return {
            "q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h),
            "gate_proj": (h, m), "up_proj": (h, m), "down_proj": (m, h),
        }  # fmt: skip

    @property
    def linear(self) -> int:
        """Weights in the linear layers of all blocks: what 4-bit packs and what a token is multiplied with."""
        return self.layers * sum(i * o for i, o in self.matrices.values())

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        small = self.layers * (
            2 * self.hidden
            + (self.queries + 2 * self.keys) * self.qkv_bias
            + 2 * self.head_dim * self.qk_norm
        )  # fmt: skip
        return self.linear + self.embedding * (1 if self.tied else 2) + small + self.hidden

    @classmethod
    def of_config(cls, config: dict) -> "Architecture":
        """From a config.json: exact for llama, qwen2 and qwen3, near for other decoders with the same fields."""
        missing = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"} - set(
            config
        )
        if missing:
            raise UserError(f"memory cannot be predicted: the model's config.json has no {', '.join(sorted(missing))}")
        kind, heads = config.get("model_type"), config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            tied=config.get("tie_word_embeddings", True),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )


# Published sizes of the recipes' models, for machines that have neither the model nor a hub.
ARCHITECTURES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Architecture(576, 1536, 30, 9, 3, 64, 49152),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": Architecture(896, 4864, 24, 14, 2, 64, 151936, qkv_bias=True),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": Architecture(1536, 8960, 28, 12, 2, 128, 151936, qkv_bias=True),
    "Qwen/Qwen2.5-1.5B-Instruct": Architecture(1536, 8960, 28, 12, 2, 128, 151936, qkv_bias=True),
    "Qwen/Qwen2.5-Coder-3B-Instruct": Architecture(2048, 11008, 36, 16, 2, 128, 151936, qkv_bias=True),
    "Qwen/Qwen3-0.6B": Architecture(1024, 3072, 28, 16, 8, 128, 151936, qk_norm=True),
    "meta-llama/Llama-3.2-1B-Instruct": Architecture(2048, 8192, 16, 32, 8, 64, 128256),
    "meta-llama/Llama-3.2-3B-Instruct": Architecture(3072, 8192, 28, 24, 8, 128, 128256),
}


@cache
def architecture(model: str) -> Architecture:
    """Of a local folder, the hub's cache, the table above or the hub, in this order; only config.json is read."""
    from huggingface_hub import hf_hub_download

    from core.models import hub_reachable, in_hub_cache

    if Path(model).is_dir():
        file = Path(model) / "config.json"
    elif in_hub_cache(model):
        file = hf_hub_download(model, "config.json", local_files_only=True)
    elif model in ARCHITECTURES:
        return ARCHITECTURES[model]
    elif not hub_reachable():
        raise UserError(f"sizes of '{model}' are unknown: no folder, not in the hub's cache, no hub reachable")
    else:
        file = hf_hub_download(model, "config.json")
    return Architecture.of_config(json.loads(Path(file).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Device:
    name: str
    gib: float  # what a program can have
    tflops: float = 0.0  # dense bf16 (T4: fp16), 0 = unknown
    bandwidth: float = 0.0  # GB/s
    kind: str = "cuda"
    bf16: bool = True  # native; compute_dtype() of core/models.py takes float32 elsewhere


# From the makers' data sheets; memory as the driver shows it.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Device("T4", 14.6, 65, 300, bf16=False),
        Device("3090", 23.6, 71, 936),
        Device("4090", 23.5, 165, 1008),
        Device("L4", 22.0, 121, 300),
        Device("A10", 22.0, 125, 600),
        Device("L40S", 44.4, 362, 864),
        Device("A100-40", 39.4, 312, 1555),
        Device("A100-80", 79.1, 312, 2039),
        Device("H100", 79.1, 989, 3350),
        Device("H200", 139.8, 989, 4800),
    )
}


def device(name: str | None = None) -> Device:
    """The GPU of that name, else the one found, else this machine's main memory."""
    if name:
        known = {key.lower(): gpu for key, gpu in GPUS.items()}
        wanted = name.lower().replace("rtx", "").replace("nvidia", "").replace("gb", "").strip(" -")
        if wanted not in known:
            raise RecipeError(f"--gpu {name}: known are {', '.join(GPUS)}")
        return known[wanted]
    import torch

    if not torch.cuda.is_available():
        return Device(f"cpu, {os.cpu_count()} cores", host_gib(), kind="cpu")
    card = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
    found, total = card.name, card.total_memory / GIB
    same = [g for key, g in GPUS.items() if key.split("-")[0] in found.replace("-", " ").split()]
    nearest = min(same, key=lambda g: abs(g.gib - total)) if same else Device(found, total)
    return replace(nearest, name=found, gib=total, bf16=torch.cuda.get_device_capability() >= (8, 0))


def host_gib() -> float:
    """Main memory, or a container's own limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text) / GIB) if text.isdigit() else total
