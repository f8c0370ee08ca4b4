"""transformers: keys and values on disk, so that a context may exceed memory.

Always true:
- a layer has one file for keys and one for values, (batch, heads, capacity, size): a token writes only its own rows
- attention gets views of the files that cover the current tokens; nothing is copied for that
- transformers' own layers count, crop, slide and reorder; only the place of keys and values differs
"""

from __future__ import annotations

import os
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import torch

from offload.errors import ShapeMismatchError, UnsupportedOpError
from offload.storage.layout import Layout, contiguous_stride
from offload.storage.owning import replace_by_zeros
from offload.storage.replacing import refuse_filled
from offload.system.regular import absolute
from offload.tensor.guests import CPU, mapped_value
from offload.tensor.rules import is_followed
from offload.tensor.views import handle_of, is_stale
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handle

States: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # keys and values

_LEAST_CAPACITY = 256  # tokens
_STEP = 64  # granularity of the capacity in tokens: heads then begin at whole cache lines, as in plain tensors


def kv_cache(config_or_model: Any, offload_dir: str | os.PathLike[str] | None = None) -> Any:
    """A cache of keys and values on disk for transformers' models: `model.generate(cache=kv_cache(model))`.

    It is transformers' `DynamicCache`, and gives the same numbers: it grows, crops, follows beams and assistants, is
    reset, deep-copied (to a private folder), and continues from one call to the next. Full and sliding-window attention
    is on disk; the small states of linear attention and convolutions, and what a model keeps in layers of its own
    kind, stay in memory.

    What it returns for one step is a view, valid until the next step, since rows are written in place.

    Args:
        config_or_model: the model that it is for, or its configuration.
        offload_dir: a new or empty folder for the files, which stay and are not opened again; None for a private one,
            whose files go with the cache.

    Returns:
        A `DynamicCache`; for an encoder with a decoder, an `EncoderDecoderCache` of two.

    Raises:
        ForeignFileError: `offload_dir` is not empty.
        UnsupportedOpError: when it is used while gradients are recorded; keys and values on disk carry none.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        >>> past = kv_cache(model)
        >>> model.generate(torch.tensor([[1, 2, 3]]), cache=past, max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 7])
        >>> past.get_seq_length(), is_offloaded(past.layers[0].keys)
        (6, True)
    """
    from transformers import EncoderDecoderCache

    config = getattr(config_or_model, "config", config_or_model)
    folder = None if offload_dir is None else absolute(offload_dir)
    if folder is not None:
        refuse_filled(folder)
    if not getattr(config, "is_encoder_decoder", False):
        return _on_disk(config, "", folder)
    parts = [_on_disk(config, prefix, folder) for prefix in ("decoder.", "cross.")]
    return EncoderDecoderCache(*parts)


def _on_disk(config: Any, prefix: str, folder: Path | None) -> Any:
    from transformers import DynamicCache

    past = DynamicCache(config=config)
    for place, layer in enumerate(past.layers):
        name, kind = f"{prefix}layers.{place}", _kind_on_disk(layer.__class__)
        if kind is None:  # it does not keep them in the usual way
            continue
        past.layers[place] = kind.__new__(kind)
        past.layers[place].__dict__.update(layer.__dict__)
        past.layers[place]._open(name, folder)
    return past


@cache
def _kind_on_disk(kind: Any) -> Any:
    """A subclass of layer class `kind` with keys and values on disk; None if it does not keep them in the usual way."""
    from offload.transformers_api import DynamicLayer, DynamicSlidingWindowLayer

    parts = {DynamicLayer.update: _LayerOnDisk, DynamicSlidingWindowLayer.update: _SlidingLayerOnDisk}
    part = parts.get(getattr(kind, "update", None))
    return part and type(f"{kind.__name__}OnDisk", (part, kind), {"_layer_type": None})  # registered for no layer type


