"""Scheduling: which batch continues, and how far, floor by floor.

A batch is a function call in a thread of its own. It waits before each floor; the lift runs the calls that wait at the
current floor, one after the other, then those at the next. It goes up for forward and down for backward, and starts
again at the bottom. So every call gets its turn, whatever a function calls, and in any order.

Blocks compute in the iterating thread, for the call whose turn it is, so that the threads of kernels are the same.

Always true:
- a call runs only while the iterating thread waits or computes for it
- at each floor calls run in the order of their numbers: sums over batches are the same as with one batch at a time
- a call that is stopped leaves its function at the next floor, with an exception that `except Exception` does not catch
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

from offload.batches.errand import Errand, Forward
from offload.batches.waiting import Parcel, storages_of, tensors_in, waiting_bytes
from offload.batches.world import Settings, Thread, World
from offload.memory import anonymous_bytes, return_freed
from offload.prefetch.engine import lease
from offload.prefetch.lease import Lease
from offload.storage.handle import Handle
from offload.tensor.scratch import release_scratch
from offload.torch_api import not_compiled, pre_hooks_of

_MUCH = 32 << 20  # bytes by which memory may grow until freed memory is returned to the system


class Stopped(BaseException):
    """Ends the function of a batch whose result is no longer needed."""


class Call:
    """The function call for one batch, in a thread of its own, which runs when told to.

    Attributes:
        number: of the batch.
        place: where it waits; None before it has started, and after it has ended.
        has_ended: whether there is a result or an error.
        thread: its thread.
        waiting_bytes: memory of its tensors while it waits.
        made: if waiting tensors go to disk: those that its last floor has created and nothing else refers to.
        taken: the storages passed to its current floor, by id, and whether they were created by a floor.
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
        self._errand: Errand | None = None
        self._is_stopped = False
        # One C call each, which an interrupt can't split.
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._back: SimpleQueue[bool] = SimpleQueue()  # whether it is still its turn, and it has an errand
        thread.begin(partial(self._run, fn, world), f"offload-batch-{number}")

    @property
    def has_drawn(self) -> bool:
        """Whether it has used random numbers."""
        return self._first.has_drawn(self._settings)

    def go_on(self) -> None:
        """Run it until it waits again or has ended. Called by the iterating thread, which waits."""
        callers = Settings.now()
        try:
            self._settings.apply()
            is_busy = True
            while is_busy:
                self._run_errand()
                self._turn.put(None)
                is_busy = self._back.get()
        except BaseException:  # an interrupt while it runs
            self.stop()
            raise
        finally:
            self._settings = Settings.now()
            callers.apply()

    def stop(self) -> None:
        """End it, and wait for that."""
        self.leave()
        self.thread.join()

    def leave(self) -> None:
        """End it and its thread, without waiting."""
        self._is_stopped = True
        self._turn.put(None)
        self.thread.end()

    def _run_errand(self) -> None:
        errand, self._errand = self._errand, None
        if errand is not None:
            with self.lift.lease.joined():
                errand.run(None if self._parcel is None else self._parcel.bring_back)

    def announce(self) -> None:
        """Its turn is near: read ahead what it has on disk."""
        if self._parcel is not None:
            self._parcel.announce()

    # In the call's thread

    def wait_at(self, place: int, given: Sequence[Any] = (), errand: Errand | None = None) -> None:
        """Wait for its turn at a place.

        Args:
            place: where.
            given: what the module there is called with.
            errand: to be run first, when it is the turn.
        """
        self._refuse_stopped()
        tensors = tensors_in(given)
        parcel = Parcel.of(tensors, self.made) if self.lift.spills and self.lift.is_shared else None
        self.made = []
        self.waiting_bytes = waiting_bytes(tensors_in(given, caches=True))
        self._parcel, self.place = parcel, place
        del tensors
        try:
            self._wait(errand, is_turn=False)
        finally:
            self._parcel, self.place = None, None
            if parcel is not None:
                parcel.bring_back()
        self._refuse_stopped()

    def send(self, errand: Errand) -> None:
        """Have the iterating thread run an errand."""
        self._refuse_stopped()
        self._wait(errand, is_turn=True)
        self._refuse_stopped()

    def _wait(self, errand: Errand | None, *, is_turn: bool) -> None:
        self._errand = errand
        self._back.put(is_turn)
        self._turn.get()

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
            self._back.put(False)


