"""Checks of user input, before anything is done with it.

Always true:
- an error names the tensor or the file, and what would be accepted
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DtypeMismatchError,
    MapError,
    MissingKeyError,
    ShapeMismatchError,
    UnsupportedOpError,
)
from offload.storage.file import TensorFile
from offload.storage.layout import Layout, contiguous
from offload.storage.subclasses import refuse_lossy
from offload.system.modes import no_functions, no_modes
from offload.system.reasons import some
from offload.torch_api import usable_devices

T = TypeVar("T")


def checked_count(number: int, what: str, *, least: int = 1) -> int:
    """A count; raises `ArgumentError` if it is less than `least`."""
    count = operator.index(number)
    if not least <= count <= sys.maxsize:
        raise ArgumentError(f"{what} should be {least} or more, not {count}")
    return count


def as_names(names: Iterable[str] | None) -> list[str] | None:
    """Names of columns or fields; None for all. A single name may be given as it is."""
    if names is None:
        return None
    return [names] if isinstance(names, str) else list(names)


def only_key(file: TensorFile, key: str | None) -> str:
    """`key`, or the key of the only value in `file`."""
    if key is not None:
        return key
    if "name" in file.notes:
        return str(file.notes["name"])
    keys = file.header.keys
    if len(keys) != 1:
        raise MissingKeyError(f"{file.path} holds {len(keys)} tensors ({some(sorted(keys))}): say which with key=")
    return keys[0]


def refuse_unstorable(tensor: object, name: str) -> None:
    """Refuse tensors without dense values, and those that a file could not restore completely."""
    refuse_lossy(checked_dense(tensor, name), name)


def checked_dense(tensor: object, name: str) -> torch.Tensor:
    """`tensor`; raises `ArgumentTypeError` if it is none, and `UnsupportedOpError` if it is meta, sparse..."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name!r}: a torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.is_meta:
        raise UnsupportedOpError(f"{name!r} is on the meta device: it has no values to write")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedOpError(
            f"{name!r} is not a dense tensor (layout {tensor.layout}, quantized {tensor.is_quantized}, "
            f"nested {tensor.is_nested}): store its parts, or its to_dense() / dequantize()"
        )
    return tensor


def refuse_new_value(stored: torch.Tensor, values: object, name: str) -> None:
    """Refuse a new value that `stored` can't take, also of a dtype without gradients where they are required."""
    values = checked_dense(values, name)
    refuse_lossy(values, name)
    if stored.requires_grad and not (values.is_floating_point() or values.is_complex()):
        raise UnsupportedOpError(
            f"{name!r}: data set to a tensor that requires gradients must be floating point or complex dtype, "
            f"not {values.dtype}: call requires_grad_(False) on it first"
        )


def refuse_other_kind(
    stored: torch.Tensor, values: torch.Tensor, name: str, *, strict_shape: bool, strict_dtype: bool
) -> None:
    """Refuse a new value of another shape or dtype unless allowed."""
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
    """The device with its index, as torch reports it; raises `DeviceError` if this machine has no such device."""
    try:
        with no_functions(), no_modes():
            return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ValueError) as error:  # also for a number that is too large
        raise DeviceError(f"this torch finds no device {device!r} here: use one of {_devices()}") from error


def computing_device(device: torch.device | str | int) -> torch.device:
    """Like `checked_device`, for a device that ops should run on: also raises for one where they can't."""
    checked = checked_device(device)
    if checked.type == "meta":
        raise DeviceError(f"ops can't run on 'meta': use one of {_devices()}")
    return checked


def _devices() -> str:
    """This machine's devices, in words."""
    return ", ".join(["cpu", *map(str, usable_devices())])


def checked_layout(shape: Any, sizes: Sequence[int], dtype: torch.dtype | None, name: str) -> Layout:
    """The layout of a new tensor; the shape as torch takes it, `(2, 3)` or `2, 3`, without bools or negative sizes."""
    given = tuple(shape) if isinstance(shape, tuple | list) and not sizes else (shape, *sizes)
    if any(isinstance(size, bool) for size in given):
        raise ArgumentTypeError(f"{name!r}: the sizes in {repr(given)[:80]} should be integers")
    whole = tuple(map(operator.index, given))
    if any(size < 0 for size in whole):
        raise ArgumentError(f"{name!r}: the shape {whole} has a negative size")
    with no_functions(), no_modes():
        kind = torch.empty(0, dtype=dtype, device="meta").dtype  # torch's default for None, and its error for others
    return contiguous(kind, whole)


def floating_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A floating-point dtype, given as such or by name; raises `ArgumentError` if it is not one."""
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ArgumentError(f"dtype {dtype!r} is not a floating-point dtype of torch: use torch.bfloat16, 'float16'...")
    return chosen


def without_stop(fn: Callable[..., T], *args: object) -> T:
    """The result of a caller's function inside an iteration, which StopIteration would end without a word."""
    try:
        return fn(*args)
    except StopIteration as error:
        raise MapError(
            "fn raised StopIteration, which an iteration would take for its end: raise another error"
        ) from error
