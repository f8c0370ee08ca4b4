"""Comparing two values bit for bit, and saying where they differ.

Always true:
- a value on disk is compared by its contents: it is read, never written to
- a difference is reported with its place: the keys and indices that lead there
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # torch can copy these bit by bit


def assert_equal(expected: object, found: object, *, strides: bool = True) -> None:
    """Raise unless two values are equal: in shape, dtype, strides, and in every bit; says where they differ.

    Args:
        expected: a tensor, a module (its state dict), or mappings, sequences and dataclasses of them. What else is in
            these is compared with `==`, and has to be of the same type.
        found: the same. A tensor with a method `materialize`, as those on disk have, counts as what that gives. A
            wrapper subclass has to be of one class on both sides; the tensors inside are compared.
        strides: whether strides count, but for those of dimensions of one element.
    """
    assert_same(expected, found, partial(assert_same_tensor, difference=difference_between, strides=strides))


def is_equal(expected: object, found: object, *, strides: bool = True) -> bool:
    """Whether `assert_equal` passes."""
    try:
        assert_equal(expected, found, strides=strides)
    except AssertionError:
        return False
    return True


def assert_same(
    expected: object, found: object, assert_same_tensor: Callable[[torch.Tensor, Any, str], None], at: str = ""
) -> None:
    """The same structure, down to the leaves.

    Args:
        assert_same_tensor: compares two tensors, given their place.
        at: the place of the two values.
    """
    if isinstance(expected, torch.nn.Module) and isinstance(found, torch.nn.Module):
        expected, found = expected.state_dict(), found.state_dict()
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(expected, found, at)
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        if set(expected) != set(found):
            raise _failure(at, f"keys {list(expected)} != {list(found)}")
        for key, value in expected.items():
            assert_same(value, found[key], assert_same_tensor, f"{at}[{key!r}]")
    elif isinstance(expected, list | tuple) and type(expected) is type(found):
        if len(expected) != len(found):
            raise _failure(at, f"{len(expected)} entries != {len(found)}")
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_same(one, other, assert_same_tensor, f"{at}[{number}]")
    elif dataclasses.is_dataclass(expected) and type(expected) is type(found):
        for name in (field.name for field in dataclasses.fields(expected)):
            assert_same(getattr(expected, name), getattr(found, name), assert_same_tensor, f"{at}.{name}")
    else:
        equal = expected == found or (expected != expected and found != found)
        if type(expected) is not type(found) or not equal:
            raise _failure(at, f"{expected!r} != {found!r}")


def _failure(at: str, message: str) -> AssertionError:
    return AssertionError(f"{at}: {message}" if at else message)


def assert_same_tensor(
    expected: torch.Tensor,
    found: object,
    at: str = "",
    *,
    difference: Callable[[torch.Tensor, torch.Tensor], str] | None,
    strides: bool = True,
    of_dense_alone: bool = False,
    held_by: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """The same metadata and values.

    Args:
        difference: describes how the values of two plain tensors differ; None if values are arbitrary.
        of_dense_alone: whether only strides of dense tensors count: for overlapping or gapped ones, torch itself may
            return a copy.
        held_by: returns what a tensor holds.
    """
    if not isinstance(found, torch.Tensor):
        raise _failure(at, f"a tensor != {found!r}")
    for what in ("shape", "dtype", "layout"):
        one, other = getattr(expected, what), getattr(found, what)
        if one != other:
            raise _failure(at, f"{what}s {one} != {other}")
    if strides and _has_strides(expected, of_dense_alone):
        _assert_same_strides(expected, found, at)
    if difference is None:
        return
    wanted, actual = map(held_by or in_memory, (expected, found))
    if strides and _has_strides(expected, of_dense_alone=True):
        _assert_same_strides(expected, actual, at)
    if not _is_wrapper(wanted) and not _is_wrapper(actual):
        if text := difference(wanted, actual):
            raise _failure(at, text)
        return
    if type(wanted) is not type(actual):
        raise _failure(at, f"{type(wanted).__name__} != {type(actual).__name__}")
    (names, context), (others, another) = (tensor.__tensor_flatten__() for tensor in (wanted, actual))  # type: ignore[attr-defined]
    if (list(names), str(context)) != (list(others), str(another)):
        raise _failure(at, f"{context} != {another}")
    for name in names:
        inner = getattr(wanted, name), getattr(actual, name)
        assert_same_tensor(*inner, f"{at}.{name}", difference=difference, strides=strides)


def _assert_same_strides(expected: torch.Tensor, found: torch.Tensor, at: str) -> None:
    both = zip(expected.shape, expected.stride(), found.stride(), strict=True)
    if any(one != other for size, one, other in both if size > 1):
        raise _failure(at, f"strides {expected.stride()} != {found.stride()}")


def _has_strides(tensor: torch.Tensor, of_dense_alone: bool) -> bool:
    """Whether its strides mean anything."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.numel() <= 1:
        return False
    return not of_dense_alone or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.nn.Parameter


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    materialize = getattr(tensor, "materialize", None)
    plain: torch.Tensor = (tensor if materialize is None else materialize()).detach().cpu()
    if plain.layout != torch.strided or plain.is_nested:
        plain = plain.to_dense()
    return torch.dequantize(plain) if plain.is_quantized else plain


def difference_between(one: torch.Tensor, other: torch.Tensor) -> str:
    """How the values of two plain tensors of one shape and dtype differ; empty if not."""
    bits, others = _bits(one), _bits(other)
    if torch.equal(bits, others):
        return ""
    left, right = _numbers(one), _numbers(other)
    same = (bits == others).view(left.numel(), -1).all(1)
    apart = ~(same | (left.isnan() & right.isnan()) | ((left == 0) & (right == 0)))
    if not apart.any():
        return "equal, but for the sign of zeros or the bits of NaNs"
    first = int(apart.nonzero()[0])
    count = f"{int(apart.sum())} of {len(apart)} numbers differ"
    return f"{count}, the first at {first}, flat: {left[first].item()} != {right[first].item()}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor, in element order."""
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = tensor.view(_INTEGERS[tensor.itemsize]).contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a one-element view may have any stride


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Flat real numbers, for finding NaNs and zeros: a complex number becomes two."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.is_complex():
        return torch.view_as_real(flat).flatten().double()
    return flat.view(torch.uint8) if flat.dtype == torch.float4_e2m1fn_x2 else flat.double()
