"""A batch as one sequence in which every token that rows share at their beginning is read once.

The rows of a GRPO group share their prompt, rows of one task their instructions. `pack` lays them out as a tree: the
first row whole, of every other row only what is new, each token at the position it has in its row. Attention gathers
for each row the keys of its whole path and the queries of its new tokens only. The same numbers and gradients as one row
at a time; no padding outside attention. `attend_in_tree` teaches a model the two extra arguments.

Exact for models whose layers all attend to the whole sequence through SDPA (Llama, Qwen2, Qwen3); see `packs_exactly`.
"""

from dataclasses import dataclass

import torch


@dataclass
class Tree:
    input_ids: list[int]
    position_ids: list[int]
    order: list[int]  # the rows as they were laid out, by their number in the order given
    paths: list[list[int]]  # for each row, in the order given: where its tokens stand
    new: list[int]  # for each row, in the order given: how many of its tokens came with it

    def tensors(self, device=None) -> dict:
        """The model's arguments. `tree_paths` is padded with -1 and, like `tree_new`, in the order of the layout."""
        width = max(map(len, self.paths))
        paths = [self.paths[r] + [-1] * (width - len(self.paths[r])) for r in self.order]
        return {
            "input_ids": torch.tensor([self.input_ids], device=device),
            "position_ids": torch.tensor([self.position_ids], device=device),
            "tree_paths": torch.tensor(paths, device=device),
            "tree_new": torch.tensor([self.new[r] for r in self.order], device=device),
        }


def pack(rows: list[list[int]], shareable: list[int]) -> Tree:
    """Lay rows out as a tree; row r may share its first `shareable[r]` tokens, the rest are its own and contiguous.

    The token before the first one that is scored must not be shared: it would have several next tokens.
    """
    order = sorted(range(len(rows)), key=lambda r: rows[r][: shareable[r]])
    tree = Tree([], [], order, [[] for _ in rows], [0] * len(rows))
    path, prefix = [], []
    for r in order:
        row, own = rows[r], rows[r][: shareable[r]]
        common = 0
        while common < min(len(prefix), len(own)) and prefix[common] == own[common]:
            common += 1
        start = len(tree.input_ids)
        path = path[:common] + list(range(start, start + len(row) - common))
        tree.input_ids += row[common:]
        tree.position_ids += range(common, len(row))
        tree.paths[r], tree.new[r], prefix = path, len(row) - common, own
    return tree


def collate(rows: list[dict]) -> dict:
    """SFT's micro-batch as a tree: rows of {"input_ids", "labels"}; what stands before a row's first label is shared."""
    first = [next((i for i, label in enumerate(row["labels"]) if label != -100), 1) for row in rows]
    tree = pack([row["input_ids"] for row in rows], [max(0, i - 1) for i in first])
    labels = [-100] * len(tree.input_ids)
    for row, path in zip(rows, tree.paths, strict=True):
        for place, label in zip(path, row["labels"], strict=True):
            if label != -100:
                labels[place] = label
    return tree.tensors() | {"labels": torch.tensor([labels])}


def packs_exactly(config) -> bool:
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    known = config.model_type in ("llama", "qwen2", "qwen3")
    return known and layers == {"full_attention"} and config._attn_implementation == "sdpa"


def attend_in_tree(model) -> None:
    """Let the model take `tree_paths` and `tree_new` beside input_ids and position_ids."""
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", _attention)  # the same function where no tree is given
    model.base_model.register_forward_pre_hook(_prepare, with_kwargs=True)


def _prepare(module, args, kwargs):
    """Once a forward: what every layer gathers and masks. A query at place p of its row sees the places up to p."""
    paths, new = kwargs.pop("tree_paths", None), kwargs.pop("tree_new", None)
    if paths is not None:
        lengths, step = (paths >= 0).sum(1), torch.arange(int(new.max()), device=paths.device)
        place = ((lengths - new)[:, None] + step).clamp(max=paths.shape[1] - 1)
        place = torch.minimum(place, lengths[:, None] - 1)
        kwargs["tree"] = (paths.gather(1, place), step < new[:, None], paths.clamp(min=0))
        seen = torch.arange(paths.shape[1], device=paths.device) <= place[..., None]
        kwargs["attention_mask"] = seen[:, None]  # (rows, 1, new tokens, path): layers take a 4D mask as it is
    return args, kwargs


def _attention(module, query, key, value, attention_mask, tree=None, **kwargs):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    queries, real, keys = tree

    def rows(x, where):  # (1, heads, tokens, dim) -> (rows, heads, places, dim)
        return x[0].transpose(0, 1)[where].transpose(1, 2)

    out, _ = sdpa_attention_forward(
        module, rows(query, queries), rows(key, keys), rows(value, keys), attention_mask, **kwargs
    )
    return out[real][None], None  # the layout's order again


def score_labelled_positions_only() -> None:
    """TRL's fused head projects every position on a CPU and only those with a label on a GPU: the latter everywhere.

    TRL asks for the device in this one place because some compilers want fixed shapes; eager CPU code does not.
    """
    import trl.trainer.utils as utils

    utils._use_triton = lambda device: True
