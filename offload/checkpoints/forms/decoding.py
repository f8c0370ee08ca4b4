"""A dense weight as a recipe over packed pieces, and what a format says of its pieces.

Always true:
- a decoder is pure and picklable, and computes rows of the weight from rows of the pieces
- pieces keep their names in the checkpoint: saving writes them back under these
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch

from offload.annotations import Settings
from offload.errors import CheckpointError
from offload.kernels.packed import NumberRows, takes
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.system.modes import no_functions, no_modes
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU
from offload.tensor.recipes import Piece
from offload.tensor.runs import Decode, Decoder
from offload.tensor.views import handle_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, wrap_handle

SCALES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of factors that are plain numbers
_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "signed_bytes"}  # of one number per byte
Tensors: TypeAlias = "Mapping[str, OffloadedTensor]"


@dataclass(frozen=True)
class Format:
    """A packed format: a row of the table in `formats`.

    Attributes:
        ends: the ends of the names of pieces, each with what the dense weight's name has there, and the piece's role;
            without a role it is left out. A name with no such end is that of a weight, whose role is "".
        weight: the dense weight over its pieces; None if what is stored under its name is dense.
        read: what `weight` needs to know of the settings; raises `ValueError`, `TypeError`, `KeyError`,
            `AttributeError` or `OverflowError` for malformed ones, and for those that are not carried out.
    """

    ends: Mapping[str, tuple[str, str | None]]
    weight: Callable[[Pieces], OffloadedTensor | None]
    read: Callable[[Settings], Any] = dict

    def place_of(self, name: str) -> tuple[str, str | None]:
        """The name of the dense weight that a stored tensor belongs to, and its role there."""
        end = next(filter(f".{name}".endswith, self.ends), None)
        if end is None:
            return name, ""
        instead, role = self.ends[end]
        return _with_end(name, end, instead), role


def _with_end(name: str, end: str, instead: str) -> str:
    """A name with another end; a layer without a name is that of a dot."""
    return (f".{name}".removesuffix(end) + instead).removeprefix(".")


def of_layer(*pieces: str) -> dict[str, tuple[str, str | None]]:
    """The `ends` of pieces that lie beside each other in a layer; each has its name as its role."""
    return {f".{piece}": (".weight", piece) for piece in pieces}


@dataclass(frozen=True)
class Pieces:
    """What a checkpoint stores of the dense weight `name`.

    Attributes:
        ends: see `Format`.
        settings: what the format has read of them.
    """

    name: str
    by_role: Tensors
    ends: Mapping[str, tuple[str, str | None]]
    settings: Any

    def __getitem__(self, role: str) -> OffloadedTensor:
        """Raises `CheckpointError` if the piece is missing."""
        if role in self.by_role:
            return self.by_role[role]
        handle = handle_of(next(iter(self.by_role.values())))
        ends = ((end, instead) for end, (instead, other) in self.ends.items() if other == role)
        end, instead = next(ends, ("", ""))
        raise CheckpointError(
            f"{handle.name!r} in {handle.path} is packed, and {_with_end(self.name, instead, end)!r} is missing, "
            "which is needed to decode it: download the checkpoint again"
        )

    def __contains__(self, role: str) -> bool:
        return role in self.by_role

    def __iter__(self) -> Iterator[OffloadedTensor]:
        return iter(self.by_role.values())

    def get(self, role: str) -> OffloadedTensor | None:
        """The piece, if it is there."""
        return self.by_role.get(role)

    def check(self, fits: bool, why: str) -> None:
        """Raises `CheckpointError` unless the pieces fit."""
        if not fits:
            raise unfit(self.name, list(self), why)


def method_of(quantization: Settings) -> str | None:
    """The name of the method in a configuration's settings."""
    is_old = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")  # bitsandbytes, unnamed
    method = quantization.get("quant_method") or ("bitsandbytes" if is_old else None)
    return None if method is None else str(getattr(method, "value", method))


