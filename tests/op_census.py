"""Checks of the op census for values on disk, beyond `tests.ops`: views stay there, files hold them.

Always true:
- each argument that can be stored is offloaded: as a whole value, as a part of a larger one, or lazily conjugated
- the plain tensors it is compared with have the same strides, and the same alignment to 64 bytes
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from offload import OffloadedTensor
from tests.campaigns import amount
from tests.equal import assert_equal
from tests.ops import Kind, is_inexact, is_plain

_NUMBERS = itertools.count()  # each value has a name of its own: a second one of a name gets a folder of its own
MOST = amount("ops", 3, 5)  # samples per op and check; the op database has up to a thousand
FEWER = amount("ops", 2, 5)  # of derivatives, and in a second dtype


def offloaded(x: Any) -> Any:
    if not is_plain(x):
        return x
    return OffloadedTensor.from_original_tensor(x.detach(), f"x{next(_NUMBERS)}").requires_grad_(x.requires_grad)


def dense(x: Any) -> Any:
    """A copy with its own strides; anything but a plain tensor is returned as it is."""
    return x.detach().clone().requires_grad_(x.requires_grad) if is_plain(x) else x


def as_whole(x: torch.Tensor) -> tuple[torch.Tensor, OffloadedTensor]:
    copy = dense(x).detach()
    return copy, offloaded(copy)


def as_part(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second row of a two-row value."""
    rows = torch.stack([torch.zeros_like(x), x.detach()])
    if rows[1].stride() != x.stride():
        return as_whole(x)
    return rows[1], offloaded(rows)[1]


def as_conjugate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    copy, stored = as_whole(x.detach().conj().resolve_conj()) if x.is_complex() else as_whole(x)
    return (copy.conj(), stored.conj()) if x.is_complex() else (copy, stored)


def storages(tree: Any) -> set[int]:
    """The storage addresses of plain tensors."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if is_plain(leaf)} - {0}


def assert_on_disk_if_view(expected: Any, actual: Any, arguments: Any) -> None:
    """A result is offloaded if the plain one shares memory with an argument, and plain otherwise."""
    shared = storages(arguments)
    for one, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        if is_plain(one) and one.numel():
            is_view = one.untyped_storage().data_ptr() in shared
            assert is_view == isinstance(other, OffloadedTensor), f"{'a' if is_view else 'not a'} view: {type(other)}"


def assert_untouched(results: Any, arguments: Any) -> None:
    """No plain result shares memory with a file, as writing to it would write to the file."""
    files = [leaf.untyped_storage() for leaf in tree_leaves(arguments) if isinstance(leaf, OffloadedTensor)]
    ranges = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in files if storage.nbytes()]
    for leaf in tree_leaves(results):
        if type(leaf) is torch.Tensor and is_plain(leaf) and leaf.untyped_storage().nbytes():
            at = leaf.untyped_storage().data_ptr()
            assert not any(start <= at < stop for start, stop in ranges), "a plain result shares memory with the file"


def assert_stored(tree: Any) -> None:
    """The tensors agree with their files."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, OffloadedTensor) and leaf.numel():
            text = leaf.offload_path.read_bytes()
            data = torch.frombuffer(bytearray(text[8 + int.from_bytes(text[:8], "little") :]), dtype=leaf.dtype)
            stored = data.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
            stored = stored.conj() if leaf.is_conj() else stored
            assert_equal(stored, leaf.materialize(), strides=False)


def see_results(expected: Any, actual: Any, plain_arguments: Any, arguments: Any) -> None:
    assert_on_disk_if_view(expected, actual, plain_arguments)
    assert_untouched(actual, arguments)


def close(kind: Kind, expected: Any, actual: Any) -> None:
    """Equal up to a few roundings of the largest number; a missing gradient counts as zero."""
    largest = max((one.detach().abs().nan_to_num(0, 0).max().item() for one in expected if _rounds(one)), default=0)
    for one, other in zip(expected, actual, strict=True):
        if one is None and other is None:
            continue
        one, other = _zeros_if_none(one, other), _zeros_if_none(other, one)
        kind.assert_same(one, other, strides=False, values=not _rounds(one))
        if _rounds(one):
            most = 64 * torch.finfo(one.dtype).eps * largest
            torch.testing.assert_close(kind.in_memory(other), one.detach(), rtol=0, atol=most, equal_nan=True)


def _zeros_if_none(x: Any, like: Any) -> Any:
    return torch.zeros_like(like) if x is None else x


def _rounds(x: Any) -> bool:
    return x is not None and x.numel() > 0 and is_inexact(x)


OFFLOADED = Kind(OffloadedTensor.materialize, [as_whole, as_part, as_conjugate], see_results, assert_stored)
CLOSE = replace(OFFLOADED, same=close)
