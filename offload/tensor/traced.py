"""What stands for a stored value while a compiler traces; and what `torch.jit.trace` sees of a call.

Always true:
- a traced value has no file; it is a tensor of the compiler's
- `torch.jit.trace` has no value stand for another: it sees the offloaded tensors themselves
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FrameType, FunctionType
from typing import Any, final

import torch


@final
class Traced:
    """Stands for a handle while a compiler traces: the value is a tensor of the compiler's."""

    __slots__ = ("generation", "inner")
    owned = True
    has_holes = False
    recipe = None

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner
        self.generation = 0

    def base(self) -> torch.Tensor:
        return self.inner

    writable_base = base

    @property
    def twin(self) -> torch.Tensor:
        return self.inner


def as_called_from(frame: FrameType, func: Any) -> Callable[..., Any]:
    """`func`, called so that who looks for its caller finds the line and the variables of `frame`.

    `torch.jit.trace` notes which line calls an op, and what the values are called there. It checks its trace against
    one over plain clones of the arguments, and does not pass another line or name (2.13).
    """
    if isinstance(func, FunctionType):  # calls by itself
        return func
    line = "\n" * (frame.f_lineno - 1) + "_traced(*_args, **_kwargs)"
    code = compile(line, frame.f_code.co_filename, "eval")

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return eval(code, {"_traced": func, "_args": args, "_kwargs": kwargs}, dict(frame.f_locals))

    return call
