"""Nested data as JSON, and back.

Always true:
- a container, and what JSON has no word for, is an object of one key, which says what it is: nothing else is an object
- a class is looked for among those that the reader hands in or has registered, never imported by the name in a file
- an error says where in the tree
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from offload.errors import CorruptFileError, OffloadError, UnknownTypeError
from offload.storage.dtypes import dtype_name, dtype_named
from offload.storage.subclasses import registered

Way: TypeAlias = tuple[str, ...]  # from the root of a tree to a place in it
Node: TypeAlias = Any  # what `json` makes of JSON

_DEEPEST = 200  # containers in each other: well within what `json` and Python take


def told(way: Way) -> str:
    """A place in a tree, for an error."""
    return repr(".".join(way)) if way else "the tree itself"


def encode(
    value: Any, tensor: Callable[[torch.Tensor, Way], Node], way: Way = (), around: Way | tuple[int, ...] = ()
) -> Node:
    """The node for `value`.

    Args:
        value: a nest of what this module knows.
        tensor: gives the node for a tensor, by itself and the way to it.
        way: to `value`.
        around: the containers that `value` is in, by `id`.

    Raises:
        UnknownTypeError: something in it has no form, is in itself, or is nested too deeply.
    """
    if isinstance(value, torch.Tensor):
        return tensor(value, way)
    scalar = _scalar(value)
    if scalar is not _NONE:
        return scalar
    if id(value) in around:
        raise UnknownTypeError(f"{told(way)} is a {type(value).__name__} that it is itself in: no file can hold that")
    if len(around) == _DEEPEST:
        raise UnknownTypeError(f"{told(way[:3])} holds containers in each other, more than {_DEEPEST}: flatten it")

    def below(child: Any, step: object) -> Node:
        return encode(child, tensor, (*way, str(step)), (*around, id(value)))

    def key(child: Any) -> Node:
        return encode(child, _refuse_key, (*way, repr(child)))

    return _container(value, below, key, way)


def decode(node: Node, tensor: Callable[[str, Any], torch.Tensor], types: Iterable[type]) -> Any:
    """The value that `encode` made the node of.

    Args:
        node: from a file, and not to be trusted.
        tensor: gives a tensor, by the kind of its node and what the node says.
        types: the classes that may be made.

    Raises:
        UnknownTypeError: the tree holds a class that is not among `types`, or that can't be made of its fields.
        CorruptFileError: that is no node.
    """
    known = tuple(types)

    def value(node: Node) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise CorruptFileError("its structure is malformed (a list without its kind)")
            return node
        ((kind, data),) = node.items()
        if kind in _CLASSES:
            return _CLASSES[kind](data, known, value)
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](data, value)
        return _SCALARS[kind](data) if kind in _SCALARS else tensor(kind, data)

    try:
        return value(node)
    except OffloadError:
        raise
    except Exception as error:  # whatever made-up nodes lead to
        raise CorruptFileError(f"its structure is malformed ({type(error).__name__}: {str(error)[:100]})") from error


# From values to nodes


def _scalar(value: Any) -> Node:
    """The node of a value that holds no others; `_NONE` for any other."""
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
    if isinstance(value, enum.Enum) and value.name in kind.__members__:
        return {"enum": [_word(kind), value.name]}
    return _NONE


def _container(value: Any, below: Callable[[Any, object], Node], key: Callable[[Any], Node], way: Way) -> Node:
    kind = type(value)
    if kind is dict and all(type(name) is str for name in value):
        return {"dict": {name: below(child, name) for name, child in value.items()}}
    if kind in (dict, OrderedDict):
        word = "items" if kind is dict else "ordered"
        return {word: [[key(name), below(child, name)] for name, child in value.items()]}
    if kind in (list, tuple):
        return {kind.__name__: [below(child, index) for index, child in enumerate(value)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        if _has_more(value, names):
            raise UnknownTypeError(f"{told(way)} is a {_word(kind)}, which is more than its fields: {_way_out(value)}")
        return {"object": [_word(kind), {name: below(getattr(value, name), name) for name in names}]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return {"named": [_word(kind), {name: below(child, name) for name, child in fields}]}
    raise UnknownTypeError(f"{told(way)} is a {_word(kind)}, which has no form in a tree: {_way_out(value)}")


def _has_more(value: Any, names: Iterable[str]) -> bool:
    """Whether a dataclass holds something beside its fields: a batch size, as tensorclasses do, or items."""
    if isinstance(value, Mapping):
        return not set(value) <= set(names)  # a ModelOutput of transformers has its fields as items
    return hasattr(value, "load_memmap") or (isinstance(value, Collection) and len(value) > 0)


def _way_out(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return "save its state_dict()"
    if hasattr(value, "__array__"):
        return "make it a tensor (torch.from_numpy, torch.as_tensor), or a number (.item())"
    if hasattr(value, "load_memmap"):
        return "offload.integrations.tensordict.save_memmap keeps such data"
    return "make it a dict, list, tuple, dataclass, named tuple, number or text"


def _refuse_key(_: torch.Tensor, way: Way) -> Node:
    raise UnknownTypeError(f"a dict in {told(way[:-1])} has a tensor as a key: use a number or text")


def _word(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


# From nodes to values


def _class_called(word: str, types: tuple[type, ...], base: Callable[[type], bool]) -> type:
    """By its full name; or by the name of the class alone, as a module may be a script once and imported later."""
    module, _, name = word.partition(":")
    exact = [cls for cls in types if _word(cls) == word]
    alike = [cls for cls in types if cls.__qualname__ == name]
    found = exact[0] if exact else alike[0] if len(alike) == 1 else registered(module, name)
    if found is None or not base(found):
        raise UnknownTypeError(
            f"the tree holds a {name} (of {module}), and no such class was given: "
            f"pass types=[{name.rpartition('.')[2]}], or call offload.register_subclass with it"
        )
    return found


def _made(make: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    try:
        return make(**fields)
    except Exception as error:  # a class that has changed since may raise anything
        name = getattr(make, "__name__", str(make))
        raise UnknownTypeError(
            f"a {name} can't be made of the fields {list(fields)} that were saved: {error}"
        ) from error


def _object(data: Any, types: tuple[type, ...], value: Callable[[Node], Any]) -> Any:
    word, nodes = data
    cls: Any = _class_called(word, types, dataclasses.is_dataclass)
    fields = {name: value(node) for name, node in nodes.items()}
    computed = {field.name for field in dataclasses.fields(cls) if not field.init}
    made = _made(cls, {name: child for name, child in fields.items() if name not in computed})
    for name in computed & fields.keys():
        object.__setattr__(made, name, fields[name])  # also where it is frozen
    return made


def _named(data: Any, types: tuple[type, ...], value: Callable[[Node], Any]) -> Any:
    word, nodes = data
    cls = _class_called(word, types, lambda cls: issubclass(cls, tuple) and hasattr(cls, "_fields"))
    return _made(cls, {name: value(node) for name, node in nodes.items()})


def _enum(data: Any, types: tuple[type, ...], _: Callable[[Node], Any]) -> Any:
    word, name = data
    cls: Any = _class_called(word, types, lambda cls: issubclass(cls, enum.Enum))
    if name not in cls.__members__:
        raise UnknownTypeError(f"{cls.__name__} has no member {name!r}, which the tree holds")
    return cls[name]


def _pairs(data: Any, value: Callable[[Node], Any]) -> Iterator[tuple[Any, Any]]:
    return ((value(key), value(child)) for key, child in data)


def _dtype(name: str) -> torch.dtype:
    dtype = dtype_named(name)
    if dtype is None:
        raise CorruptFileError(f"this torch has no dtype {name!r}: the tree was saved by another version")
    return dtype


_NONE = object()
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
    "list": lambda data, value: [value(node) for node in data],
    "tuple": lambda data, value: tuple(value(node) for node in data),
}
_CLASSES: dict[str, Callable[[Any, tuple[type, ...], Callable[[Node], Any]], Any]] = {
    "object": _object,
    "named": _named,
    "enum": _enum,
}
