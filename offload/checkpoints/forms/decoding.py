"""A dense weight as a recipe over packed pieces; choosing the module for a configuration.

Always true:
- a decoder is pure and picklable, and computes rows of the weight from rows of the pieces
- pieces keep their names in the checkpoint: saving writes them back under these
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.annotations import Settings
from offload.checkpoints.forms.settings import refuse_other_settings
from offload.errors import CheckpointError
from offload.kernels.packed import NumberRows, Packed, takes
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.storage.modes import no_functions, no_modes
from offload.tensor.guests import CPU
from offload.tensor.recipes import Decode, Decoded, Piece
from offload.tensor.views import handle_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, wrap_handle
from offload.torch_api import DisableTorchFunctionSubclass

SCALES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of factors that are plain numbers
Tensors: TypeAlias = "Mapping[str, OffloadedTensor]"
Unpack: TypeAlias = "Callable[[Tensors, Settings], dict[str, OffloadedTensor]]"

_MODULES = {  # by the method's name in a configuration
    "awq": "integers",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fbgemm_fp8": "fp8",
    "fp8": "fp8",
    "gptq": "integers",
    "mxfp4": "mxfp4",
    "mxfp8": "fp8",
}
_LEFT_TO_TRANSFORMERS = ("bitnet", "metal", "torchao")


def unpacked(tensors: Tensors, quantization: Settings) -> dict[str, OffloadedTensor] | None:
    """The tensors of a quantized checkpoint as those of the dense one, by the names they would have there.

    Args:
        tensors: of the checkpoint, referenced.
        quantization: the `quantization_config` of the model.

    Returns:
        None if the weights should stay packed because transformers computes with them as they are.

    Raises:
        CheckpointError: pieces are missing, or do not match each other; the message names the tensor and its file. Or
            the format is not supported.
    """
    method = method_of(quantization)
    module = _MODULES.get(str(method))
    if module is None and method in _LEFT_TO_TRANSFORMERS:
        return None
    if module is None:
        raise CheckpointError(
            f"{weights_in(tensors)} are packed by {method!r}, which is not decoded here: dequantize the model with the "
            f"package that packed it and save that, or get a checkpoint in one of the forms "
            f"{', '.join(sorted([*_MODULES, *_LEFT_TO_TRANSFORMERS]))}"
        )
    unpack: Unpack = import_module(f"offload.checkpoints.forms.{module}").unpack
    refuse_other_settings(quantization, str(method), _path_of(tensors))
    with DisableTorchFunctionSubclass():  # answered by the wrappers' metadata: no rule is needed
        return unpack(tensors, quantization)


def _path_of(tensors: Tensors) -> Path | None:
    """The file of the first one, if there is one."""
    return next((handle_of(tensor).path for tensor in tensors.values()), None)


def method_of(quantization: Settings) -> str | None:
    """The name of the method in a configuration's settings."""
    is_old = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")  # bitsandbytes, unnamed
    found = quantization.get("quant_method") or ("bitsandbytes" if is_old else None)
    return None if found is None else str(getattr(found, "value", found))


def decoded(
    name: str,
    decode: Decode,
    pieces: Sequence[OffloadedTensor],
    *,
    shape: Sequence[int],
    granule: int = 1,
    per: Sequence[int | None],
    is_divisible: bool = False,
    stacked: bool = False,
    dtype: torch.dtype | None = None,
    packed: Packed | None = None,
) -> OffloadedTensor:
    """The dense value called `name`, computed from packed pieces when it is read. For other arguments see `Decoded`.

    Args:
        shape: of the dense value.
        dtype: of the dense value, if `decode` leaves the last rounding to a copy.

    Raises:
        CheckpointError: the pieces have other numbers of rows, or can't be decoded.
    """
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
        whole = partial(decode)  # partial functions with the same arguments don't compare equal
        decode, found, made = _tried(whole.func, whole.args, tuple(whole.keywords.items()), given)
    except Exception as error:  # decoders can raise anything for shapes that they don't expect
        raise unfit(name, pieces, str(error)) from error
    if found not in ((min(granule, rows), *row), (granule, *row)):
        raise unfit(name, pieces, f"they make rows of {list(found[1:])}, and {row} are needed")
    recipe = Decoded(
        contiguous(dtype or made, tuple(shape)),
        decode,
        [Piece(handle_of(piece), view_spec) for piece, view_spec in zip(pieces, view_specs, strict=True)],
        granule=granule,
        per=per,
        is_divisible=is_divisible,
        stacked=stacked,
        packed=packed,
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
        made = decode(*(torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in given))
        return decode, tuple(made.shape), made.dtype


def number_rows(
    kind: str,
    pieces: Sequence[OffloadedTensor],
    roles: tuple[str, ...] = ("numbers", "scales"),
    *,
    group: int = 0,
    **options: Any,
) -> NumberRows | None:
    """How the kernels take numbers whose factors are stored elsewhere: see `NumberRows`. None if they do not."""
    if not all(takes(role, piece.dtype) for piece, role in zip(pieces, roles, strict=True)):
        return None
    return NumberRows(kind, roles, group=group, **options) if group % 32 == 0 or group == 16 else None


def read_now(piece: OffloadedTensor) -> torch.Tensor:
    """The numbers of a small piece, which say how others are packed.

    Raises: as `Handle.base`.
    """
    with no_functions(), no_modes():
        return Piece(handle_of(piece), view_spec_of(piece)).value()


def weights_in(tensors: Tensors) -> str:
    """The weights of a checkpoint in words, with a file of it."""
    path = _path_of(tensors)
    return "the weights" if path is None else f"the weights in {path}"


def unfit(name: str, pieces: Sequence[OffloadedTensor], why: str) -> CheckpointError:
    """The error for pieces that don't match each other."""
    kinds = ", ".join(f"{handle_of(piece).name} {piece.dtype} {list(piece.shape)}" for piece in pieces)
    return CheckpointError(
        f"{name!r} can't be made from its pieces in {handle_of(pieces[0]).path} ({kinds}): {why}. Download it again."
    )


def missing(weight: OffloadedTensor, piece: str) -> CheckpointError:
    """The error for a packed weight with a missing piece."""
    handle = handle_of(weight)
    return CheckpointError(
        f"{handle.name!r} in {handle.path} is packed, and {piece!r} is missing, which is needed to decode it: download "
        "the checkpoint again"
    )
