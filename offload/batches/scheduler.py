"""Scheduling: which batch continues, and how far, stage by stage.

A batch is a function call in a thread of its own. It waits before each stage. The scheduler runs the calls that wait
at the current stage, one after the other, then those at the next: up the model for forward, down for backward, and
again from the bottom. So every call gets its turn, whatever a function calls, and in any order.

Blocks compute in the iterating thread, for the call whose turn it is, so that the threads of kernels are the same.

Always true:
- a call runs only while the iterating thread waits or computes for it
- at each stage calls run in the order of their numbers: sums over batches are the same as with one batch at a time
- a block whose experts are computed for several calls ends for the last one first, unless it has hooks inside, which
  would see that
- memory that several tensors of a waiting call share counts once
- a call that is stopped leaves its function at the next stage, with an exception that `except Exception` lets pass
- calls are listed before their threads begin, and hooks before they are put on: an interrupt leaves none of them
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from queue import SimpleQueue

import torch
from torch import nn

from offload.annotations import Args, Kwargs
from offload.batches.delegated_call import DelegatedCall, Forward
from offload.batches.gathering import Gathering
from offload.batches.states import Settings, ThreadState
from offload.importing import imported
from offload.memory import anonymous_bytes, return_freed
from offload.prefetch.engine import lease
from offload.prefetch.order import Lease
from offload.prefetch.scratch import release_scratch
from offload.storage.handle import Handle
from offload.system.background import Worker
from offload.system.modes import no_functions, no_modes
from offload.tensor.experts import gathered_by
from offload.torch_api import (
    hooks_of,
    is_dual_level,
    not_compiled,
    pre_hooks_of,
    remove_hook,
    storage_id,
    transform_on_top,
)

_MUCH = 32 << 20  # bytes by which memory may grow until freed memory is returned to the system
_LOOK = 0.1  # seconds between looks, as an interrupt just before a wait would not end it
_DEPTH = 4  # nesting depth of objects that are searched for tensors
_DEPTH_OF_CACHES = 6  # including the layers of KV caches


class Stopped(BaseException):
    """Ends the function of a batch whose result is no longer needed."""


class Call:
    """A batch's function call in a thread of its own; `place` is where it waits, None before it starts and after."""

    def __init__(
        self, scheduler: Scheduler, number: int, fn: Callable[[], object], state: ThreadState, settings: Settings
    ) -> None:
        self.scheduler = scheduler
        self.number = number
        self.place: int | None = None
        self.has_ended = False
        self.result: object = None
        self.error: BaseException | None = None
        self.waiting_bytes = 0
        self._first, self._settings = settings, settings
        self._delegated: DelegatedCall | None = None
        self.is_computing = False
        self._is_stopped = False
        # One C call each, which an interrupt can't split.
        self._turn: SimpleQueue[None] = SimpleQueue()
        self._back: SimpleQueue[bool] = SimpleQueue()  # whether it is still its turn, and it delegates a call
        self.thread = Worker(partial(self._run, fn, state), f"offload-batch-{number}")

    @property
    def has_drawn(self) -> bool:
        """Whether it has used random numbers."""
        return self._first.has_drawn(self._settings)

    def go_on(self) -> None:
        """Run it until it waits again or has ended. Called by the iterating thread, which waits."""
        try:
            with self._own_settings():
                is_busy = True
                while is_busy:
                    self._run_delegated()
                    self._turn.put(None)
                    is_busy = self._back.get()
        except BaseException:  # an interrupt while it runs
            self.stop()
            raise

    @property
    def is_ready(self) -> bool:
        """Whether its stage can be computed now, and was not."""
        return self._delegated is not None

    def compute(self) -> None:
        """Compute its stage before it is told to go on, which it still waits for. Called by the iterating thread."""
        with self._own_settings():
            self._run_delegated()

    @contextmanager
    def _own_settings(self) -> Iterator[None]:
        callers = Settings.now()
        try:
            self._settings.apply()
            yield
        finally:
            self._settings = Settings.now()
            callers.apply()

    def stop(self) -> None:
        """End it, and wait for that, unless another interrupt has ended such a wait."""
        is_first = not self._is_stopped
        self.leave()
        while is_first and self.thread.is_running:
            self.thread.join(_LOOK)

    def leave(self) -> None:
        """End it, without waiting."""
        self._is_stopped = True
        self._turn.put(None)

    def _run_delegated(self) -> None:
        delegated, self._delegated = self._delegated, None
        if delegated is not None:
            self.is_computing = True
            try:
                with self.scheduler.lease.joined(), gathered_by(self.scheduler.gathering):
                    delegated.run()
            finally:
                self.is_computing = False

    # In the call's thread

    def wait_at(self, place: int, given: Args = (), delegated: DelegatedCall | None = None) -> None:
        """Wait for its turn at a place, whose module is called with `given`; then `delegated` is run first."""
        self._refuse_stopped()
        self.waiting_bytes = waiting_bytes(tensors_in(given, caches=True))
        self.place = place
        try:
            self._wait(delegated, is_turn=False)
        finally:
            self.place = None
        self._refuse_stopped()

    def delegate(self, delegated: DelegatedCall) -> None:
        self._refuse_stopped()
        self._wait(delegated, is_turn=True)
        self._refuse_stopped()

    def _wait(self, delegated: DelegatedCall | None, *, is_turn: bool) -> None:
        self._delegated = delegated
        self._back.put(is_turn)
        self._turn.get()

    def _refuse_stopped(self) -> None:
        if self._is_stopped:
            raise Stopped

    def _run(self, fn: Callable[[], object], state: ThreadState) -> None:
        self._turn.get()
        _CURRENT.call = self
        self.scheduler.lease.join()
        try:
            self._refuse_stopped()
            self.result = state.run(fn)
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            del fn
            self.has_ended = True
            self._back.put(False)


