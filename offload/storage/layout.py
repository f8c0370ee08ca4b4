"""How values are laid out in memory and in files: pure data, no I/O.

Always true:
- a layout is dense, or that of an expanded value, or another one with overlapping elements
- an entry starts where a tensor can be mapped; any other value is loose
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

_MOST = 2**63 - 1  # largest number of bytes and elements that torch can count


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of one value in memory: dtype, shape, and strides in elements.

    Attributes:
        nbytes: size in bytes; with overlapping elements, from the first one to the last.
        overlaps: whether it has more elements than its bytes can hold separately.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int = field(init=False, repr=False, compare=False)
    overlaps: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        apart, span = math.prod(self.shape) * self.dtype.itemsize, span_of(self.dtype, self.shape, self.stride)
        object.__setattr__(self, "nbytes", min(apart, span))
        object.__setattr__(self, "overlaps", span < apart)

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


@dataclass(frozen=True, slots=True)
class Record:
    """The bytes of a storage in a file: where they begin, and their number, unpacked.

    Attributes:
        packed: their number in the file, if deflated; None if they are stored as they are.
        is_swapped: whether they are in the other byte order.
    """

    start: int
    nbytes: int
    packed: int | None = None
    is_swapped: bool = False


@dataclass(frozen=True, slots=True)
class Loose:
    """A value that can't be mapped as a tensor where it lies: it is copied out of a record.

    Attributes:
        layout: of the copy.
        begin: its first byte in the record.
        stride: in the record, in elements.
        is_conjugated, is_negated: whether its numbers are the conjugates, or negatives, of the stored ones.
    """

    key: str
    layout: Layout
    record: Record
    begin: int
    stride: tuple[int, ...]
    is_conjugated: bool = False
    is_negated: bool = False

    @property
    def entry(self) -> Entry | None:
        """Its place in the file, if copying the bytes is enough."""
        lies_otherwise = self.stride != self.layout.stride or self.is_conjugated or self.is_negated
        if lies_otherwise or self.record.packed is not None or self.record.is_swapped:
            return None
        return Entry(self.key, self.layout, self.start)

    @property
    def start(self) -> int:
        """Its first byte in the file, if its record is not packed."""
        return self.record.start + self.begin

    @property
    def span(self) -> int:
        """Bytes from the start of its first element to the end of its last one."""
        return span_of(self.layout.dtype, self.layout.shape, self.stride)


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


def is_aligned(entry: Entry) -> bool:
    """Whether its elements begin at multiples of their size."""
    return entry.start % entry.layout.dtype.itemsize == 0


def can_be_over(entry: Entry) -> bool:
    """Whether it can be mapped as a tensor where it lies.

    In safetensors files without padding, which are common, values begin at any byte. Kernels for most dtypes read them
    there; those for complex128 crash the process (torch 2.13, x86).
    """
    return entry.layout.dtype != torch.complex128 or is_aligned(entry)


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
