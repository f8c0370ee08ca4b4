"""Tensor subclasses as inner tensors, and JSON that says how to rebuild them.

Always true:
- nothing is pickled: the JSON contains plain data and class names
- only classes on the allow-list are rebuilt; one that could not be rebuilt is refused when it is stored
- what a class would not restore is not stored: no class that can't be flattened, and no attribute that flattening
  leaves out
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch

from offload.annotations import Json
from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    CorruptFileError,
    OffloadError,
    UnknownSubclassError,
    UnknownTypeError,
)
from offload.storage.layout import Layout, dtype_name, dtype_named, layout_as
from offload.storage.nodes import decode, encode
from offload.system.reasons import naming
from offload.torch_api import is_traceable_wrapper_subclass

# Classes known without registration: package -> class -> the modules that may define it, newest first.
_AO = "torchao.quantization"
_WORKFLOWS = f"{_AO}.quantize_.workflows"
_FORMATS, _PROTOTYPES = "torchao.prototype.mx_formats", "torchao.prototype.quantization"
_KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "torchao": {
        **dict.fromkeys(("Float8Tensor", "Int8Tensor", "IntxOpaqueTensor", "IntxUnpackedToInt8Tensor"), (_AO,)),
        **dict.fromkeys(("Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4Tensor"), (_AO,)),
        **dict.fromkeys(("Int4TilePackedTo4dTensor", "MappingType"), (_AO,)),
        **dict.fromkeys(("PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor", "PerToken"), (_AO,)),
        **dict.fromkeys(("QuantizeTensorToFloat8Kwargs", "QuantizeTensorToInt8Kwargs"), (_WORKFLOWS,)),
        **dict.fromkeys(
            ("NF4Tensor", "SubclassTensorArgs"), (f"{_WORKFLOWS}.nf4.nf4_tensor", "torchao.dtypes.nf4tensor")
        ),
        "Float8MMConfig": ("torchao.float8.inference",),
        "IntxPackingFormat": (f"{_WORKFLOWS}.intx.intx_packing_format",),
        "KernelPreference": (f"{_AO}.quantize_.common",),
        **dict.fromkeys(("MXTensor", "QuantizeTensorToMXKwargs"), (f"{_FORMATS}.mx_tensor",)),
        **dict.fromkeys(("NVFP4Tensor", "QuantizeTensorToNVFP4Kwargs"), (f"{_FORMATS}.nvfp4_tensor",)),
        "ScaleCalculationMode": (f"{_FORMATS}.config",),
        "CodebookQuantizedPackedTensor": (f"{_PROTOTYPES}.codebook_groupwise.codebook_quantized_tensor",),
        "CodebookQuantizedTensor": (f"{_PROTOTYPES}.codebook.codebook_quantized_tensor",),
        "GGUFQuantizedTensor": (f"{_PROTOTYPES}.gguf.gguf_quantized_tensor",),
        "Int4OpaqueTensor": (f"{_PROTOTYPES}.int4", _AO),
        "UIntxBitPackedTensor": (f"{_PROTOTYPES}.uintx.uintx_bit_packed_tensor",),
        "UintxTensor": ("torchao.prototype.dtypes.uintx.uintx_utils",),
    }
}
_REGISTERED: dict[str, type] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  # exactly these classes, not their subclasses
_NUMBERS_ALONE = {"offload:OffloadedTensor", "tensordict:MemoryMappedTensor"}  # they only say where the numbers are
_SIMPLE = (bool, int, float, str)
is_subclass_value: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass  # stored as inner tensors

SubclassSpec = dict[str, Json]
_OF_MALFORMED = (ArgumentError, ArgumentTypeError, UnknownTypeError)  # what malformed ones raise


def register_subclass(*classes: type) -> None:
    """Let values of these classes be stored and rebuilt: a tensor subclass, and the classes that its context holds.

    A tensor subclass needs `__tensor_flatten__` and `__tensor_unflatten__`. Enums, dataclasses and named tuples may
    appear in its context.

    Raises:
        UnknownSubclassError: a class is none of these; nothing is registered then.

    Example:
        >>> from torch.testing._internal.two_tensor import TwoTensor
        >>> register_subclass(TwoTensor)
    """
    for cls in classes:
        _refuse_unfit(cls)
    for cls in classes:
        _REGISTERED[_word(cls)] = cls


def _refuse_unfit(cls: object) -> None:
    """Refuse classes that can't be stored or rebuilt."""
    if not isinstance(cls, type):
        raise UnknownSubclassError(f"{cls!r} is not a class: register the class of the tensor")
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    if issubclass(cls, torch.Tensor):
        if not (hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")):
            raise UnknownSubclassError(
                f"{cls.__name__} (of {cls.__module__}) lacks __tensor_flatten__ and __tensor_unflatten__: without "
                "them a file would hold only its numbers. Add both, or store its parts"
            )
    elif not (issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls) or is_named_tuple):
        raise UnknownSubclassError(
            f"{cls.__name__} (of {cls.__module__}) is not a tensor subclass, enum, dataclass or named tuple: "
            "it can't be rebuilt from plain data"
        )


