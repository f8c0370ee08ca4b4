"""Memory budgets for values on disk, as set by the user, and current usage.

Always true:
- a setting is process-wide, permanently or until the `with` that made it ends
- what is in memory is queried from the kernel, not tracked
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from offload.errors import ArgumentError, ArgumentTypeError, BudgetError
from offload.memory import as_budget
from offload.prefetch.copies import pool_on
from offload.prefetch.engine import POOL, UNTRACKED, counts, lock, replanning, track
from offload.prefetch.pages import joined
from offload.prefetch.plan import Pool, Value
from offload.prefetch.reader import Counts
from offload.prefetch.room import OnDevice
from offload.prefetch.value import page_state_of
from offload.storage.handle import Access, Handle
from offload.tensor.locals import local_of
from offload.tensor.recipes import stored_in
from offload.tensor.small import SMALL_VALUES
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded
from offload.torch_api import tree_leaves, usable_accelerator, usable_devices
from offload.transformers_api import kv_bytes_per_token

log = logging.getLogger("offload.budget")

_CONTEXT = 4096  # tokens whose keys and values a device has room for, unless it is known how many there will be
_OF_TABLES = 2  # dimensions of a table, of which rows are read

__all__ = ["evict", "keep_resident", "set_read_ahead"]

Amount: TypeAlias = "int | str"
MaxMemory: TypeAlias = "Amount | Mapping[int | str, Amount] | None"


def _undone_by(undo: Callable[[], object]) -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.callback(undo)
    return stack


def set_max_memory(max_memory: MaxMemory) -> AbstractContextManager[object]:
    """Set how much of the values on disk may stay in memory between ops; the rest is read again for each use.

    Without it, values stay while there is memory that nothing else needs. Values of up to 64 KiB stay in any case.
    Beside the budget there is what is in use or read ahead (`set_read_ahead`).

    Args:
        max_memory: "8GiB", or bytes; or a dictionary from "cpu" and accelerators (0, "cuda:1") to one of them. None for
            no limit in main memory but what is available. An accelerator that is not named fills itself: with what is
            free there when a model is first used, and at the start of each `generate`, less a tenth (1 GiB at least),
            and less the keys and values of the context. At an out-of-memory error half of that is given back for a
            while. With 0 nothing stays there.

    Returns:
        A context manager that restores the earlier setting; without `with`, the new one holds.

    Raises:
        ValueError: an invalid amount, one below 1 MiB other than 0, or a device that has no budget.

    Example:
        >>> with set_max_memory("4GiB"):
        ...     pass  # run the model
    """
    undo = partial(_limit, POOL.max_memory, POOL.on_devices)
    _limit(*_shares(max_memory))
    return _undone_by(undo)


def set_read_ahead(window: Amount | bool) -> AbstractContextManager[object]:
    """Set how many bytes may be in memory because they are read ahead, in use, or just used.

    Args:
        window: bytes, or "256MiB". A value that is larger than that is read ahead alone. False reads nothing ahead.
            True, the default, follows the disk and the values: what the disk gives in a quarter second, and the next
            three values at least; 64 MiB or more, and no more than a tenth of the budget beside that.

    Returns:
        A context manager that brings back what was set before; the setting holds without it, too.

    Raises:
        ValueError: `window` is not an amount of memory.

    Example:
        >>> with set_read_ahead("256MiB"):
        ...     pass  # run the model
    """
    undo = partial(setattr, POOL, "fixed_window", POOL.fixed_window)
    POOL.fixed_window = _window_of(window)
    return _undone_by(undo)


def keep_resident(*what: object) -> None:
    """Keep values in memory once they are read, whatever else streams.

    Args:
        what: offloaded tensors, modules, or lists and dicts of them.

    Raises:
        BudgetError: they do not fit in the budget; nothing is changed.
        TypeError: something else was given.

    Example:
        >>> from offload import OffloadedTensor
        >>> w = OffloadedTensor.zeros((2, 2), name="w")
        >>> keep_resident(w)
    """
    values = _values_in(what)
    with replanning() as leaving:
        for pool in {value.pool for value in values}:
            leaving.extend(pool.reconsider(anew=True))
            pinned = {value for value in pool.values() if value.pinned} | {v for v in values if v.pool is pool}
            size = sum(value.nbytes for value in pinned)
            if size > (most := pool.capacity):
                raise BudgetError(f"{size} bytes can't stay in memory: the budget is {most}. Raise max_memory.")
        for value in values:
            value.pinned = True
        for pool in {value.pool for value in values}:
            leaving.extend(pool.reconsider(anew=True))


def evict(*what: object) -> None:
    """Drop values from memory, and no longer keep them resident. The next read brings them back.

    Args:
        what: as `keep_resident`.

    Raises:
        TypeError: something else.

    Example:
        >>> from offload import OffloadedTensor
        >>> evict(OffloadedTensor.zeros((2, 2), name="v"))
    """
    values, states = _values_in(what), [page_state_of(handle) for handle in handles_in(what)]
    with replanning() as leaving:
        for one in states:
            one.checked_until = 0.0
        for value in values:
            value.pinned = False
        for pool in {value.pool for value in values}:
            leaving.extend(pool.reconsider(anew=True))
        leaving.extend([*values, *(copy for one in states for copy in one.copies.values())])
    SMALL_VALUES.release()


def keep_assistant(model: nn.Module, assistant: nn.Module) -> None:
    """Keep an assistant in memory; if it does not fit in its budget, it streams."""
    if assistant is model:
        return
    try:
        keep_resident(assistant)
    except BudgetError as error:
        log.info("the assistant does not stay in memory: %s", error)


def expect_context(model: nn.Module, context: int | None = None, key: object = None) -> None:
    """Keep room for keys and values on the accelerators of a model.

    Args:
        context: tokens; None for 4,096.
        key: of one of several contexts, for which the devices are filled anew; None for a model that does not generate.
    """
    pools: dict[torch.device, OnDevice] = {}
    for module in model.modules() if usable_accelerator() is not None else ():
        if not isinstance(module, nn.Embedding):  # of a table, rows are sent
            for one in map(local_of, (*module.parameters(False), *module.buffers(False))):
                if is_offloaded(one) and one.device.type != "cpu" and one.device not in pools:
                    for handle in stored_in([handle_of(one)]):
                        pools.setdefault(one.device, pool_on(one.device, page_state_of(handle).pool))
    beside = (context or _CONTEXT) * kv_bytes_per_token(model) if pools else 0
    for pool in pools.values():
        with replanning() as leaving:
            if key is None:
                pool.beside[model] = beside
            else:
                pool.contexts[key] = model, beside
                leaving.extend(pool.grant())


@contextmanager
def filled_devices(model: nn.Module, context: int | None = None) -> Iterator[None]:
    """Let as much of a model stay on its accelerators as there is room for now, beside the contexts of such blocks."""
    key = object()
    try:
        expect_context(model, context, key)
        yield
    finally:
        with lock():
            for pool in Pool.all():
                if isinstance(pool, OnDevice):
                    pool.contexts.pop(key, None)


def is_read_by_each_pass(model: nn.Module) -> bool:
    """Whether each pass reads something from the disk: values that don't stay, or that it picks, such as experts."""
    with replanning() as leaving:
        for handle in stored_in(handles_in([model])):
            state = page_state_of(handle)
            whole = state.ranges.get(handle.extent)
            leaving.extend((state.pool or POOL).reconsider())
            if whole is not None and not whole.is_picked:
                is_read = not whole.kept
            else:  # not rows of a table
                is_read = handle.access is Access.PICKED or len(handle.layout.shape) > _OF_TABLES
            if is_read:
                return True
    return False


