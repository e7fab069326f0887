"""Decoding with a transformers model where many rows share most of their prompt: a GRPO group, questions of one database.

What a cluster of rows has in common is read once and its keys and values are copied to the rows; a row that is done
leaves the batch; keys and values grow in place (core/kv_cache.py). The same numbers as `model.generate`, several times
sooner on CPU. `fast_generate` stands in for `model.generate` in TRL's rollouts.
"""

import contextlib

from core.kv_cache import growing_cache


def read_prompts(model, prompts: list[list[int]], pad: int):
    """(logits of the next token, attention mask, cache) after the prompts, in their order."""
    import torch

    device = model.device
    clusters = _clusters(prompts)
    owner = {row: c for c, (rows, _) in enumerate(clusters) for row in rows}
    prefixes = [prompts[rows[0]][:shared] for rows, shared in clusters]
    rests = [p[len(prefixes[owner[row]]) :] for row, p in enumerate(prompts)]
    cache = growing_cache(model)
    ids, mask = _left_padded(prefixes, pad, device)
    if ids.shape[1]:
        forward(model, ids, mask, cache)
        rows = torch.tensor([owner[row] for row in range(len(prompts))], device=device)
        cache.batch_select_indices(rows)
        mask = mask[rows]
    else:
        mask = mask.new_ones((len(prompts), 0))
    ids, rest_mask = _left_padded(rests, pad, device)
    mask = torch.cat([mask, rest_mask], dim=1)
    return forward(model, ids, mask, cache), mask, cache


def forward(model, ids, mask, cache):
    """Logits after the last of `ids`; padding may stand anywhere, positions count what the mask shows."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with _weights_first() if ids.device.type == "cpu" and ids.numel() <= 64 else contextlib.nullcontext():
        return model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


@contextlib.contextmanager
def _weights_first():
    """Multiply few rows as (W x^T)^T: the CPU library shares out the rows of its first factor among the cores."""
    import torch.nn.functional as F

    linear = F.linear

    def weights_first(x, weight, bias=None):
        y = weight.mm(x.reshape(-1, x.shape[-1]).t()).t().contiguous().view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    F.linear = weights_first
    try:
        yield
    finally:
        F.linear = linear


def sample(logits, temperature: float, generator=None, points: list[float] | None = None):
    """One token a row; temperature 0 is greedy. `points`: the rows' own random numbers from [0, 1)."""
    import torch

    if temperature == 0:
        return logits.argmax(-1)
    # one random number a row against the running sum: torch.multinomial draws one for every entry of the vocabulary
    total = torch.softmax(logits.double() / temperature, dim=-1).cumsum(-1)
    if points is None:
        at = torch.rand((len(logits), 1), dtype=total.dtype, device=logits.device, generator=generator)
    else:
        at = torch.tensor(points, dtype=total.dtype, device=logits.device)[:, None]
    return torch.searchsorted(total, at * total[:, -1:], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def fast_generate(model, eos_ids: list[int], pad: int):
    """A function with the signature of `model.generate`, for the settings that GRPO samples with.

    `generate.logprobs` holds, for each row of the last call, the log-probabilities of the tokens it has written.
    """
    import torch

    original = model.generate
    plain = set(getattr(model.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}

    def generate(input_ids=None, attention_mask=None, generation_config=None, **kwargs):
        config = generation_config
        filtered = config.top_k or (config.top_p or 1.0) < 1 or config.min_p or (config.repetition_penalty or 1.0) != 1
        generate.logprobs = None
        if not plain or kwargs.keys() - {"disable_compile"} or filtered:
            return original(input_ids, attention_mask=attention_mask, generation_config=config, **kwargs)
        temperature = config.temperature if config.do_sample else 0.0
        prompts = [i[m.bool()].tolist() for i, m in zip(input_ids, attention_mask, strict=True)]
        rows, written, logprobs = list(range(len(prompts))), [[] for _ in prompts], [[] for _ in prompts]
        with torch.no_grad():
            logits, mask, cache = read_prompts(model, prompts, pad)
            for _ in range(config.max_new_tokens):
                tokens = sample(logits, temperature)
                chosen = (logits.float() / (temperature or 1.0)).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
                for row, token, logprob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
                    written[row].append(token)
                    logprobs[row].append(logprob)
                alive = [slot for slot, row in enumerate(rows) if written[row][-1] not in eos_ids]
                if not alive:
                    break
                if len(alive) < len(rows):
                    keep = torch.tensor(alive, device=mask.device)
                    cache.batch_select_indices(keep)
                    mask, tokens, rows = mask[keep], tokens[keep], [rows[slot] for slot in alive]
                mask = torch.cat([mask, mask.new_ones((len(rows), 1))], dim=1)
                logits = forward(model, tokens[:, None], mask, cache)
        generate.logprobs = logprobs
        width = max(len(w) for w in written)
        new = torch.tensor([w + [pad] * (width - len(w)) for w in written], device=input_ids.device)
        return torch.cat([input_ids, new], dim=1)

    return generate


def _left_padded(rows: list[list[int]], pad: int, device):
    import torch

    width = max(len(r) for r in rows)
    ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows], dtype=torch.long, device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], dtype=torch.long, device=device)
    return ids.view(len(rows), width), mask.view(len(rows), width)


def _clusters(prompts: list[list[int]]) -> list[tuple[list[int], int]]:
    """(rows, tokens they share) for neighbours in sorted order that share at least half; each row keeps one token."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    clusters: list[tuple[list[int], int]] = []
    for row in order:
        prompt = prompts[row]
        if clusters:
            rows, shared = clusters[-1]
            common = _common(prompts[rows[0]][:shared], prompt[:-1])
            if 2 * common >= len(prompt):
                clusters[-1] = ([*rows, row], common)
                continue
        clusters.append(([row], len(prompt) - 1))
    return clusters


def _common(a: list[int], b: list[int]) -> int:
    most = min(len(a), len(b))
    return next((n for n in range(most) if a[n] != b[n]), most)
