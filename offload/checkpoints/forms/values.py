"""The values of a checkpoint in the form in which a model has them, whatever the form in which they are stored.

Always true:
- nothing is read or written: values are referenced, or recipes over what is referenced
- one table says which form of checkpoint is handled how, for loading, filling and converting
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from offload.annotations import Pretrained, Settings
from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.forms.decoding import method_of
from offload.checkpoints.forms.formats import unpacked
from offload.checkpoints.forms.gguf import as_saved
from offload.checkpoints.forms.integers import for_modules
from offload.checkpoints.forms.packing import left_beside
from offload.checkpoints.forms.torchao import PARTS_NOTE, rebuilt
from offload.errors import CheckpointError
from offload.memory import uncollected
from offload.tensor.views import handle_of
from offload.tensor.wrapper import PathLike, is_offloaded

_BYTES = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int8, torch.uint8),
)
_ENDS = ("_scale_inv", "_scale", ".absmax")  # of the names of scales, after the name of a weight
_SCALES = ("scale", "scales", "qscale_weight", "SCB")  # beside a weight


class Form(Enum):
    """How a checkpoint's values are stored, and so handled."""

    PLAIN = auto()  # as the model has them
    MAPPED = auto()  # in a GGUF file: under other names, in blocks
    DECODED = auto()  # packed: dense values are recipes over the pieces
    REBUILT = auto()  # in torchao's classes, over their inner tensors
    FOR_MODULES = auto()  # for modules of transformers' own, in a form that is known here
    LEFT = auto()  # for modules of transformers' own, and left to it


@dataclass(frozen=True)
class Values:
    """A checkpoint's values, on disk or deferred, by the names that they have in a checkpoint of the model.

    Attributes:
        form: how they are stored.
        quantization: the settings in the model's configuration, if there are any.
        beside: tensors of the checkpoint that no decoded value is computed from.
    """

    form: Form
    tensors: Mapping[str, torch.Tensor]
    quantization: Settings | None = None
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def keeps_dtype(self, name: str) -> bool:
        """Whether transformers leaves a value in its own dtype when it dequantizes: a weight that is not packed."""
        tensor = self.tensors[name]
        return (
            self.form is Form.DECODED
            and method_of(self.quantization or {}) in ("bitsandbytes", "fp8")
            and name.endswith(".weight")
            and is_offloaded(tensor)
            and handle_of(tensor).composed is None
        )


@uncollected()
def values_in(
    source: Checkpoint,
    quantization: Settings | None,
    offload_dir: PathLike | None = None,
    *,
    model: Pretrained | None = None,
    dtype: torch.dtype | None = None,
) -> Values:
    """The values of a checkpoint.

    Args:
        quantization: the settings in the model's configuration; None if there are none.
        offload_dir: where values go at their first write.
        model: on the meta device; needed for a GGUF file, and for values in a form for modules of its own.
        dtype: the requested one, of what is mapped or for modules; None for the model's.

    Raises `CheckpointError` if pieces are missing or do not match each other, or the form is not supported.
    """
    tensors = source.tensors(offload_dir)
    if source.is_gguf:
        assert model is not None
        return Values(Form.MAPPED, as_saved(source, tensors, model, dtype or model.dtype))
    if quantization is None:
        _refuse_scaled(source, tensors, model)
        return Values(Form.PLAIN, tensors)
    dense = unpacked(tensors, quantization)
    if dense is not None:
        _refuse_scaled(source, dense, model, method_of(quantization))
        return Values(Form.DECODED, dense, quantization, left_beside(tensors, dense))
    if method_of(quantization) == "bitnet" and model is not None:
        return Values(Form.FOR_MODULES, for_modules(tensors, quantization, dtype or model.dtype), quantization)
    if PARTS_NOTE in (metadata := source.metadata):
        return Values(Form.REBUILT, rebuilt(tensors, metadata), quantization)
    return Values(Form.LEFT, tensors, quantization)


def _refuse_scaled(
    source: Checkpoint, values: Mapping[str, torch.Tensor], model: Pretrained | None, method: str | None = None
) -> None:
    is_stored = {name: is_offloaded(value) and handle_of(value).composed is None for name, value in values.items()}
    dtypes = {name: value.dtype for name, value in values.items() if is_stored[name] and value.dtype in _BYTES}
    if dtypes:
        refuse_scaled(source, dtypes, set(source) - set(model.state_dict() if model is not None else ()), method)


def refuse_scaled(
    source: Checkpoint, dtypes: Mapping[str, torch.dtype], unused: Collection[str], method: str | None = None
) -> None:
    """Refuse packed numbers whose scales are not used: by themselves they are no weight.

    `dtypes` are those of values that a model is to be filled with as they are stored; of `unused` names it has no
    value. The configuration says that weights are packed by `method`. Raises `CheckpointError`.
    """
    for name, dtype in dtypes.items():
        layer = name.removesuffix("weight")
        names = [*(name + end for end in _ENDS), *(layer + end for end in _SCALES)]
        scale = next((one for one in names if one in unused), None)
        if dtype in _BYTES and scale is not None:
            what = "does not say how they are packed" if method is None else f"says {method!r}, which they are not"
            raise CheckpointError(
                f"{name!r} in {source[name].file.path} is {dtype}, and {scale!r} is there, too, which the model does "
                f"not use: the weights are packed, and the quantization_config of the model {what}. Download the "
                "checkpoint again, with its config.json."
            )
