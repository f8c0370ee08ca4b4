"""Names for the tensors of nested data, and the classes that may be made of it.

Always true:
- a tensor that is in several places has one name
- a class is one of those passed in, or registered
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import torch

from offload.errors import UnknownTypeError
from offload.storage.nodes import Way
from offload.storage.subclasses import registered
from offload.tensor.saved import identity_of

ROOT = "tensor"  # the name of a tensor that is the whole tree


@dataclass
class Named:
    """The tensors of a nest by name, each once.

    Example:
        >>> from offload.storage.nodes import encode
        >>> named, one = Named(), torch.ones(1)
        >>> encode([one, {"again": one, "sum": torch.zeros(1)}], lambda *found: {"tensor": named.name_for(*found)})
        {'list': [{'tensor': '0'}, {'dict': {'again': {'tensor': '0'}, 'sum': {'tensor': '1.sum'}}}]}
        >>> named.tensors
        {'0': tensor([1.]), '1.sum': tensor([0.])}
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[Hashable, str] = field(default_factory=dict)

    def name_for(self, tensor: torch.Tensor, way: Way) -> str:
        """The path joined by dots; numbered if another path reads the same, or if it is not a valid name."""
        same = identity_of(tensor)
        if same not in self._names:
            name, number = ".".join(way) or ROOT, 1
            while name in self.tensors or name == "__metadata__":
                number += 1
                name = f"{'.'.join(way) or ROOT}~{number}"
            self._names[same], self.tensors[name] = name, tensor
        return self._names[same]


def class_among(types: Iterable[type], name: str) -> type | None:
    """The class with the full name; or the only one with that class name: its module may have been a script before."""
    exact = [cls for cls in types if f"{cls.__module__}.{cls.__qualname__}" == name]
    alike = [cls for cls in types if cls.__name__ == name.rpartition(".")[2]]
    return exact[0] if exact else alike[0] if len(alike) == 1 else None


def classes_among(types: Iterable[type]) -> Callable[[str], type]:
    """What `decode` needs to find these classes, and registered ones, by name."""
    known = tuple(types)

    def class_named(word: str) -> type:
        module, _, name = word.partition(":")
        found = class_among(known, word.replace(":", ".")) or registered(module, name)
        if found is None:
            raise UnknownTypeError(
                f"the tree holds a {name} (of {module}), and no such class was given: "
                f"pass types=[{name.rpartition('.')[2]}], or call offload.register_subclass with it"
            )
        return found

    return class_named
