"""A Hugging Face folder as one GGUF file, for llama.cpp and Ollama: Llama, Qwen2 and Qwen3 with byte-level BPE.

`plan` reads headers only and refuses what would load and then speak garbage; `convert` streams the weights block by
block, so that memory holds one shard at most. The rows are quantised by llama.cpp's own kernel (core/quantise.py).
Strings that are not in Unicode NFC are tokenised differently by llama.cpp, which does not normalise; nothing else is.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType, TokenType

from core.artifacts import atomic_file
from core.config import UserError
from core.quantise import quantised, type_of

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
KINDS = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
}
BLOCK = 2 << 20  # values that are in memory as numbers at a time

# How text is cut before the merges. llama.cpp knows these cuts by name; ours are told from tokenizer.json.
CUTS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": (
        "llama-bpe"
    ),
}


@dataclass
class Tensor:
    shard: Path
    source: str  # its name in the shard
    name: str  # its name in the GGUF file
    shape: list[int]
    type: Type
    head_rows: int = 0  # rows of one attention head, where these are to be interleaved

    @property
    def nbytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size


@dataclass
class Plan:
    folder: Path
    kind: str
    config: object
    architecture: gguf.MODEL_ARCH
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the file, give or take its vocabulary."""
        return sum(t.nbytes for t in self.tensors) + 64 * self.config.vocab_size


