"""A function run in a process of its own.

Always true:
- the process is fresh: it has imported what trials need, and has loaded, computed and mapped nothing
- what goes wrong in it is raised here; a process that is killed is an error that says so
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")


def run_apart(function: Callable[..., T], *args: Any) -> T:
    """What the function returns.

    Args:
        function: one that a module defines by name.
        args: what can be pickled.

    Raises:
        RuntimeError: the process was killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.preload"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool as error:
            raise RuntimeError("the process was killed; under a memory cap that is for want of memory") from error
