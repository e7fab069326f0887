"""Decoding with a transformers model where many rows share most of their prompt: a GRPO group, questions of one database.

What a cluster of rows has in common is read once and its keys and values are copied to the rows; a row that is done
leaves the batch; keys and values grow in place (core/kv_cache.py). The same numbers as `model.generate`, several times
sooner on CPU. `fast_generate` stands in for `model.generate` in TRL's rollouts: there an adapter is part of the weights
while it writes, and the second turn of an episode goes on from the keys and values of the first.
"""

import contextlib

from core.kv_cache import growing_cache, rows_of, stacked, without_gaps


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
    with _weights_first() if ids.device.type == "cpu" and ids.numel() <= 128 else contextlib.nullcontext():
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


@contextlib.contextmanager
def adapter_in_weights(model):
    """Float32 weights with LoRA added, one product a layer instead of three; the weights themselves come back as they were."""
    import torch
    from peft.tuners.lora import Linear

    alone = []
    with torch.no_grad():
        for layer in model.modules():
            if not isinstance(layer, Linear) or layer.disable_adapters or layer.merged:
                continue
            weight = layer.base_layer.weight
            if type(weight.data) is torch.Tensor and weight.dtype == torch.float32:  # neither quantised nor sharded
                alone.append((layer, weight.data))
                weight.data = sum((layer.get_delta_weight(name) for name in layer.active_adapters), weight.data)
                layer.merged_adapters = list(layer.active_adapters)
    try:
        yield
    finally:
        for layer, data in alone:
            layer.base_layer.weight.data, layer.merged_adapters = data, []


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

    `generate.logprobs` holds, for each row of the last call, the log-probabilities of the tokens it has written. Keys and
    values are kept for a call that goes on from all of them, until then or `generate.forget()`.
    """
    import torch

    original, kept = model.generate, []  # kept: (ids, keys and values) of each row of the last call
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
        beginnings = [next((k for k in kept if _begins(p, k[0])), None) for p in prompts]
        kept.clear()

        def leave(slots):
            done = rows_of(cache, slots, mask)
            kept.extend((prompts[rows[s]] + written[rows[s]][:-1], d) for s, d in zip(slots, done, strict=True))

        with torch.no_grad(), adapter_in_weights(model):
            if None in beginnings:
                logits, mask, cache = read_prompts(model, prompts, pad)
            else:
                cache, mask = stacked(model, [states for _, states in beginnings])
                rests = [p[len(k) :] for p, (k, _) in zip(prompts, beginnings, strict=True)]
                ids, rest_mask = _left_padded(rests, pad, model.device)
                mask = torch.cat([mask, rest_mask], dim=1)
                logits = forward(model, ids, mask, cache)
            del beginnings
            while True:
                tokens = sample(logits, temperature)
                chosen = (logits.float() / (temperature or 1.0)).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
                for row, token, logprob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
                    written[row].append(token)
                    logprobs[row].append(logprob)
                alive = [slot for slot, row in enumerate(rows) if written[row][-1] not in eos_ids]
                alive = alive if len(written[rows[0]]) < config.max_new_tokens else []
                if not alive:
                    break
                if len(alive) < len(rows):
                    leave([slot for slot in range(len(rows)) if slot not in alive])
                    alive = without_gaps(alive)
                    keep = torch.tensor(alive, device=mask.device)
                    cache.batch_select_indices(keep)
                    mask, tokens, rows = mask[keep], tokens[keep], [rows[slot] for slot in alive]
                mask = torch.cat([mask, mask.new_ones((len(rows), 1))], dim=1)
                logits = forward(model, tokens[:, None], mask, cache)
            leave(range(len(rows)))
        generate.logprobs = logprobs
        width = max(len(w) for w in written)
        new = torch.tensor([w + [pad] * (width - len(w)) for w in written], device=input_ids.device)
        return torch.cat([input_ids, new], dim=1)

    generate.forget = kept.clear
    return generate


def _begins(prompt: list[int], ids: list[int]) -> bool:
    return len(ids) < len(prompt) and prompt[: len(ids)] == ids


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
