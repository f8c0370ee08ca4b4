"""Nested data with tensors in it, as JSON and named tensors.

Always true:
- what is taken apart and put together again is equal, also tuples, keys that are numbers, infinities and NaN
- tensors over the same memory or file are one
- only plain data is taken apart, and only plain data comes of it
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.errors import CheckpointError, UnknownTypeError, UnsupportedOpError
from offload.storage.subclasses import refuse_lossy
from offload.tensor.arguments import refuse_unstorable
from offload.tensor.saved import identity_of, subclass_value

_KIND = "*"  # the key of a dictionary that stands for something else


@dataclass
class Apart:
    """The tensors that were found, by name.

    Example:
        >>> apart = Apart()
        >>> apart.take({"lr": 0.1, "betas": (0.9, 1), "sum": torch.ones(2)}, "it")
        {'lr': 0.1, 'betas': {'*': 'tuple', 'of': [0.9, 1]}, 'sum': {'*': 'tensor', 'of': 'it.sum'}}
        >>> apart.tensors
        {'it.sum': tensor([1., 1.])}
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _keys: dict[Hashable, str] = field(default_factory=dict)

    def take(self, value: Any, name: str) -> Any:
        """`value` as JSON has it, but for its tensors.

        Args:
            value: numbers, text, None, lists, tuples, dictionaries, tensors, nested as they may be.
            name: what it is called in errors, and how the names of its tensors begin.

        Raises:
            TypeError: it holds something else; the message says where.
            UnsupportedOpError: a tensor is of a subclass, such as a quantized weight.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                refuse_unstorable(value, name)
            return {_KIND: "tensor", "of": self._key(value, name)}
        if type(value) in (list, tuple):
            parts = [self.take(part, f"{name}.{place}") for place, part in enumerate(value)]
            return parts if type(value) is list else {_KIND: "tuple", "of": parts}
        if type(value) in (dict, OrderedDict, Counter):
            return self._take_dictionary(value, name)
        raise UnknownTypeError(
            f"{name} is a {type(value).__name__}, and only plain data and tensors can be saved: numbers, text, None, "
            "lists, tuples, dictionaries, or an object whose state_dict has those"
        )

    def _take_dictionary(self, value: Mapping[Any, Any], name: str) -> dict[str, Any]:
        parts = {key: self.take(part, f"{name}.{key}") for key, part in value.items()}
        if all(type(key) is str for key in parts) and _KIND not in parts and type(value) is not Counter:
            return parts
        pairs = [[self.take(key, f"{name}, a key"), part] for key, part in parts.items()]
        return {_KIND: "counter" if type(value) is Counter else "pairs", "of": pairs}

    def _key(self, tensor: torch.Tensor, name: str) -> str:
        refuse_lossy(tensor, name)
        if subclass_value(tensor) is not None:
            raise UnsupportedOpError(
                f"{name} is of a tensor subclass, which a checkpoint of training has no form for: "
                "pass frozen=False to leave out what is not trained"
            )
        identity = identity_of(tensor)
        if identity not in self._keys:
            key = name if name not in self.tensors else f"{name}#{len(self.tensors)}"
            self.tensors[key] = tensor.detach()
            self._keys[identity] = key
        return self._keys[identity]


def put_together(parts: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `Apart.take` took apart, with these tensors by name.

    Raises:
        CheckpointError: no such thing was taken apart, or a tensor is missing.
    """
    if isinstance(parts, list):
        return [put_together(part, tensors) for part in parts]
    if not isinstance(parts, dict):
        return parts
    if _KIND not in parts:
        return {key: put_together(part, tensors) for key, part in parts.items()}
    match parts:
        case {"*": "tensor", "of": str(key)} if key in tensors:
            return tensors[key]
        case {"*": "tuple", "of": list(members)}:
            return tuple(put_together(part, tensors) for part in members)
        case {"*": "pairs" | "counter" as kind, "of": list(pairs)} if all(_is_pair(pair) for pair in pairs):
            whole = {put_together(key, tensors): put_together(part, tensors) for key, part in pairs}
            return Counter(whole) if kind == "counter" else whole
    raise CheckpointError(f"{str(parts)[:100]} stands for nothing that the checkpoint has: it is not whole")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and not isinstance(pair[0], list)
