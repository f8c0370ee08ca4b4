"""The tables of rules: how ops find what executes them.

Always true:
- an op has at most one rule: in `RULES` for an aten overload, in `FUNCTIONS` for one of torch's Python functions
- `OffloadedTensor.__torch_function__` looks into `FUNCTIONS`, `OffloadedTensor.__torch_dispatch__` into `RULES`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from offload.annotations import Args, Kwargs, Op
from offload.errors import ArgumentError

Rule: TypeAlias = Callable[[Op, Args, Kwargs], Any]
RULES: dict[object, Any] = {}
FUNCTIONS: dict[object, Rule] = {}
BY_SCHEMA = "by schema"  # builds the rule of an aten op that has none
OUT = "out="  # a call with `out=`
INNER = "inner"  # a call on a value of a tensor subclass


def implements(*ops: object) -> Callable[[Rule], Rule]:
    """Register the rule of aten ops, below autograd; raises `ArgumentError` if one of them has a rule already."""
    return _registrar(RULES, ops)


def overrides(*functions: object) -> Callable[[Rule], Rule]:
    """Like `implements`, for functions of torch's Python interface, above autograd."""
    return _registrar(FUNCTIONS, functions)


def _registrar(table: dict[object, Any], keys: Iterable[object]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for key in keys:
            if key in table:
                raise ArgumentError(f"{key} has a rule already: {table[key].__name__}")
            table[key] = rule
        return rule

    return register