def registered(module: str, name: str) -> type | None:
    """The class called `name`, of the package of `module`, if it was registered with `register_subclass`."""
    return _REGISTERED.get(f"{module.partition('.')[0]}:{name}")


def refuse_lossy(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor if a file would lose part of it.

    Attributes that begin with an underscore are marks and caches, and may be left out.

    Raises `UnknownSubclassError` if its class can't be flattened, is not on the allow-list, or leaves attributes out.
    """
    kind = type(tensor)
    if kind in _PLAIN or _word(kind) in _NUMBERS_ALONE:
        return
    with naming(name):
        if not is_subclass_value(tensor):
            raise UnknownSubclassError(
                f"{kind.__name__} (of {kind.__module__}) has no __tensor_flatten__: only its numbers would be "
                "stored. Store its parts, or its as_subclass(torch.Tensor)"
            )
        _checked_word(kind)
        lost = sorted(extra for extra in extras_of(tensor) if not extra.startswith("_"))
        if lost:
            raise UnknownSubclassError(
                f"this {kind.__name__} has {', '.join(lost)}, which its __tensor_flatten__ leaves out, so it would "
                "be lost: remove it, or have __tensor_flatten__ put it into the context"
            )


def extras_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes set on a tensor; for a wrapper subclass, only those that rebuilding it does not set.

    Raises `UnknownSubclassError` if it can't be rebuilt.
    """
    noted: dict[str, Any] = vars(tensor)
    if type(tensor) in _PLAIN or not noted:
        return noted
    if not is_subclass_value(tensor):
        return {}  # all of it may be part of the value
    try:
        rebuilt = vars(with_inner(tensor, lambda inner: inner))
    except Exception as error:  # classes can raise anything
        raise UnknownSubclassError(
            f"a {type(tensor).__name__} can't be rebuilt from the result of its __tensor_flatten__: {error}"
        ) from error
    return {
        name: value
        for name, value in noted.items()  # of values, only numbers and texts are compared
        if name not in rebuilt
        or (type(value) in _SIMPLE and (type(value) is not type(one := rebuilt[name]) or str(value) != str(one)))
    }


def flatten(tensor: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], SubclassSpec]:
    """The plain tensors inside `tensor`, by key, and how to rebuild it.

    Raises:
        UnknownSubclassError: as `refuse_lossy`; or a class in its context is not on the allow-list.
    """
    refuse_lossy(tensor, name)
    attributes, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    values: dict[str, torch.Tensor] = {}
    inner: dict[str, SubclassSpec | None] = {}
    for attribute in attributes:
        part: torch.Tensor = getattr(tensor, attribute)
        key = f"{name}.{attribute}"
        if is_subclass_value(part):
            parts, inner[attribute] = flatten(part, key)
            values |= parts
        else:
            refuse_lossy(part, key)
            values[key], inner[attribute] = part, None
    try:
        node = encode(context, _refuse_tensor, _checked_word)
    except UnknownTypeError as error:
        raise UnknownSubclassError(f"in a tensor subclass's context, {error}") from error
    spec = {
        "class": _checked_word(type(tensor)),
        "context": node,
        "inner": inner,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": dtype_name(tensor.dtype),
    }
    wide_first = sorted(values, key=lambda key: -values[key].itemsize)  # keeps every value aligned
    return {key: values[key] for key in wide_first}, spec