def decoded(
    name: str,
    decoder: Decoder,
    pieces: Sequence[OffloadedTensor],
    *,
    shape: Sequence[int],
    stacked: bool = False,
    dtype: torch.dtype | None = None,
) -> OffloadedTensor:
    """The dense value of this shape, computed from packed pieces when it is read. For other arguments see `Decoded`.

    `dtype` is that of the value, if the decoder leaves the last rounding to a copy. Raises `CheckpointError` if the
    pieces have other numbers of rows, or can't be decoded.
    """
    granule, per = decoder.granule, decoder.per
    rows, *row = shape[1:] if stacked else shape
    with no_functions(), no_modes():
        view_specs = [view_spec_of(piece) for piece in pieces]
        if stacked and any(len(view_spec) != max(shape[0], 1) for view_spec in view_specs):
            raise unfit(name, pieces, f"not all of them are stacks of {max(shape[0], 1)}")
        ones = [view_spec[0] for view_spec in view_specs] if stacked else view_specs
    for one, each in zip(ones, per, strict=True):
        if each is not None and len(one) != -(-rows * each // granule):
            raise unfit(name, pieces, f"{list(one.shape)} does not make {rows} rows, {granule} from {each}")
    given = tuple(
        (tuple(one.shape) if each is None else (min(each, len(one)), *one.shape[1:]), one.dtype)
        for one, each in zip(ones, per, strict=True)
    )
    try:
        whole = partial(decoder.decode)  # partial functions with the same arguments don't compare equal
        decode, actual, its_dtype = _tried(whole.func, whole.args, tuple(whole.keywords.items()), given)
    except Exception as error:  # decoders can raise anything for shapes that they don't expect
        raise unfit(name, pieces, str(error)) from error
    if actual not in ((min(granule, rows), *row), (granule, *row)):
        raise unfit(name, pieces, f"they make rows of {list(actual[1:])}, and {row} are needed")
    recipe = Decoded(
        contiguous(dtype or its_dtype, tuple(shape)),
        replace(decoder, decode=decode),
        [Piece(handle_of(piece), view_spec) for piece, view_spec in zip(pieces, view_specs, strict=True)],
        stacked=stacked,
    )
    return wrap_handle(Handle.compose(recipe, name, handle_of(pieces[0]).folder), CPU)


@lru_cache(maxsize=1024)
def _tried(
    function: Decode,
    first: tuple[object, ...],
    named: tuple[tuple[str, object], ...],
    given: tuple[tuple[tuple[int, ...], torch.dtype], ...],
) -> tuple[Decode, tuple[int, ...], torch.dtype]:
    """The call, and the shape and dtype of its result for one granule; cached, one trial for all weights of a kind."""
    decode = partial(function, *first, **dict(named)) if first or named else function
    with no_functions(), no_modes():
        value = decode(*(torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in given))
        return decode, tuple(value.shape), value.dtype


def number_rows(
    kind: str | None,
    pieces: Sequence[OffloadedTensor],
    roles: tuple[str, ...] = ("numbers", "scales"),
    *,
    group: int = 0,
    **options: Any,
) -> NumberRows | None:
    """How the kernels take numbers whose factors are stored elsewhere: see `NumberRows`. None if they do not.

    Args:
        kind: None for that of the dtype of the numbers, which are bytes.
    """
    kind = kind or _KINDS.get(pieces[0].dtype)
    if kind is None or not all(takes(role, piece.dtype) for piece, role in zip(pieces, roles, strict=True)):
        return None
    return NumberRows(kind, roles, group=group, **options) if group % 32 == 0 or group == 16 else None


def read_now(piece: OffloadedTensor) -> torch.Tensor:
    """The numbers of a small piece, which say how others are packed. Raises: as `Handle.base`."""
    with no_functions(), no_modes():
        return Piece(handle_of(piece), view_spec_of(piece)).value()


def unfit(name: str, pieces: Sequence[OffloadedTensor], why: str) -> CheckpointError:
    """The error for pieces that don't match each other."""
    kinds = ", ".join(f"{handle_of(piece).name} {piece.dtype} {list(piece.shape)}" for piece in pieces)
    return CheckpointError(
        f"{name!r} can't be made from its pieces in {handle_of(pieces[0]).path} ({kinds}): {why}. Download the "
        "checkpoint again, with its config.json."
    )
