"""Which type each tensor of a GGUF gets, and the rows in that type, by the kernel that llama.cpp itself quantises with.

Python's gguf package writes no k-quants; the library of xllamacpp, llama.cpp built as a wheel, exports the function.
The choice of types is llama.cpp's for dense models, so that a q4_k_m of ours is the q4_k_m of everybody else.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from core.config import UserError

PLAIN = {"f32": Type.F32, "f16": Type.F16, "q8_0": Type.Q8_0, "q4_k_m": Type.Q4_K}
NARROW = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}  # for rows that are no multiple of 256


def type_of(name: str, shape: list[int], kind: str, layers: int, tied: bool) -> Type:
    """The type of one tensor in a file of `kind`; UserError if its rows do not divide into blocks."""
    if len(shape) == 1:
        return Type.F32
    chosen = PLAIN[kind]
    if chosen == Type.Q4_K:
        if name == "output.weight" or (tied and name == "token_embd.weight"):
            chosen = Type.Q6_K
        elif name.endswith(("attn_v.weight", "ffn_down.weight")) and _more_bits(int(name.split(".")[1]), layers):
            chosen = Type.Q6_K
        if shape[-1] % 256:
            chosen = NARROW[chosen]
    if shape[-1] % GGML_QUANT_SIZES[chosen][0]:
        raise UserError(
            f"gguf-{kind} needs rows that are a multiple of {GGML_QUANT_SIZES[chosen][0]} values; "
            f"{name} has rows of {shape[-1]}: choose gguf-f16"
        )
    return chosen


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third of those between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def quantised(values: np.ndarray, kind: Type) -> memoryview:
    """float32 rows as blocks of `kind`; the rows are shared out among the cores."""
    rows, width = values.shape
    block, size = GGML_QUANT_SIZES[kind]
    out = np.empty(rows * width // block * size, dtype=np.uint8)
    cores = min(os.cpu_count() or 1, rows)
    edges = [rows * i // cores for i in range(cores + 1)]

    def work(first: int, last: int) -> None:
        _kernel()(kind, values.ctypes.data, out.ctypes.data, first * width, last - first, width, None)

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(work, edges[:-1], edges[1:]))
    return out.data


@cache
def _kernel():
    """ggml_quantize_chunk(type, from, to, first value, rows, values a row, importance) -> bytes written."""
    from xllamacpp import xllamacpp

    function = ctypes.CDLL(xllamacpp.__file__).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
                         ctypes.c_void_p]  # fmt: skip
    return function
