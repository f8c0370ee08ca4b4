"""Running a function in a separate process, or in several at once.

Always true:
- the process is fresh: it has imported what trials need, and has not loaded, computed or mapped anything
- its errors are raised here; a killed process is an error that says so
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_begun: list[Iterator[Any]] = []  # in a stepping process, the running generator


def run_apart(function: Callable[..., T], *args: Any) -> T:
    """The function's result.

    Args:
        function: defined at module level.
        args: picklable.

    Raises:
        RuntimeError: the process was killed.
    """
    with _process() as pool:
        return _answer(pool, function, *args)


def run_together(function: Callable[..., T], count: int, *args: Any) -> list[T]:
    """The function's results in several processes that run at the same time; their number is the first argument.

    Args and errors: as `run_apart`.
    """
    with _process(count) as pool, ThreadPoolExecutor(count) as waiting:
        return list(waiting.map(lambda number: _answer(pool, function, number, *args), range(count)))


@contextmanager
def stepping_apart(steps: Callable[..., Iterator[T]], *args: Any) -> Iterator[Callable[[], T]]:
    """The results of a generator in a separate process: the next one at each call.

    Args:
        steps: defined at module level.
        args: picklable.

    Raises: as `run_apart`, also from the calls.
    """
    with _process() as pool:
        _answer(pool, _begin, steps, *args)
        yield lambda: _answer(pool, _next)


def _begin(steps: Callable[..., Iterator[Any]], *args: Any) -> None:
    _begun.append(steps(*args))


def _next() -> Any:
    return next(_begun[-1])


def _process(count: int = 1) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.preload"])
    return ProcessPoolExecutor(count, mp_context=context)


def _answer(pool: ProcessPoolExecutor, function: Callable[..., T], *args: Any) -> T:
    try:
        return pool.submit(function, *args).result()
    except BrokenProcessPool as error:
        raise RuntimeError("the process was killed; under a memory cap that is for want of memory") from error