class Scheduler:
    """Calls on their way through the stages of models; `sweeps` counts how often it came back to the first stage."""

    def __init__(self, stages: Sequence[nn.Module], blocks: Sequence[Sequence[Handle]]) -> None:
        """`blocks` are the values that each stage is expected to use."""
        self.sweeps = 0
        self._stages, self._blocks = stages, blocks
        self._places = 2 * max(len(stages), 1)
        self._at = 0
        self._calls: list[Call] = []
        self.gathering = Gathering(self._compute_next, self._are_others_due)
        self._least = anonymous_bytes()  # since freed memory was last returned
        self.lease: Lease

    @property
    def count(self) -> int:
        return len(self._calls)

    def begin(
        self, number: int, fn: Callable[[], object], state: ThreadState, settings: Settings, *, alone: bool
    ) -> Call:
        """A new call, run up to its first stage or its end; `alone` unless others will be in progress beside it."""
        self.lease.keeps_results = not alone
        call = Call(self, number, fn, state, settings)
        self._calls.append(call)
        call.thread.begin()
        self._carry(call)
        return call

    def go_on(self) -> Call:
        first = min(self._calls, key=self._distance)
        assert first.place is not None
        if first.place != self._at:
            self.sweeps += first.place == 0
            self._at = first.place
            self.lease.move_on()
        self._carry(first)
        return first

    def _compute_next(self) -> bool:
        """Compute the stage for the next call, while others in it wait; False if none can be, or hooks would see it."""
        waiting = [call for call in self._calls if call.place == self._at and call.is_ready]
        stage = self._stages[self._at]
        if not waiting or any(hooks_of(part) or pre_hooks_of(part) for part in stage.modules() if part is not stage):
            return False
        min(waiting, key=attrgetter("number")).compute()
        return True

    def _are_others_due(self) -> bool:
        """Whether the current stage is still to be computed for other calls than those that are inside of it now."""
        return any(call.place == self._at and not call.is_computing for call in self._calls)

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
            self._calls = [call for call in self._calls if call not in calls]
            raise

    def _distance(self, call: Call) -> tuple[int, int]:
        assert call.place is not None
        return (call.place - self._at) % self._places, call.number

    def _carry(self, call: Call) -> None:
        call.go_on()
        if call.has_ended:
            call.thread.join()
            self._calls.remove(call)
        grown = anonymous_bytes() - self._least
        if grown > _MUCH:  # glibc keeps freed memory per thread, while other threads allocate more
            return_freed()
            self._least = anonymous_bytes()
        else:
            self._least += min(grown, 0)

    # In the threads of calls

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """In this context, calls wait before each stage."""
        self.lease = lease()
        kind: type[_Hook] = _Hook
        if imported("torch._dynamo", "disable"):
            kind = type("_UncompiledHook", (_Hook,), {"__call__": not_compiled(_Hook.__call__)})
        undo: list[Callable[[], object]] = [release_scratch, self.lease.end]
        try:
            self.lease.expect(self._blocks)
            for stage, module in enumerate(self._stages):
                if self._is_plain(module):
                    forward = Forward(module, partial(self._delegate, stage))
                    undo.append(forward.take_off)
                    vars(module)["forward"] = forward
                else:
                    before = kind(partial(self._arrive, stage))
                    undo.append(partial(remove_hook, module, before))
                    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                after = kind(partial(self._leave, self._places - 1 - stage))
                undo.append(partial(remove_hook, module, after))
                module.register_forward_hook(after)
            yield
        finally:
            undo.append(self.stop)  # last: what calls do as they end still happens inside
            try:
                _carry_out(undo)
            except BaseException:  # an interrupt: what it met is carried out again, and then the rest
                _carry_out(undo)
                raise

    def _is_plain(self, module: nn.Module) -> bool:
        """Whether calls wait for a stage in its forward, which the iterating thread can make, or before its hooks."""
        inside = {*module.modules()} - {module}
        return "forward" not in vars(module) and not pre_hooks_of(module) and inside.isdisjoint(self._stages)

    def _arrive(self, stage: int, _module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._enter(stage, (args, kwargs))

    def _delegate(self, stage: int, forward: Callable[[], object] | None, given: Args) -> DelegatedCall | None:
        """Have a stage's forward called by the iterating thread, if possible; returns the call if it was made."""
        delegated = DelegatedCall(forward) if forward is not None and DelegatedCall.can_be_run() else None
        self._enter(stage, given, delegated)
        return delegated if delegated is not None and delegated.is_done else None

    def _enter(self, stage: int, given: Args, delegated: DelegatedCall | None = None) -> None:
        call = self._mine()
        if call is None:
            return
        if stage != self._at:
            call.wait_at(stage, given, delegated)
        elif delegated is not None:
            call.delegate(delegated)

    def _leave(self, place: int, _module: nn.Module, _args: Args, output: object) -> None:
        """After a stage: backward will wait for the others before it comes down to this one."""
        if self._mine() is None:
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._return_to, place))

    def _return_to(self, place: int, _gradients: object) -> None:
        call = self._mine()  # on an accelerator backward runs in a thread of torch's, and does not wait
        if call is not None and place != self._at:
            call.wait_at(place)

    def _mine(self) -> Call | None:
        """The call that runs in this thread; None where it can't wait: in a transform, or with dual levels."""
        if transform_on_top() is not None or is_dual_level():
            return None
        call: Call | None = getattr(_CURRENT, "call", None)
        return call if call is not None and call.scheduler is self else None


