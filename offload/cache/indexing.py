"""Resolving row indices.

Always true:
- an index of one dimension selects the rows that it selects of a plain tensor; bytes (uint8) are numbers of rows
- an invalid index is an error that names the index and the size; nothing is clipped or wrapped twice
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from offload.errors import RowIndexError

Numbers: TypeAlias = "npt.NDArray[np.int64]"
_FORMS = (
    "an int, a slice, a range, integers of any dtype in a tensor, an array or a list, with one dimension, or a mask of "
    "bools"
)


class Rows:
    """Some rows of a cache by index, counted from 0, in the requested order; an index may repeat.

    Attributes:
        count: how many rows there are.
        last: the largest index, -1 if there are no rows.
        span: the same rows as a slice, if they are consecutive.
        is_one: whether a single row was selected, which is returned without a leading dimension.
    """

    __slots__ = ("_numbers", "count", "is_one", "last", "span")

    def __init__(self, numbers: Numbers, last: int | None = None, *, is_one: bool = False) -> None:
        """`last`: the largest index, if known."""
        self._numbers: Numbers | None = numbers
        self.count = len(numbers)
        self.span = span_of(numbers)
        self.is_one = is_one
        if last is None:
            last = -1 if not self.count else self.span.stop - 1 if self.span else int(numbers.max())
        self.last = last

    @classmethod
    def run(cls, first: int, end: int) -> Rows:
        """The rows from `first` up to `end`."""
        rows = cls.__new__(cls)
        rows._numbers, rows.span, rows.is_one = None, slice(first, max(first, end)), False
        rows.count = max(end - first, 0)
        rows.last = end - 1 if rows.count else -1
        return rows

    @property
    def numbers(self) -> Numbers:
        if self._numbers is None:
            self._numbers = np.arange(self.span.start, self.span.stop)  # type: ignore[union-attr]
        return self._numbers

    def some(self, most: int) -> list[int]:
        """About so many of them, evenly spread."""
        step = -(-self.count // most)
        if self.span is not None:
            return list(range(self.span.start, self.span.stop, step or 1))
        numbers: list[int] = self.numbers[::step].tolist()
        return numbers

    def copied(self) -> Rows:
        """The rows with their own copy of the indices: the caller may modify his."""
        return self if self._numbers is None else Rows(self._numbers.copy(), self.last, is_one=self.is_one)

    def __len__(self) -> int:
        return self.count


def rows_of(index: object, size: int) -> Rows:
    """The rows that `index` selects among `size`. Raises: RowIndexError (it is not an index, or is out of range)."""
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        return Rows.run(start, stop) if step == 1 else Rows(np.arange(start, stop, step, dtype=np.int64))
    if isinstance(index, range):
        _checked(np.array([index[0], index[-1]] if index else []), size)  # before memory for all of them is allocated
        return Rows(_checked(np.arange(index.start, index.stop, index.step, dtype=np.int64), size)[0])
    if isinstance(index, torch.Tensor | np.ndarray | list):
        numbers = _array(index)
        if numbers.dtype == bool:
            if len(numbers) != size:
                raise RowIndexError(f"the mask has {len(numbers)} elements, and the cache {size} rows")
            return Rows(np.flatnonzero(numbers))
        return Rows(*_checked(numbers, size), is_one=numbers.ndim == 0)
    return Rows(*_checked(np.array(_number(index)), size), is_one=True)


def plain_of(index: object, size: int) -> int | slice | torch.Tensor | None:
    """The rows that `index` selects among `size`, in a form that torch takes; None for all but the commonest forms.

    A tensor's numbers are as they are: negative ones, and those out of range, are among them.
    """
    if type(index) is list:
        with suppress(TypeError, ValueError, RuntimeError):  # not numbers, or too large
            index = np.asarray(index)
    if type(index) is np.ndarray and index.dtype == np.int64 and index.flags.carray and index.ndim == 1:
        index = torch.from_numpy(index) if index.strides[0] >= 0 else None  # contiguous, if it has one row
    if type(index) is torch.Tensor:
        is_plain = index.dtype == torch.int64 and index.layout == torch.strided and index.ndim == 1 and index.is_cpu
        return index if is_plain else None
    if type(index) is int:
        row = index if index >= 0 else index + size
        return row if 0 <= row < size else None
    if type(index) is slice:
        start, stop, step = index.indices(size)
        return slice(start, max(start, stop)) if step == 1 else None
    return None


def span_of(numbers: Numbers) -> slice | None:
    """The same rows as a slice, if they are consecutive."""
    count = len(numbers)
    if not count:
        return slice(0, 0)
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first != count - 1 or (count > 2 and bool((numbers[1:] - numbers[:-1] != 1).any())):
        return None
    return slice(first, last + 1)


def last_of_each(numbers: Numbers) -> Numbers | None:
    """Positions that sort the numbers and keep the last of equal ones; None if they are strictly ascending already."""
    if len(numbers) < 2 or bool((np.diff(numbers) > 0).all()):
        return None
    order = np.argsort(numbers, kind="stable")
    positions: Numbers = order[np.append(np.diff(numbers[order]) != 0, True)]
    return positions


def _number(index: Any) -> int:
    if not isinstance(index, bool | np.bool_):
        with suppress(TypeError, OverflowError):
            return operator.index(index)
    raise RowIndexError(f"{_short(index)} ({type(index).__name__}) is not an index of rows: give {_FORMS}")


def _array(index: torch.Tensor | npt.NDArray[Any] | Sequence[object]) -> npt.NDArray[Any]:
    """An array of bool or integers, with at most one dimension."""
    try:
        if isinstance(index, torch.Tensor):
            array = (index if index.is_cpu else index.cpu()).numpy()
        elif isinstance(index, np.ndarray):
            array = np.require(np.asarray(index), requirements=["C", "W"])  # as torch requires them
            array = array if min(array.strides, default=0) >= 0 else array.copy()  # of one row, backwards
        else:
            array = np.asarray(index if len(index) else np.empty(0, dtype=np.int64))
    except (ValueError, TypeError, RuntimeError):  # ragged lists; a tensor that NumPy can't represent
        array = np.asarray(None)
    if array.ndim == 1 and array.dtype == bool:
        return array
    if array.ndim > 1 or array.dtype.kind not in "iu":
        kind = f"shape {array.shape}, {array.dtype}"
        raise RowIndexError(f"{_short(index)} ({kind}) is not an index of rows: give {_FORMS}")
    return array


def _checked(numbers: npt.NDArray[Any], size: int) -> tuple[Numbers, int | None]:
    """Indices from 0 on, with one dimension; and the largest, if known."""
    if numbers.ndim == 0:
        numbers = numbers[None]
    if not len(numbers):
        return numbers.astype(np.int64), None
    if numbers.dtype == np.int64:
        most = int(np.maximum.reduce(numbers.view(np.uint64)))
        if most < size:
            return numbers, most  # viewed as unsigned, a negative number is larger than any size
    least, most = int(numbers.min()), int(numbers.max())
    if least < -size or most >= size:
        wrong = most if most >= size else least
        has = f"its rows go from 0 to {size - 1}, or from {-size} to -1" if size else "it has no rows"
        raise RowIndexError(f"row {wrong} is out of range for a cache of {size} rows: {has}")
    numbers = numbers.astype(np.int64, copy=False)  # uint64 values were checked before
    return np.where(numbers < 0, numbers + size, numbers) if least < 0 else numbers, None


def _short(index: object) -> str:
    text = repr(index)
    return text if len(text) <= 60 else f"{text[:60]}..."
