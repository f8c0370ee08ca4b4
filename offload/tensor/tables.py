"""The rules that ops have of their own.

Always true:
- a key is an aten overload in `RULES`, a function of torch's Python interface in `FUNCTIONS`
- `BY_SCHEMA` makes the rule of an aten op that has none
- `OUT` is the rule of a call with `out=`, `INNER` that of a call on a value that is itself of a tensor subclass
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from offload.errors import ArgumentError

Rule: TypeAlias = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

BY_SCHEMA = "by schema"
OUT = "out="
INNER = "inner"
RULES: dict[Any, Any] = {}
FUNCTIONS: dict[Any, Rule] = {}


def registrar(table: dict[Any, Any], *keys: Any) -> Callable[[Rule], Rule]:
    """A decorator that makes a function the rule of `keys`.

    Raises:
        ArgumentError: one of them has a rule.
    """

    def register(rule: Rule) -> Rule:
        for key in keys:
            if key in table:
                raise ArgumentError(f"{key} has a rule already: {table[key].__name__}")
            table[key] = rule
        return rule

    return register
