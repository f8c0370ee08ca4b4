"""The values of a checkpoint in the form in which a model has them, whatever the form in which they are stored.

Always true:
- nothing is read or written: values are referenced, or recipes over what is referenced
- one table says which form of checkpoint is handled how, for loading, filling and converting
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from offload.annotations import Pretrained, Settings
from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.forms.bitnet import for_modules
from offload.checkpoints.forms.decoding import keeps_dtypes, method_of, unpacked
from offload.checkpoints.forms.gguf import as_saved
from offload.checkpoints.forms.packing import left_beside
from offload.checkpoints.forms.torchao import PARTS_NOTE, rebuilt
from offload.memory import uncollected
from offload.tensor.views import handle_of
from offload.tensor.wrapper import PathLike, is_offloaded


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
    """A checkpoint's values by the names that they have in a checkpoint of the model.

    Attributes:
        form: how they are stored.
        tensors: on disk, or deferred.
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
            and keeps_dtypes(self.quantization or {})
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
        source: the checkpoint.
        quantization: the settings in the model's configuration; None if there are none.
        offload_dir: where values go at their first write.
        model: on the meta device; needed for a GGUF file, and for values in a form for modules of its own.
        dtype: the requested one, of what is mapped or for modules; None for the model's.

    Raises:
        CheckpointError: pieces are missing or do not match each other, or the form is not supported.
    """
    tensors = source.tensors(offload_dir)
    if source.is_gguf:
        assert model is not None
        return Values(Form.MAPPED, as_saved(source, tensors, model, dtype or model.dtype))
    if quantization is None:
        return Values(Form.PLAIN, tensors)
    dense = unpacked(tensors, quantization)
    if dense is not None:
        return Values(Form.DECODED, dense, quantization, left_beside(tensors, dense))
    if method_of(quantization) == "bitnet" and model is not None:
        return Values(Form.FOR_MODULES, for_modules(tensors, quantization, dtype or model.dtype), quantization)
    if PARTS_NOTE in (metadata := source.metadata):
        return Values(Form.REBUILT, rebuilt(tensors, metadata), quantization)
    return Values(Form.LEFT, tensors, quantization)