def with_inner(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A wrapper subclass like `tensor`, with `change` applied to its inner tensors."""
    attributes, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {attribute: change(getattr(tensor, attribute)) for attribute in attributes}
    changed: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return changed


def layout_from(spec: Json) -> Layout:
    """The dtype, shape and strides of the rebuilt tensor. Raises `CorruptFileError` if it is malformed."""
    try:
        dtype = dtype_named(spec["dtype"])
        layout = None if dtype is None else layout_as(dtype, spec["shape"], spec["stride"])
    except (KeyError, TypeError) as error:
        raise _malformed(spec) from error
    if layout is None:
        raise _malformed(spec)
    return layout


def unflatten(values: Mapping[str, torch.Tensor], spec: SubclassSpec, name: str) -> torch.Tensor:
    """The tensor that `flatten` took apart.

    Raises `UnknownSubclassError` if its class is not on the allow-list; `CorruptFileError` if an inner tensor is
    missing, or `spec` is malformed.
    """
    try:
        rebuilt = _rebuilt(values, spec, name)
        if (list(rebuilt.shape), dtype_name(rebuilt.dtype)) != (spec["shape"], spec["dtype"]):
            raise _malformed(spec)
    except Exception as error:  # classes can raise anything when given arguments that are not their own
        if isinstance(error, OffloadError) and not isinstance(error, _OF_MALFORMED):
            raise
        raise _malformed(spec) from error
    return rebuilt


def _rebuilt(values: Mapping[str, torch.Tensor], spec: SubclassSpec, name: str) -> torch.Tensor:
    cls = _known(spec["class"])
    inner = {}
    for attribute, part in spec["inner"].items():
        key = f"{name}.{attribute}"
        if part is None and key not in values:
            raise CorruptFileError(f"the inner tensor {key!r} of a {spec['class']} is missing")
        inner[attribute] = values[key] if part is None else _rebuilt(values, part, key)
    shape, stride = torch.Size(spec["shape"]), tuple(spec["stride"])
    context = decode(spec["context"], _refuse_tensor, _known)
    rebuilt: torch.Tensor = cls.__tensor_unflatten__(inner, context, shape, stride)  # type: ignore[attr-defined]
    return rebuilt


def _refuse_tensor(_: object, where: object) -> NoReturn:
    raise UnknownTypeError(f"there is a tensor ({where}), which can't be stored as plain data")


def _malformed(spec: Json) -> CorruptFileError:
    return CorruptFileError(f"its description of a tensor subclass is malformed: {str(spec)[:200]}")


def _word(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]}:{cls.__qualname__}"


def _known(word: str) -> type:
    if word in _REGISTERED:
        return _REGISTERED[word]
    package, _, name = str(word).partition(":")
    modules = _KNOWN.get(package, {}).get(name)
    if modules is None:
        raise UnknownSubclassError(
            f"{name} (of {package}) is not a class that offload stores: "
            f"call offload.register_subclass({name}) if you trust it"
        )
    for module in modules:
        with suppress(ImportError, AttributeError):
            cls: type = getattr(importlib.import_module(module), name)
            return cls
    raise UnknownSubclassError(f"{name} is needed to rebuild this value: install a version of {package} that has it")


def _checked_word(cls: type) -> str:
    word = _word(cls)
    if _known(word) is not cls:
        raise UnknownSubclassError(
            f"{cls.__name__} (of {cls.__module__}) is not the {cls.__name__} that offload stores: "
            f"call offload.register_subclass({cls.__name__}) if you trust it"
        )
    return word
