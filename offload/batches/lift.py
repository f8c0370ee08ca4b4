"""Which batch goes on, and how far: floor by floor.

A batch is a call of a function in a thread of its own. Before each floor it waits; the lift takes those that wait at
the present floor, one after the other, then those at the next one. It goes up for forward and down for backward, and
starts again at the ground. So whatever a function calls, and in which order, each call gets its turn.

Always true:
- a call runs only while the thread that asked for it waits
- at one floor calls go on in the order of their numbers: sums over batches are those of one batch after the other
- a call that is stopped leaves its function at the next floor, by an exception that `except Exception` does not catch
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from offload.batches.waiting import Parcel, storages_of, tensors_in, waiting_bytes
from offload.batches.world import Settings, Thread, World
from offload.memory import anonymous_bytes, return_freed
from offload.prefetch.engine import lease
from offload.prefetch.stream import Lease
from offload.storage.handle import Handle
from offload.torch_api import not_compiled

_MUCH = 32 << 20  # bytes of memory that calls may take, or have freed, until what is free is given back


class Stopped(BaseException):
    """Leaves the function of a batch whose result nobody waits for any more."""


class Call:
    """A function of one batch, in a thread of its own meanwhile, that runs when it is told to.

    Attributes:
        number: of the batch.
        place: where it waits; None before it has begun, and after it has ended.
        has_ended: whether there is a result, or an error.
        thread: that it runs in.
        waiting_bytes: how much memory its tensors take where it waits.
        made: the tensors that its last floor has given, and that nobody else knows; if they go to disk.
        taken: the storages that its present floor was given, by their identity, and whether they were such.
    """

    def __init__(
        self, lift: Lift, number: int, fn: Callable[[], Any], world: World, settings: Settings, thread: Thread
    ) -> None:
        self.lift = lift
        self.thread = thread
        self.number = number
        self.place: int | None = None
        self.has_ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.waiting_bytes = 0
        self.made: list[torch.Tensor] = []
        self.taken: dict[int, bool] = {}
        self._first, self._settings = settings, settings
        self._parcel: Parcel | None = None
        self._is_stopped = False
        # One call into C each, which an interrupt does not cut in two.
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._back: SimpleQueue[None] = SimpleQueue()
        thread.begin(partial(self._run, fn, world), f"offload-batch-{number}")

    @property
    def has_drawn(self) -> bool:
        """Whether it has taken random numbers."""
        return self._first.has_drawn(self._settings)

    def go_on(self) -> None:
        """Let it run until it waits again, or has ended. Called by the thread that goes on then."""
        callers = Settings.now()
        try:
            self._settings.apply()
            self._turn.put(None)
            self._back.get()
        except BaseException:  # an interrupt, while it runs
            self.stop()
            raise
        finally:
            self._settings = Settings.now()
            callers.apply()

    def stop(self) -> None:
        """Have it end, and wait for that."""
        self.leave()
        self.thread.join()

    def leave(self) -> None:
        """Have it end, and its thread; nobody waits for that."""
        self._is_stopped = True
        self._turn.put(None)
        self.thread.end()

    def announce(self) -> None:
        """Its turn is soon: what it has on disk is read ahead."""
        if self._parcel is not None:
            self._parcel.announce()

    # In its thread

    def wait_at(self, place: int, given: Sequence[Any] = ()) -> None:
        """Wait for its turn at a place, with what a module is given there."""
        self._refuse_stopped()
        tensors = tensors_in(given)
        parcel = Parcel.of(tensors, self.made) if self.lift.spills and self.lift.is_shared else None
        self.made = []
        self.waiting_bytes = waiting_bytes(tensors_in(given, caches=True))
        self._parcel, self.place = parcel, place
        del tensors
        self._back.put(None)
        self._turn.get()
        self._parcel, self.place = None, None
        if parcel is not None:
            parcel.bring_back()
        self._refuse_stopped()

    def _refuse_stopped(self) -> None:
        if self._is_stopped:
            raise Stopped

    def _run(self, fn: Callable[[], Any], world: World) -> None:
        self._turn.get()
        _HERE.call = self
        self.lift.lease.join()
        try:
            self._refuse_stopped()
            self.result = world.run(fn)
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            del fn
            self.made = []
            self.thread.look()
            self.has_ended = True
            self._back.put(None)


class Lift:
    """Calls on their way through the floors of models.

    Attributes:
        spills: whether what waits goes to disk.
        lease: what calls at the present floor use of the disk.
    """

    def __init__(self, floors: Sequence[nn.Module], lots: Sequence[Sequence[Handle]], *, spills: bool) -> None:
        """Floors, and the values that each of them is expected to use."""
        self.spills = spills
        self._floors, self._lots = floors, lots
        self._places = 2 * max(len(floors), 1)
        self._at = 0
        self._calls: list[Call] = []
        self._idle: list[Thread] = []  # of calls that have ended
        self._least = anonymous_bytes()  # since freed memory was given back
        self.lease: Lease

    @property
    def count(self) -> int:
        """How many calls are on their way."""
        return len(self._calls)

    @property
    def is_shared(self) -> bool:
        """Whether several calls are on their way."""
        return len(self._calls) > 1

    def begin(self, number: int, fn: Callable[[], Any], world: World, settings: Settings) -> Call:
        """A new call, which has come to its first floor, or to its end."""
        call = Call(self, number, fn, world, settings, self._thread())
        self._calls.append(call)
        self._carry(call)
        return call

    def go_on(self) -> Call:
        """Have the next call run; gives it."""
        first, *others = sorted(self._calls, key=self._distance)
        assert first.place is not None
        if first.place != self._at:
            self._at = first.place
            self.lease.move_on()
        for call in others[:1]:
            call.announce()
        self._carry(first)
        return first

    def restart(self) -> None:
        """Take those first that wait below."""
        self._at = 0

    def stop(self, after: int = -1) -> None:
        """End every call of a later batch than `after`; after another interrupt, without waiting for that."""
        calls = [call for call in self._calls if call.number > after]
        try:
            for call in calls:
                call.stop()
                self._calls.remove(call)
        except BaseException:
            for call in calls:
                call.leave()
            raise

    def _distance(self, call: Call) -> tuple[int, int]:
        assert call.place is not None
        return (call.place - self._at) % self._places, call.number

    def _carry(self, call: Call) -> None:
        call.go_on()
        if call.has_ended:
            self._calls.remove(call)
            self._idle.append(call.thread)
        self._give_back()

    def _thread(self) -> Thread:
        while self._idle:
            thread = self._idle.pop()
            if thread.is_as_new:
                return thread
            thread.end()
        return Thread()

    def _end_idle(self) -> None:
        for thread in self._idle:
            thread.end()
        for thread in self._idle:
            thread.join()

    def _give_back(self) -> None:
        """What calls have freed: glibc keeps it for each thread, and the others take more."""
        grown = anonymous_bytes() - self._least
        if grown > _MUCH:
            return_freed()
            self._least = anonymous_bytes()
        else:
            self._least += min(grown, 0)

    # In the threads of calls

    @contextmanager
    def gates(self) -> Iterator[None]:
        """Inside, calls wait before each floor."""
        self.lease = lease()
        gate = _uncompiled_gate() if "torch._dynamo" in sys.modules else _Gate
        with ExitStack() as stack:
            stack.callback(self.lease.end)
            self.lease.expect(self._lots)
            for floor, module in enumerate(self._floors):
                before = gate(partial(self._arrive, floor))
                after = gate(partial(self._leave, self._places - 1 - floor))
                for handle in (
                    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                    module.register_forward_hook(after),
                ):
                    stack.callback(handle.remove)
            stack.callback(self._end_idle)
            stack.callback(self.stop)  # first: what they do as they end is done here
            yield

    def _arrive(self, floor: int, _module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self._mine()
        if call is None:
            return
        if self.spills:
            made = storages_of(call.made)
            call.taken = {key: key in made for key in storages_of(tensors_in((args, kwargs)))}
        if floor != self._at:
            call.wait_at(floor, (args, kwargs))

    def _leave(self, place: int, module: nn.Module, _args: Any, output: Any) -> None:
        """After a floor: backward will wait for the others before it comes down to it."""
        call = self._mine()
        if call is None:
            return
        tensors = tensors_in(output)
        if self.spills:
            call.made = _made_by(module, tensors, call.taken)
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._return_to, place))

    def _return_to(self, place: int, _gradients: Any) -> None:
        call = self._mine()  # on an accelerator backward runs in a thread of torch's: it waits for nobody
        if call is not None and place != self._at:
            call.wait_at(place)

    def _mine(self) -> Call | None:
        """The call that this thread runs for this lift."""
        call: Call | None = getattr(_HERE, "call", None)
        return call if call is not None and call.lift is self else None


class _Gate:
    """A hook of a module. In a copy of the module, and where that is unpickled, it does nothing."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *given: Any) -> None:
        if self._act is not None:
            self._act(*given)

    def __reduce__(self) -> tuple[type[_Gate], tuple[()]]:
        return _Gate, ()


def _uncompiled_gate() -> type[_Gate]:
    return type("_UncompiledGate", (_Gate,), {"__call__": not_compiled(_Gate.__call__)})


def _made_by(module: nn.Module, tensors: list[torch.Tensor], taken: dict[int, bool]) -> list[torch.Tensor]:
    """Of the tensors that a module has given, those that are neither its own nor those of who called it."""
    own = storages_of(tensors_in([vars(part) for part in module.modules()], own=True))
    return [one for one in tensors if all(key not in own and taken.get(key, True) for key in storages_of([one]))]


def _forget() -> None:
    """In a forked child nobody waits, and nobody lets go on."""
    _HERE.call = None


_HERE = threading.local()
os.register_at_fork(after_in_child=_forget)
