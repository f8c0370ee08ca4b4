"""Plain Python data as JSON, and back.

Always true:
- containers, and whatever JSON has no word for, are objects with one key that names the kind; nothing else is
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from offload.errors import CorruptFileError
from offload.storage.layout import dtype_name, dtype_named

Node: TypeAlias = Any  # what `json` makes of JSON


def scalar_node(value: Any) -> Node:
    """The node of a value that contains no others; `NONE` for anything else."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in (float, complex):
        return {kind.__name__: str(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is torch.Size:
        return {"size": list(value)}
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is torch.device:
        return {"device": str(value)}
    return NONE


def container_node(value: Any, below: Callable[[Any, object], Node], key: Callable[[Any], Node]) -> Node:
    """The node of a plain container; None for anything else."""
    kind = type(value)
    if kind is dict and all(type(name) is str for name in value):
        return {"dict": {name: below(child, name) for name, child in value.items()}}
    if kind in _WORDS:
        return {_WORDS[kind]: [[key(name), below(child, name)] for name, child in value.items()]}
    if kind in (list, tuple):
        return {kind.__name__: [below(child, index) for index, child in enumerate(value)]}
    return None


def plain_value(kind: str, data: Any, value: Callable[[Node], Any]) -> Any:
    """The value of a node of one of the kinds in `PLAIN`.

    Args:
        kind, data: of the node.
        value: turns the nodes inside it into values.
    """
    return _CONTAINERS[kind](data, value) if kind in _CONTAINERS else _SCALARS[kind](data)


def _pairs(data: Any, value: Callable[[Node], Any]) -> Iterator[tuple[Any, Any]]:
    return ((value(key), value(child)) for key, child in data)


def _dtype(name: str) -> torch.dtype:
    dtype = dtype_named(name)
    if dtype is None:
        raise CorruptFileError(f"this torch has no dtype {name!r}: it was stored by another version")
    return dtype


NONE = object()
_WORDS: dict[type, str] = {dict: "items", OrderedDict: "ordered", Counter: "counter"}
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": complex,
    "bytes": lambda data: base64.b64decode(data, validate=True),
    "size": torch.Size,
    "dtype": _dtype,
    "device": torch.device,
}
_CONTAINERS: dict[str, Callable[[Any, Callable[[Node], Any]], Any]] = {
    "dict": lambda data, value: {name: value(node) for name, node in data.items()},
    "items": lambda data, value: dict(_pairs(data, value)),
    "ordered": lambda data, value: OrderedDict(_pairs(data, value)),
    "counter": lambda data, value: Counter(dict(_pairs(data, value))),
    "list": lambda data, value: [value(node) for node in data],
    "tuple": lambda data, value: tuple(value(node) for node in data),
}
PLAIN = _SCALARS.keys() | _CONTAINERS.keys()
