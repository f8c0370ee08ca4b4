"""What several ranks do together, or none of them does.

Always true:
- an error on one rank is an error on all, at the same step: nobody waits for one that has given up
- one process by itself does the same steps, and asks nobody
- nothing but what is said here travels: no weight
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
    """The processes of a group of torch.distributed, or of a mesh; or this one alone.

    Attributes:
        rank: the number of this one among them.
        size: how many they are.
    """

    def __init__(self, *groups: Any) -> None:
        """`groups` are a process group, or those that this one is in of each dimension of a mesh."""
        self._groups = groups
        self.size = prod(group.size() for group in groups)
        self.rank = 0
        for group in groups:
            self.rank = self.rank * group.size() + group.rank()

    @classmethod
    def of(cls, values: Iterable[object], group: Any = None) -> Ranks:
        """Those of `group`; if that is None, all of them where one of the values is a DTensor, else this one alone."""
        if group is None and any(is_dtensor(value) for value in values):
            import torch.distributed

            group = torch.distributed.group.WORLD
        return cls() if group is None else cls(group)

    @classmethod
    def of_mesh(cls, mesh: Any) -> Ranks:
        """Those that a DTensor's mesh is of."""
        return cls(*(mesh.get_group(dim) for dim in range(mesh.ndim)))

    def all(self, act: Callable[[], T], here: str = "nothing was done here either") -> T:
        """What `act` gives here, once it has ended well everywhere.

        Args:
            here: what is to be said where it failed elsewhere.

        Raises:
            RankError: it failed on another rank, or that one has gone. Where it failed, its own error.
        """
        if self.size == 1:
            return act()
        try:
            done = act()
        except BaseException as error:
            self.gather(f"{type(error).__name__}: {short(str(error))}")
            raise
        said: list[str | None] = self.gather(None)
        for rank, text in enumerate(said):
            if text is not None:
                raise RankError(f"rank {rank} failed, and {here}: {text}")
        return done

    def first(self, act: Callable[[], T]) -> T:
        """What `act` gives on the first rank, which alone does it.

        Raises: as `all`.
        """
        done = self.all(act if self.rank == 0 else lambda: None)
        return self.gather(done)[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """What each rank says, by its number.

        Raises:
            RankError: one of them has gone.
        """
        if self.size == 1:
            return [value]
        import torch.distributed

        said: list[Any] = [value]
        try:
            for group in reversed(self._groups):
                parts: list[Any] = [None] * group.size()
                torch.distributed.all_gather_object(parts, said, group=group)
                said = [one for part in parts for one in part]
        except RuntimeError as error:
            raise RankError(f"another rank has exited, and nothing was done here either: {error}") from error
        return said
