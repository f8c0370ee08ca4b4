"""`map_batches`: a function over batches, in lockstep through a model.

Always true:
- batches are taken one by one, in the iterating thread, and only as many as are in flight
- results come in order, or when they are ready; an exception is raised where the result would have come
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from offload.batches.scheduler import Call, Scheduler
from offload.batches.stages import handles_of, models_of, stages_of
from offload.batches.states import Seeds, Settings, ThreadState
from offload.errors import ArgumentTypeError
from offload.memory import anonymous_bytes, available_bytes
from offload.progress import Bar
from offload.tensor.arguments import checked_count, without_stop

B = TypeVar("B")
R = TypeVar("R")

_MOST = 32  # batches in flight by default
_SHARE = 0.25  # default share of available memory for waiting tensors
_A_THREAD = 6 << 20  # memory per thread: its stack, and what kernels allocate per thread (oneDNN 3.12)
_HELD = 2  # a batch holds twice what waits: the caller also has the inputs of that, such as embeddings
_BACKLOG = 4  # times as many results as batches in flight may wait for an earlier one
_log = logging.getLogger("offload.batches")


def map_batches(
    fn: Callable[[B], R],
    batches: Iterable[B],
    model: nn.Module | Sequence[nn.Module],
    *,
    in_flight: int | None = None,
    blocks: Iterable[nn.Module | str] | None = None,
    ordered: bool = True,
    progress: bool = True,
) -> Iterator[R]:
    """Call a function with each batch, so that a model on disk is read once for many of them.

    All batches in flight go through a block of the model while it is in memory, then through the next one. `fn` is
    ordinary code that calls the model, once or many times (`generate`), or not at all. Its results are those of
    calling it without this, bit for bit.

    Each batch has a thread; one runs at a time, in the context of the caller: gradients, inference mode, autocast,
    default dtype and device, the accelerator's stream, modes, context variables. Each batch has random numbers of its
    own: they follow from the caller's generator and the batch's number, whatever is in flight. `fn` must not wait for
    another batch, nor call the model while it holds a lock that another batch, or the model, needs. Python's and
    numpy's random numbers, and everything else that a process has once, are shared. Blocks may not find what `fn` keeps
    in a `threading.local`: where there is no accelerator, no gradients are recorded and no modes are active, they
    compute in the iterating thread.

    Inside torch.func's transforms and forward-mode differentiation batches do not wait for one another: what `fn` does
    there has the model to itself.

    With gradients, backward inside `fn` goes down the model in lockstep too, on the CPU; gradients are summed up in the
    order of the batches. On an accelerator each batch's backward runs alone.

    Args:
        fn: called with a batch.
        batches: any iterable; it is read as batches are begun.
        model: what `fn` calls; a list if it calls several.
        in_flight: how many batches are under way at a time. Their hidden states, and whatever else they hold, are in
            memory together, with some 6 MiB for the thread of each. None: up to 32, as many as a quarter of the
            available memory has room for, at twice the size of what waits. Where gradients are recorded, the first
            batch is done alone then, to see what its graph takes.
        blocks: the modules, or their names, before which batches wait for one another. None: each layer of the model,
            and each module with values before and after them.
        ordered: give results in the order of the batches; False: as they are ready.
        progress: show a bar, on a terminal.

    Returns:
        An iterator over the results. When it is closed, every batch is stopped: its `fn` meets an exception that
        `except Exception` lets pass. If it catches that, too, and goes on, another interrupt leaves it to itself. The
        model can't be copied, nor pickled, before that.

    Raises:
        TypeError, ValueError: not a function, not a model, not a count.
        Exception: what `fn` or `batches` raise, a `MapError` for StopIteration; the results of earlier batches have
            been given by then.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> batches = [torch.zeros(1, 2), torch.ones(1, 2)]
        >>> [out.shape for out in map_batches(model, batches, model)]
        [torch.Size([1, 1]), torch.Size([1, 1])]
    """
    if inspect.isgeneratorfunction(fn):
        raise ArgumentTypeError("fn is a generator, which would run outside its batch: return a list")
    most = None if in_flight is None else checked_count(in_flight, "in_flight")
    models = models_of(model)
    stages = stages_of(models, blocks)
    scheduler = Scheduler(stages, handles_of(models, stages))
    mapping = _Mapping(fn, iter(batches), scheduler, most)
    bar = Bar(batches, desc="batches", delay=1, disable=None if progress else True, leave=False)
    return mapping.results(bar, ordered=ordered)


class _Mapping:
    def __init__(
        self, fn: Callable[[Any], object], batches: Iterator[object], scheduler: Scheduler, most: int | None
    ) -> None:
        self._fn = fn
        self._batches: Iterator[Any] | None = batches
        self._scheduler = scheduler
        self._limit = most or 1  # batches in flight
        self._capacity = None if most else int(available_bytes() * _SHARE)  # for what waits
        self._largest = 0  # largest waiting batch so far, in bytes
        self._before = anonymous_bytes() if torch.is_grad_enabled() else None  # graphs: until one batch is measured
        self._grown = 0  # the most by which memory has grown since
        self._state, self._settings, self._seeds = ThreadState(), Settings.now(), Seeds()
        self._has_drawn = False
        self._begun = 0
        self._ended: dict[int, Call] = {}
        self._failure: tuple[int, BaseException] | None = None  # the first failure, with its batch number

    def results(self, bar: Bar, *, ordered: bool) -> Iterator[Any]:
        try:
            with bar, self._scheduler.hooked():
                given = 0
                while self._batches is not None or self._scheduler.count:
                    is_behind = len(self._ended) >= _BACKLOG * self._limit  # results wait for one in progress
                    if self._batches is not None and self._scheduler.count < (1 if is_behind else self._limit):
                        self._begin()
                    else:
                        self._look_at(self._scheduler.go_on())
                    for number in sorted(self._ended):
                        if number == given or not ordered:
                            given += 1
                            bar.update()
                            yield self._ended.pop(number).result
                failure, self._failure = self._failure, None
                if failure is not None:
                    try:
                        raise failure[1]
                    finally:
                        del failure  # its frames refer to this one
        finally:
            if self._has_drawn:
                self._seeds.move_on()

    def _begin(self) -> None:
        assert self._batches is not None
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            return
        except Exception as error:
            self._fail(self._begun, error)
            return
        settings = self._settings.seeded(self._seeds.next())
        fn = partial(without_stop, self._fn, batch)
        call = self._scheduler.begin(self._begun, fn, self._state, settings, alone=self._limit == 1)
        self._begun += 1
        self._look_at(call)

    def _look_at(self, call: Call) -> None:
        if self._capacity is not None:
            self._measure(call, self._capacity)
        if not call.has_ended:
            return
        self._has_drawn = self._has_drawn or call.has_drawn
        if call.error is None:
            self._ended[call.number] = call
        else:
            error, call.error = call.error, None  # its frames refer to the call
            self._fail(call.number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        """Batches before the failed one still yield their results; later ones are stopped."""
        if not isinstance(error, Exception):
            raise error
        self._batches = None
        error.add_note(f"in batch {number}")
        self._failure = number, error
        self._scheduler.stop(after=number)
        self._ended = {one: call for one, call in self._ended.items() if one < number}

    def _measure(self, call: Call, capacity: int) -> None:
        """Compute how many batches fit, if each takes as much as this one; with gradients, once its graph is whole."""
        size = _HELD * call.waiting_bytes
        if self._before is not None:
            size = self._grown = max(self._grown, anonymous_bytes() - self._before)
            if not call.has_ended:
                return
            self._before = None
        if size < self._largest:
            return
        self._limit = max(1, min(_MOST, capacity // (size + _A_THREAD)))
        if not self._largest:
            _log.info("%d batches in flight: one takes %d bytes while it waits", self._limit, size)
            self._scheduler.restart()
        self._largest = max(size, 1)
