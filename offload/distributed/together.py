"""What several ranks do together, or none of them does.

Always true:
- an error on one rank is an error on all, at the same step: nobody waits for one that has given up
- one process by itself does the same steps, and asks nobody
- nothing but what is said here travels: no weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from offload.errors import RankError
from offload.storage.reasons import short
from offload.tensor.locals import is_dtensor

T = TypeVar("T")


class Ranks:
    """The processes of a group of torch.distributed, or this one alone.

    Attributes:
        rank: the number of this one among them.
        size: how many they are.
    """

    def __init__(self, group: Any = None) -> None:
        """`group` is a process group; None for this process alone."""
        self._group = group
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()

    @classmethod
    def of(cls, values: Iterable[object], group: Any = None) -> Ranks:
        """Those of `group`; if that is None, all of them where one of the values is a DTensor, else this one alone."""
        if group is None and any(is_dtensor(value) for value in values):
            import torch.distributed

            group = torch.distributed.group.WORLD
        return cls(group)

    def all(self, act: Callable[[], T]) -> T:
        """What `act` gives here, once it has ended well everywhere.

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
                raise RankError(f"rank {rank} failed, and nothing was done here either: {text}")
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

        said: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(said, value, group=self._group)
        except RuntimeError as error:
            raise RankError(f"another rank has gone, and nothing was done here either: {error}") from error
        return said
