"""GGUF files against their readers: transformers (weights, bit for bit) and llama.cpp itself (tokens, greedy text)."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from core.config import UserError
from core.gguf import CUTS, convert, plan
from tests.gguf_strings import PIECES, strings

ROPE3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64}  # fmt: skip
MODELS = {  # name: (configuration, how text is cut, what differs from the shape below)
    "smollm2": ("LlamaConfig", "smollm", {}),
    "llama-3.2": ("LlamaConfig", "llama-bpe", {"rope_parameters": ROPE3, "head_dim": 32}),
    "qwen2.5": ("Qwen2Config", "qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", "qwen2", {"head_dim": 128}),
}


def build_tokenizer(cut: str):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors, trainers
    from tokenizers import pre_tokenizers as cuts
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(ignore_merges=cut == "llama-bpe"))
    last = cuts.ByteLevel(add_prefix_space=False, use_regex=cut == "smollm")
    if cut == "smollm":
        first = cuts.Digits(individual_digits=True)
    else:
        first = cuts.Split(Regex({v: k for k, v in CUTS.items()}[cut]), "isolated")
    tokenizer.pre_tokenizer = cuts.Sequence([first, last])
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=special,
        initial_alphabet=cuts.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(strings([], 900), trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    bos = "<|begin|>" if cut == "llama-bpe" else None
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def build(folder, name: str, **changes):
    """A model of the family with random weights, as step 6 leaves it: config, generation_config, tokenizer, template."""
    import torch
    import transformers

    config_name, cut, differences = MODELS[name]
    tokenizer = build_tokenizer(cut)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True}  # fmt: skip
    config = getattr(transformers, config_name)(
        vocab_size=len(tokenizer) + 3, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, **(shape | differences | changes),
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # larger than at a model's birth, so that positions and biases matter
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.25)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture(scope="module", params=MODELS)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *build(folder, request.param)


def test_transformers_reads_the_weights_back_bit_for_bit(made, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, model, tokenizer = made
    convert(folder, tmp_path / "m.gguf", "f32")
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").state_dict()
    for name, weight in model.state_dict().items():
        assert np.array_equal(back[name].numpy(), weight.numpy()), name
    assert AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf").chat_template == tokenizer.chat_template
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


class Engine:
    """llama.cpp's own server in this process, on one thread."""

    def __init__(self, path, lora=None):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.port = str(path), 512, 1, False, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.verbosity = 1
        if lora:
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(lora), 1.0)]
        self.server = xllamacpp.Server(params)

    def post(self, route: str, **body):
        request = urllib.request.Request(
            self.server.listening_address + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())

    def tokens(self, text: str) -> list[int]:
        return self.post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def greedy(self, ids: list[int], n: int) -> list[int]:
        """With the file's own sampling defaults, and past any end token."""
        reply = self.post(
            "/completion", prompt=ids, n_predict=n, return_tokens=True, ignore_eos=True, cache_prompt=False
        )
        return reply["tokens"]


def greedy(model, ids: list[int], n: int) -> list[int]:
    import torch

    ended = model.config.eos_token_id
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=n, do_sample=False, suppress_tokens=[ended], pad_token_id=1
        )
    return out[0, len(ids) :].tolist()


@pytest.mark.slow
def test_llama_cpp_reads_the_same_tokens_and_writes_the_same_text(made, tmp_path):
    """A wrong row order, RoPE, bias, norm or cut of text changes the text of a model with random weights at once."""
    folder, model, tokenizer = made
    engine = Engine(convert(folder, tmp_path / "m.gguf", "f32"))
    texts = strings(tokenizer.all_special_tokens)
    assert len(texts) >= 500
    assert [t for t in texts if engine.tokens(t) != tokenizer(t).input_ids] == []
    for text in (" ".join(PIECES[:60]), "SELECT name FROM customer", "列出所有姓名", "12 apples"):
        ids = tokenizer(text).input_ids
        assert engine.greedy(ids, 24) == greedy(model, ids, 24)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m"])
