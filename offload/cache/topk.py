"""Columns of the k largest log-probabilities of a teacher, packed.

Always true:
- a row is stored as bytes of one size, as `offload.kernels.logps` lays them out, from the largest to the smallest
- ids are read as they were written; a log-probability is off by half a step at most, or by a part in 2^11 of it
- NaN, what is over 0 by more than rounding, and ids that the vocabulary does not have are refused
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload.errors import CacheError, DtypeMismatchError, ShapeMismatchError
from offload.kernels.logps import bytes_of_row, pack, unpack
from offload.tensor.arguments import checked_count

_BITS = range(8, 13)
_MOST_IDS = 1 << 31
_LEAST, _MOST = torch.finfo(torch.float16).min, 0.1  # what half precision rounds 0 to is below


class TopLogps(NamedTuple):
    """Token ids, int64, and their log-probabilities, float32, each (..., k), from the most likely on."""

    ids: Any
    logps: Any


@dataclass(frozen=True, slots=True)
class TopK:
    """The kind of a column; see `topk`."""

    k: int
    vocab: int
    bits: int
    shape: tuple[Any, ...] = ()

    @property
    def id_bits(self) -> int:
        return max((self.vocab - 1).bit_length(), 1)

    @property
    def row_bytes(self) -> int:
        """Of k of them."""
        return bytes_of_row(self.k, self.id_bits, self.bits)

    @property
    def text(self) -> str:
        return f"topk(k={self.k}, vocab={self.vocab}, bits={self.bits})"

    def packed(self, value: Any, name: str) -> torch.Tensor:
        """Values as they are stored: (..., bytes), uint8, on the CPU.

        Raises:
            ShapeMismatchError, DtypeMismatchError
            CacheError: there are NaN, numbers that are no log-probabilities, or ids that are too large.
        """
        ids, logps = self._pair(value, name)
        if ids.shape != logps.shape or ids.shape[-1:] != (self.k,):
            raise ShapeMismatchError(
                f"column {name!r} takes {self.k} ids and as many log-probabilities, not {tuple(ids.shape)} and "
                f"{tuple(logps.shape)}"
            )
        flat, numbers = (
            each.reshape(-1, self.k) for each in (ids.to("cpu", torch.int64), logps.to("cpu", torch.float32))
        )
        if flat.numel():
            self._refuse_others(flat, numbers, name)
        if not bool((numbers[:, 1:] <= numbers[:, :-1]).all()):
            numbers, order = numbers.sort(stable=True, dim=1, descending=True)
            flat = flat.gather(1, order)
        return pack(flat, numbers, self.id_bits, self.bits).view(*ids.shape[:-1], self.row_bytes)

    def _pair(self, value: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probabilities, given in either order, or all logits."""
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[-1:] == (self.vocab,):
            top = value.detach().topk(self.k)
            return top.indices, top.values.float() - value.detach().float().logsumexp(-1, keepdim=True)
        if isinstance(value, tuple) and len(value) == 2:
            both = sorted((torch.as_tensor(part).detach() for part in value), key=torch.is_floating_point)
            is_integer = both[0].dtype != torch.bool and not both[0].is_complex() and not both[0].is_floating_point()
            if is_integer and both[1].is_floating_point():
                return both[0], both[1]
        raise DtypeMismatchError(
            f"column {name!r} takes (ids, log-probabilities), integers and floats of the shape (..., {self.k}), or "
            f"logits of the shape (..., {self.vocab}); not a {type(value).__name__}"
        )

    def _refuse_others(self, ids: torch.Tensor, logps: torch.Tensor, name: str) -> None:
        low, high = map(int, ids.aminmax())
        if low < 0 or high >= self.vocab:
            raise CacheError(
                f"column {name!r}: ids go from 0 to {self.vocab - 1}, and there is {low if low < 0 else high}"
            )
        least, most = map(float, logps.aminmax())
        if most == -torch.inf:
            return
        if least == -torch.inf and most == most:
            least = float(logps.where(logps > -torch.inf, 0).amin())
        if not _LEAST <= least <= most <= _MOST:
            raise CacheError(
                f"column {name!r}: log-probabilities go from {_LEAST:.0f} to 0, or are -inf, and there is "
                f"{most if not most <= _MOST else least}: take log_softmax of logits, or give all of them"
            )

    def read(self, packed: torch.Tensor) -> TopLogps:
        """What `packed` was given, on the device where the bytes are."""
        ids, logps = unpack(packed.reshape(-1, self.row_bytes), self.k, self.id_bits, self.bits)
        shape = (*packed.shape[:-1], self.k)
        return TopLogps(ids.view(shape), logps.view(shape))

    def to_json(self) -> dict[str, int]:
        return {"k": self.k, "vocab": self.vocab, "bits": self.bits}

    @classmethod
    def from_json(cls, described: Mapping[str, int]) -> TopK:
        """Raises: CacheError, KeyError, TypeError (it does not describe such a column)."""
        return topk(described["k"], described["vocab"], described["bits"])


def topk(k: int, vocab: int, bits: int = 10, shape: Sequence[int | None] = ()) -> TopK:
    """A column of the k largest log-probabilities over a vocabulary, for `TensorCache.create`.

    It is written from `(ids, logps)`, each (rows, k), or from logits, (rows, vocab), and read as such a pair. A row
    takes `4 + k * (ceil(log2(vocab)) + bits) / 8` bytes.

    Args:
        k: how many are kept.
        vocab: the size of the vocabulary.
        bits: of a log-probability, 8 to 12: those between the largest and the smallest of a row are rounded to one of
            `2**bits - 1` evenly spread numbers.
        shape: what a row is made of, if not of one position: `(None,)` for texts of different lengths.

    Returns:
        The description of the column.

    Raises:
        CacheError: there are no such columns.

    Example:
        >>> import tempfile
        >>> from offload import TensorCache
        >>> cache = TensorCache.create(tempfile.mkdtemp(), {"teacher": topk(k=2, vocab=5)}, num_rows=1)
        >>> cache[[0]] = {"teacher": torch.tensor([[0.0, 3.0, 1.0, 2.0, -1.0]])}  # logits
        >>> cache[[0]]["teacher"]
        TopLogps(ids=tensor([[1, 3]]), logps=tensor([[-0.4519, -1.4521]]))
    """
    vocab, k, bits = checked_count(vocab, "vocab"), checked_count(k, "k"), checked_count(bits, "bits")
    if not k <= vocab <= _MOST_IDS or bits not in _BITS:
        raise CacheError(
            f"topk(k={k}, vocab={vocab}, bits={bits}): k up to vocab, which is up to 2^31, and 8 to 12 bits"
        )
    return TopK(k, vocab, bits, tuple(shape))


def row_at(values: Any, at: int) -> Any:
    """One of the rows of a column."""
    return TopLogps(*(part[at] for part in values)) if isinstance(values, TopLogps) else values[at]
