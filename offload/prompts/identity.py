"""What distinguishes a model from others that could give other keys and values for the same tokens.

Always true:
- two models with one identity have the same class, configuration, settings of modules (adapters, scalings of rope) and
  attention, the same versions of torch and transformers, and values of the same names, files and numbers
- a value on disk is known by the state of its file, and by samples of it; one in memory by all its numbers
- a value that this process has written to in place is known to this process alone
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from hashlib import blake2b
from operator import is_not
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from offload.errors import ArgumentError
from offload.storage.file import TensorFile
from offload.storage.modes import no_functions, no_modes
from offload.storage.reasons import reading
from offload.storage.regular import read_all
from offload.storage.replacing import process_tag
from offload.storage.subclasses import is_subclass_value
from offload.storage.write import bytes_of
from offload.tensor.guests import CPU
from offload.tensor.locals import is_dtensor
from offload.tensor.recipes import Piece, stored_in
from offload.tensor.views import handle_of, view_spec_of
from offload.tensor.wrapper import is_offloaded
from offload.torch_api import version_of

_SAMPLES = 1024  # values of a file of which some bytes are looked at
_SAMPLE = 2048  # bytes
_STEPS = 512  # numbers of a value in memory that are compared at each call
_NOT_OF_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version")
_PRIVATE = ("_active_adapter", "_disable_adapters")  # settings of modules that count although their names are private


class Identities:
    """Identities of models, with what does not have to be read again."""

    def __init__(self) -> None:
        self._samples: weakref.WeakKeyDictionary[TensorFile, bytes] = weakref.WeakKeyDictionary()
        self._in_memory = WeakIdKeyDictionary()
        self._stored = WeakIdKeyDictionary()

    def of(self, model: Any) -> str:
        """The identity of a transformers model, as text of 64 digits.

        Raises:
            ArgumentError: its values are distributed, or on the meta device.
            MissingFileError, ChangedFileError, ReadError
        """
        import transformers

        digest = blake2b(digest_size=32)
        device = model.device.type
        mixed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        versions = torch.__version__, transformers.__version__, device, mixed
        _note(digest, versions, type(model).__qualname__, _configuration(model.config))
        with no_functions(), no_modes():
            for name, module in model.named_modules(remove_duplicate=False):
                _note(digest, name, type(module).__qualname__, _settings(vars(module)))
            for named in (model.named_parameters, model.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    _note(digest, name, tuple(tensor.shape), tensor.dtype)
                    self._add(digest, tensor, name)
        return digest.hexdigest()

    def _add(self, digest: Any, tensor: torch.Tensor, name: str) -> None:
        if is_dtensor(tensor) or tensor.is_meta:
            raise ArgumentError(f"prompts can't be kept for a model whose values are distributed, or missing: {name!r}")
        if is_offloaded(tensor):
            self._add_stored(digest, tensor)
        elif is_subclass_value(tensor):
            attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            for attribute in attributes:
                self._add(digest, getattr(tensor, attribute), f"{name}.{attribute}")
        else:
            digest.update(self._numbers(tensor))

    def _add_stored(self, digest: Any, tensor: Any) -> None:
        handle, view_spec = handle_of(tensor), view_spec_of(tensor)
        state = [handle, view_spec, *(stored.source for stored in stored_in([handle]))]
        known = self._stored.get(tensor)
        if known is None or len(known[0]) != len(state) or any(map(is_not, known[0], state)):
            found = blake2b(digest_size=16)
            Piece(handle, view_spec).note(found)
            for file in dict.fromkeys(stored.file for stored in stored_in([handle]) if not stored.owned):
                found.update(self._sampled(file))
            known = self._stored[tensor] = state, found.digest()
        digest.update(known[1])
        for stored in stored_in([handle]):
            if stored.owned:  # in place: the time of change is only that of what has been written out
                stored.flush()
                with reading(stored.path):
                    status = os.stat(stored.path)
                written = (process_tag(), id(stored), version_of(tensor)) if version_of(tensor) else None
                _note(digest, status.st_ino, status.st_size, status.st_mtime_ns, written)

    def _sampled(self, file: TensorFile) -> bytes:
        """Some bytes of many values: files of two revisions may have the same size and time."""
        found = self._samples.get(file)
        if found is None:
            digest = blake2b(digest_size=16)
            entries = list(file.entries.values())
            with file.descriptor() as opened, reading(file.path):
                for entry in entries[:: -(-len(entries) // _SAMPLES) or 1]:
                    count = min(_SAMPLE, entry.layout.nbytes)
                    begin = entry.start + (entry.layout.nbytes - count) // 2
                    digest.update(read_all(opened.fileno(), count, begin))
            found = self._samples[file] = digest.digest()
        return found

    def _numbers(self, tensor: torch.Tensor) -> bytes:
        """All numbers of a plain tensor, hashed once, and again if its version, or some of them, have changed."""
        flat = tensor.detach().reshape(-1)
        if tensor.is_inference():  # it has no version
            return _hashed(flat)
        mark = version_of(tensor), tensor.data_ptr(), _hashed(flat[:: -(-len(flat) // _STEPS) or 1])
        known = self._in_memory.get(tensor)
        if known is None or known[0] != mark:
            known = self._in_memory[tensor] = mark, _hashed(flat)
        return bytes(known[1])


def _hashed(flat: torch.Tensor) -> bytes:
    return blake2b(bytes_of(flat.to(CPU).contiguous()), digest_size=16).digest()


def _note(digest: Any, *things: object) -> None:
    digest.update(repr(things).encode())


def _configuration(config: Any) -> str:
    settings = {key: value for key, value in config.to_dict().items() if key not in _NOT_OF_THE_MODEL}
    text = getattr(config.get_text_config(decoder=True), "_attn_implementation", None)
    return json.dumps([settings, text], sort_keys=True, default=_text_of)


def _settings(members: Mapping[str, object]) -> list[tuple[str, str]]:
    """The attributes of a module that are plain data."""
    return sorted(
        (name, _text_of(value))
        for name, value in members.items()
        if (not name.startswith("_") or name in _PRIVATE) and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _text_of(value: object) -> str:
    """Plain data as text that is the same in other processes: the order of a set of strings is not."""
    if isinstance(value, Mapping):
        return str([(_text_of(key), _text_of(part)) for key, part in value.items()])
    if isinstance(value, list | tuple):
        return str([*map(_text_of, value)])
    return str(sorted(map(_text_of, value))) if isinstance(value, set | frozenset) else repr(value)
