"""What distinguishes a model from others that could give other keys and values for the same tokens.

Always true:
- two models with one identity have the same class, configuration, settings of modules (adapters, scalings of rope) and
  attention, the same versions of torch and transformers, and values of the same names, files and numbers
- a value on disk is known by the state of its file; one in memory by all its bytes, which are read each time: they can
  be written to in ways that no version counts
- a value that this process has written to in place is known to this process alone
- a model with anything that can't be compared, such as a hook or a patched method, has no identity
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import PurePath
from types import NoneType
from typing import Any
from zlib import crc32

import torch

from offload.errors import ArgumentError
from offload.storage.replacing import process_tag
from offload.storage.subclasses import is_subclass_value
from offload.storage.write import bytes_of
from offload.system.modes import no_functions, no_modes
from offload.system.reasons import reading
from offload.tensor.guests import CPU
from offload.tensor.locals import is_dtensor
from offload.tensor.recipes import Piece, stored_in
from offload.tensor.views import handle_of, view_spec_of
from offload.tensor.wrapper import is_offloaded
from offload.torch_api import have_global_hooks, hooks_of, pre_hooks_of, version_of

log = logging.getLogger("offload.generation")

_NOT_OF_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PRIVATE = ("_active_adapter", "_disable_adapters")  # settings of modules that count although their names are private


def identity_of(model: Any) -> str | None:
    """A model's identity, 64 digits; None if it can't be compared; `ArgumentError` for distributed or no values."""
    import transformers

    unknown = _unknown_in(model)
    if unknown is not None:
        log.warning("%s: no kept prompts are used, and none is kept", unknown)
        return None
    digest = blake2b(digest_size=32)
    device = model.device.type
    mixed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    versions = torch.__version__, transformers.__version__, device, mixed
    settings = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_OF_THE_MODEL}
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    config = json.dumps([settings, attention], sort_keys=True, default=_text_of)
    _note(digest, versions, _name_of(type(model)), config)
    with no_functions(), no_modes():
        for name, module in model.named_modules(remove_duplicate=False):
            plain = sorted((key, _text_of(value)) for key, value in vars(module).items() if _counts(key, value))
            _note(digest, name, _name_of(type(module)), plain)
        for named in (model.named_parameters, model.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                _note(digest, name, tuple(tensor.shape), tensor.dtype)
                _add(digest, tensor, name)
    return digest.hexdigest()


def _add(digest: Any, tensor: torch.Tensor, name: str) -> None:
    if is_dtensor(tensor) or tensor.is_meta:
        raise ArgumentError(f"prompts can't be kept for a model whose values are distributed, or missing: {name!r}")
    if is_offloaded(tensor):
        _add_stored(digest, tensor)
    elif is_subclass_value(tensor):
        attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for attribute in attributes:
            _add(digest, getattr(tensor, attribute), f"{name}.{attribute}")
    else:
        _note(digest, crc32(bytes_of(tensor.detach().to(CPU).contiguous())))


def _add_stored(digest: Any, tensor: Any) -> None:
    handle = handle_of(tensor)
    Piece(handle, view_spec_of(tensor)).note(digest)
    for stored in stored_in([handle]):
        written = None
        if stored.owned:  # in place: the time of change is only that of what has been written out
            stored.flush()
            written = (process_tag(), id(stored), version_of(tensor)) if version_of(tensor) else None
        with reading(stored.path):
            status = os.stat(stored.path)
        _note(digest, status.st_ino, status.st_size, status.st_mtime_ns, written)


def _unknown_in(model: Any) -> str | None:
    """What of a model can't be compared, in words; None if all can."""
    if have_global_hooks():
        return "all modules have a hook"
    for name, module in model.named_modules():
        place, kind = name or "the model", type(module)
        hooks = (*hooks_of(module).values(), *pre_hooks_of(module).values())
        if not all(map(_is_of_batches, hooks)):
            return f"{place} has a hook"
        has_own = any("forward" in vars(base) and base.__module__ == kind.forward.__module__ for base in kind.mro())
        if not _is_importable(kind) or not has_own:  # it was put there later
            return f"{place} is a {kind.__qualname__}, whose code is not in a module of its own"
        for key, value in vars(module).items():
            if inspect.isroutine(getattr(kind, key, None)) and not (key == "forward" and _is_usual(value, module)):
                return f"{key} of {place} is another one than that of its class"
            if not (key[0] == "_" or key == "forward" or _is_known(value)):
                return f"{key} of {place} is a {type(value).__name__}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not (type(tensor) in _PLAIN or is_offloaded(tensor) or is_subclass_value(tensor)):
            return f"{name} is a {type(tensor).__name__}"
    return None


def _is_importable(code: Any) -> bool:
    """Whether its name tells which class or function it is, in another process too."""
    return "<" not in code.__qualname__ and code.__module__ != "__main__"


def _is_of_batches(hook: object) -> bool:
    """Whether `map_batches` put it there: such hooks wait, and give what the class's own method gives."""
    return type(hook).__module__.startswith("offload.batches.")


def _is_usual(forward: Any, module: Any) -> bool:
    """Whether the `forward` of a module itself is its class's, in lockstep or between accelerate's hooks."""
    hook = vars(module).get("_hf_hook")
    is_own = getattr(vars(module).get("_old_forward"), "__func__", None) is type(module).forward
    parts = [getattr(forward, "func", None), *map(type, getattr(hook, "hooks", [hook]))]
    is_aligning = is_own and all(getattr(part, "__module__", None) == "accelerate.hooks" for part in parts)
    return is_aligning or _is_of_batches(forward)


def _name_of(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _note(digest: Any, *things: object) -> None:
    digest.update(repr(things).encode())


def _counts(key: str, value: object) -> bool:
    return (not key.startswith("_") or key in _PRIVATE) and _is_plain(value)


def _is_plain(value: object) -> bool:
    """Whether it is data, or a function with a name, of which `_text_of` tells all."""
    return all(
        isinstance(leaf, bool | int | float | str | torch.dtype | NoneType)
        or (inspect.isroutine(leaf) and not inspect.ismethod(leaf) and _is_importable(leaf))
        for leaf in _leaves(value)
    )


def _is_known(value: object) -> bool:
    """Whether it is plain, or tells only where a model is and how it was made."""
    where = (torch.device, PurePath)
    return all(isinstance(one, where) or hasattr(one, "to_dict") or _is_plain(one) for one in _leaves(value))


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, partial):
        value = (value.func, value.args, value.keywords)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _text_of(value: object) -> str:
    """Plain data as text that is the same in other processes: the order of a set of strings is not."""
    if isinstance(value, Mapping):
        return str([(_text_of(key), _text_of(part)) for key, part in value.items()])
    if isinstance(value, list | tuple):
        return str([*map(_text_of, value)])
    if isinstance(value, partial):
        return _text_of((value.func, value.args, value.keywords))
    if inspect.isroutine(value):
        return _name_of(value)
    return str(sorted(map(_text_of, value))) if isinstance(value, set | frozenset) else repr(value)
