"""Small computed values, which are computed once.

Always true:
- a recipe never changes, so that what it gave is what it gives, as long as its sources and their files are the same:
  files are looked at ten times a second at the most
- all of them together take at most 64 MiB: beyond that, or when memory is asked back, all are computed again
- a value that somebody wrote to, such as compiled code, is computed again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakSet

import torch

from offload.storage.handle import Handle, Source
from offload.system.locks import fork_safe_lock
from offload.system.modes import no_functions, no_modes
from offload.tensor.boxes import recut
from offload.torch_api import version_of

MOST = 64 << 10  # bytes of a value
_ALL = 64 << 20  # bytes of all of them


class SmallValue:
    """The value of a recipe, once it has been computed. A copy, or an unpickled one, begins empty."""

    __slots__ = ("__weakref__", "_known", "_last_view")

    def __init__(self) -> None:
        self._known: _Computed | None = None
        self._last_view: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # spec, view, of which value

    def __reduce__(self) -> tuple[type[SmallValue], tuple[()]]:
        return SmallValue, ()

    @property
    def is_known(self) -> bool:
        """Whether it need not be computed."""
        return self._known is not None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        known = self._known
        return 0 if known is None else known.value.nbytes

    def view(self, view_spec: torch.Tensor | None) -> torch.Tensor | None:
        """The view that a meta tensor describes, or the whole: do not write to it. None: it has to be computed."""
        known = self._known
        if known is None or version_of(known.value) != known.version:
            return None
        for handle, source in known.sources:
            if handle.source is not source or not source.file.is_as_opened():
                return None
        if view_spec is None:
            return known.value
        last = self._last_view
        if last is not None and last[0] is view_spec and last[2] is known.value:
            return last[1]
        view = _view_of(known.value, view_spec)
        self._last_view = view_spec, view, known.value
        return view

    def computed(
        self, compute: Callable[[], torch.Tensor], handles: Iterable[Handle], view_spec: torch.Tensor | None
    ) -> torch.Tensor:
        """Like `view`, of what `compute` gives now; kept from then on, unless its sources are in files of ours."""
        sources = tuple((handle, handle.source) for handle in handles)
        with no_functions(), no_modes():
            value = compute().clone()  # it may lie in a mapping, or in memory that is used again
        if not any(source.owned for _, source in sources):
            self._known = _Computed(value, version_of(value), sources)
            SMALL_VALUES.count(self, value.nbytes)
        return value if view_spec is None else _view_of(value, view_spec)

    def release(self) -> None:
        """Give its memory back."""
        self._known = self._last_view = None


class _Computed(NamedTuple):
    """A value, its version, and what it was computed from."""

    value: torch.Tensor
    version: int
    sources: tuple[tuple[Handle, Source], ...]


def _view_of(value: torch.Tensor, view_spec: torch.Tensor) -> torch.Tensor:
    with no_functions(), no_modes():
        return recut(value, 0, view_spec)


class KeptValues:
    """All small values that are kept.

    Attributes:
        releases: how often their memory was given back: whoever refers to some of it lets go when this moves.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._values: WeakSet[SmallValue] = WeakSet()
        self._at_most = 0  # bytes, with those of values that are gone
        self.releases = 0

    def count(self, small: SmallValue, nbytes: int) -> None:
        with self._lock:
            self._values.add(small)
            self._at_most += nbytes
            is_too_much = self._at_most > _ALL and self._counted() > _ALL
        if is_too_much:
            self.release()

    def _counted(self) -> int:
        self._at_most = sum(one.nbytes for one in list(self._values))
        return self._at_most

    def nbytes(self) -> int:
        """Bytes that they take."""
        with self._lock:
            return self._counted()

    def release(self) -> None:
        """Give their memory back; they are computed again when they are used."""
        with self._lock:
            for one in list(self._values):
                one.release()
            self._values.clear()
            self._at_most = 0
            self.releases += 1


SMALL_VALUES = KeptValues()
