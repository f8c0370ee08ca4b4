"""Nested plain data as JSON, and back: trees, the state of training, and what tensor subclasses keep beside tensors.

Always true:
- containers, and whatever JSON has no word for, are objects with one key that names the kind; nothing else is
- a tensor is stored as the caller says
- a class has a name in a file, and the caller says which class that is: none is imported by a name in a file
- an error says where in the data it is
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from offload.annotations import Json
from offload.errors import CorruptFileError, OffloadError, UnknownTypeError
from offload.storage.layout import dtype_name, dtype_named

Node: TypeAlias = Json
Way: TypeAlias = tuple[str, ...]  # path from the root of nested data to a place in it

_DEEPEST = 200  # containers nested in each other: well within what `json` and Python allow


def place_of(way: Way) -> str:
    """A place in nested data, for an error message."""
    return repr(".".join(way)) if way else "the value itself"


def encode(
    value: object, tensor: Callable[[torch.Tensor, Way], Node], named: Callable[[type], str] | None = None
) -> Node:
    """The node for nested data.

    Args:
        tensor: returns the node for a tensor, given the tensor and its path.
        named: returns the name of a class, for the reader; None if enums, dataclasses and named tuples are refused.

    Raises `UnknownTypeError` if something in it can't be stored, contains itself, or is nested too deeply.
    """

    def node(value: object, way: Way, around: tuple[int, ...], tensor: Callable[[torch.Tensor, Way], Node]) -> Node:
        if isinstance(value, torch.Tensor):
            return tensor(value, way)
        scalar = _scalar(value)
        if scalar is not _NONE:
            return scalar
        if id(value) in around:
            what = f"{place_of(way)} is a {type(value).__name__}"
            raise UnknownTypeError(f"{what} that contains itself: no file can hold that")
        if len(around) == _DEEPEST:
            raise UnknownTypeError(f"{place_of(way[:3])} is nested more than {_DEEPEST} containers deep: flatten it")

        def below(child: object, step: object) -> Node:
            return node(child, (*way, str(step)), (*around, id(value)), tensor)

        node_of_it = _container(value, below, lambda key: node(key, (*way, repr(key)), (), _refuse_key))
        if node_of_it is None and named is not None:
            node_of_it = _instance(value, below, way, named)
        if node_of_it is None:
            what, out = name_of(type(value)), _way_out(value, takes_classes=named is not None)
            raise UnknownTypeError(f"{place_of(way)} is a {what}, which can't be stored as plain data: {out}")
        return node_of_it

    return node(value, (), (), tensor)


def _scalar(value: Any) -> Node:
    """The node of a value that contains no others; `_NONE` for anything else."""
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
    return _NONE


def _container(value: Any, below: Callable[[Any, object], Node], key: Callable[[Any], Node]) -> Node:
    """The node of a plain container; None for anything else."""
    kind = type(value)
    if kind is dict and all(type(name) is str for name in value):
        return {"dict": {name: below(child, name) for name, child in value.items()}}
    if kind in _WORDS:
        return {_WORDS[kind]: [[key(name), below(child, name)] for name, child in value.items()]}
    if kind in (list, tuple):
        return {kind.__name__: [below(child, index) for index, child in enumerate(value)]}
    return None


def _instance(value: Any, below: Callable[[Any, object], Node], way: Way, named: Callable[[type], str]) -> Node:
    """The node of an enum, a dataclass or a named tuple; None for anything else."""
    kind = type(value)
    if isinstance(value, enum.Enum) and value.name in kind.__members__:
        return {"enum": [named(kind), value.name]}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if _has_more(value, fields):
            out = _way_out(value, takes_classes=True)
            raise UnknownTypeError(f"{place_of(way)} is a {name_of(kind)}, which is more than its fields: {out}")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = dict(zip(value._fields, value, strict=True))
    else:
        return None
    return {"object": [named(kind), {name: below(child, name) for name, child in fields.items()}]}


def _has_more(value: object, names: Iterable[str]) -> bool:
    """Whether a dataclass holds more than its fields: a batch size, as in tensorclasses, or items."""
    if isinstance(value, Mapping):
        return not set(value) <= set(names)  # a ModelOutput of transformers has its fields as items
    return hasattr(value, "load_memmap") or (isinstance(value, Collection) and len(value) > 0)


def _way_out(value: object, *, takes_classes: bool) -> str:
    if isinstance(value, torch.nn.Module):
        return "save its state_dict()"
    if hasattr(value, "load_memmap"):
        return "offload.integrations.tensordict.save_memmap keeps such data"
    return f"make it a dict, list, tuple, {'dataclass, named tuple, ' if takes_classes else ''}tensor, number or text"


def _refuse_key(_: torch.Tensor, way: Way) -> Node:
    raise UnknownTypeError(f"a dict in {place_of(way[:-1])} has a tensor as a key: use a number or text")


def name_of(cls: type) -> str:
    """The full name of a class, with a colon after its module."""
    return f"{cls.__module__}:{cls.__qualname__}"


def decode(node: Node, tensor: Callable[[str, Json], torch.Tensor], class_named: Callable[[str], type]) -> Any:
    """The value for which `encode` made the node, which is from a file, and not trusted.

    Args:
        tensor: returns a tensor, given the kind of its node and the node's content.
        class_named: returns the class with a name, or raises.

    Raises `UnknownTypeError` if a class can't be built from its fields; `CorruptFileError` if it is not a valid node.
    """

    def value(node: Node) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise CorruptFileError("its structure is malformed (a list without its kind)")
            return node
        ((kind, data),) = node.items()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](data, value)
        if kind in _SCALARS:
            return _SCALARS[kind](data)
        if kind not in ("enum", "object"):
            return tensor(kind, data)
        name, content = data
        cls = class_named(name)
        if kind == "enum":
            if not issubclass(cls, enum.Enum) or content not in cls.__members__:
                raise UnknownTypeError(f"{cls.__name__} is no enum with a {content!r}, as it was when it was saved")
            return cls[content]
        return _object(cls, {field: value(below) for field, below in content.items()})

    try:
        return value(node)
    except OffloadError:
        raise
    except Exception as error:  # malformed nodes can raise anything
        raise CorruptFileError(f"its structure is malformed ({type(error).__name__}: {str(error)[:100]})") from error


def _object(cls: Any, fields: dict[str, Any]) -> Any:
    computed: set[str] = set()
    if dataclasses.is_dataclass(cls):
        computed = {field.name for field in dataclasses.fields(cls) if not field.init}
    elif not (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        raise UnknownTypeError(f"{cls.__name__} is not a dataclass or named tuple, as it was when it was saved")
    try:
        instance = cls(**{name: child for name, child in fields.items() if name not in computed})
    except Exception as error:  # a class changed since then may raise anything
        raise UnknownTypeError(
            f"a {cls.__name__} can't be made of the fields {list(fields)} that were saved: {error}"
        ) from error
    for name in computed & fields.keys():
        object.__setattr__(instance, name, fields[name])  # works on frozen ones, too
    return instance


def _pairs(data: Json, value: Callable[[Node], object]) -> list[tuple[Any, Any]]:
    return [(value(key), value(child)) for key, child in data]


def _dtype(name: str) -> torch.dtype:
    dtype = dtype_named(name)
    if dtype is None:
        raise CorruptFileError(f"this torch has no dtype {name!r}: it was stored by another version")
    return dtype


_NONE = object()
_WORDS: dict[type, str] = {dict: "items", OrderedDict: "ordered", Counter: "counter"}
_SCALARS: dict[str, Callable[[Json], Any]] = {
    "float": float,
    "complex": complex,
    "bytes": lambda data: base64.b64decode(data, validate=True),
    "size": torch.Size,
    "dtype": _dtype,
    "device": torch.device,
}
_CONTAINERS: dict[str, Callable[[Json, Callable[[Node], Any]], Any]] = {
    "dict": lambda data, value: {name: value(node) for name, node in data.items()},
    "items": lambda data, value: dict(_pairs(data, value)),
    "ordered": lambda data, value: OrderedDict(_pairs(data, value)),
    "counter": lambda data, value: Counter(dict(_pairs(data, value))),
    "list": lambda data, value: [value(node) for node in data],
    "tuple": lambda data, value: tuple(value(node) for node in data),
}
