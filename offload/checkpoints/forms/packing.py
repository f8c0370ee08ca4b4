"""Saving a quantized model: its packed pieces, where its values are still computed from them.

Always true:
- pieces are written as they are, under the names by which they were read; nothing is repacked
- a value is saved dense if it was changed, or if another value computed from the same pieces was changed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload.annotations import Settings
from offload.checkpoints.forms.decoding import method_of
from offload.storage.handle import Handle
from offload.tensor.decoded import Decoded
from offload.tensor.guests import CPU
from offload.tensor.recipes import Joined, Piece, stored_in
from offload.tensor.saved import identity_of
from offload.tensor.views import handle_of, is_part, meta_of
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handle

_LEFT_OUT = {  # where a configuration lists the dense modules, by method
    "bitsandbytes": "llm_int8_skip_modules",
    "compressed-tensors": "ignore",
}
_USUAL = "modules_to_not_convert"
_OF_A_MATRIX = 2  # dimensions


@dataclass(frozen=True)
class Packed:
    """How a model's checkpoint was quantized: the attribute `packed_as` of the model.

    Attributes:
        quantization: the settings in its configuration.
        names: of the model's values that were packed.
        beside: tensors for kernels that quantize activations, which the checkpoint has and the model does not.
    """

    quantization: Settings
    names: tuple[str, ...]
    beside: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, quantization: Settings, beside: Mapping[str, torch.Tensor]) -> Packed:
        """From a model that has just been loaded."""
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return cls(quantization, tuple(name for name, tensor in named if _is_packed(tensor)), beside)

    def still_beside(self, dense: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors to save beside the packed pieces if these values of the model are dense."""
        changed = {name.rpartition(".")[0] for name in set(self.names) & dense.keys()}
        if len(changed) == len({name.rpartition(".")[0] for name in self.names}):
            return {}
        return {
            name: tensor
            for name, tensor in self.beside.items()
            if not any(".".join(name.split(".")[:depth]) in changed for depth in range(1, name.count(".") + 1))
        }

    def now(self, dense: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
        """The settings for the configuration if these values of the model are dense; None if all are."""
        changed = sorted(set(self.names) & dense.keys())
        if len(changed) == len(self.names):
            return None
        if not changed:
            return dict(self.quantization)
        key = _LEFT_OUT.get(str(method_of(self.quantization)), _USUAL)
        listed = self.quantization.get(key)
        if listed is None:  # a list replaces what is left out without one, such as the output layer
            listed = [name.removesuffix(".weight") for name, tensor in dense.items() if tensor.dim() == _OF_A_MATRIX]
        return {**self.quantization, key: sorted({*listed, *(name.removesuffix(".weight") for name in changed)})}


def left_beside(
    tensors: Mapping[str, OffloadedTensor], dense: Mapping[str, OffloadedTensor]
) -> dict[str, OffloadedTensor]:
    """The tensors of a packed checkpoint that no dense one is computed from."""
    used = set(stored_in(handle_of(tensor) for tensor in dense.values()))
    return {name: tensor for name, tensor in tensors.items() if handle_of(tensor) not in used}


def packed_state(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The packed pieces of a model's values, by their names in the checkpoint; and the other values, by their own."""
    owners = {name: list(_owners(tensor)) for name, tensor in state.items()}
    made = {name for name, found in owners.items() if any(isinstance(owner, Decoded) for owner, _ in found)}
    distinct = {identity_of(state[name]): name for name in made}  # tied values count once
    used: Counter[Any] = Counter()
    for name in distinct.values():
        for owner, count in owners[name]:
            used[owner] += count
    whole = {owner for owner, count in used.items() if count == _size(owner)}
    packed = {name for name in made if whole.issuperset(owner for owner, _ in owners[name])}
    pieces: dict[str, torch.Tensor] = {
        handle.name: wrap_handle(handle, CPU)
        for name in sorted(packed)
        for owner, _ in owners[name]
        for handle in ([piece.handle for piece in owner.pieces] if isinstance(owner, Decoded) else [owner])
    }
    return pieces, {name: tensor for name, tensor in state.items() if name not in packed}


def _is_packed(tensor: torch.Tensor) -> bool:
    return any(isinstance(owner, Decoded) for owner, _ in _owners(tensor))


def _owners(tensor: torch.Tensor) -> Iterator[tuple[Decoded | Handle, int]]:
    """The sources that a value is computed from, and the number of elements of each; nothing for other values."""
    if is_offloaded(tensor) and not is_part(tensor) and handle_of(tensor).composed is not None:
        yield from _of_piece(Piece(handle_of(tensor)))


def _of_piece(piece: Piece) -> Iterator[tuple[Decoded | Handle, int]]:
    composed = piece.handle.composed
    if isinstance(composed, Joined):
        for inner, _ in composed.rows_of(piece.view_spec):
            yield from _of_piece(inner)
    else:
        yield composed if isinstance(composed, Decoded) else piece.handle, piece.view_spec.numel()


def _size(owner: Decoded | Handle) -> int:
    return meta_of(owner).numel() if isinstance(owner, Handle) else torch.Size(owner.layout.shape).numel()
