"""A KV cache that grows in place. transformers' DynamicCache copies every key and value at every token."""

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64  # tokens allocated ahead


class GrowingLayer(DynamicLayer):
    """One layer's keys and values in a buffer with room; what attention sees are views of its filled part."""

    def __init__(self):
        super().__init__()
        self.key_buffer = self.value_buffer = None

    def update(self, key_states, value_states, *args, **kwargs):
        filled = 0 if self.key_buffer is None else self.keys.shape[-2]
        end = filled + key_states.shape[-2]
        if self.key_buffer is None or end > self.key_buffer.shape[-2]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.key_buffer = _enlarged(self.key_buffer, key_states, filled, end + ROOM)
            self.value_buffer = _enlarged(self.value_buffer, value_states, filled, end + ROOM)
        self.key_buffer[..., filled:end, :] = key_states
        self.value_buffer[..., filled:end, :] = value_states
        self.keys, self.values = self.key_buffer[..., :end, :], self.value_buffer[..., :end, :]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rebuild(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        chosen = indices.tolist()
        if any(source != place and source < len(chosen) for place, source in enumerate(chosen)):
            self._rebuild(lambda buffer: buffer[indices])
            return
        for place, source in enumerate(chosen):  # rows that leave: only those that take their places are copied
            if source != place:
                self.key_buffer[place], self.value_buffer[place] = self.key_buffer[source], self.value_buffer[source]
        self._rebuild(lambda buffer: buffer[: len(chosen)])

    def _rebuild(self, change) -> None:
        end = self.keys.shape[-2]
        self.key_buffer, self.value_buffer = change(self.key_buffer), change(self.value_buffer)
        self.keys, self.values = self.key_buffer[..., :end, :], self.value_buffer[..., :end, :]


def without_gaps(alive: list[int]) -> list[int]:
    """The slots that are alive, ordered so that the last ones take the places of those that have left."""
    there, last = set(alive), [slot for slot in alive if slot >= len(alive)]
    return [slot if slot in there else last.pop() for slot in range(len(alive))]


def _enlarged(buffer, states, filled: int, size: int):
    new = states.new_empty(*states.shape[:-2], size, states.shape[-1])
    if filled:
        new[..., :filled, :] = buffer[..., :filled, :]
    return new


def growing_cache(model) -> DynamicCache:
    """A cache for a model whose layers all attend to everything (Llama, Qwen2, Qwen3 families)."""
    cache = DynamicCache()
    cache.layers = [GrowingLayer() for _ in range(model.config.num_hidden_layers)]
    cache.layer_class_to_replicate = None
    return cache


def rows_of(cache: DynamicCache, rows, mask: torch.Tensor) -> list[torch.Tensor]:
    """What rows have read, without padding: (layers, keys and values, heads, tokens, width) for each."""
    if not len(rows):
        return []
    width = cache.layers[0].keys.shape[-2]
    return [
        torch.stack([torch.stack([x[row][:, shown] for x in (la.keys, la.values)]) for la in cache.layers])
        for row, shown in zip(rows, mask[list(rows), :width].bool(), strict=True)
    ]


def stacked(model, rows: list[torch.Tensor]) -> tuple[DynamicCache, torch.Tensor]:
    """A cache that goes on from such rows, padded on the left, and its mask."""
    cache, width = growing_cache(model), max(row.shape[-2] for row in rows)
    mask = torch.tensor([[0] * (width - row.shape[-2]) + [1] * row.shape[-2] for row in rows], device=rows[0].device)
    for number, layer in enumerate(cache.layers):
        both = rows[0].new_zeros(2, len(rows), *rows[0].shape[2:3], width, rows[0].shape[-1])
        for slot, row in enumerate(rows):
            both[:, slot, :, width - row.shape[-2] :] = row[number]
        layer.update(*both)
    return cache, mask