class Lift:
    """Calls on their way through the floors of models.

    Attributes:
        spills: whether waiting tensors go to disk.
        lease: holds the values on disk that calls at the current floor use.
    """

    def __init__(self, floors: Sequence[nn.Module], lots: Sequence[Sequence[Handle]], *, spills: bool) -> None:
        """`lots` are the values that each floor is expected to use."""
        self.spills = spills
        self._floors, self._lots = floors, lots
        self._places = 2 * max(len(floors), 1)
        self._at = 0
        self._calls: list[Call] = []
        self._idle: list[Thread] = []  # of calls that have ended
        self._least = anonymous_bytes()  # since freed memory was last returned
        self.lease: Lease

    @property
    def count(self) -> int:
        """The number of calls in progress."""
        return len(self._calls)

    @property
    def is_shared(self) -> bool:
        """Whether several calls are in progress."""
        return len(self._calls) > 1

    def begin(self, number: int, fn: Callable[[], Any], world: World, settings: Settings, *, alone: bool) -> Call:
        """A new call, run up to its first floor or its end; `alone` unless others will be in progress beside it."""
        self.lease.keeps_results = not alone
        call = Call(self, number, fn, world, settings, self._thread())
        self._calls.append(call)
        self._carry(call)
        return call

    def go_on(self) -> Call:
        """Run the next call; returns it."""
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
        """Start again with the calls that wait at the lowest place."""
        self._at = 0

    def stop(self, after: int = -1) -> None:
        """End the calls of batches after number `after`; after another interrupt, without waiting."""
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
        """Return freed memory: glibc keeps it per thread, while other threads allocate more."""
        grown = anonymous_bytes() - self._least
        if grown > _MUCH:
            return_freed()
            self._least = anonymous_bytes()
        else:
            self._least += min(grown, 0)

    # In the threads of calls

    @contextmanager
    def gates(self) -> Iterator[None]:
        """In this context, calls wait before each floor."""
        self.lease = lease()
        gate = _uncompiled_gate() if "torch._dynamo" in sys.modules else _Gate
        with ExitStack() as stack:
            stack.callback(release_scratch)
            stack.callback(self.lease.end)
            self.lease.expect(self._lots)
            for floor, module in enumerate(self._floors):
                is_plain = self._is_plain(module)
                if is_plain:
                    stack.enter_context(Forward(module, partial(self._pass, floor)).instead())
                before = gate(partial(self._arrive, floor, is_plain))
                after = gate(partial(self._leave, self._places - 1 - floor))
                for handle in (
                    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                    module.register_forward_hook(after),
                ):
                    stack.callback(handle.remove)
            stack.callback(self._end_idle)
            stack.callback(self.stop)  # first: what calls do as they end still happens inside
            yield

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether a floor has its class's forward, and no other floor inside, before which calls wait."""
        inside = {*module.modules()} - {module}
        return "forward" not in vars(module) and inside.isdisjoint(self._floors)

    def _arrive(self, floor: int, is_plain: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a floor. A plain one without other hooks, which come later, waits where its forward is called."""
        call = self._mine()
        if call is None:
            return
        if self.spills:
            made = storages_of(call.made)
            call.taken = {key: key in made for key in storages_of(tensors_in((args, kwargs)))}
        if floor != self._at and (not is_plain or len(pre_hooks_of(module)) > 1):
            call.wait_at(floor, (args, kwargs))

    def _pass(self, floor: int, forward: Callable[[], Any] | None, given: Sequence[Any]) -> Errand | None:
        """At a floor, before its forward: wait, and have it called by the iterating thread if possible.

        Returns the errand if it was called.
        """
        call = self._mine()
        if call is None:
            return None
        errand = Errand(forward) if forward is not None and Errand.can_be_run() else None
        if floor != self._at:
            call.wait_at(floor, given, errand)
        elif errand is not None:
            call.send(errand)
        return errand if errand is not None and errand.is_done else None

    def _leave(self, place: int, module: nn.Module, _args: Any, output: Any) -> None:
        """After a floor: backward will wait for the others before it comes down to this one."""
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
        call = self._mine()  # on an accelerator backward runs in a thread of torch's, and does not wait
        if call is not None and place != self._at:
            call.wait_at(place)

    def _mine(self) -> Call | None:
        """The call of this lift that runs in this thread."""
        call: Call | None = getattr(_HERE, "call", None)
        return call if call is not None and call.lift is self else None


class _Gate:
    """A module hook. In a copy of the module, or an unpickled one, it does nothing."""

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
    """Tensors returned by a module that belong neither to the module nor to its caller."""
    own = storages_of(tensors_in([vars(part) for part in module.modules()], own=True))
    return [one for one in tensors if all(key not in own and taken.get(key, True) for key in storages_of([one]))]


def _forget() -> None:
    """In a forked child there are no waiting calls, and no lift to resume them."""
    _HERE.call = None


_HERE = threading.local()
os.register_at_fork(after_in_child=_forget)
