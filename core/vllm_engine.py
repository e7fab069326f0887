"""Episodes through vLLM in this process: token ids in, token ids out, all episodes of a chunk in every round.

Prefix caching reads each conversation once, however many turns it has. Not yet run on a GPU.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from core.rollout import Episode, accept_all, stream_of

CHUNK = 512  # episodes between two progress lines; an interrupted evaluation loses at most one chunk


_loaded = []  # the one LLM of this process


def load_llm(source: str, context: int):
    """vLLM with the weights of a folder, in place of the last; an adapter is merged into a temporary folder first."""
    from vllm import LLM

    from core.models import adapter_base, compute_dtype, load_tokenizer, save_merged

    if _loaded:
        _loaded.pop().llm_engine.engine_core.shutdown()  # ends its process, which gives the GPU's memory back
    options = {"max_model_len": context, "enable_prefix_caching": True, "dtype": str(compute_dtype()).split(".")[-1]}
    base = adapter_base(source)
    if base is None:
        _loaded.append(LLM(source, **options))
        return _loaded[0]
    with tempfile.TemporaryDirectory() as folder:
        save_merged(base, Path(source), load_tokenizer(source), Path(folder) / "merged")
        _loaded.append(LLM(str(Path(folder) / "merged"), **options))
    return _loaded[0]


class VLLMEngine:
    def __init__(self, llm, tokenizer, temperature: float = 0.0, seed: int = 0):
        self.llm, self.tokenizer, self.temperature, self.seed = llm, tokenizer, temperature, seed

    def play(self, episodes: list[Episode]) -> Iterator[list[Episode]]:
        order = sorted(episodes, key=lambda e: e.prompt_ids)
        for start in range(0, len(order), CHUNK):
            chunk, began = order[start : start + CHUNK], time.perf_counter()
            active = chunk
            while active:
                active = self._turn(active)
            for episode in chunk:
                episode.seconds = (time.perf_counter() - began) / len(chunk)
            yield chunk

    def _turn(self, active: list[Episode]) -> list[Episode]:
        """One turn of each episode; returns those that go on."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": e.prompt_ids + e.completion_ids} for e in active]
        params = [
            SamplingParams(
                temperature=self.temperature,
                max_tokens=e.budget,
                stop_token_ids=[self.tokenizer.eos_token_id],
                seed=stream_of(self.seed, e).getrandbits(31) if self.temperature else None,
                detokenize=False,
            )
            for e in active
        ]
        turns = []
        for e, prompt, out in zip(active, prompts, self.llm.generate(prompts, params, use_tqdm=False), strict=True):
            assert list(out.prompt_token_ids) == prompt["prompt_token_ids"], f"vLLM changed the ids of {e.row['id']}"
            turns.append(list(out.outputs[0].token_ids))
        return [e for e, suffix in zip(active, accept_all(active, turns), strict=True) if suffix is not None]
