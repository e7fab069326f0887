"""A tiny real model, built in seconds: two Llama layers and a byte-level BPE trained on the mini tasks' own text."""

import json
from pathlib import Path


def build_tiny_model(folder: Path, raw: Path) -> Path:
    """Writes a folder that from_pretrained loads; `raw` is where the mini tasks stand (made if missing)."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tasks import TASKS

    texts = []
    for name in ("mini_sql", "mini_math"):
        TASKS[name].source(str(raw / name))
    for row in json.loads((raw / "mini_sql" / "train_spider.json").read_text())[:300]:
        texts += [row["question"], row["query"]]
    texts += (raw / "mini_math" / "train.jsonl").read_text().splitlines()[:300]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
