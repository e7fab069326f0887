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
def test_a_second_turn_goes_on_from_the_first_and_the_adapter_counts(model):
    import copy

    from peft import LoraConfig, get_peft_model
    from transformers import GenerationConfig

    from core import decode

    torch.manual_seed(1)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules=["q_proj", "up_proj"])).eval()
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.3)
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompts, read, real = [[5, 6, 7, 8], [5, 6, 7, 9, 9], [5, 6, 7, 8]], [], decode.forward

    def counted(model, ids, mask, cache):
        read.append(mask[:, -ids.shape[1] :].sum().item())
        return real(model, ids, mask, cache)

    decode.forward = counted
    try:
        eos = by_transformers(adapted, prompts[0], 9, None)[5]
        generate = decode.fast_generate(adapted, [eos], 0)
        for turn in range(3):
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            read.clear()
            out = generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
            for n, (prompt, row) in enumerate(zip(prompts, out, strict=True)):
                want = by_transformers(adapted, prompt, 9, eos)
                assert row[: len(want)] == want
                prompts[n] = [*prompt, *want, 11 + n, 12, 13][: 40 + n]  # a tool's result of another length each
            assert turn == 0 or read[0] == 12  # the last token written and the result, not the whole conversation
        assert all(torch.equal(p, before[name]) for name, p in adapted.named_parameters())
        with adapted.disable_adapter():
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            out = generate(input_ids=ids, attention_mask=(ids > 0).long(), generation_config=config)[0, width:]
            want = by_transformers(adapted, prompts[0], 9, eos)
            assert out.tolist()[: len(want)] == want
    finally:
        decode.forward = real


@pytest.mark.slow
def test_sampling_follows_the_model(model):
    from core.decode import sample

    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20000, 1)
    counts = torch.bincount(sample(logits, 1.0, torch.Generator().manual_seed(0)), minlength=3) / 20000
    assert torch.allclose(counts, torch.softmax(torch.tensor([0.0, 1.0, 2.0]), -1), atol=0.015)
