"""What users hand in, looked at before anything is done with it.

Always true:
- an error names the tensor or the file, and what would do
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from offload.errors import ArgumentError, ArgumentTypeError, DtypeMismatchError, ShapeMismatchError, UnsupportedOpError
from offload.storage.file import TensorFile
from offload.storage.modes import no_functions, no_modes
from offload.storage.subclasses import refuse_lossy
from offload.tensor.outside import SeenFromOutside


def only_key(file: TensorFile, key: str | None) -> str:
    """`key`, or that of the one value of `file`."""
    if key is not None:
        return key
    if "name" in file.notes:
        return str(file.notes["name"])
    keys = file.header.keys
    if len(keys) != 1:
        raise KeyError(f"{file.path} holds {len(keys)} tensors ({', '.join(sorted(keys)[:5])}...): say which with key=")
    return keys[0]


def refuse_unstorable(tensor: object, name: str) -> None:
    """Refuse what has no dense value, or is more than a file can give back."""
    refuse_other_class(checked_dense(tensor, name), name)


def refuse_other_class(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose class is more than its numbers, unless a file can give it back.

    Raises:
        UnknownSubclassError
    """
    if not isinstance(tensor, SeenFromOutside):
        refuse_lossy(tensor, name)


def checked_dense(tensor: object, name: str) -> torch.Tensor:
    """`tensor`, which has a dense value.

    Raises:
        TypeError: it is none.
        UnsupportedOpError: it is empty, sparse...
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r}: a torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.is_meta:
        raise UnsupportedOpError(f"{name!r} is on the meta device: it has no values to write")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedOpError(
            f"{name!r} is not a dense tensor (layout {tensor.layout}, quantized {tensor.is_quantized}, "
            f"nested {tensor.is_nested}): store its parts, or its to_dense() / dequantize()"
        )
    return tensor


def refuse_without_grad(stored: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Refuse a new value of a dtype that has no gradients, for a tensor that requires them; torch says it so, too."""
    if stored.requires_grad and not (values.is_floating_point() or values.is_complex()):
        raise RuntimeError(
            f"{name!r}: data set to a tensor that requires gradients must be floating point or complex dtype, "
            f"not {values.dtype}: call requires_grad_(False) on it first"
        )


def refuse_other_kind(
    stored: torch.Tensor, values: torch.Tensor, name: str, *, strict_shape: bool, strict_dtype: bool
) -> None:
    """Refuse a new value of another shape or dtype, unless that is allowed."""
    if strict_shape and values.shape != stored.shape:
        raise ShapeMismatchError(
            f"{name!r} has shape {tuple(stored.shape)}, the new value {tuple(values.shape)}: "
            "pass strict_shape=False to change it"
        )
    if strict_dtype and values.dtype != stored.dtype:
        raise DtypeMismatchError(
            f"{name!r} has dtype {stored.dtype}, the new value {values.dtype}: pass strict_dtype=False to change it"
        )


def checked_device(device: torch.device | str | int) -> torch.device:
    """The device with its index, as torch reports it.

    Raises:
        RuntimeError, AssertionError: torch's own, if there is no such device here.
    """
    with no_functions(), no_modes():
        return torch.empty(0, device=device).device


def checked_sizes(shape: Any, *sizes: int) -> tuple[int, ...]:
    """A shape as torch takes it: `(2, 3)` or `2, 3`.

    Raises:
        ArgumentTypeError: it holds something else than whole numbers.
        ArgumentError: a size is negative.
    """
    is_whole = isinstance(shape, Iterable) and not sizes and not (isinstance(shape, torch.Tensor) and shape.dim() == 0)
    try:
        found = tuple(map(operator.index, shape if is_whole else (shape, *sizes)))
    except TypeError as error:
        raise ArgumentTypeError(f"{(shape, *sizes)} is no shape: give sizes as (2, 3), or as 2, 3") from error
    if any(size < 0 for size in found):
        raise ArgumentError(f"no tensor has the shape {found}: sizes are 0 or more")
    return found


def checked_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """A dtype; torch's default one for None.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not isinstance(dtype, torch.dtype | None):
        raise ArgumentTypeError(f"{dtype!r} is no dtype: give one of torch's, as torch.float32")
    return torch.get_default_dtype() if dtype is None else dtype


def floating_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating-point dtype, by itself or by its name.

    Raises:
        ValueError: it is none.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype {dtype!r} is no floating-point dtype of torch's: use torch.bfloat16, 'float16'...")
    return found
