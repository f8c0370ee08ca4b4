"""A snapshot of training state in files, for a checkpoint that is written while training goes on.

Always true:
- staged values don't change, whatever happens to the tensors; their files go with the last user
- nothing is in memory as a whole: what refers to a checkpoint, or is computed from one, is referenced again, and
  everything else is copied to files
"""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch

from offload.storage.modes import no_functions, no_modes
from offload.storage.owning import create_temporary
from offload.storage.regular import absolute
from offload.storage.subclasses import is_subclass_value
from offload.tensor.guests import mapped_value
from offload.tensor.locals import is_dtensor, local_of, with_local
from offload.tensor.saved import identity_of
from offload.tensor.views import handle_of, target_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap, wrap_handle
from offload.torch_api import tree_map

_SMALL = 64 << 10  # bytes up to which a tensor in memory is copied in memory


class FileStager:
    """Stages a state in files for `async_save` of torch.distributed.checkpoint, whose own stager copies it to memory.

    Args:
        folder: where a private folder for the copies is made; None for `TMPDIR`. It goes with this process.

    Example:
        >>> from offload import OffloadedTensor
        >>> w = OffloadedTensor.zeros(3, name="w")
        >>> staged = FileStager().stage({"w": w, "step": 7})
        >>> w.fill_(1.0).tolist(), staged["w"].tolist(), staged["step"]
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], 7)
    """

    should_synchronize_after_execute = False  # `stage` is synchronous

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else absolute(folder)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same state, frozen: tensors on disk, or small ones, and copies of everything else.

        Raises:
            WriteError: the disk is full...
        """
        staged: dict[Hashable, torch.Tensor] = {}

        def stage(value: object) -> Any:
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            local = local_of(value).detach()
            known = identity_of(local)
            if known not in staged:
                staged[known] = _staged(local, self._folder)
            return with_local(value.detach(), staged[known]) if is_dtensor(value) else staged[known]

        with torch.no_grad():
            return tree_map(stage, state_dict)  # type: ignore[no-any-return]

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to close: files go with the staged values."""


def _staged(tensor: torch.Tensor, folder: Path | None) -> torch.Tensor:
    if not is_offloaded(tensor):
        small = tensor.numel() * tensor.itemsize <= _SMALL
        if small or is_subclass_value(tensor) or tensor.layout != torch.strided:
            return copy.deepcopy(tensor)
        return _copied(tensor, "staged", tensor.device, folder)
    handle = handle_of(tensor)
    if handle.owned or handle.was_stored:  # a write would change its file, or replace it
        return _copied(tensor, handle.name, target_of(tensor), folder)
    with no_functions(), no_modes():
        return wrap(handle.elsewhere(None), view_spec_of(tensor), target_of(tensor))


def _copied(tensor: torch.Tensor, name: str, target: torch.device, folder: Path | None) -> OffloadedTensor:
    with no_functions(), no_modes():
        value = mapped_value(tensor) if is_offloaded(tensor) else tensor
        return wrap_handle(create_temporary(value, name, folder), target)
