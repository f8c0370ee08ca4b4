"""The compiled library: which instruction set, which threads, and its functions.

Always true:
- it is loaded at the first use, and never built at run time; one of other sources is not used
- its threads are those of torch's own OpenMP team: a second team would compete with them for the processors
- addresses of tensors are passed on while the tensors are referenced; nothing is kept
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("offload.kernels")

SWITCH = "OFFLOAD_KERNELS"  # `off` takes the compiled code out; a path names another build of it
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
LEVELS = {
    "x86_64": ("plain C", "AVX2", "AVX-512", "AVX-512 and products of bfloat16"),
    "aarch64": ("plain C", "NEON"),
    "": ("plain C",),
}
MOST_ROWS = 64  # of activations, in one call

_INTERFACE = 1  # as in kernels.h
_BFLOAT16 = 3  # the level with products of bfloat16
_AT_LEVEL = (2, 8, 32)  # see `most_rows`

_LEAST = 1 << 15  # numbers for which a second thread is worth waking
_forked = False


_TYPES: dict[str, type[Any]] = {
    "pointer": ctypes.c_void_p,
    "count": ctypes.c_int64,
    "int": ctypes.c_int32,
    "float": ctypes.c_float,
    "table": ctypes.c_float * 16,
}


def _fields(text: str) -> list[tuple[str, type[Any]]]:
    """The fields of a structure, from lines of a type and names, as C declares them."""
    declared = [line.split() for line in text.strip().splitlines()]
    return [(name, _TYPES[kind]) for kind, *names in declared for name in names]


class Matrix(ctypes.Structure):
    """Packed rows, as the library takes them: `matrix` in kernels.h. `packed` makes them."""

    _fields_ = _fields("""
        pointer rows
        count step columns
        int kind heads scale_dtype zero_dtype
        count group rows_per_scale
        pointer scales zeros
        count scale_step zero_step
        float divisor last
        pointer nested_numbers nested_scales
        count nested_block
        float nested_offset
        table table
        pointer order
        int bits less
        count outputs
        pointer book
    """)


class Part(ctypes.Structure):
    """Packed rows whose products are columns of a result: `part` in experts.h."""

    _fields_ = _fields("""
        pointer packed
        count count column
    """)


class Expert(ctypes.Structure):
    """An expert, and the rows that it is given: `expert` in experts.h."""

    _fields_ = _fields("""
        pointer up down
        count up_count down_count begin end to
    """)


class Layer(ctypes.Structure):
    """What is computed with some experts of a layer: `layer` in experts.h, which says what each field is."""

    _fields_ = _fields("""
        pointer experts
        count count
        pointer x
        count x_step
        pointer tokens
        count rows hidden inner width wide
        pointer up down places weights out
        count all_tokens picks
        int x_dtype out_dtype
    """)


class Team(ctypes.Structure):
    """Functions of the OpenMP runtime that torch uses."""

    _fields_ = _fields("pointer parallel number count")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled library; None if it was not built, can't be loaded, or is switched off."""
    asked = os.environ.get(SWITCH, "")
    if asked.lower() == "off":
        return None
    folder = Path(__file__).parent
    for path in [Path(asked)] if asked else [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]:
        if path.exists():
            try:
                found = ctypes.CDLL(str(path))
            except OSError:  # of another architecture, as in a folder that is shared between machines
                return None
            if _interface_of(found) == _INTERFACE:
                return _with_signatures(found)
            log.warning("%s is of another version: torch decodes packed weights until offload is installed again", path)
    return None


def _interface_of(found: ctypes.CDLL) -> int | None:
    return int(found.offload_kernels_interface()) if hasattr(found, "offload_kernels_interface") else None


