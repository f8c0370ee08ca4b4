"""Comparing a model on disk with the same model without `offload`.

Always true:
- equal means bit for bit: a NaN equals only the same bits, and 0 is not -0
- both read the same checkpoint, mapped at the same offsets, so that alignment is the same
- each difference is a line that names it; without differences there are no lines
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import offload
from bench.probes import first_value

SMALL_SHARDS = "100KB"
_SMALL = 1024  # bytes up to which a parameter may be in memory


def differences(
    plain: Any, model: Any, source: Path, probe: Mapping[str, Any] | None, notes: list[str], tokens: int = 4
) -> Iterator[str]:
    """All differences between a plain model and the one on disk.

    Args:
        plain, model: loaded from `source`, in evaluation mode.
        probe: inputs; None to skip forward passes.
        notes: things that the plain model itself can't do are added here, and not compared.
        tokens: number of tokens to generate, for models that can.
    """
    yield from in_states(plain, model)
    yield from not_on_disk(model)
    yield from in_ties(plain, model)
    if probe is not None:
        yield from in_outputs(plain, model, probe, notes)
        if hasattr(plain, "generate"):
            yield from in_tokens(plain, model, probe, notes, tokens)
    yield from in_saved(plain, model, source, notes)


def in_states(plain: Any, model: Any) -> Iterator[str]:
    """State dictionaries: names in order, shapes, dtypes, values."""
    ours, theirs = model.state_dict(), plain.state_dict()
    if list(ours) != list(theirs):
        yield f"state_dict has other names: {sorted(set(ours) ^ set(theirs))[:4]}"
    for name in theirs.keys() & ours.keys():
        yield from _between(f"state_dict: {name}", theirs[name], offload.materialize(ours[name]))
    buffers = dict(model.named_buffers())
    for name, value in plain.named_buffers():
        if name not in theirs:
            yield from _between(f"buffer {name}", value, offload.materialize(buffers[name]))


def not_on_disk(model: Any) -> Iterator[str]:
    """Larger parameters that are in memory."""
    for name, value in model.named_parameters():
        if not offload.is_offloaded(value) and value.numel() * value.itemsize > _SMALL:
            yield f"{name} is in memory"


def in_ties(plain: Any, model: Any) -> Iterator[str]:
    """Which names share a parameter."""
    if _ties(plain) != _ties(model):
        yield f"tied parameters: {sorted(map(sorted, _ties(plain) ^ _ties(model)))[:3]}"


def _ties(model: Any) -> set[frozenset[str]]:
    named: dict[int, set[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(value), set()).add(name)
    return {frozenset(names) for names in named.values()}


def in_outputs(plain: Any, model: Any, probe: Mapping[str, Any], notes: list[str]) -> Iterator[str]:
    """Results of a forward pass."""
    ours, theirs = (dict(outputs(one, probe)) for one in (model, plain))
    if ours.keys() != theirs.keys():
        yield f"outputs: {sorted(ours.keys() ^ theirs.keys())[:4]}"
    unequal = {name: list(_between(f"output {name}", theirs[name], ours[name])) for name in theirs.keys() & ours.keys()}
    if not any(unequal.values()):
        return
    again = dict(outputs(plain, probe))
    for name, lines in sorted(unequal.items()):
        if lines and list(_between(name, theirs[name], again[name])):
            notes.append(f"{name} is not the same in two passes of the plain model")
        else:
            yield from lines


@torch.no_grad()
def outputs(model: Any, probe: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors returned by a forward pass, by name, with the same random numbers each time."""
    torch.manual_seed(0)
    yield from tensors_in(model(**probe))


def tensors_in(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in nested containers and caches, by path."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth > 8 or isinstance(value, (str, int, float, torch.dtype, torch.device)):
        return
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from tensors_in(below, f"{name}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for at, below in enumerate(value):
            yield from tensors_in(below, f"{name}.{at}", depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        yield from tensors_in(vars(value), name, depth + 1)


def in_tokens(plain: Any, model: Any, probe: Mapping[str, Any], notes: list[str], tokens: int) -> Iterator[str]:
    """Greedy generation; by a class's own `generate`, whatever that gives."""
    try:
        theirs = generated(plain, probe, tokens)
    except Exception as error:  # from transformers, with the plain model
        notes.append(f"does not generate: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
        return
    notes.append("generates")
    ours = generated(model, probe, tokens)
    if not torch.equal(_bits(theirs), _bits(ours)):
        yield f"tokens: {ours.tolist()} for {theirs.tolist()}"


def generated(model: Any, probe: Mapping[str, Any], tokens: int) -> torch.Tensor:
    """The tokens, or other values, that a model generates."""
    torch.manual_seed(0)
    given = {name: value for name, value in probe.items() if not name.startswith("decoder_")}
    start = {"decoder_start_token_id": 0} if model.config.is_encoder_decoder else {}
    if model.can_generate():
        found = model.generate(**given, **start, max_new_tokens=tokens, do_sample=False)
    else:
        known = signature(model.generate).parameters.values()
        needed = [one.name for one in known if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        more = {name: first_value(name, model) for name in needed if name not in given}
        found = model.generate(**more, **{one.name: given[one.name] for one in known if one.name in given})
    return next(value for _, value in tensors_in(found))


def in_saved(plain: Any, model: Any, source: Path, notes: list[str]) -> Iterator[str]:
    """Checkpoints saved by both, the one on disk in small shards."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain.save_pretrained(Path(folder) / "plain")
        except Exception as error:  # from transformers, with the plain model
            notes.append(f"is not saved again: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
            return
        model.save_pretrained(Path(folder) / "ours", max_shard_size=SMALL_SHARDS)
        theirs, ours, first = (stored(path) for path in (Path(folder) / "plain", Path(folder) / "ours", source))
        if ours.keys() != theirs.keys():
            yield f"saved names: {sorted(ours.keys() ^ theirs.keys())[:4]}"
        for name in theirs.keys() & ours.keys():
            yield from _between(f"saved: {name}", theirs[name], ours[name])
        if theirs.keys() != first.keys():
            notes.append(f"saved under other names than it was loaded from: {sorted(theirs.keys() ^ first.keys())[:2]}")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of all shards."""
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found.update(load_file(shard))
    return found


def _between(what: str, expected: torch.Tensor, found: torch.Tensor) -> Iterator[str]:
    if type(found) is not torch.Tensor and not isinstance(found, torch.nn.Parameter):
        yield f"{what} is a {type(found).__name__}"
    elif (expected.shape, expected.dtype) != (found.shape, found.dtype):
        yield f"{what} is {found.dtype} {tuple(found.shape)} for {expected.dtype} {tuple(expected.shape)}"
    elif not torch.equal(_bits(expected), _bits(found)):
        yield f"{what} has other values"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


def first(found: Iterator[str], most: int = 3) -> str:
    """The first differences in a line."""
    lines = [line for line, _ in zip(found, range(most + 1), strict=False)]
    return "; ".join(lines[:most]) + ("..." if len(lines) > most else "")
