"""How often the experts of a model are used, kept in a file from one run to the next.

Always true:
- the file only says what is likely: whatever it contains, values are the same
- it is replaced as a whole, when the model goes or the process ends; a forked child leaves it alone
- a file of another kind is an error at the start, and is never replaced
"""

from __future__ import annotations

import logging
import os
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from offload.annotations import Json
from offload.budget import handles_in
from offload.errors import CorruptFileError, ForeignFileError, OffloadError
from offload.prefetch.engine import POOL
from offload.prefetch.value import page_state_of
from offload.storage.handle import Handle
from offload.storage.regular import absolute, is_there
from offload.storage.state_file import Kind, read_state, write_state
from offload.tensor.recipes import stored_in
from offload.tensor.wrapper import PathLike

_KIND = Kind(what="the uses of a model's experts", stamp={"offload": {"expert uses": 1}}, foreign=ForeignFileError)
_LEAST = 0.01  # of one use just now: fewer are not worth a line
_MEAN = 12.0  # uses that values have which are used equally often: with more, a run would learn late that use changes
_MOST = 1e30  # uses of one value
_log = logging.getLogger("offload.models")

_Uses = list[tuple[int, int, float]]  # first byte, bytes, uses


def keep_expert_counts(model: nn.Module, path: PathLike) -> None:
    """Begin with the uses of experts that an earlier run has noted in a file, and note this run's there.

    What stays in memory is then right from the start, for text of the same kind.

    Args:
        model: a mixture of experts on disk.
        path: of the file, which is made when the model goes or the process ends.

    Raises:
        ForeignFileError, CorruptFileError: the file is not of this kind.
        ReadError
    """
    path = absolute(path)
    handles = sorted(stored_in(handles_in([model])), key=lambda handle: (str(handle.path), handle.extent))
    if is_there(path):
        known = _in_file(path)
        for handle in handles:
            _begin_with(handle, known.get(handle.path.name, []))
    weakref.finalize(model, _note, handles, path, os.getpid())


def _in_file(path: Path) -> dict[str, _Uses]:
    """The uses by file, scaled down to what they are where memory is short."""
    found = read_state(path, _KIND)
    try:
        files = {
            name: [(int(start), int(size), float(count)) for start, size, count in uses]
            for name, uses in found["files"].items()
        }
        counts = [count for uses in files.values() for _, _, count in uses]
        if not all(0 <= count < _MOST for count in counts):
            raise ValueError("not a number of uses")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CorruptFileError(f"{path} is damaged: remove it, and the uses of experts are counted anew") from error
    scale = min(1.0, _MEAN * len(counts) / max(sum(counts), 1.0))
    return {name: sorted((start, size, count * scale) for start, size, count in uses) for name, uses in files.items()}


def _begin_with(handle: Handle, uses: _Uses) -> None:
    """Its values begin with these uses, as far as they are in it."""
    first, size = handle.extent
    state = page_state_of(handle)
    worth = (state.pool or POOL).picked.worth
    for start, nbytes, count in uses[bisect_left(uses, (first,)) :]:
        if start >= first + size:
            return
        state.uses[start, nbytes] = count * worth


def _note(handles: Iterable[Handle], path: Path, pid: int) -> None:
    if os.getpid() != pid:
        return
    files: dict[str, Json] = defaultdict(list)
    for handle in handles:
        state = page_state_of(handle)
        worth = (state.pool or POOL).picked.worth
        found = state.uses | {key: value.uses for key, value in state.ranges.items() if value.is_picked}
        files[handle.path.name] += [
            [*key, round(count / worth, 3)] for key, count in found.items() if count > _LEAST * worth
        ]
    try:
        if is_there(path):
            read_state(path, _KIND)  # another file may have come there since
        write_state(path, _KIND, {"files": {name: uses for name, uses in files.items() if uses}})
    except OffloadError as error:
        _log.warning("the uses of experts are not noted: %s", error)