class _Rows:
    """A layer's keys or values, in a file with spare capacity: (batch, heads, capacity, size)."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self._name = name
        self._folder = folder
        self._file: OffloadedTensor | None = None

    def append(self, past: torch.Tensor | None, states: torch.Tensor) -> OffloadedTensor:
        """The tokens of `past`, a view of the file, followed by `states`; raises for others than the stored ones."""
        first, end = 0, 0
        if past is not None and is_offloaded(past):
            self._refuse_others(past, states)
            first = past.storage_offset() // past.shape[-1]
            end = first + past.shape[-2]
        if not self._takes(states, end):
            first, end = 0, self._grow(past if first < end else None, states)
        assert self._file is not None
        self._file[:, :, end : end + states.shape[-2]] = states
        return self._file[:, :, first : end + states.shape[-2]].to(states.device)  # type: ignore[return-value]

    def put(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """`states` in the file, replacing everything there; returned unchanged if they are there already, or empty."""
        if states is None or states.numel() == 0 or self._holds(states):
            return states
        return self.append(None, states)

    def again(self, past: torch.Tensor | None) -> torch.Tensor | None:
        """The tokens of `past` again, after the capacity may have grown: they are then at the start of the new file."""
        if past is None or not self._holds(past) or not is_stale(past):
            return past
        assert self._file is not None
        return self._file[:, :, : past.shape[-2]].to(past.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rows:
        copy = _Rows(self._name, None)
        copy._file = None if self._file is None else self._file.__deepcopy__(memo)
        return copy

    def _holds(self, states: torch.Tensor) -> TypeGuard[OffloadedTensor]:
        return is_offloaded(states) and self._file is not None and handle_of(states) is handle_of(self._file)

    def _takes(self, states: torch.Tensor, end: int) -> bool:
        file = self._file
        if file is None or file.dtype != states.dtype or _shape_of_a_token(file) != _shape_of_a_token(states):
            return False
        return end + states.shape[2] <= file.shape[2]

    def _grow(self, past: torch.Tensor | None, states: torch.Tensor) -> int:
        """Make room for `states` after the tokens of `past`, which are moved to the start; returns their number."""
        count = 0 if past is None else past.shape[-2]
        batch, heads, new, size = states.shape
        capacity = max((count + new) * 3 // 2, _LEAST_CAPACITY)
        shape = (batch, heads, -(-capacity // _STEP) * _STEP, size)
        if self._file is None:
            place = {"name": self._name, "offload_dir": self._folder, "exist_ok": True}
            self._file = OffloadedTensor.empty(shape, dtype=states.dtype, **place)  # type: ignore[arg-type]
            return 0
        handle, layout = handle_of(self._file), Layout(states.dtype, shape, contiguous_stride(shape))
        before = () if past is None else mapped_value(past.to(CPU)).flatten(0, 1)  # type: ignore[arg-type]
        row = layout.nbytes // (batch * heads)
        try:
            replace_by_zeros(handle, layout, ((number * row, part) for number, part in enumerate(before)))
        finally:
            self._file = wrap_handle(handle, CPU)
        return count

    def _refuse_others(self, past: torch.Tensor, states: torch.Tensor) -> None:
        if _shape_of_a_token(past) != _shape_of_a_token(states) or past.dtype != states.dtype:
            raise ShapeMismatchError(
                f"{self._name!r} holds tokens of {past.dtype} {tuple(past.shape)}, the new ones have {states.dtype} "
                f"{tuple(states.shape)}: reset() the cache, or use another one for another batch or dtype"
            )


def _shape_of_a_token(states: torch.Tensor) -> tuple[int, ...]:
    return (*states.shape[:2], states.shape[3])


class _LayerOnDisk:
    """The part of a layer that keeps keys and values on disk; whatever other code assigns to them goes there."""

    is_initialized: bool
    lazy_initialization: Any

    def _open(self, name: str, folder: Path | None) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._rows_of_keys = _Rows(f"{name}.keys", folder)
        self._rows_of_values = _Rows(f"{name}.values", folder)

    def _put_keys(self, states: torch.Tensor | None) -> None:
        self._keys = self._rows_of_keys.put(states)

    def _put_values(self, states: torch.Tensor | None) -> None:
        self._values = self._rows_of_values.put(states)

    keys = property(attrgetter("_keys"), _put_keys)
    values = property(attrgetter("_values"), _put_values)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> States:
        self._keys, self._values = self._appended(key_states, value_states)
        return self._keys, self._values

    def reset(self) -> None:
        self._keys = self._values = None
        self.is_initialized = False
        super().reset()  # type: ignore[misc]

    def _appended(self, key_states: torch.Tensor, value_states: torch.Tensor) -> States:
        if is_followed(key_states) or is_followed(value_states):
            raise UnsupportedOpError(
                f"{self._rows_of_keys._name!r}: keys and values on disk carry no gradients. Run the model under "
                "torch.no_grad(), or pass use_cache=False to train it."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        try:
            keys = self._rows_of_keys.append(self._keys, key_states)
            return keys, self._rows_of_values.append(self._values, value_states)
        except BaseException:
            self._keys = self._rows_of_keys.again(self._keys)
            self._values = self._rows_of_values.again(self._values)
            raise


class _SlidingLayerOnDisk(_LayerOnDisk):
    sliding_window: int
    cumulative_length: int
    record_past: bool

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> States:
        keys, values = self._appended(key_states, value_states)
        new = key_states.shape[-2]
        self.cumulative_length += new
        window = self.sliding_window - 1
        if not self.record_past:
            self._keys, self._values = keys[:, :, -window:], values[:, :, -window:]
            return keys, values
        self._keys, self._values = keys, values  # until `crop` decides which of them stay
        return keys[:, :, -window - new :], values[:, :, -window - new :]
