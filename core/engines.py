"""Where a stage's answers come from: local weights through vLLM or transformers, or a server.

`open_source` gives (tokenizer, temperature -> engine). Weights are loaded when the first engine is asked for, and once.
"""

import functools
import importlib.util
from collections.abc import Callable

from core.config import Recipe, UserError
from core.endpoint import EndpointEngine, to_openai
from core.rollout import TransformersEngine


def open_source(recipe: Recipe, source: str, wanted: str, say: Callable[[str], None] = print) -> tuple:
    """Local weights. `wanted`: vllm, transformers, or auto (vLLM where it is installed and there is a GPU)."""
    from core.models import load_model, load_tokenizer

    tokenizer, kind = load_tokenizer(source), _kind(wanted)

    @functools.cache
    def load():
        say(f"  engine: {kind}")
        if kind == "vllm":
            from core.vllm_engine import load_llm

            return load_llm(source, recipe.data.max_length + recipe.agent.max_completion_length)
        return load_model(source)

    def engine(temperature: float):
        if kind == "vllm":
            from core.vllm_engine import VLLMEngine

            return VLLMEngine(load(), tokenizer, temperature, recipe.seed)
        return TransformersEngine(load(), tokenizer, recipe.eval.batch_size, temperature, recipe.seed)

    return tokenizer, engine


def _kind(wanted: str) -> str:
    import torch

    installed = importlib.util.find_spec("vllm") is not None
    if wanted == "vllm" and not installed:
        raise UserError("--engine vllm: vLLM is not installed here. Run ./step1_env.sh --gpu, or --engine transformers")
    if wanted == "auto":
        return "vllm" if installed and torch.cuda.is_available() else "transformers"
    return wanted


def open_endpoint(recipe: Recipe, url: str, model: str, concurrency: int) -> tuple:
    """A server: it renders and tokenises by itself, so there is no tokenizer."""
    return None, lambda temperature: EndpointEngine(url, model, concurrency, temperature, recipe.seed)


def compare_prompts(recipe: Recipe, url: str, model: str, row: dict, tools: list[dict]) -> str:
    """One line: does the server read a row's prompt with the ids of training?"""
    from core.chat import prompt_ids
    from core.models import load_tokenizer, stage_source
    from core.served import compare_prompt

    try:
        tokenizer = load_tokenizer(stage_source(recipe, "base", say=lambda _: None))
    except (UserError, OSError) as error:
        return f"prompts: not compared with training, as its tokenizer is not here ({error})"
    return compare_prompt(url, model, to_openai(row["prompt"]), tools, prompt_ids(tokenizer, row["prompt"], tools))
