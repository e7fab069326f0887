"""Which engine writes GRPO's rollouts: what the recipe asks for, or the fastest of what this machine has."""

import importlib.util

from core.config import Recipe

SLEEPS = {"vllm_enable_sleep_mode": True}  # vLLM in the trainer's process: its memory is the trainer's while that works


def vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def generation_backend(recipe: Recipe, cuda: bool, vllm: bool | None = None) -> tuple[dict, str]:
    """GRPOConfig fields that choose the engine, and the choice in one sentence. vllm: whether it is installed."""
    vllm = vllm_installed() if vllm is None else vllm
    asked = recipe.grpo.config
    wanted, paged = asked.get("use_vllm"), asked.get("use_transformers_continuous_batching", False)
    mode = asked.get("vllm_mode", "colocate")
    packed = recipe.grpo.load_in_4bit  # TRL 1.16 would hand them over as they are (huggingface/trl, issue 4973)
    usable = vllm and (cuda or mode == "server") and not packed
    if usable and (wanted or (wanted is None and not paged)):
        fields = {"use_vllm": True, "vllm_mode": mode, "use_transformers_continuous_batching": False}
        if mode == "server":
            where = asked.get("vllm_server_base_url") or (
                f"http://{asked.get('vllm_server_host', '0.0.0.0')}:{asked.get('vllm_server_port', 8000)}"
            )
            return fields, f"vLLM at {where} (start it on another GPU with: trl vllm-serve --model <the SFT folder>)"
        fields |= SLEEPS | {k: v for k, v in asked.items() if k in SLEEPS}
        asleep = "asleep during updates" if fields["vllm_enable_sleep_mode"] else "kept in memory"
        return fields, f"vLLM in this process, {asleep}"
    missing = "" if vllm else "vLLM is not installed (./step1_env.sh --gpu installs it)"
    missing = missing or ("vLLM does not take the 4-bit weights that are trained on" if packed else "")
    missing = missing or ("" if usable else "vLLM in the trainer's process needs a CUDA device")
    why = f": {missing}" if wanted and missing else ""
    if paged:
        return {"use_vllm": False}, f"transformers with continuous batching{why}"
    return {"use_vllm": False}, f"transformers, token by token with one cache for what prompts share{why}"