@dataclass(frozen=True)
class MemorySummary:
    """Memory usage of the values on disk that have been read, or are expected to be; in file bytes, counted once.

    Attributes:
        budget: how many bytes may stay in memory.
        values: the size of all of them.
        kept: the size of those that stay.
        resident: the bytes that are in memory now, as the kernel counts them.
        computed: the size of small computed values in memory, such as norms that were cast; beside the budget.
        counts: reads since the process started.
        on_devices: for each accelerator in use, the bytes that may stay there, and those that do.
    """

    budget: int
    values: int
    kept: int
    resident: int
    computed: int
    counts: Counts
    on_devices: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        rows = {
            "budget": _in_mib(self.budget),
            "values": _in_mib(self.values),
            "  to stay": _in_mib(self.kept),
            "  to stream": _in_mib(self.values - self.kept),
            "resident now": _in_mib(self.resident),
            "small computed values": _in_mib(self.computed),
            "read from disk": _in_mib(self.counts.bytes_read),
            "reads: found in memory": str(self.counts.found),
            "reads: read ahead": str(self.counts.ahead),
            "reads: waited for": str(self.counts.missed),
            "read ahead for nothing": str(self.counts.wasted),
            "waited": f"{self.counts.waited:.2f} s",
        }
        for device, (most, stays) in self.on_devices.items():
            rows |= {f"may stay on {device}": _in_mib(most), f"stays on {device}": _in_mib(stays)}
        return "\n".join(f"{label:<24}{value:>14}" for label, value in rows.items())


