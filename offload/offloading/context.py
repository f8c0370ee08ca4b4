"""The context in which large results go to disk.

Always true:
- a thread has at most one pair of modes; a context inside another only changes where they put things
- other threads are not affected
- views, and tensors that an op writes to, stay what they are
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offload.annotations import Args, Kwargs, Op
from offload.memory import as_bytes
from offload.offloading.made import Destination, log, made_on_disk
from offload.storage.folders import named_folder
from offload.system.locks import fork_safe_lock
from offload.tensor.rules import decompose, is_composite, tensors_in
from offload.tensor.wrapper import OffloadedTensor
from offload.torch_api import (
    TRACING_MODES,
    OpOverload,
    TorchDispatchMode,
    dispatch_modes,
    function_modes,
    get_dispatch_mode,
    is_dual_level,
    modes_are_on,
    one_mode_less,
    storage_id,
    transform_on_top,
)


@contextmanager
def offloading(offload_dir: str | os.PathLike[str] | None = None, *, min_bytes: int | str = "1MiB") -> Iterator[None]:
    """A context in which large results of factories and ops go to disk.

    Inside, in this thread, the result of `torch.empty`, `randn`, `x @ y`, `w.float()`... is an `OffloadedTensor` if it
    takes at least `min_bytes`. The values are those of the plain op, bit for bit, random ones too. So a module that is
    made inside has its weights on disk, and so has an adapter that peft makes.

    - Factories, elementwise ops, casts, copies and products of matrices are computed straight into their file. The
      result of another op is in memory for a moment.
    - Views, in-place ops and `out=` behave as always: they share the memory of their argument.
    - `torch.load` and `safetensors.torch.load_file` load into memory, as always. `offload.load_file` opens such a file
      with its tensors on disk, and transformers models are opened by `offload.from_pretrained`.
    - Fake and meta tensors are left alone, and so are traced functions. Compiled functions run eagerly, and what has to
      be compiled (flex_attention) does not run, as in any dispatch mode of torch's. There `matmul` sums a product with
      a batch of one in another order, too (torch 2.13).
    - Tensors on an accelerator go to disk too, and compute there.

    A context inside another replaces it. Leave `offload_dir` out for temporary results: each file is then
    removed with its tensor. In a folder that you name, all of them stay.

    Args:
        offload_dir: the folder for the files, which stay; None for a private one.
        min_bytes: the least size, in bytes or as "1MiB".

    Returns:
        A context manager.

    Raises:
        WriteError: the folder can't be used; inside: there is no room for a result.
        ValueError: `min_bytes` is not an amount of memory.

    Example:
        >>> from offload import is_offloaded
        >>> with offloading(min_bytes=1024):
        ...     big, small = torch.ones(16, 16), torch.ones(2)
        >>> is_offloaded(big), is_offloaded(small)
        (True, False)
    """
    folder = None if offload_dir is None else named_folder(offload_dir)
    destination = Destination(folder, as_bytes(min_bytes))
    known = _active()
    if known is not None:
        outer = known.destination
        try:
            known.destination = destination
            yield
        finally:
            known.destination = outer
        return
    results = _Results(destination)
    functions = _Functions(results)
    try:
        with results, functions:
            yield
    finally:  # an interrupt just as a mode is left can leave it on
        if functions in function_modes():
            functions.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if results in dispatch_modes():
            results.__exit__(None, None, None)


class _Results(TorchDispatchMode):
    """Below autograd: sees each op and its results."""

    supports_higher_order_operators = True

    def __init__(self, destination: Destination) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.destination = destination
        # torch notes for the whole process, once per mode, that there is one. Threads may leave in another order than
        # they came in, so their notes must be removable in any order (torch 2.13).
        for name, value in vars(self).items():
            if isinstance(value, deque):
                setattr(self, name, _NOTES.setdefault(name, value))

    def __enter__(self) -> Any:
        with _LOCK:
            return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *failure: object) -> None:
        with _LOCK:
            super().__exit__(*failure)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Op, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or _is_left_alone(types):
            return func(*args, **kwargs)
        if is_composite(func):  # in inference mode; may or may not return a view
            with self:
                return decompose(func, args, kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        if not modes_are_on():
            on_disk = made_on_disk(self.destination, func, args, kwargs)
            if on_disk is not None:
                return on_disk
        results = func(*args, **kwargs)
        return self._put_away(func, results, args, kwargs)

    def _put_away(self, func: OpOverload, results: Any, args: Args, kwargs: Kwargs) -> Any:
        """Put new, large results on disk; those that an op wrote to, or that share memory with an argument, stay."""
        if isinstance(results, (tuple, list)):
            return type(results)([self._put_away(func, result, args, kwargs) for result in results])
        what = func.overloadpacket.__name__
        if not self.destination.takes(results, what):
            return results
        if _storage_of(results) in map(_storage_of, tensors_in(*args, *kwargs.values())):
            log.debug("%s: a result stays in memory, since it shares the memory of an argument", what)
            return results
        return self.destination.put(results, what)


def _storage_of(tensor: torch.Tensor) -> int | None:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return storage_id(tensor.untyped_storage()) if is_plain else None


class _Functions(TorchFunctionMode):
    """Above autograd: sees functions that torch computes in another way under a mode, and `torch.tensor`."""

    def __init__(self, results: _Results) -> None:
        super().__init__()
        self.results = results

    def __torch_function__(self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _WATCHED or _is_left_alone(()):
            return func(*args, **kwargs)
        if func is torch.tensor:
            return self._put_away(func, func(*args, **kwargs))
        if dispatch_modes()[-1] is not self.results:
            return func(*args, **kwargs)
        with one_mode_less():
            result = func(*args, **kwargs)
        return result if result.requires_grad and not result.is_leaf else self._put_away(func, result)

    def _put_away(self, func: Op, result: torch.Tensor) -> torch.Tensor:
        destination = self.results.destination
        if not destination.takes(result, func.__name__):
            return result
        return destination.put(result.detach(), func.__name__).requires_grad_(result.requires_grad)


def _active() -> _Results | None:
    stack = dispatch_modes()
    return next((mode for mode in stack if isinstance(mode, _Results)), None)


def _is_left_alone(types: Sequence[type]) -> bool:
    """Whether tensors are stand-ins, so that there is nothing to store."""
    return (
        any(kind is not OffloadedTensor for kind in types)
        or any(get_dispatch_mode(key) is not None for key in TRACING_MODES)
        or transform_on_top() is not None
        or is_dual_level()
        or torch.compiler.is_compiling()
    )


# With the functions after the first, torch takes another branch under a mode, with other last bits (2.13).
_WATCHED = {
    torch.tensor,
    *(torch.norm, torch.linalg.norm, torch.linalg.matrix_norm, torch.linalg.cond, torch.linalg.eigvalsh),
    *(torch.linalg.svdvals, torch.linalg.pinv, torch.pinverse, torch.Tensor.pinverse),
}
_LOCK = fork_safe_lock()
_NOTES: dict[str, deque[bool]] = {}
