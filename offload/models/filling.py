"""Transformers' own loader, given tensors that are on disk.

Always true:
- it renames, stacks, splits and casts deferred tensors: nothing is read or written
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.annotations import Config, Kwargs, Pretrained
from offload.checkpoints.companions import quantization_of
from offload.checkpoints.forms.decoding import method_of
from offload.checkpoints.forms.values import Values
from offload.errors import CheckpointError, OffloadError
from offload.memory import uncollected
from offload.system.locks import fork_safe_lock
from offload.system.modes import no_grad, no_inference
from offload.tensor.deferred import deferred, refuse_to_share
from offload.tensor.wrapper import OffloadedTensor, is_offloaded

_SHARDING = ("tp_plan", "distributed_config", "device_mesh")  # options with which transformers shards weights


class Waiting:
    """A tensor of a checkpoint, deferred when a loader asks for its `[...]`: of tens of thousands, one by one."""

    __slots__ = ("_keeps_dtype", "_tensor")

    def __init__(self, tensor: OffloadedTensor, *, keeps_dtype: bool = False) -> None:
        self._tensor = tensor
        self._keeps_dtype = keeps_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return deferred(self._tensor, keeps_dtype=self._keeps_dtype)[index]


@uncollected()
def filled(
    model_class: Any,
    config: Config,
    path: Path,
    tensors: Mapping[str, torch.Tensor | Waiting],
    dtype: torch.dtype,
    **options: object,
) -> tuple[Pretrained, Kwargs]:
    """A class's model with deferred tensors, and transformers' loading info; or a `CheckpointError`."""
    named = tensors.items()
    state: dict[str, Any] = {name: Waiting(one) if is_offloaded(one) else one for name, one in named}
    is_shared = any(options.get(name) is not None for name in _SHARDING)
    looked_at = is_shared or quantization_of(config) is not None  # by others, before they are taken
    if looked_at:
        state = {name: one[...] if isinstance(one, Waiting) else one for name, one in state.items()}
    if is_shared:
        for name, tensor in state.items():
            refuse_to_share(tensor, name)
    options = {**options, "state_dict": state, "dtype": dtype, "output_loading_info": True}
    # Inference parameters can't be views of files, and transformers would follow the default device, even to "meta".
    in_turn = nullcontext() if looked_at else one_by_one()
    with in_turn, no_inference(), no_grad(), torch.device("cpu"):
        try:
            model, report = model_class.from_pretrained(None, config=config, **options)
        except (OffloadError, MemoryError):
            raise
        except Exception as error:  # it can raise anything for settings that it does not expect
            raise CheckpointError(
                f"transformers can't make a {model_class.__name__} from {path}: {error} (see its log)"
            ) from error
    return model, report


_SERIAL = "HF_DEACTIVATE_ASYNC_LOAD"
_LOCK = fork_safe_lock()
_LOADINGS: list[str | None] = []  # in progress: the environment variable before each


@contextmanager
def one_by_one() -> Iterator[None]:
    """Make transformers convert each tensor when it gets to it, not all ahead in threads, which are for reading."""
    with _LOCK:
        _LOADINGS.append(os.environ.get(_SERIAL))
        os.environ[_SERIAL] = "1"
    try:
        yield
    finally:
        with _LOCK:
            before = _LOADINGS.pop()  # the first one's, used when the last one ends
            if not _LOADINGS and before is None:
                os.environ.pop(_SERIAL, None)
            elif not _LOADINGS:
                os.environ[_SERIAL] = str(before)


def waiting(values: Values) -> dict[str, torch.Tensor | Waiting]:
    """The values as transformers takes them; those that it would not cast keep their dtype."""
    from offload.transformers_api import HfQuantizer

    is_fp8 = method_of(values.quantization or {}) == "fp8"
    if not hasattr(HfQuantizer, "get_new_dtype") or (is_fp8 and _casts_beside_fp8()):  # before 5.21, it casts all
        return dict(values.tensors)
    return {
        name: Waiting(tensor, keeps_dtype=True) if values.keeps_dtype(name) and is_offloaded(tensor) else tensor
        for name, tensor in values.tensors.items()
    }


def _casts_beside_fp8() -> bool:
    """Whether transformers casts a weight that an FP8 checkpoint stores without scales, as it does from 5.24 on."""
    from offload.transformers_api import Fp8Dequantize

    layer, weight = nn.Linear(1, 1, device="meta", dtype=torch.bfloat16), torch.empty(1, 1, device="meta")
    converted = Fp8Dequantize(None).convert({"weight": weight}, full_layer_name="weight", model=layer)
    return bool(converted["weight"].dtype == torch.bfloat16)
