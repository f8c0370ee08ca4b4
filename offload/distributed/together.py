"""Steps that several ranks do together, or none of them does.

Always true:
- an error on one rank is an error on all, at the same step: no rank waits for one that has given up
- a single process does the same steps without communication
- only these messages are sent: no weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, TypeVar

from offload.errors import RankError
from offload.storage.reasons import short
from offload.tensor.locals import is_dtensor

T = TypeVar("T")


class Ranks:
    """The processes of a torch.distributed group, or of a mesh; or only this one.

    Attributes:
        rank: this process's number among them.
        size: their number.
    """

    def __init__(self, *groups: Any) -> None:
        """`groups` are one process group, or this process's group in each dimension of a mesh."""
        self._groups = groups
        self.size = prod(group.size() for group in groups)
        self.rank = 0
        for group in groups:
            self.rank = self.rank * group.size() + group.rank()

    @classmethod
    def of(cls, values: Iterable[object], group: Any = None) -> Ranks:
        """The ranks of `group`; for None, all ranks if one of the values is a DTensor, otherwise only this process."""
        if group is None and any(is_dtensor(value) for value in values):
            import torch.distributed

            group = torch.distributed.group.WORLD
        return cls() if group is None else cls(group)

    @classmethod
    def of_mesh(cls, mesh: Any) -> Ranks:
        """The ranks of a DTensor's mesh."""
        return cls(*(mesh.get_group(dim) for dim in range(mesh.ndim)))

    def all(self, act: Callable[[], T], elsewhere: str = "nothing was done here either") -> T:
        """The result of `act` on this rank, once it has succeeded on every rank.

        Args:
            elsewhere: what to add to the error if it failed elsewhere.

        Raises:
            RankError: it failed on another rank, or that rank is gone. Where it failed, its own error.
        """
        if self.size == 1:
            return act()
        try:
            done = act()
        except BaseException as error:
            self.gather(f"{type(error).__name__}: {short(str(error))}")
            raise
        gathered: list[str | None] = self.gather(None)
        for rank, text in enumerate(gathered):
            if text is not None:
                raise RankError(f"rank {rank} failed, and {elsewhere}: {text}")
        return done

    def first(self, act: Callable[[], T]) -> T:
        """The result of `act` on the first rank, the only one that runs it.

        Raises: as `all`.
        """
        done = self.all(act if self.rank == 0 else lambda: None)
        return self.gather(done)[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """What each rank passes, by rank.

        Raises:
            RankError: one of them is gone.
        """
        if self.size == 1:
            return [value]
        import torch.distributed

        gathered: list[Any] = [value]
        try:
            for group in reversed(self._groups):
                parts: list[Any] = [None] * group.size()
                torch.distributed.all_gather_object(parts, gathered, group=group)
                gathered = [one for part in parts for one in part]
        except RuntimeError as error:
            raise RankError(f"another rank has exited, and nothing was done here either: {error}") from error
        return gathered
