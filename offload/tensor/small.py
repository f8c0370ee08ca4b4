"""Small computed values, which are computed once.

Always true:
- a recipe never changes, so that what it gave is what it gives, as long as its files are those that were opened: they
  are looked at ten times a second at the most
- all of them together take at most 64 MiB: beyond that, or when memory is asked back, all are computed again
- a value that somebody wrote to, such as compiled code, is computed again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

import torch

from offload.storage.file import TensorFile
from offload.system.locks import fork_safe_lock
from offload.system.modes import no_functions, no_modes
from offload.tensor.boxes import recut
from offload.torch_api import version_of

MOST = 64 << 10  # bytes of a value
_ALL = 64 << 20  # bytes of all of them


class SmallValue:
    """The value of a recipe, once it has been computed. A copy, or an unpickled one, begins empty."""

    __slots__ = ("__weakref__", "_files", "_last_view", "_value", "_version")

    def __init__(self) -> None:
        self._value: torch.Tensor | None = None
        self._version = 0
        self._files: list[TensorFile] = []
        self._last_view: tuple[torch.Tensor, torch.Tensor] | None = None

    def __reduce__(self) -> tuple[type[SmallValue], tuple[()]]:
        return SmallValue, ()

    @property
    def is_known(self) -> bool:
        """Whether it need not be computed."""
        return self._value is not None

    def view(self, view_spec: torch.Tensor | None) -> torch.Tensor | None:
        """The view that a meta tensor describes, or the whole: do not write to it.

        None: it has to be computed, which raises if a file has changed.
        """
        value = self._value
        if value is None or version_of(value) != self._version:
            return None
        for file in self._files:
            if not file.is_as_opened():
                return None
        if view_spec is None:
            return value
        last = self._last_view
        if last is not None and last[0] is view_spec:
            return last[1]
        with no_functions(), no_modes():
            view = recut(value, 0, view_spec)
        self._last_view = view_spec, view
        return view

    def keep(self, compute: Callable[[], torch.Tensor], files: Iterable[TensorFile]) -> None:
        """Keep what `compute` gives.

        Args:
            files: that it is computed from, and that were looked at for it.
        """
        with no_functions(), no_modes():
            value = compute().clone()  # it may lie in a mapping, or in memory that is used again
        self._files, self._last_view = list(files), None
        self._version = version_of(value)
        self._value = value
        _ALL_KEPT.count(self, value.nbytes)

    def release(self) -> int:
        """Give its memory back, and say how many bytes these were."""
        value, self._value, self._last_view = self._value, None, None
        return 0 if value is None else value.nbytes


class _Kept:
    """All of them."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._values: WeakSet[SmallValue] = WeakSet()
        self._at_most = 0  # bytes, with those of values that are gone
        self.releases = 0

    def count(self, small: SmallValue, nbytes: int) -> None:
        with self._lock:
            self._values.add(small)
            self._at_most += nbytes
            if self._at_most > _ALL and self._counted() > _ALL:
                self._release()

    def _counted(self) -> int:
        self._at_most = sum(one._value.nbytes for one in list(self._values) if one._value is not None)
        return self._at_most

    def _release(self) -> int:
        freed = sum(one.release() for one in list(self._values))
        self._values.clear()
        self._at_most = 0
        self.releases += 1
        return freed

    def nbytes(self) -> int:
        with self._lock:
            return self._counted()

    def release(self) -> int:
        with self._lock:
            return self._release()


_ALL_KEPT = _Kept()


def small_bytes() -> int:
    """Bytes of all small values that are kept."""
    return _ALL_KEPT.nbytes()


def release_small() -> int:
    """Give the memory of all small values back; they are computed again when they are used. Returns its bytes."""
    return _ALL_KEPT.release()


def releases() -> int:
    """How often their memory has been given back: whoever refers to some of it lets go when this moves."""
    return _ALL_KEPT.releases
