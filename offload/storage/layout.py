"""How values are laid out in memory and in files: pure data, no I/O.

Always true:
- the layout of a stored value is dense: its elements fill its bytes without a gap or an overlap
- an entry starts where a tensor can be mapped
- every dtype that torch stores as plain bytes can be stored: by its safetensors word, or as raw bytes (`U8`) with
  torch's name for it in the metadata; dtypes that need a scale (the `q` ones) can't

Source of the words: the safetensors format, https://github.com/huggingface/safetensors (`Dtype` in tensor.rs).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from offload.annotations import Json

MISALIGNED = "begins in the middle of an element, where torch can't read complex128: save it in a file of its own"
_MOST = 2**63 - 1  # largest number of bytes and elements that torch can count


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of one value in memory: dtype, shape, and strides in elements.

    Attributes:
        nbytes: the size of a dense value in bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions, from the outermost in memory to the innermost."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]))

    @property
    def is_dense(self) -> bool:
        """True if the elements fill their bytes without a gap or an overlap."""
        step = 1
        for dim in reversed(self.order):
            if self.shape[dim] > 1 and self.stride[dim] != step:
                return 0 in self.shape
            step *= self.shape[dim]
        return True


@dataclass(frozen=True, slots=True)
class Entry:
    """One value inside a file: its key, its layout, and the byte at which it starts."""

    key: str
    layout: Layout
    start: int


def span_of(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes from the start of the first element to the end of the last one."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if not size:
            return 0
        last += (size - 1) * step
    return (last + 1) * dtype.itemsize


def is_countable(shape: Iterable[int], itemsize: int) -> bool:
    """True if torch can count the bytes and strides of such a value; checked step by step, as the shape may be huge."""
    total = itemsize
    for size in shape:
        total *= max(size, 1)
        if total > _MOST:
            return False
    return True


def layout_as(dtype: torch.dtype, shape: Json, stride: Json) -> Layout | None:
    """A layout given in a file; None if no tensor can have it, so that torch would fail, or crash."""
    shape, stride = list(shape), list(stride)
    if len(shape) != len(stride) or not are_counts(shape) or not are_counts(stride) or not is_countable(shape, 1):
        return None
    layout = Layout(dtype, tuple(shape), tuple(stride))
    return layout if span_of(dtype, layout.shape, layout.stride) <= _MOST else None


def can_be_over(entry: Entry) -> bool:
    """Whether it can be mapped as a tensor where it lies.

    In safetensors files without padding, which are common, values begin at any byte. Kernels for most dtypes read them
    there; those for complex128 crash the process (torch 2.13, x86).
    """
    return entry.layout.dtype != torch.complex128 or entry.start % entry.layout.dtype.itemsize == 0


@lru_cache(maxsize=1024)
def contiguous(dtype: torch.dtype, shape: tuple[int, ...]) -> Layout:
    """The row-major layout; cached, since the many values of a model share few of them."""
    return Layout(dtype, shape, contiguous_stride(shape))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, as torch gives them (a size of 0 counts as 1)."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def are_counts(numbers: Json) -> bool:
    """True for a list of numbers that are valid as sizes, strides or offsets."""
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number <= _MOST for number in numbers)


# Words whose elements are whole bytes; the 4-bit and 6-bit words of the format have no torch dtype of their own.
_WORDS = (
    "BOOL=bool U8=uint8 I8=int8 I16=int16 U16=uint16 I32=int32 U32=uint32 I64=int64 U64=uint64 F16=float16 "
    "BF16=bfloat16 F32=float32 F64=float64 C64=complex64 F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2 "
    "F8_E4M3FNUZ=float8_e4m3fnuz F8_E5M2FNUZ=float8_e5m2fnuz F8_E8M0=float8_e8m0fnu"
)
TORCH_DTYPES: dict[str, torch.dtype] = {
    word: getattr(torch, name) for word, name in (pair.split("=") for pair in _WORDS.split()) if hasattr(torch, name)
}
WORDS: dict[torch.dtype, str] = {dtype: word for word, dtype in TORCH_DTYPES.items()}
_SCALED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
_NAMED: dict[str, torch.dtype] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}" and name not in _SCALED
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name for a dtype: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def is_storable(dtype: torch.dtype) -> bool:
    """Whether its values mean something by themselves; those of the `q` dtypes need a scale."""
    return dtype_name(dtype) in _NAMED


def dtype_named(name: str) -> torch.dtype | None:
    """The torch dtype called `name`; None if this torch has none that could be stored."""
    return _NAMED.get(name)