def convert(hf_folder: Path, target: Path, kind: str) -> Path:
    """Write `target` (f32, f16, q8_0 or q4_k_m) from a folder with config, tokenizer, template and safetensors."""
    todo = plan(hf_folder, kind)
    with atomic_file(target, "wb") as out:
        writer = gguf.GGUFWriter(out.name, gguf.MODEL_ARCH_NAMES[todo.architecture])
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(Path(target).stem)
        writer.add_file_type(KINDS[kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_shape(writer, todo.config)
        _add_sampling(writer, todo.folder)
        add_vocabulary(writer, todo.folder, todo.config)
        small = {"rope_freqs.weight": freqs} if (freqs := _rope_divisors(todo.config)) is not None else {}
        for name, array in small.items():
            writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
        for tensor in todo.tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.nbytes, raw_dtype=tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in small.values():
            writer.write_tensor_data(array)
        _write_tensors(writer, todo.tensors)
        writer.close()
    return Path(target)


def plan(hf_folder: Path, kind: str) -> Plan:
    """What the file will hold, from headers alone; UserError if the folder cannot become that kind of GGUF."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(hf_folder)
    if kind not in KINDS:
        raise UserError(f"'{kind}' is no kind of GGUF that is written here; there are: {', '.join(KINDS)}")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0][:300]
        raise UserError(
            f"{folder}: its config.json is not one that loads here ({first}). Export hf, or another stage"
        ) from error
    architecture = _architecture(config)
    with torch.device("meta"):
        expected = {n: list(p.shape) for n, p in AutoModelForCausalLM.from_config(config).state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = []
    for shard, shapes in tensor_shapes(folder).items():
        for source, shape in shapes.items():
            if source == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if expected.pop(source, None) != shape:
                raise UserError(
                    f"{shard}: tensor {source} {shape} has no place in a {architecture.name} model of this config.json"
                    f"{': merge the adapter first' if 'lora' in source else ''}"
                )
            name = names.get_name(source, try_suffixes=(".weight", ".bias"))
            kept = type_of(name, shape, kind, config.num_hidden_layers, config.tie_word_embeddings)
            halves = architecture == gguf.MODEL_ARCH.LLAMA and (".q_proj." in source or ".k_proj." in source)
            tensors.append(Tensor(shard, source, name, shape, kept, _head_size(config) if halves else 0))
    if expected:
        raise UserError(f"{folder}: {len(expected)} tensors are missing, the first is {next(iter(expected))}")
    return Plan(folder, kind, config, architecture, tensors)


def tensor_shapes(folder: Path, file: str = "") -> dict[Path, dict[str, list[int]]]:
    """Shape by tensor name, for each shard of a model (or for one `file`); a shard that was cut short is a UserError."""
    from safetensors import SafetensorError, safe_open

    found = {}
    for shard in [folder / file] if file else weight_files(folder):
        try:
            with safe_open(shard, "pt") as weights:
                found[shard] = {name: weights.get_slice(name).get_shape() for name in weights.keys()}
        except SafetensorError as error:
            raise UserError(f"{shard} is not whole ({error}): make it again, or choose another checkpoint") from error
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors shards of a model folder; all of them must be there."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    missing = sorted(n for n in names if not (folder / n).exists())
    if missing:
        raise UserError(f"{folder} is not a whole model: {', '.join(missing)} is missing. Make the stage again")
    return sorted(folder / n for n in names)


def _architecture(config) -> gguf.MODEL_ARCH:
    """Everything that changes what a model computes is known here, or refused."""
    name = (config.architectures or ["none"])[0]
    why = ""
    if name not in ARCHITECTURES:
        raise UserError(f"architecture {name} cannot become a GGUF here; known: {', '.join(ARCHITECTURES)}")
    if getattr(config, "quantization_config", None):
        why = "its weights are quantised; merge into the unquantised base"
    elif getattr(config, "use_sliding_window", False):
        why = "it uses a sliding window"
    elif config.rope_parameters.get("rope_type", "default") not in ("default", "llama3"):
        why = f"its RoPE is of type '{config.rope_parameters['rope_type']}' (known: default, llama3)"
    elif config.hidden_act != "silu":
        why = f"its activation is '{config.hidden_act}' (known: silu)"
    if why:
        raise UserError(f"{config._name_or_path}: cannot become a GGUF here: {why}")
    return ARCHITECTURES[name]


def _head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_shape(writer, config) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_sampling(writer, folder: Path) -> None:
    """A greedy model stays greedy: llama.cpp takes its defaults from here, and would sample at 0.8, top 40, otherwise."""
    path = folder / "generation_config.json"
    asked = json.loads(path.read_text()) if path.exists() else {"do_sample": True}
    if not asked.get("do_sample"):
        writer.add_sampling_temp(0.0)
        return
    for name, add in (
        ("temperature", writer.add_sampling_temp),
        ("top_k", writer.add_sampling_top_k),
        ("top_p", writer.add_sampling_top_p),
        ("min_p", writer.add_sampling_min_p),
    ):
        if name in asked:
            add(asked[name])


def _rope_divisors(config):
    """Llama 3.1 and later stretch low frequencies: by how much, for each pair of dimensions. None without stretching."""
    if config.rope_parameters.get("rope_type", "default") == "default":
        return None
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = _head_size(config)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (plain / stretched).numpy()


def add_vocabulary(writer, folder: Path, config) -> None:
    """The tokenizer as transformers runs it, the ids of its special tokens, and the chat template."""
    tokenizer, backend, texts, added = _vocabulary(folder, config.vocab_size)
    types = [TokenType.NORMAL if i in texts else TokenType.UNUSED for i in range(config.vocab_size)]
    for i, token in added.items():
        types[i] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut(backend, folder))
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(config.vocab_size)])
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in backend["model"]["merges"]])
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    if ids["bos"] is None:
        ids["bos"] = config.bos_token_id  # Qwen: never written, but llama.cpp would take token 11 without one
    for name, i in ids.items():
        if i is not None:
            getattr(writer, f"add_{name}_token_id")(i)
    probe = tokenizer("a").input_ids
    writer.add_add_bos_token(probe[0] == ids["bos"])
    writer.add_add_eos_token(probe[-1] == ids["eos"])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def check_vocabulary(folder: Path, size: int) -> None:
    """UserError if llama.cpp would read text as other tokens than the tokenizer in `folder` does."""
    _, backend, _, _ = _vocabulary(folder, size)
    _cut(backend, folder)


def _vocabulary(folder: Path, size: int) -> tuple:
    """The tokenizer, what it is made of, its tokens and the added ones by id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {t["id"]: t for t in backend["added_tokens"]}
    texts = {i: t for t, i in backend["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    if max(texts) >= size:
        raise UserError(f"{folder}: the tokenizer has {max(texts) + 1} tokens, the model's embeddings {size}")
    return tokenizer, backend, texts, added


def _cut(backend: dict, folder: Path) -> str:
    """llama.cpp's name of the pre-tokenizer, from its structure: a model's name says nothing about its tokenizer."""
    model, before = backend["model"], backend["pre_tokenizer"] or {}
    parts = before.get("pretokenizers", [before])
    kinds = [p.get("type") for p in parts]
    regex = parts[-1].get("use_regex", True)
    name = None
    if kinds == ["ByteLevel"] and regex:
        name = "gpt-2"
    elif kinds == ["Digits", "ByteLevel"] and regex and parts[0]["individual_digits"]:
        name = "smollm"
    elif (
        kinds == ["Split", "ByteLevel"] and not regex and parts[0]["behavior"] == "Isolated" and not parts[0]["invert"]
    ):
        name = CUTS.get(parts[0]["pattern"].get("Regex"))
    strange = [
        model["type"] != "BPE" or model.get("byte_fallback") or model.get("end_of_word_suffix"),
        model.get("ignore_merges", False) != (name == "llama-bpe"),
        any(p.get("add_prefix_space") for p in parts),
        (backend["normalizer"] or {"type": "NFC"})["type"] != "NFC",
        any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in backend["added_tokens"]),
    ]
    if name is None or any(strange):
        raise UserError(
            f"{folder}: llama.cpp has no tokenizer that cuts text as this one does ({model['type']}, "
            f"{' + '.join(str(k) for k in kinds)}), so a GGUF would read other tokens than in training"
        )
    return name


def _write_tensors(writer, tensors: list[Tensor]) -> None:
    """One shard is open at a time, and of it one block of rows is in memory as numbers."""
    from itertools import groupby

    from safetensors import safe_open

    out = writer.fout[0]
    for shard, group in groupby(tensors, key=lambda t: t.shard):
        with safe_open(shard, "pt") as weights:
            for tensor in group:
                writer.write_padding(out, out.tell())
                begin = out.tell()
                source = weights.get_slice(tensor.source)
                for rows in _blocks(tensor):
                    out.write(_encode(source[rows], tensor))
                assert out.tell() - begin == tensor.nbytes, (tensor, out.tell() - begin)
    writer.write_padding(out, out.tell())


def _blocks(tensor: Tensor):
    rows = max(1, BLOCK // math.prod(tensor.shape[1:]))
    if tensor.head_rows:
        rows = max(tensor.head_rows, rows // tensor.head_rows * tensor.head_rows)
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, start + rows)


def _encode(block, tensor: Tensor):
    import torch

    block = turned(block, tensor.head_rows)
    if tensor.type == Type.F16:
        small = block.to(torch.float16)
        if not torch.isfinite(small).all():
            raise UserError(f"{tensor.source} has values that float16 cannot hold: choose gguf-f32")
        return small.contiguous().numpy().data
    values = block.to(torch.float32).contiguous().numpy()
    return values.data if tensor.type == Type.F32 else quantised(values, tensor.type)


def turned(rows, head_rows: int):
    """Rows of q and k as llama.cpp's Llama wants them: RoPE turns neighbours there, and halves of a head in transformers."""
    if not head_rows:
        return rows
    return rows.reshape(-1, 2, head_rows // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
