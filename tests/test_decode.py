"""The fast decoder against transformers' own `generate`, on a tiny real model: same tokens, whatever the batch shares."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    ).eval()


def by_transformers(model, prompt, new, eos):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                         eos_token_id=eos, pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 6, 7, 8]] * 4,  # a GRPO group
        [[5, 6, 7, 8, 9], [5, 6, 7, 1], [9, 9], [5, 6, 7, 8, 9, 10, 11, 12]],  # clusters of different lengths
        [[3], [4, 4, 4]],  # nothing shared, one token only
        [[2, 3, 4, 5], [2, 3, 4]],  # one prompt is the beginning of another
    ],
)
def test_same_tokens_as_generate(model, prompts):
    from transformers import GenerationConfig

    from core.decode import fast_generate

    eos = by_transformers(model, prompts[0], 6, None)[
        3
    ]  # a token that some row does write: rows end at different times
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=0)
    out = fast_generate(model, [eos], 0)(input_ids=ids, attention_mask=mask, generation_config=config)[
        :, width:
    ].tolist()
    for prompt, row in zip(prompts, out, strict=True):
        want = by_transformers(model, prompt, 12, eos)
        assert row[: len(want)] == want and set(row[len(want) :]) <= {0}


@pytest.mark.slow
def test_sampling_follows_the_model(model):
    from core.decode import sample

    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20000, 1)
    counts = torch.bincount(sample(logits, 1.0, torch.Generator().manual_seed(0)), minlength=3) / 20000
    assert torch.allclose(counts, torch.softmax(torch.tensor([0.0, 1.0, 2.0]), -1), atol=0.015)
