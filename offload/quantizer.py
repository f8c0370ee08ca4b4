"""A small quantizer: 4-bit integers in groups that share a scale.

Always true:
- a value is its code, from -8 to 7, times the scale of its group; a group lies within a row, and the last may be short
- two codes are in a byte, the even column in the low half
- quantizing reads some rows at a time: the codes, the scales and these rows are all that is in memory
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from offload.errors import ArgumentError, ArgumentTypeError, UnsupportedOpError
from offload.tensor.arguments import checked_count, refuse_other, refuse_unstorable
from offload.torch_api import make_wrapper, no_function, op_schema, return_and_correct_aliasing

_LEAST, _MOST = -8, 7
_NARROWEST = 0.5  # of the min-max scale
_BLOCK = 1 << 20  # elements that are quantized at a time
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_aten = torch.ops.aten


class GroupedInt4Tensor(torch.Tensor):
    """A tensor of 4-bit codes with a scale for each group. Make one with `quantize_int4`.

    An op runs on the dequantized values, and its result is plain; `detach`, `clone`, and `to` with another floating
    dtype or device, keep the codes.

    Attributes:
        codes: two to a byte, uint8, (..., half of the columns, rounded up).
        scales: (..., groups).
        group_size: how many columns share a scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int

    @staticmethod
    def __new__(
        cls: type[GroupedInt4Tensor],
        codes: torch.Tensor,
        scales: torch.Tensor,
        group_size: int,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> GroupedInt4Tensor:
        """The tensor of that shape and dtype.

        Raises:
            ValueError: the codes or the scales are not of a tensor of that shape.
        """
        *rows, columns = shape
        groups = -(-columns // group_size) if type(group_size) is int and group_size > 0 else None
        wanted = ([*rows, -(-columns // 2)], [*rows, groups])
        if (list(codes.shape), list(scales.shape)) != wanted or codes.dtype != torch.uint8:
            raise ArgumentError(
                f"codes {tuple(codes.shape)} of {codes.dtype} and scales {tuple(scales.shape)} are not those of a "
                f"tensor {tuple(shape)} in groups of {group_size}"
            )
        made: GroupedInt4Tensor = make_wrapper(cls, shape, dtype=dtype, device=codes.device)
        made.codes, made.scales, made.group_size = codes, scales, group_size
        return made

    def dequantize(self) -> torch.Tensor:
        """The values, plain: each code times its scale, rounded to the dtype."""
        halves = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(-2)
        codes = halves[..., : self.shape[-1]].to(self.scales.dtype).add_(_LEAST)
        scales = self.scales.repeat_interleave(self.group_size, -1)[..., : self.shape[-1]]
        return codes.mul_(scales).to(self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GroupedInt4Tensor({tuple(self.shape)}, {self.dtype}, group_size={self.group_size})"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scales"], {"group_size": self.group_size, "dtype": self.dtype}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: dict[str, Any], outer_size: Any, outer_stride: Any
    ) -> GroupedInt4Tensor:
        return GroupedInt4Tensor(
            inner["codes"], inner["scales"], context["group_size"], tuple(outer_size), context["dtype"]
        )

    __torch_function__ = no_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
            same = args[0]._with(func(args[0].codes), func(args[0].scales), args[0].dtype)
            return return_and_correct_aliasing(func, args, kwargs, same)
        if func is _aten._to_copy.default and kwargs.get("dtype", args[0].dtype) in _DTYPES:
            return args[0]._sent(**kwargs)
        if _is_written_to(func, args, kwargs):
            raise UnsupportedOpError(
                f"{func} would write to a GroupedInt4Tensor {tuple(args[0].shape)}: change its dequantize(), and "
                "quantize that"
            )
        return func(*_dequantized(args), **dict(zip(kwargs, _dequantized(tuple(kwargs.values())), strict=True)))

    def _with(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> GroupedInt4Tensor:
        return GroupedInt4Tensor(codes, scales, self.group_size, tuple(self.shape), dtype)

    def _sent(self, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> GroupedInt4Tensor:
        """A copy of another dtype, or elsewhere."""
        codes, scales = (part.to(device=device, copy=True) for part in (self.codes, self.scales))
        return self._with(codes, scales, dtype or self.dtype)


def quantize_int4(
    tensor: torch.Tensor,
    group_size: int = 128,
    *,
    candidates: int = 1,
    importance: torch.Tensor | None = None,
) -> GroupedInt4Tensor:
    """A tensor rounded to 4 bits: symmetric, with a scale for each group of columns.

    The min-max scale of a group is the least with which no value is cut off: none then moves by more than half of it.
    That is rounding to nearest, the baseline of published methods. With more `candidates` scales down to half of it are
    tried too, and that with the least squared error is taken: large values are cut off so that the many small ones
    come out better.

    Args:
        tensor: (..., columns), of floating point, plain or offloaded; a part of its rows is in memory at a time.
        group_size: the columns of a group. Where it does not divide them, the last group is shorter.
        candidates: how many scales are tried for each group, from the min-max one (1: that alone) evenly towards half.
        importance: (columns,), not negative: the weight of each column's error in the choice, such as the diagonal of
            a Hessian.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        TypeError: the tensor is not of 16 to 64 bits of floating point.
        ValueError: it has no columns' dimension, or values that are not finite; or another argument is out of range.

    Source:
        Rounding in groups: Yao et al., "ZeroQuant" (2022, arXiv:2206.01861). Scales by search over the squared error:
        Choukroun et al., "Low-bit Quantization of Neural Networks for Efficient Inference" (2019, arXiv:1902.06822).
        The diagonal of a Hessian as weights: LeCun et al., "Optimal Brain Damage" (1989).

    Example:
        >>> q = quantize_int4(torch.tensor([[-8.0, 7.0, 0.4, 3.0]]), group_size=2)
        >>> q.dequantize()
        tensor([[-8.0000,  7.0000,  0.4286,  3.0000]])
        >>> q.codes.nbytes
        2
    """
    _check(tensor, group_size, candidates, importance)
    *outer, columns = tensor.shape
    groups, count = -(-columns // group_size), math.prod(outer)
    rows = tensor.detach().reshape(count, columns)
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    weights = None if importance is None else _in_groups(importance.detach().to(dtype)[None], groups, group_size)
    codes = torch.zeros((count, -(-columns // 2)), dtype=torch.uint8, device=tensor.device)
    scales = torch.zeros((count, groups), dtype=dtype, device=tensor.device)
    for start, stop in _blocks(count, columns):
        block = _in_groups(rows[start:stop].to(dtype), groups, group_size)
        if not block.isfinite().all():
            raise ArgumentError(f"rows {start} to {stop - 1} hold values that are not finite: none is near to them")
        scales[start:stop] = best = _best_scales(block, candidates, weights)
        codes[start:stop] = _packed(_codes(block, best).flatten(1)[:, :columns])
    codes, scales = (part.view(*outer, part.shape[-1]) for part in (codes, scales))
    return GroupedInt4Tensor(codes, scales, group_size, tuple(tensor.shape), tensor.dtype)


def _check(tensor: torch.Tensor, group_size: int, candidates: int, importance: torch.Tensor | None) -> None:
    refuse_unstorable(tensor, "the tensor to quantize")
    if importance is not None:
        refuse_other(importance, torch.Tensor, "an importance that is a torch.Tensor")
    checked_count(group_size, "group_size")
    checked_count(candidates, "candidates")
    if tensor.dtype not in _DTYPES:
        raise ArgumentTypeError(f"a tensor of {tensor.dtype} is not quantized: it should be of one of {_DTYPES}")
    if tensor.dim() == 0:
        raise ArgumentError("a number alone is not quantized: there are no columns to group")
    if importance is None:
        return
    if tuple(importance.shape) != tuple(tensor.shape[-1:]):
        raise ArgumentError(f"importance is {tuple(importance.shape)}, and should be {tuple(tensor.shape[-1:])}")
    if not (importance >= 0).all():
        raise ArgumentError("importance holds negative numbers, or such as are none")


def _blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK // max(columns, 1))
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _in_groups(rows: torch.Tensor, groups: int, group_size: int) -> torch.Tensor:
    """(rows, groups, group_size), with zeros where the last group is short."""
    padded = torch.nn.functional.pad(rows, (0, groups * group_size - rows.shape[-1]))
    return padded.view(len(rows), groups, group_size)


def _best_scales(block: torch.Tensor, candidates: int, weights: torch.Tensor | None) -> torch.Tensor:
    """The scale of each group that gives the least error: (rows, groups)."""
    largest = torch.maximum(block.amax(-1) / _MOST, block.amin(-1) / _LEAST).clamp_(min=0)
    if candidates == 1:
        return largest
    best, least = largest, _error(block, largest, weights)
    for number in range(1, candidates):
        scales = largest * (1 - (1 - _NARROWEST) * number / (candidates - 1))
        error = _error(block, scales, weights)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best


def _error(block: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The squared error of each group: (rows, groups)."""
    error = _codes(block, scales).mul_(scales[..., None]).sub_(block).square_()
    return (error if weights is None else error.mul_(weights)).sum(-1)


def _codes(block: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (block / torch.where(scales > 0, scales, 1)[..., None]).round_().clamp_(_LEAST, _MOST)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes (rows, columns), two to a byte."""
    halves = torch.nn.functional.pad(codes.sub(_LEAST).to(torch.uint8), (0, codes.shape[-1] % 2))
    return halves[:, ::2] | halves[:, 1::2] << 4


def _is_written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op writes to a quantized tensor, not only to what is plain."""
    given = {argument.name: value for argument, value in zip(op_schema(func).arguments, args, strict=False)} | kwargs
    written = (given.get(one.name) for one in op_schema(func).arguments if one.alias_info and one.alias_info.is_write)
    flat = (part for value in written for part in (value if isinstance(value, (list, tuple)) else [value]))
    return any(isinstance(part, GroupedInt4Tensor) for part in flat)


def _dequantized(values: tuple[Any, ...]) -> list[Any]:
    """Arguments of an op with plain values in place of quantized ones."""
    return [
        type(value)(_dequantized(tuple(value)))
        if isinstance(value, (list, tuple))
        else value.dequantize()
        if isinstance(value, GroupedInt4Tensor)
        else value
        for value in values
    ]
