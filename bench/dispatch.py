"""Dispatch overhead per op, in microseconds: an offloaded argument against the same plain tensor.

Always true:
- tensors are tiny, so that the op itself takes almost no time
- a value is the difference of two times taken one after the other
- the limit is a tensor subclass that only unwraps its argument and calls the op
- a tensor that is just a mapping, such as tensordict's, has no dispatch: it is the plain tensor here
"""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import offload
from bench.apart import run_apart
from bench.peers import IN_MEMORY, OURS, PACKAGES, WAYS, absent
from bench.rounds import Figure, in_turn
from bench.scale import Scale

Op = Callable[[torch.Tensor], object]
LIMIT = "a bare subclass"
_ROUNDS = 15
_PEERS_OF_OPS = {"torch_to_nnef": "torch_to_nnef"}


class Bare(torch.Tensor):
    """A minimal wrapper subclass."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls: type[Bare], inner: torch.Tensor) -> Bare:
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.held = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.held if type(arg) is cls else arg for arg in args), **(kwargs or {}))


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """One figure per op, and one for a module."""
    return run_apart(_figures, scale.calls, scratch)


def _figures(calls: int, scratch: Path) -> list[Figure]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        of_ops = _figures_of_ops(calls, Path(own))
        with torch.no_grad():
            return [*of_ops, _figure_of_module(calls, Path(own))]


def _figures_of_ops(calls: int, folder: Path) -> list[Figure]:
    plain = torch.randn(8, 8)
    missing = absent(_PEERS_OF_OPS)
    stored = {arm: make(plain, folder) for arm, make in _STORED.items() if arm not in missing}

    def figure(name: str, op: Op) -> Figure:
        base = partial(op, plain)
        arms = {arm: partial(overhead, partial(op, tensor), base, calls) for arm, tensor in stored.items()}
        done = in_turn(arms, _ROUNDS, missing)
        limit = done.take(LIMIT)
        return Figure(f"dispatch: {name}", "µs", done.results, limit, LIMIT, done.missing)

    with torch.no_grad():
        without_graph = [figure(name, op) for name, op in _OPS.items()]
    followed = torch.randn(1, 8, requires_grad=True)
    return [*without_graph, figure("F.linear(x, w), x requires grad", lambda w: F.linear(followed, w))]


def _figure_of_module(calls: int, folder: Path) -> Figure:
    x, missing = torch.randn(1, 8), absent(PACKAGES)
    modules = {arm: _filled(arm, folder) for arm in WAYS if arm not in missing}
    base, calls = partial(modules.pop(IN_MEMORY), x), calls // 5
    arms = {arm: partial(overhead, partial(module, x), base, calls) for arm, module in modules.items()}
    done = in_turn(arms, _ROUNDS, missing)
    return Figure("dispatch: nn.Linear(8, 8)(x)", "µs", done.results, [], "", done.missing)


def overhead(op: Callable[[], object], plain: Callable[[], object], calls: int) -> float:
    """Microseconds by which a call takes longer."""
    base = timeit.timeit(plain, number=calls)
    return (timeit.timeit(op, number=calls) - base) / calls * 1e6


def _filled(arm: str, folder: Path) -> nn.Module:
    """A linear module, loaded in one of the ways; accelerate keeps the smaller one in memory."""
    own = folder / arm
    own.mkdir()
    save_file(_two_modules().state_dict(), own / "model.safetensors", metadata={"format": "pt"})
    with offload.init_empty_weights():
        model = _two_modules()
    return WAYS[arm].fill(model, own / "model.safetensors", own)[1]


def _two_modules() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(8, 8)])


def _torch_to_nnef(plain: torch.Tensor, folder: Path) -> torch.Tensor:
    from torch_to_nnef.tensor.offload import OffloadedTensor

    return OffloadedTensor.from_original_tensor(plain, "w", folder)


_STORED: dict[str, Callable[[torch.Tensor, Path], torch.Tensor]] = {
    LIMIT: lambda plain, _folder: Bare(plain),
    OURS: lambda plain, _folder: offload.OffloadedTensor.from_original_tensor(plain, "w"),
    "torch_to_nnef": _torch_to_nnef,
}
_X, _PICKED = torch.randn(1, 8), torch.tensor([1])
_OPS: dict[str, Op] = {
    "F.linear(x, w)": lambda w: F.linear(_X, w),
    "x * w": lambda w: _X * w,
    "w.exp()": lambda w: w.exp(),
    "F.embedding(rows, w)": lambda w: F.embedding(_PICKED, w),
    "w.t()": lambda w: w.t(),
}
