"""The tree: every row's numbers and gradients are those of the row alone, and shared tokens stand there once."""

import random

import pytest
import torch

from core.tree import attend_in_tree, collate, pack


def test_shared_beginnings_stand_once():
    rows = [[1, 2, 3, 4, 9, 9], [1, 2, 7, 8], [5, 6, 7], [1, 2, 3, 4, 9, 8]]
    tree = pack(rows, [4, 3, 2, 4])
    assert [[tree.input_ids[i] for i in path] for path in tree.paths] == rows
    assert [[tree.position_ids[i] for i in path] for path in tree.paths] == [list(range(len(r))) for r in rows]
    assert len(tree.input_ids) == 4 + 2 + 2 + 2 + 3
    assert tree.paths[0][:4] == tree.paths[3][:4] and tree.paths[0][4] != tree.paths[3][4]  # the same 9, but its own


@pytest.mark.parametrize("seed", range(20))
def test_every_token_stands_once_and_comes_with_the_row_that_brought_it(seed):
    rng = random.Random(seed)
    rows = [[rng.randrange(2) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 7))]
    tree = pack(rows, [rng.randint(0, len(row) - 1) for row in rows])
    assert [[tree.input_ids[i] for i in path] for path in tree.paths] == rows
    brought = [i for r in tree.order for i in tree.paths[r][len(rows[r]) - tree.new[r] :]]
    assert brought == list(range(len(tree.input_ids)))


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    attend_in_tree(model)
    return model


def test_a_batch_as_a_tree_has_the_loss_and_gradients_of_its_rows_alone(model):
    rng = random.Random(1)
    prompts = [[rng.randrange(50) for _ in range(12)] for _ in range(2)]
    rows = []
    for n in range(6):
        tail = [rng.randrange(50) for _ in range(rng.randint(2, 9))]
        ids = prompts[n % 2] + tail
        rows.append({"input_ids": ids, "labels": [-100] * 12 + [t if rng.random() < 0.8 else -100 for t in tail]})

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def total(batch):
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], ignore_index=-100, reduction="sum")

    one_by_one = sum(total({k: torch.tensor([v]) for k, v in row.items()}) for row in rows)
    batch = collate(rows)
    assert batch["input_ids"].shape[1] < sum(len(row["input_ids"]) for row in rows) - 4 * 11 + 1
    as_tree = total(batch)
    torch.testing.assert_close(as_tree, one_by_one)
    torch.testing.assert_close(gradient(as_tree), gradient(one_by_one), rtol=1e-4, atol=1e-5)
