"""The dtypes of a safetensors header, as torch dtypes.

Always true:
- every dtype that torch can hold in plain bytes has a form here: by its safetensors word, or as raw bytes (`U8`)
  with torch's word for it in the file's metadata
- a dtype that means nothing without a scale (the `q` ones) has none

Source of the words: the safetensors format, https://github.com/huggingface/safetensors (`Dtype` in tensor.rs).
"""

from __future__ import annotations

import torch

# Words whose elements are whole bytes; the 4-bit and 6-bit words of the format have no torch dtype of their own.
_WORDS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
TORCH_DTYPES: dict[str, torch.dtype] = {
    word: getattr(torch, name) for word, name in _WORDS.items() if hasattr(torch, name)
}
WORDS: dict[torch.dtype, str] = {dtype: word for word, dtype in TORCH_DTYPES.items()}
_SCALED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
_NAMED: dict[str, torch.dtype] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}" and name not in _SCALED
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's word for a dtype: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype | None:
    """The torch dtype called `name`, None where this torch has none such that could be stored."""
    return _NAMED.get(name)
