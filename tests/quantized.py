"""Quantized weights: torchao's weight-only configurations that run on this CPU, and comparing the results.

These need weights whose columns are a multiple of 256, and whose elements are a multiple of 16384.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PROTOTYPES = "torchao.prototype.quantization"


def _config(path: str, **options: Any) -> Callable[[], Any]:
    """A function that creates a configuration; values that are functions are called."""
    module, _, name = path.rpartition(".")

    def made() -> Any:
        given = {key: value() if callable(value) else value for key, value in options.items()}
        return getattr(import_module(module), name)(**given)

    return made


def _granularity(name: str, *args: int) -> Callable[[], Any]:
    return lambda: getattr(import_module("torchao.quantization"), name)(*args)


def _intx(bits: int, **options: Any) -> Callable[[], Any]:
    return _config("torchao.quantization.IntxWeightOnlyConfig", weight_dtype=getattr(torch, f"int{bits}"), **options)


_GROUP = _granularity("PerGroup", 32)
_INT8, _FLOAT8 = "torchao.quantization.Int8WeightOnlyConfig", "torchao.quantization.Float8WeightOnlyConfig"

_ALONE = {"set_inductor_config": False}  # True changes how all of torch multiplies

# Of classes supported by torchao's safetensors format, and so by transformers.
IN_TORCHAOS_FORM: dict[str, Callable[[], Any]] = {
    "int8": _config(_INT8, **_ALONE),
    "int8-group": _config(_INT8, granularity=_GROUP, **_ALONE),
    "int8-tensor": _config(_INT8, granularity=_granularity("PerTensor"), **_ALONE),
    "float8": _config(_FLOAT8, **_ALONE),
    "float8-e5m2": _config(_FLOAT8, weight_dtype=torch.float8_e5m2, **_ALONE),
    "float8-tensor": _config(_FLOAT8, granularity=_granularity("PerTensor"), **_ALONE),
    **{f"int{bits}x": _intx(bits) for bits in range(1, 9)},
    "int4x-group": _intx(4, granularity=_GROUP),
    "int4x-hqq": _intx(4, granularity=_GROUP, intx_choose_qparams_algorithm="hqq_scale_only"),
    "int4x-stretched": _config(
        "torchao.prototype.parq.quant.config_torchao.StretchedIntxWeightConfig",
        b=4,
        quant_min=-8,
        quant_max=7,
        activation_quantization=None,
    ),
    "nvfp4": _config("torchao.prototype.mx_formats.NVFP4WeightOnlyConfig"),
}
OF_ITS_OWN: dict[str, Callable[[], Any]] = {
    "nf4": _config("torchao.prototype._nf4tensor_api.NF4WeightOnlyConfig"),
    "int4-opaque": _config(f"{_PROTOTYPES}.int4.PrototypeInt4WeightOnlyConfig", group_size=32, **_ALONE),
    "codebook": _config(f"{_PROTOTYPES}.codebook.codebook_quantized_tensor.CodebookWeightOnlyConfig"),
    "gguf": _config(f"{_PROTOTYPES}.gguf.GGUFWeightOnlyConfig"),
}
WEIGHT_ONLY = IN_TORCHAOS_FORM | OF_ITS_OWN


def identical(expected: object, found: object) -> bool:
    """Whether two values have the same classes, inside too, and are bit-identical; other objects are compared."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return expected == found
    if type(expected) is not type(found) or expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    if not is_traceable_wrapper_subclass(expected):
        return torch.equal(_bits(expected), _bits(found))
    (names, context), (others, another) = expected.__tensor_flatten__(), found.__tensor_flatten__()
    inner = (identical(getattr(expected, name), getattr(found, name)) for name in names)
    return names == others and str(context) == str(another) and all(inner)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def outcome(act: Callable[[Any], Any], value: torch.Tensor) -> object:
    """The result, detached, or the class of the error."""
    try:
        result = act(value)
    except Exception as error:
        return type(error)
    return result.detach() if isinstance(result, torch.Tensor) else result
