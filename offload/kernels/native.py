"""The compiled library: which instruction set, which threads, and its functions.

Always true:
- it is loaded at the first use, and never built at run time; one of other sources is not used
- its threads are those of torch's own OpenMP team: a second team would compete with them for the processors
- C checks nothing: each function here raises an `ArgumentError` for sizes that do not fit, before C has an address
- addresses of tensors are passed on while the tensors are referenced; nothing is kept
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
from collections.abc import Container, Sequence
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.errors import ArgumentError

log = logging.getLogger("offload.kernels")

SWITCH = "OFFLOAD_KERNELS"  # `off` takes the compiled code out; a path names another build of it
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
LEVELS = {
    "x86_64": ("plain C", "AVX2", "AVX-512", "AVX-512, products of bytes and of bfloat16"),
    "aarch64": ("plain C", "NEON"),
    "": ("plain C",),
}
MOST_ROWS = 64  # of activations, in one call

_INTERFACE = 3  # as in kernels.h
_OF_ROWS = 2  # dimensions
_BFLOAT16 = 3  # the level with products of bfloat16
_AT_LEVEL = (2, 8, 32)  # see `most_rows`

_LEAST = 1 << 20  # numbers for which a second thread is worth waking: with fewer, waiting for it takes as long
_BYTES_PER_NUMBER = 16  # that are copied in the time
_forked = False
_NO_MEMORY = "no memory for a product, or for rows"
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_TYPES: dict[str, type[Any]] = {
    "pointer": ctypes.c_void_p,
    "count": ctypes.c_int64,
    "int": ctypes.c_int32,
    "float": ctypes.c_float,
    "table": ctypes.c_float * 16,
}


def _fields(text: str) -> list[tuple[str, type[Any]]]:
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


class RowsOfPart(ctypes.Structure):
    """Packed rows whose products are columns of a result: `part` in kernels.h."""

    _fields_ = _fields("""
        pointer packed
        count count column
    """)


class ProductCall(ctypes.Structure):
    """Products with rows, but for the activations: `product` in kernels.h."""

    _fields_ = _fields("""
        pointer parts
        count count x_step out_step
        int x_dtype bias_dtype out_dtype level
        pointer threads
        count most_threads
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
                loaded = ctypes.CDLL(str(path))
            except OSError:  # of another architecture, as in a folder that is shared between machines
                return None
            if _interface_of(loaded) == _INTERFACE:
                return _with_signatures(loaded)
            log.warning("%s is of another version: torch decodes packed weights until offload is installed again", path)
    return None


def _interface_of(loaded: ctypes.CDLL) -> int | None:
    return int(loaded.offload_kernels_interface()) if hasattr(loaded, "offload_kernels_interface") else None