def memory_summary() -> MemorySummary:
    """What is in memory, and what was read; prints as a table.

    A read of what was in memory less than a second ago is not counted.

    Returns:
        Bytes kept, resident and read, the budget, and how long ops waited.

    Example:
        >>> memory_summary().counts.wasted >= 0
        True
    """
    with replanning() as leaving:
        leaving.extend(POOL.reconsider(anew=True))
        pools = [pool for pool in Pool.all() if not isinstance(pool, OnDevice)]
        values = [value for pool in pools for value in pool.values()]
        budget = sum(pool.capacity for pool in pools if pool is POOL or pool.values())
        on_devices: dict[str, tuple[int, int]] = {}
        for device, there in (pair for pool in pools for pair in pool.on_devices.items()):
            leaving.extend(there.reconsider(anew=True))
            most, stays = on_devices.get(str(device), (0, 0))
            on_devices[str(device)] = most + there.capacity, stays + sum(one.cached_bytes() for one in there.values())
    return MemorySummary(
        budget=budget,
        values=_bytes_in(values),
        kept=_bytes_in(value for value in values if value.kept),
        resident=sum(extent.cached_bytes() for extent in joined(values)),
        computed=SMALL_VALUES.nbytes(),
        counts=counts(),
        on_devices=on_devices,
    )


def pool_for(max_memory: MaxMemory, read_ahead: Amount | bool | None) -> Pool | None:
    """A separate budget for the values of one model; None if neither argument is given."""
    if max_memory is None and read_ahead is None:
        return None
    pool = Pool(window=None if read_ahead is None else _window_of(read_ahead))
    pool.max_memory, pool.on_devices = _shares(max_memory)
    return pool


def _shares(max_memory: MaxMemory) -> tuple[int | None, dict[torch.device, Pool]]:
    shares: Mapping[int | str, Any] = max_memory if isinstance(max_memory, Mapping) else {"cpu": max_memory}
    amounts = {_accelerator(device): as_budget(amount) for device, amount in shares.items() if device != "cpu"}
    on_devices: dict[torch.device, Pool] = {device: OnDevice(amount, device) for device, amount in amounts.items()}
    share = shares.get("cpu")
    return None if share is None else as_budget(share), on_devices


def _accelerator(device: int | str) -> torch.device:
    try:
        named = torch.device(device)
        accelerator = torch.device(named.type, named.index or 0)
    except (RuntimeError, TypeError):  # not a device name or index
        accelerator = None
    if accelerator not in usable_devices():
        raise ArgumentError(f"max_memory: {device!r} is neither 'cpu' nor an accelerator of this machine")
    return accelerator


def _window_of(window: Amount | bool) -> int | None:
    if isinstance(window, bool):
        return None if window else 0
    return as_budget(window)


def _limit(max_memory: int | None, on_devices: dict[torch.device, Pool]) -> None:
    with replanning() as leaving:
        leaving.extend(value for pool in POOL.on_devices.values() for value in pool.values())
        POOL.max_memory, POOL.on_devices = max_memory, on_devices
        leaving.extend(POOL.reconsider(anew=True))
    SMALL_VALUES.release()


def _values_in(what: Iterable[object]) -> list[Value]:
    values = [track(handle, *handle.extent) for handle in stored_in(handles_in(what))]
    return [value for value in values if value is not UNTRACKED]


def _bytes_in(values: Iterable[Value]) -> int:
    return sum(extent.nbytes for extent in joined(values))


def handles_in(what: Iterable[object]) -> set[Handle]:
    """The handles of the tensors on disk among tensors and modules, in lists and dicts; `TypeError` for others."""
    parts: list[Any] = []
    for leaf in tree_leaves(what):
        if not isinstance(leaf, nn.Module | torch.Tensor | None):
            raise ArgumentTypeError(f"{leaf!r} is neither a tensor nor a module: it can't be kept in memory or dropped")
        parts.extend([*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf])
    return {handle_of(tensor) for tensor in map(local_of, parts) if is_offloaded(tensor)}


def _in_mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