class _Hook:
    """A module hook; kept prompts know it by its class."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *given: object) -> None:
        self._act(*given)


def _carry_out(undo: list[Callable[[], object]]) -> None:
    """Carry out these acts from the last to the first, and forget each that is done."""
    while undo:
        undo[-1]()
        undo.pop()


def tensors_in(given: object, *, caches: bool = False) -> list[torch.Tensor]:
    """The plain tensors in arguments or results: in lists, dictionaries, objects, and layers of `caches`."""
    return list(_tensors(given, _DEPTH_OF_CACHES if caches else _DEPTH))


def _tensors(given: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        if type(given) is torch.Tensor and given.device.type != "meta" and given.layout == torch.strided:
            yield given
    elif depth and not isinstance(given, str | bytes | int | float | torch.nn.Module | None):
        if isinstance(given, dict):
            parts: Iterable[object] = given.values()
        elif isinstance(given, list | tuple | set):
            parts = given
        else:
            parts = getattr(given, "__dict__", {}).values()
        for part in list(parts):
            yield from _tensors(part, depth - 1)


def waiting_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """How much main memory tensors take, counting shared memory once."""
    with no_functions(), no_modes():
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())


def _forget() -> None:
    """In a forked child there are no waiting calls, and no scheduler to resume them."""
    _CURRENT.call = None


_CURRENT = threading.local()
os.register_at_fork(after_in_child=_forget)