def test_smaller_kinds_hold_the_same_model(made, tmp_path, kind):
    """llama.cpp loads them, and the weights that they stand for are near: by 2^-11, by 1/254, by about 1/16 of a block."""
    import gguf

    folder, model, tokenizer = made
    path = convert(folder, tmp_path / "m.gguf", kind)
    assert len(Engine(path).greedy(tokenizer("SELECT").input_ids, 8)) == 8
    exact = {t.name: t.data for t in gguf.GGUFReader(convert(folder, tmp_path / "x.gguf", "f32")).tensors}
    limit = {"f16": 2**-10, "q8_0": 1 / 200, "q4_k_m": 1 / 10}[kind]
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.abs(values - exact[tensor.name]).max() <= limit * np.abs(exact[tensor.name]).max(), tensor.name
    assert path.stat().st_size < (tmp_path / "x.gguf").stat().st_size


@pytest.fixture
def tiny(tmp_path):
    build(tmp_path / "m", "qwen3")
    return tmp_path / "m"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_cannot_become_a_gguf_is_said_before_anything_is_written(tiny, tmp_path):
    with pytest.raises(UserError, match="no kind of GGUF.*q4_k_m"):
        plan(tiny, "q3_k")
    weights = tiny / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="is not whole"):
        plan(tiny, "f16")
    weights.unlink()
    with pytest.raises(UserError, match="model.safetensors is missing"):
        convert(tiny, tmp_path / "out" / "m.gguf", "f16")
    assert not (tmp_path / "out").exists()
    weights.write_bytes(whole)
    config = (tiny / "config.json").read_text()
    for changes, says in (
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*known: Llama"),
        ({"num_hidden_layers": 4, "layer_types": None}, "tensors are missing.*layers.3"),
        ({"vocab_size": 5000}, "has no place"),
        ({"hidden_act": "gelu"}, "activation is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "RoPE is of type 'yarn'"),
        ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, "unquantised base"),
    ):
        edit(tiny / "config.json", **changes)
        with pytest.raises(UserError, match=says):
            plan(tiny, "f16")
        (tiny / "config.json").write_text(config)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (tiny / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="no tokenizer that cuts text.*Whitespace"):
        convert(tiny, tmp_path / "m.gguf", "f16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


def test_rows_that_do_not_divide_into_blocks_are_refused(tmp_path):
    build(tmp_path, "smollm2", intermediate_size=72)
    for kind in ("q8_0", "q4_k_m"):
        with pytest.raises(UserError, match=rf"gguf-{kind} needs rows that are a multiple of 32.*rows of 72"):
            plan(tmp_path, kind)
    assert plan(tmp_path, "f16")


MEASURED = """
import re, sys
from pathlib import Path
from core.gguf import convert

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

small, large, out, kind = sys.argv[1:]
convert(Path(small), Path(out), kind)  # everything is imported and loaded once
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: it is the parent's otherwise
before = status("VmRSS")
convert(Path(large), Path(out), kind)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
@pytest.mark.parametrize("kind", ["f16", "q4_k_m"])
def test_memory_holds_one_shard_whatever_the_model_s_size(tmp_path, kind):
    """Five shards of 128 MB: what the conversion adds to the process is at most 1.2 times one of them."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    large = tmp_path / "large"
    _, tokenizer = build(tmp_path / "small", "smollm2")
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5, "vocab_size": len(tokenizer)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**wide, tie_word_embeddings=True), dtype=torch.bfloat16)
    for weight in model.to_empty(device="cpu").state_dict().values():
        weight.fill_(0.01)
    model.save_pretrained(large, max_shard_size="140MB")
    tokenizer.save_pretrained(large)
    shards = [f.stat().st_size / 2**20 for f in large.glob("*.safetensors")]
    assert len(shards) >= 5
    words = [sys.executable, "-c", MEASURED, tmp_path / "small", large, tmp_path / "m.gguf", kind]
    done = subprocess.run(words, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    added = float(done.stdout.split()[-1])
    print(
        f"{kind}: {added:.0f} MB added, {len(shards)} shards, the largest {max(shards):.0f} MB, {sum(shards):.0f} in all"
    )
    assert 1 < added <= 1.2 * max(shards)  # less than one MB would be no measurement
