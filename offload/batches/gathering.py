"""Experts of several batches as one act: each expert is read, decoded and multiplied once for all of them.

A block that comes to its experts for one batch is called for the next batch, up to its experts, and so on. The last
call computes the experts of all; then each goes on to the end of the block, the last one first.

Always true:
- each batch gets the bits that it gets alone; if computing together fails, each computes alone, with errors of its own
- batches that compute in another way (settings, autocast, inference mode) are not computed together
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload.batches.states import computing
from offload.tensor.experts import Act

_MOST = 16  # batches, as each one's block is called inside of the one before
_BYTES = 64 << 20  # of results, which are in memory together
_log = logging.getLogger("offload.batches")


class Gathering:
    """The acts that wait for others at a stage."""

    def __init__(self, compute_next: Callable[[], bool], are_others_due: Callable[[], bool]) -> None:
        """`compute_next` computes the stage for the next batch, False if there is none."""
        self._compute_next, self._are_others_due = compute_next, are_others_due
        self._waiting: list[_Waiting] = []

    def __call__(self, act: Act) -> torch.Tensor | None:
        mine = _Waiting((act.key, computing()), act)
        self._waiting.append(mine)
        try:
            while not mine.is_done and self._fits(act.nbytes) and self._compute_next():
                pass
            if not mine.is_done:
                self._compute([one for one in self._waiting if one.key == mine.key and not one.is_done])
        finally:
            self._waiting.remove(mine)
        return mine.found if mine.is_done else act.result()

    def _fits(self, nbytes: int) -> bool:
        sizes = [one.act.nbytes for one in self._waiting]
        return len(sizes) < _MOST and sum(sizes) + nbytes <= _BYTES

    def _compute(self, together: list[_Waiting]) -> None:
        are_last = not self._are_others_due()
        if len(together) == 1:
            together[0].act.is_last = are_last
            return
        try:
            results = Act.together([one.act for one in together], are_last=are_last)
        except Exception as error:  # each has its own
            _log.debug("%d batches compute their experts apart: %s", len(together), error)
            return
        for one, result in zip(together, results, strict=True):
            one.found, one.is_done = result, True


@dataclass(eq=False)
class _Waiting:
    """An act that waits for its result."""

    key: object
    act: Act
    found: torch.Tensor | None = None
    is_done: bool = False