def _with_signatures(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    place, how = (pointer, number, whole), (whole, pointer, ctypes.c_uint)  # `how`: level, team, threads
    loaded.offload_decode.argtypes = (pointer, pointer, number, number, *place, whole, *how)
    loaded.offload_multiply.argtypes = (pointer, pointer, number, pointer, pointer)
    loaded.offload_experts.argtypes = (pointer, *how)
    loaded.offload_gather.argtypes = (pointer, pointer, pointer, number, pointer, *how)
    loaded.offload_pack_logps.argtypes = (pointer, pointer, number, number, whole, whole, pointer)
    loaded.offload_unpack_logps.argtypes = (pointer, number, number, whole, whole, pointer, pointer, pointer, whole)
    return loaded


@lru_cache(maxsize=1)
def best_level() -> int:
    """The most capable instruction set of this processor, as an index in its `LEVELS`."""
    kernels = library()
    return 0 if kernels is None else int(kernels.offload_kernels_levels())


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


def require(fits: bool, *facts: object) -> None:
    """Raises `ArgumentError` for sizes that C must not be given."""
    if not fits:
        raise ArgumentError(f"the kernels do not take these sizes: {' '.join(map(str, facts))}")


def memory_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's numbers.

    Raises:
        ArgumentError: it has no memory that C can read.
    """
    address = tensor.data_ptr() if tensor.is_cpu else 0
    if not address and tensor.numel():
        raise ArgumentError(f"a {type(tensor).__name__} on {tensor.device} has no memory that the kernels can read")
    return address


def _address(
    tensor: torch.Tensor, shape: tuple[int, ...], dtypes: Container[torch.dtype] = DTYPES, *, step: int | None = None
) -> int:
    """The address of a tensor of this shape, whose rows are `step` numbers apart; None for any distance."""
    fits = tensor.shape == shape and tensor.dtype in dtypes
    require(fits, tensor.shape, "of", tensor.dtype, "for", shape)
    require(shape[-1] < 2 or tensor.stride(-1) == 1, "numbers that are apart in", shape)
    require(step is None or shape[0] < 2 or tensor.stride(0) == step, "rows that are apart in", shape)
    return memory_of(tensor)


def _rows_of(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 0


def _indices(rows: torch.Tensor, count: int, end: int, *, least: int = 0) -> int:
    """The address of so many indices, from `least` to `end - 1`."""
    address = _address(rows, (count,), (torch.int64,))
    few = (ctypes.c_int64 * count).from_address(address) if 0 < count <= MOST_ROWS else None
    low, high = (min(few), max(few)) if few else map(int, rows.aminmax()) if count else (least, least)
    require(least <= low and (high < end or not count), "rows from", low, "to", high, "of", end)
    return address


def _call(function: str, *given: object, numbers: int, level: int | None) -> None:
    """Call a function of the library, whose threads go through this many numbers.

    Raises:
        ArgumentError: there is no library, or not for this processor.
        MemoryError
    """
    kernels, how = _chosen(numbers, level)
    if getattr(kernels, function)(*given, *how):
        raise MemoryError(_NO_MEMORY)


def _chosen(numbers: int, level: int | None) -> tuple[ctypes.CDLL, tuple[int, int | None, int]]:
    """The library; the level, and the team and threads that go through so many numbers."""
    kernels, chosen = library(), best_level() if level is None else level
    if kernels is None or not 0 <= chosen <= best_level():
        raise ArgumentError(f"there are no kernels of level {chosen}: {description()}")
    count, team = _threads(numbers)
    return kernels, (chosen, team, count)


def decode(matrix: Matrix, first: int, place: torch.Tensor, *, level: int | None = None) -> None:
    """Decode rows into a tensor of shape (rows, columns), in its dtype; its rows may be apart.

    Args:
        matrix: whose memory is alive.
        first: the row for `place[0]`.
        level: another instruction set than the best.

    Raises:
        ArgumentError: the matrix does not have these rows, or `place` does not have these columns.
        MemoryError
    """
    rows = _rows_of(place)
    require(0 <= first <= matrix.outputs - rows, rows, "rows from", first, "on, of", matrix.outputs)
    _decode(matrix, None, first, (rows, matrix.columns), place, level)


def decode_turned(matrix: Matrix, place: torch.Tensor, *, level: int | None = None) -> None:
    """Decode all rows into the columns of a tensor of shape (columns, rows), in its dtype; not of words."""
    require(not matrix.bits, "words are not turned")
    _decode(matrix, None, 0, (matrix.columns, matrix.outputs), place, level, is_turned=True)


def pick(matrix: Matrix, rows: torch.Tensor, place: torch.Tensor, *, level: int | None = None) -> None:
    """Like `decode`, of any rows: `place[n]` is row `rows[n]`."""
    rows = rows.to(torch.int64).contiguous()
    picked = _indices(rows, rows.numel(), matrix.outputs)
    _decode(matrix, picked, 0, (rows.numel(), matrix.columns), place, level)


def _decode(
    matrix: Matrix,
    picked: int | None,
    first: int,
    shape: tuple[int, int],
    place: torch.Tensor,
    level: int | None,
    *,
    is_turned: bool = False,
) -> None:
    address = _address(place, shape)
    _call(
        *("offload_decode", ctypes.addressof(matrix), picked, first, shape[int(is_turned)]),
        *(address, place.stride(0), DTYPES[place.dtype], is_turned),
        numbers=place.numel(), level=level,
    )  # fmt: skip


def is_usual(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is torch's own, of a dtype, contiguous, and has memory that the kernels can read."""
    return (
        type(x) in _PLAIN
        and x.dtype is dtype
        and x.layout is torch.strided
        and x.is_cpu
        and not x.is_nested
        and x.is_contiguous()
        and not x.is_neg()
    )


class Product:
    """Products with packed rows, those of some matrices side by side: what does not depend on the activations.

    Attributes:
        matrices: the packed rows; their memory is alive.
        parts, count: as the library takes them: their address, and how many there are.
        sizes: the rows of all of them, and their columns.
    """

    __slots__ = ("_array", "_calls", "count", "matrices", "parts", "sizes")

    def __init__(self, parts: Sequence[tuple[Matrix, int]]) -> None:
        """Each part is the first rows of a matrix, so many; their products are side by side.

        Args:
            parts: matrices whose memory is alive.

        Raises:
            ArgumentError: a matrix has fewer rows, or other columns than the first.
        """
        self.matrices, self._array, height = [matrix for matrix, _ in parts], (RowsOfPart * len(parts))(), 0
        self.parts, self.count, columns = ctypes.addressof(self._array), len(parts), parts[0][0].columns
        for part, (matrix, count) in zip(self._array, parts, strict=True):
            fits = 0 <= count <= matrix.outputs and matrix.columns == columns
            require(fits, count, "rows of", matrix.outputs, "and columns", matrix.columns, "beside", columns)
            part.packed, part.count, part.column = ctypes.addressof(matrix), count, height
            height += count
        self.sizes = height, columns
        # For usual activations: the function, and what it takes.
        self._calls: dict[object, tuple[Any, int, ProductCall]] = {}

    def into(
        self, x: torch.Tensor, bias: torch.Tensor | None, place: torch.Tensor, *, level: int | None = None
    ) -> None:
        """`place = x @ rows.T + bias`.

        Args:
            x: (..., columns), contiguous, or a matrix whose columns are; at most `MOST_ROWS` rows.
            bias: (rows,), contiguous.
            place: (..., rows), laid out as `x` may be.
            level: another instruction set than the best.

        Raises:
            ArgumentError: sizes do not fit.
            MemoryError
        """
        height, columns = self.sizes
        (rows, step, given), (_, apart, out) = _rows_in(x, columns), _rows_in(place, height)
        require(x.shape[:-1] == place.shape[:-1] and rows <= MOST_ROWS, x.shape, "for", place.shape)
        added, kind = (None, x.dtype) if bias is None else (_address(bias, (height,)), bias.dtype)
        multiply, call, _kept = self._prepared(rows, step, apart, x.dtype, kind, place.dtype, level)
        if multiply(call, given, rows, added, out):
            raise MemoryError(_NO_MEMORY)

    def times(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, most: int) -> torch.Tensor | None:
        """`x @ rows.T + bias`, a new tensor; None if one of them is not usual, or does not fit.

        Args:
            x: (..., columns), of at most `most` rows, and `MOST_ROWS`.
            bias: (rows,).
            dtype: of all of them.

        Raises:
            MemoryError
        """
        height, columns = self.sizes
        if not is_usual(x, dtype) or (shape := x.shape)[-1:] != (columns,):
            return None
        given, rows = x.data_ptr(), x.numel() // max(columns, 1)
        if not (given and 0 < rows <= most and rows <= MOST_ROWS):
            return None
        if bias is not None and not (is_usual(bias, dtype) and bias.shape == (height,) and bias.data_ptr()):
            return None
        key = dtype, torch.get_num_threads(), _forked, rows * height * columns < _LEAST
        known = self._calls.get(key)
        if known is None:
            known = self._calls[key] = self._prepared(rows, columns, height, dtype, dtype, dtype, None)
        place = x.new_empty((*shape[:-1], height))
        if known[0](known[1], given, rows, None if bias is None else bias.data_ptr(), place.data_ptr()):
            raise MemoryError(_NO_MEMORY)
        return place

    def _prepared(
        self, rows: int, step: int, apart: int, x: torch.dtype, bias: torch.dtype, place: torch.dtype, level: int | None
    ) -> tuple[Any, int, ProductCall]:
        """The function of the library, and what it takes: its address, and what has to be alive."""
        kernels, how = _chosen(rows * self.sizes[0] * self.sizes[1], level)
        call = ProductCall(self.parts, self.count, step, apart, DTYPES[x], DTYPES[bias], DTYPES[place], *how)
        return kernels.offload_multiply, ctypes.addressof(call), call


def _rows_in(tensor: torch.Tensor, columns: int) -> tuple[int, int, int]:
    """How many rows of so many numbers a tensor has, how far apart they are, and the address of the first."""
    shape = tensor.shape
    require(tensor.dtype in DTYPES and len(shape) > 0 and shape[-1] == columns, shape, tensor.dtype, "for", columns)
    if tensor.is_contiguous():
        return tensor.numel() // columns if columns else math.prod(shape[:-1]), columns, memory_of(tensor)
    require(len(shape) == _OF_ROWS and (columns < 2 or tensor.stride(1) == 1), "numbers that are apart in", shape)
    return shape[0], tensor.stride(0), memory_of(tensor)


class ExpertRows(NamedTuple):
    """How many rows an expert is given, and the row of the results that theirs begin with."""

    up: Product
    down: Product
    rows: int
    to: int


class WeightedSum(NamedTuple):
    """A sum for each token.

    Attributes:
        places: which rows of the results are added, (tokens, picks), int64; -1 for none.
        weights: their factors, (tokens, picks), float32.
        out: the sums, (tokens, width).
    """

    places: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


def multiply_experts(
    experts: Sequence[ExpertRows],
    x: torch.Tensor,
    down: torch.Tensor,
    *,
    tokens: torch.Tensor | None = None,
    up: torch.Tensor | None = None,
    total: WeightedSum | None = None,
) -> None:
    """Products with experts, and the weighted sum of the results of all experts.

    Args:
        experts: each is given at most `MOST_ROWS` rows, one after the other.
        x: (tokens, hidden), if there are `tokens`: products with `up`, SiLU of their first half times the second, and
            products with `down`. Else (rows, inner), of which the products with `down` alone are wanted.
        down: the results, (rows, width), float32; of these experts and of others.
        tokens: the row of x for each row that the experts are given.
        up: if they are wanted alone, the products with `up`: (rows, wide), float32.
        total: added up at last.

    Raises:
        ArgumentError: sizes do not fit.
        MemoryError
    """
    require(down.dim() == _OF_ROWS, "results of", down.shape)
    layer, (results, width) = Layer(), down.shape
    layer.down, layer.width = _address(down, (results, width), (torch.float32,), step=width), width
    array = _add_experts(layer, experts, results)
    rows, wide, hidden, inner = layer.rows, layer.wide, layer.hidden, layer.inner
    if experts:
        layer.x = _address(x, (rows, inner) if tokens is None else (_rows_of(x), hidden))
        layer.x_step, layer.x_dtype, layer.experts = x.stride(0), DTYPES[x.dtype], ctypes.addressof(array)
    if tokens is not None:
        layer.tokens = _indices(tokens, rows, _rows_of(x))
        require(up is not None or wide == 2 * inner, wide, "products for", inner)
    if up is not None:
        require(tokens is not None, "products with `up` alone, of no tokens")
        layer.up = _address(up, (rows, wide), (torch.float32,), step=wide)
    if total is not None:
        _add_sum(layer, total, results)
    _call("offload_experts", ctypes.addressof(layer), numbers=rows * hidden * inner, level=None)


def _add_experts(layer: Layer, experts: Sequence[ExpertRows], results: int) -> ctypes.Array[Expert]:
    """The experts, as the library takes them; their number and sizes are added to the layer."""
    array, first, rows = (Expert * len(experts))(), None, 0
    for field, (up, down, count, to) in zip(array, experts, strict=True):
        sizes = up.sizes, down.sizes
        first = first or sizes
        require(first == sizes, "an expert of", sizes, "beside one of", first)
        require(0 < count <= MOST_ROWS and 0 <= to <= results - count, count, "rows from", to, "on, of", results)
        (field.up, field.up_count), (field.down, field.down_count) = (up.parts, up.count), (down.parts, down.count)
        field.begin, field.end, field.to = rows, rows + count, to
        rows += count
    layer.count, layer.rows = len(experts), rows
    if first is not None:
        (layer.wide, layer.hidden), (width, layer.inner) = first
        require(width == layer.width, width, "products, where there is room for", layer.width)
    return array


def _add_sum(layer: Layer, total: WeightedSum, results: int) -> None:
    places, weights, out = total
    require(places.dim() == _OF_ROWS and places.is_contiguous(), "places of", places.shape)
    layer.all_tokens, layer.picks = places.shape
    layer.places = _indices(places.view(-1), places.numel(), results, least=-1)
    layer.weights = _address(weights, (places.numel(),), (torch.float32,))
    layer.out = _address(out, (layer.all_tokens, layer.width), step=layer.width)
    layer.out_dtype = DTYPES[out.dtype]


def gather(pieces: Sequence[torch.Tensor], begins: Sequence[int], place: torch.Tensor) -> None:
    """Put pieces where they begin in a place, by all threads; all are uint8, contiguous, of one dimension.

    Raises:
        ArgumentError: sizes do not fit.
    """
    sizes, room = [piece.numel() for piece in pieces], place.numel()
    given = [_address(piece, (size,), (torch.uint8,)) for piece, size in zip(pieces, sizes, strict=True)]
    to, count = _address(place, (room,), (torch.uint8,)), len(sizes)
    fits = count == len(begins) and all(0 <= at <= room - size for at, size in zip(begins, sizes, strict=True))
    require(fits, "pieces of", sizes, "from", begins, "on, in", room)
    if library() is None:
        for piece, size, at in zip(pieces, sizes, begins, strict=True):
            place[at : at + size].copy_(piece)
        return
    arrays = [(ctypes.c_int64 * count)(*one) for one in (given, sizes, begins)]
    _call("offload_gather", *arrays, count, to, numbers=sum(sizes) // _BYTES_PER_NUMBER, level=None)


def pack_logps(ids: torch.Tensor, logps: torch.Tensor, width: int, id_bits: int, bits: int) -> torch.Tensor:
    """See `logps.pack`; a packed row has `width` bytes.

    Raises:
        ArgumentError: sizes do not fit.
    """
    require(ids.dim() == _OF_ROWS, "ids of the shape", ids.shape)
    ids, logps, (rows, k) = ids.contiguous(), logps.contiguous(), ids.shape
    packed = torch.empty((rows, width), dtype=torch.uint8, device="cpu")
    addresses = _address(ids, (rows, k), (torch.int64,)), _address(logps, (rows, k), (torch.float32,))
    _logps(width, k, id_bits, bits).offload_pack_logps(*addresses, rows, k, id_bits, bits, memory_of(packed))
    return packed


def unpack_logps(
    packed: torch.Tensor, k: int, width: int, id_bits: int, bits: int, *, level: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `logps.unpack`; a packed row has `width` bytes.

    Raises:
        ArgumentError: sizes do not fit.
    """
    packed, rows = packed.contiguous(), _rows_of(packed)
    ids = torch.empty((rows, k), dtype=torch.int64, device="cpu")
    logps, address = torch.empty_like(ids, dtype=torch.float32), _address(packed, (rows, width), (torch.uint8,))
    scratch, level = torch.empty(width + 32, dtype=torch.uint8, device="cpu"), best_level() if level is None else level
    places = memory_of(ids), memory_of(logps), memory_of(scratch)
    _logps(width, k, id_bits, bits).offload_unpack_logps(address, rows, k, id_bits, bits, *places, level)
    return ids, logps


def _logps(width: int, k: int, id_bits: int, bits: int) -> ctypes.CDLL:
    """The library, for rows of this many bytes."""
    fits = 0 < id_bits < 32 and 1 < bits < 24 and k > 0 and width == 4 + (k * (id_bits + bits) + 7) // 8
    kernels = library()
    require(fits and kernels is not None, k, "numbers of", id_bits, "and", bits, "bits in", width, "bytes")
    assert kernels is not None
    return kernels
