"""What takes the place of a model's values, and is to be where they were.

Always true:
- a new value takes the place of the old one in its file, which holds the old one or the new one, whole
- a value that others are tied to, and that they keep, gets a file of its own
- what was in memory stays there
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from offload.memory import return_freed
from offload.models.journal import RUNS, marks_of
from offload.models.slots import tensor_slots
from offload.prefetch.residency import books_of
from offload.storage.handle import Handle
from offload.tensor.wrapper import (
    OffloadedTensor,
    dressed,
    guest_of,
    handle_of,
    is_offloaded,
    replace_value,
    wrap_handle,
)


class Replacing:
    """A model's values as they were, for those that come in their places.

    Args:
        model: the model.
        suffix: is added to the name of a new file where another value has the name.
    """

    def __init__(self, model: nn.Module, suffix: str) -> None:
        self._model = model
        self._suffix = suffix
        self._slots = tensor_slots(model)  # also keeps the tensors, whose identity tells them apart
        tensors = [slot.tensor for slot in self._slots]
        self._handles = {handle_of(tensor) for tensor in tensors if is_offloaded(tensor)}
        self._holders = Counter({id(slot.tensor): len(slot.owners) for slot in self._slots})

    def stored(
        self, old: torch.Tensor, new: torch.Tensor, name: str, marks: Sequence[str] = ()
    ) -> OffloadedTensor | None:
        """The parameter over what is stored of `new` in the place of `old`; None if it stays what it is.

        Args:
            old: one of the model's values.
            new: what a module has in its place.
            name: of the new one, if it gets a file of its own.
            marks: what the file is to say of runs. One that says all of it already is left as it is.
        """
        if not is_offloaded(old) or (is_offloaded(new) and handle_of(new) in self._handles):
            return None
        return_freed()  # what the new one was computed with
        if self._holders[id(old)] > 1:
            self._holders[id(old)] -= 1
            stored = self._beside(old, new, name, marks)
        else:
            if not marks or not set(marks) <= set(_marks_of(old)):
                notes = {RUNS: [*_marks_of(old), *marks]} if marks else None
                replace_value(old, new.detach(), notes, strict_shape=False, strict_dtype=False)
            stored = old.detach()  # type: ignore[assignment]
        return dressed(stored, requires_grad=new.requires_grad, is_parameter=isinstance(new, nn.Parameter))

    def finish(self, marks: Sequence[str] = ()) -> list[str]:
        """Bring to disk what took a value's place by way of a module that took another's; gives the names."""
        before = {name: slot.tensor for slot in self._slots for name in slot.names}
        names = []
        new = [slot for slot in tensor_slots(self._model) if before.get(slot.name, slot.tensor) is not slot.tensor]
        for slot in sorted(new, key=lambda slot: slot.name == getattr(before[slot.name], "name", None)):
            stored = self.stored(before[slot.name], slot.tensor, slot.name, marks)
            if stored is not None:
                slot.fill(stored)
                names.append(slot.name)
        return names

    def _beside(self, old: OffloadedTensor, new: torch.Tensor, name: str, marks: Sequence[str]) -> OffloadedTensor:
        """`new` in a file of its own, in the folder and under the memory budget of `old`."""
        handle, value = handle_of(old), guest_of(new.detach())
        notes = {RUNS: list(marks)} if marks else None
        own_name = f"{handle.name}.{self._suffix}" if name in ("", handle.name) else name
        made = Handle.create(value, own_name, handle.folder, notes, exist_ok=True)
        books_of(made).pool = books_of(handle).pool
        self._handles.add(made)
        return wrap_handle(made, new.device)


def _marks_of(tensor: OffloadedTensor) -> tuple[str, ...]:
    handle = handle_of(tensor)
    return marks_of(handle.file) if handle.owned else ()
