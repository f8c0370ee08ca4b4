"""Nested data as JSON, and back.

Always true:
- containers, and whatever JSON has no word for, are objects with one key that names the kind; nothing else is
- a tensor is stored under its name; one that is in several places has one name
- a class is looked up among those passed in or registered, never imported by a name in a file
- an error says where in the tree it is
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from offload.errors import CorruptFileError, OffloadError, UnknownTypeError
from offload.storage.nodes import NONE, PLAIN, Node, container_node, plain_value, scalar_node
from offload.storage.subclasses import registered
from offload.tensor.saved import identity_of

Way: TypeAlias = tuple[str, ...]  # path from the root of a tree to a place in it

ROOT = "tensor"  # the name of a tensor that is the whole tree
_DEEPEST = 200  # containers nested in each other: well within what `json` and Python allow


def told(way: Way) -> str:
    """A place in a tree, for an error message."""
    return repr(".".join(way)) if way else "the tree itself"


@dataclass
class Named:
    """The tensors of a nest by name, each once.

    Example:
        >>> named, one = Named(), torch.ones(1)
        >>> encode([one, {"again": one, "sum": torch.zeros(1)}], lambda *found: {"tensor": named.name_of(*found)})
        {'list': [{'tensor': '0'}, {'dict': {'again': {'tensor': '0'}, 'sum': {'tensor': '1.sum'}}}]}
        >>> named.tensors
        {'0': tensor([1.]), '1.sum': tensor([0.])}
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[Hashable, str] = field(default_factory=dict)

    def name_of(self, tensor: torch.Tensor, way: Way) -> str:
        """The path joined by dots; numbered if another path reads the same, or if it is not a valid name."""
        same = identity_of(tensor)
        if same not in self._names:
            name, number = ".".join(way) or ROOT, 1
            while name in self.tensors or name == "__metadata__":
                number += 1
                name = f"{'.'.join(way) or ROOT}~{number}"
            self._names[same], self.tensors[name] = name, tensor
        return self._names[same]


def encode(value: Any, tensor: Callable[[torch.Tensor, Way], Node], *, classes: bool = True) -> Node:
    """The node for `value`.

    Args:
        value: nested data of the supported kinds.
        tensor: returns the node for a tensor, given the tensor and its path.
        classes: whether enums, dataclasses and named tuples are allowed, which a reader has to be given.

    Raises:
        UnknownTypeError: something in it can't be stored, contains itself, or is nested too deeply.
    """

    def node(value: Any, way: Way, around: tuple[int, ...], tensor: Callable[[torch.Tensor, Way], Node]) -> Node:
        if isinstance(value, torch.Tensor):
            return tensor(value, way)
        scalar = scalar_node(value)
        if scalar is not NONE:
            return scalar
        if id(value) in around:
            what = f"{told(way)} is a {type(value).__name__}"
            raise UnknownTypeError(f"{what} that it is itself in: no file can hold that")
        if len(around) == _DEEPEST:
            raise UnknownTypeError(f"{told(way[:3])} holds containers in each other, more than {_DEEPEST}: flatten it")

        def below(child: Any, step: object) -> Node:
            return node(child, (*way, str(step)), (*around, id(value)), tensor)

        made = container_node(value, below, lambda key: node(key, (*way, repr(key)), (), _refuse_key))
        if made is None and classes:
            made = _instance(value, below, way)
        if made is None:
            raise UnknownTypeError(
                f"{told(way)} is a {_word(type(value))}, which has no form in a tree: {_way_out(value, classes)}"
            )
        return made

    return node(value, (), (), tensor)


def decode(node: Node, tensor: Callable[[str, Any], torch.Tensor], types: Iterable[type]) -> Any:
    """The value for which `encode` made the node.

    Args:
        node: from a file, not trusted.
        tensor: returns a tensor, given the kind of its node and the node's content.
        types: the classes that may be made.

    Raises:
        UnknownTypeError: the tree contains a class that is not among `types`, or that can't be built from its fields.
        CorruptFileError: it is not a valid node.
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
        return plain_value(kind, data, value) if kind in PLAIN else tensor(kind, data)

    try:
        return value(node)
    except OffloadError:
        raise
    except Exception as error:  # malformed nodes can raise anything
        raise CorruptFileError(f"its structure is malformed ({type(error).__name__}: {str(error)[:100]})") from error


# From values to nodes


def _instance(value: Any, below: Callable[[Any, object], Node], way: Way) -> Node:
    """The node of an instance of a class that a reader has to be given; None for anything else."""
    kind = type(value)
    if isinstance(value, enum.Enum) and value.name in kind.__members__:
        return {"enum": [_word(kind), value.name]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        if _has_more(value, names):
            out = _way_out(value, True)
            raise UnknownTypeError(f"{told(way)} is a {_word(kind)}, which is more than its fields: {out}")
        return {"object": [_word(kind), {name: below(getattr(value, name), name) for name in names}]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return {"named": [_word(kind), {name: below(child, name) for name, child in fields}]}
    return None


def _has_more(value: Any, names: Iterable[str]) -> bool:
    """Whether a dataclass holds more than its fields: a batch size, as in tensorclasses, or items."""
    if isinstance(value, Mapping):
        return not set(value) <= set(names)  # a ModelOutput of transformers has its fields as items
    return hasattr(value, "load_memmap") or (isinstance(value, Collection) and len(value) > 0)


def _way_out(value: Any, classes: bool) -> str:
    if isinstance(value, torch.nn.Module):
        return "save its state_dict()"
    if hasattr(value, "__array__"):
        return "make it a tensor (torch.from_numpy, torch.as_tensor), or a number (.item())"
    if hasattr(value, "load_memmap"):
        return "offload.integrations.tensordict.save_memmap keeps such data"
    return f"make it a dict, list, tuple, {'dataclass, named tuple, ' if classes else ''}number or text"


def _refuse_key(_: torch.Tensor, way: Way) -> Node:
    raise UnknownTypeError(f"a dict in {told(way[:-1])} has a tensor as a key: use a number or text")


def _word(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


# From nodes to values


def class_among(types: Iterable[type], name: str) -> type | None:
    """The class with the full name; or the only one with that class name: its module may have been a script before."""
    exact = [cls for cls in types if f"{cls.__module__}.{cls.__qualname__}" == name]
    alike = [cls for cls in types if cls.__name__ == name.rpartition(".")[2]]
    return exact[0] if exact else alike[0] if len(alike) == 1 else None


def _class_called(word: str, types: tuple[type, ...], base: Callable[[type], bool]) -> type:
    module, _, name = word.partition(":")
    found = class_among(types, word.replace(":", ".")) or registered(module, name)
    if found is None or not base(found):
        raise UnknownTypeError(
            f"the tree holds a {name} (of {module}), and no such class was given: "
            f"pass types=[{name.rpartition('.')[2]}], or call offload.register_subclass with it"
        )
    return found


def _made(make: Callable[..., Any], fields: Mapping[str, Any]) -> Any:
    try:
        return make(**fields)
    except Exception as error:  # a class changed since then may raise anything
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
        object.__setattr__(made, name, fields[name])  # works on frozen ones, too
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


_CLASSES: dict[str, Callable[[Any, tuple[type, ...], Callable[[Node], Any]], Any]] = {
    "object": _object,
    "named": _named,
    "enum": _enum,
}
