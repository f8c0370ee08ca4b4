"""Which rows are meant.

Always true:
- every form that names rows of a plain tensor names the same rows here
- what is no row is an error that tells the index and the size; nothing is clipped or wrapped around twice
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from offload.errors import RowIndexError

Numbers: TypeAlias = "npt.NDArray[np.int64]"
_FORMS = "an int, a slice, a range, a list, or a 1-D integer or bool tensor or array"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a cache.

    Attributes:
        numbers: from 0 on, in the order that was asked for; may repeat.
        is_one: whether a single row was named, which comes without a leading dimension.
    """

    numbers: Numbers
    is_one: bool = False

    def __len__(self) -> int:
        return len(self.numbers)


def rows_of(index: Any, size: int) -> Rows:
    """The rows that `index` names among `size`.

    Raises:
        RowIndexError: it names none, or some that are not there.
    """
    if isinstance(index, slice):
        return Rows(np.arange(*index.indices(size), dtype=np.int64))
    if isinstance(index, range):
        _checked(np.array([index[0], index[-1]] if index else []), size)  # before there is memory for all
        return Rows(_checked(np.arange(index.start, index.stop, index.step, dtype=np.int64), size))
    if isinstance(index, torch.Tensor | np.ndarray | list):
        numbers = _array(index)
        return Rows(_masked(numbers, size) if numbers.dtype == bool else _checked(numbers, size), numbers.ndim == 0)
    return Rows(_checked(np.array(_number(index)), size), True)


def span_of(numbers: Numbers) -> slice | None:
    """The slice that gives the same rows, where each follows the one before."""
    count = len(numbers)
    if not count:
        return slice(0, 0)
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first != count - 1 or (count > 2 and bool((numbers[1:] - numbers[:-1] != 1).any())):
        return None
    return slice(first, last + 1)


def _number(index: Any) -> int:
    if not isinstance(index, bool | np.bool_):
        try:
            return operator.index(index)
        except (TypeError, OverflowError):
            pass
    raise RowIndexError(f"{_short(index)} ({type(index).__name__}) names no rows: give {_FORMS}")


def _array(index: torch.Tensor | npt.NDArray[Any] | Sequence[Any]) -> npt.NDArray[Any]:
    """An array of bool, or of integers, with one dimension or none."""
    if isinstance(index, torch.Tensor):
        array = index.detach().cpu().numpy()
    else:
        try:
            array = np.asarray(index if len(index) or isinstance(index, np.ndarray) else np.empty(0, dtype=np.int64))
        except ValueError:  # lists of different lengths
            array = np.asarray(None)
    if array.ndim == 1 and array.dtype == bool:
        return array
    if array.ndim > 1 or array.dtype.kind not in "iu" or array.dtype == np.uint8:  # torch takes uint8 for a mask
        raise RowIndexError(f"{_short(index)} (shape {array.shape}, {array.dtype}) names no rows: give {_FORMS}")
    return array


def _masked(mask: npt.NDArray[np.bool_], size: int) -> Numbers:
    if len(mask) != size:
        raise RowIndexError(f"the mask has {len(mask)} elements, and the cache {size} rows")
    return np.flatnonzero(mask)


def _checked(numbers: npt.NDArray[Any], size: int) -> Numbers:
    """From 0 on, and with a dimension."""
    numbers = np.atleast_1d(numbers)
    if not len(numbers):
        return numbers.astype(np.int64)
    if numbers.dtype == np.int64 and int(np.maximum.reduce(numbers.view(np.uint64))) < size:
        return numbers  # read without its sign a negative number is larger than any size
    least, most = int(numbers.min()), int(numbers.max())
    if least < -size or most >= size:
        wrong = most if most >= size else least
        has = f"its rows go from 0 to {size - 1}, or from {-size} to -1" if size else "it has no rows"
        raise RowIndexError(f"row {wrong} is out of range for a cache of {size} rows: {has}")
    numbers = numbers.astype(np.int64, copy=False)  # those of 64 bits without a sign have been looked at as they are
    return np.where(numbers < 0, numbers + size, numbers) if least < 0 else numbers


def _short(index: object) -> str:
    text = repr(index)
    return text if len(text) <= 60 else f"{text[:60]}..."