def _with_signatures(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    place, how = (pointer, number, whole), (whole, pointer, ctypes.c_uint)  # `how`: level, team, threads
    found.offload_decode.argtypes = (pointer, pointer, number, number, *place, whole, *how)
    found.offload_multiply.argtypes = (pointer, number, pointer, number, number, whole, pointer, whole, *place, *how)
    found.offload_experts.argtypes = (pointer, *how)
    return found


@lru_cache(maxsize=1)
def best_level() -> int:
    """The most capable instruction set of this processor, as an index in its `LEVELS`."""
    found = library()
    return 0 if found is None else int(found.offload_kernels_levels())


@lru_cache(maxsize=2 * len(DTYPES))
def most_rows(dtype: torch.dtype, *, in_integers: bool = False) -> int:
    """Up to how many rows of activations are multiplied faster than by decoding the rows and torch's product.

    Measured with matrices of 4096 x 4096, on one thread.

    Args:
        dtype: of the activations.
        in_integers: whether the kernel multiplies in integers (see `limbs.h`), and not in floats.
    """
    level = best_level()
    usual = _AT_LEVEL[min(level, len(_AT_LEVEL) - 1)]
    if dtype != torch.bfloat16:
        return usual
    return min(usual, 8 if level < _BFLOAT16 else 16 if in_integers else usual)


def description() -> str:
    """How packed weights are decoded here, in words."""
    if os.environ.get(SWITCH, "").lower() == "off":
        return f"switched off ({SWITCH}=off): torch decodes packed weights, many times as slowly"
    if library() is None:
        return "not built (install offload again, where there is a C compiler): torch decodes, many times as slowly"
    return f"compiled, with {LEVELS.get(platform.machine(), LEVELS[''])[best_level()]}"


@lru_cache(maxsize=1)
def _team() -> Team | None:
    """The functions of torch's OpenMP runtime; None where torch was built with another one."""
    paths = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    try:
        runtime = ctypes.CDLL(str(paths[0])) if paths else None
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        return None if runtime is None else Team(*(ctypes.cast(runtime[name], ctypes.c_void_p) for name in names))
    except (OSError, AttributeError):
        return None


def _after_fork() -> None:
    """The team's threads are gone in a forked child, and the runtime would wait for them forever."""
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def _threads(numbers: int) -> tuple[int, int | None]:
    """How many threads go through this many numbers, and the address of their team."""
    team = None if _forked else _team()
    count = torch.get_num_threads() if team is not None and numbers >= _LEAST else 1
    return count, None if team is None or count == 1 else ctypes.addressof(team)


def decode(matrix: Matrix, first: int, place: torch.Tensor, *, level: int | None = None) -> None:
    """Decode rows into a tensor of shape (rows, columns), in its dtype; its rows may be apart.

    Args:
        matrix: whose memory is alive, and has these rows.
        first: the row for `place[0]`.
        level: another instruction set than the best.

    Raises:
        MemoryError
    """
    assert 0 <= first <= matrix.outputs - len(place), "the rows are there"
    _decode(matrix, None, first, place, False, level)


def decode_turned(matrix: Matrix, place: torch.Tensor, *, level: int | None = None) -> None:
    """Decode all rows into the columns of a tensor of shape (columns, rows), in its dtype; not of words."""
    assert place.shape[1] == matrix.outputs, "a column for each row"
    _decode(matrix, None, 0, place, True, level)


def pick(matrix: Matrix, rows: torch.Tensor, place: torch.Tensor, *, level: int | None = None) -> None:
    """Like `decode`, of any rows: `place[n]` is row `rows[n]`."""
    rows = rows.to(torch.int64).contiguous()
    assert rows.shape == place.shape[:1], "one for each place"
    assert all(0 <= row < matrix.outputs for row in (rows.aminmax() if len(rows) else ())), "the rows are there"
    _decode(matrix, rows.data_ptr(), 0, place, False, level)


def _decode(
    matrix: Matrix, picked: int | None, first: int, place: torch.Tensor, is_turned: bool, level: int | None
) -> None:
    found = library()
    assert found is not None, "callers ask `library` first"
    assert place.stride(1) == 1 or place.numel() <= place.shape[0], "numbers side by side"
    columns, rows = place.shape if is_turned else place.shape[::-1]
    assert columns == matrix.columns, "and no longer"
    count, team = _threads(place.numel())
    failed = found.offload_decode(
        *(ctypes.addressof(matrix), picked, first, rows),
        *(place.data_ptr(), place.stride(0), DTYPES[place.dtype], is_turned),
        *(best_level() if level is None else level, team, count),
    )
    if failed:
        raise MemoryError(f"no memory for rows of {columns} floats")


def multiply(
    matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None, place: torch.Tensor, *, level: int | None = None
) -> None:
    """The products of rows of activations with packed rows: `place = x @ rows.T + bias`.

    Args:
        matrix: whose memory is alive, and has `place.shape[1]` rows.
        x: (at most `MOST_ROWS`, columns); its columns are contiguous.
        bias: (rows,), contiguous.
        place: (rows of x, rows); its columns are contiguous.
        level: another instruction set than the best.

    Raises:
        MemoryError
    """
    found = library()
    assert found is not None, "callers ask `library` first"
    assert place.shape[1] <= matrix.outputs, "the rows are there"
    assert x.shape[1] == matrix.columns, "and no longer"
    count, team = _threads(place.shape[1] * x.shape[1])
    failed = found.offload_multiply(
        *(ctypes.addressof(matrix), place.shape[1]),
        *(x.data_ptr(), len(x), x.stride(0), DTYPES[x.dtype]),
        *((None, 0) if bias is None else (bias.data_ptr(), DTYPES[bias.dtype])),
        *(place.data_ptr(), place.stride(0), DTYPES[place.dtype]),
        *(best_level() if level is None else level, team, count),
    )
    if failed:
        raise MemoryError(f"no memory for {len(x)} x {x.shape[1]} floats")


def multiply_experts(layer: Layer) -> None:
    """What the layer's fields ask for: products with experts, and their weighted sum.

    Args:
        layer: whose memory is alive; an expert is given at most `MOST_ROWS` rows.

    Raises:
        MemoryError
    """
    found = library()
    assert found is not None, "callers ask `library` first"
    count, team = _threads(layer.rows * layer.hidden * layer.inner)
    if found.offload_experts(ctypes.addressof(layer), best_level(), team, count):
        raise MemoryError(f"no memory for {layer.rows} rows of experts")
