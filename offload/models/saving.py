"""Write a model, or named tensors, as a safetensors checkpoint.

Always true:
- no value is in memory as a whole: what is on disk is copied from file to file, everything else piece by piece
- every file is complete under a temporary name before the first is put in place, and shards get names that no file has;
  the last rename, of the index or the only file, makes the new checkpoint the visible one
- at any moment a reader finds either the old checkpoint, complete, or the new one
- only earlier checkpoints of ours are replaced or removed, and no file that a live tensor refers to
- the files that `from_pretrained` needs beside a transformers model's weights are written after the weights
- any safetensors reader returns the values as they are
- if ranks share the values, each writes its own ranges of the same files, and no value is sent
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, product
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.companions import (
    NOTE,
    Companions,
    companions_in,
    companions_of,
    is_of_transformers,
    quantization_of,
)
from offload.checkpoints.forms.packing import packed_state
from offload.checkpoints.forms.torchao import in_torchaos_form, prefixes_of_quantized
from offload.distributed.placing import runs_of
from offload.distributed.together import Ranks
from offload.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    ForeignFileError,
    OffloadError,
    ReadError,
    UnsupportedOpError,
    WriteError,
)
from offload.memory import as_bytes
from offload.models import log
from offload.progress import progress_in_bytes
from offload.storage.file import TensorFile
from offload.storage.header import MARK, VERSION, build, is_standard, is_unicode
from offload.storage.layout import Layout, contiguous
from offload.storage.reasons import reading, writing
from offload.storage.regular import absolute, closed_after, is_there
from offload.storage.replacing import made_folder, new_file, replacing_all, sync_folder, write_all
from offload.storage.state_file import Kind, state_if_ours
from offload.storage.subclasses import is_subclass_value, refuse_lossy
from offload.storage.write import write_beside
from offload.tensor.arguments import checked_dense, floating_dtype, refuse_unstorable
from offload.tensor.locals import is_dtensor, local_of
from offload.tensor.saved import files_of, identity_of, refuse_referenced, refuse_sources, subclass_value, write_box
from offload.tensor.wrapper import PathLike

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d+-)?\d{5}-of-\d{5}\.safetensors")
_LARGEST_STEP = 64  # alignment in bytes of values whose sizes allow it
_OWN_METADATA = ("format", MARK, NOTE)
_KIND = Kind(what="an index of offload", stamp={"metadata": {MARK: json.dumps({"version": VERSION})}})


def save_checkpoint(
    model_or_state_dict: nn.Module | Mapping[str, torch.Tensor] | Checkpoint,
    folder: PathLike,
    max_shard_size: int | str = "5GB",
    *,
    dtype: torch.dtype | str | None = None,
    process_group: Any = None,
) -> list[Path]:
    """Write `model.safetensors`, or shards with an index, as `save_pretrained` does, in bounded memory.

    Beside the weights of a transformers model go its configuration, its settings for generation, its own code if it
    has any, and its tokenizer if the folder that it was loaded from is there: `from_pretrained(folder)` loads it again.

    Tied weights are written once. Quantized weights of torchao are written in torchao's own form. What was loaded from
    packed weights, and has not been changed, is written as it was packed, under the names that it had there.

    An earlier checkpoint in the folder is replaced as a whole: a process that is killed leaves it, or the new one.
    Where its shards have the usual names, new ones are called `model-2-00001-of-00003.safetensors`, as the index says.

    DTensors are saved whole, by all ranks together: each calls this, with a folder that all of them see, and writes the
    ranges of the files that it has. A value that several ranks have is written by one of them. An error on one rank is
    an error on all, and leaves nothing behind.

    Args:
        model_or_state_dict: a module, of which its `state_dict()` is saved; tensors by name; or an opened checkpoint.
        folder: created if needed. An earlier checkpoint in it is replaced if this function wrote it.
        max_shard_size: bytes of the values in a file: "5GB", "500MiB", 4096. A value that is larger has its own file.
        dtype: to convert floating-point values to, piece by piece, by itself or by its name; those of 8 bits and less
            stay as they are.
        process_group: of the ranks that save together; None for all, where a value is a DTensor, else this process
            alone. Give one where ranks have stages of a model, and no DTensors.

    Returns:
        The files with the weights, the index last.

    Raises:
        ForeignFileError: `folder` has a checkpoint that offload did not write, or one that live tensors refer to; or
            the configuration of another model, which offload did not write.
        UnsupportedOpError: a value can't be stored in a safetensors file.
        UnknownSubclassError: a value is of a tensor subclass that torchao can't store.
        WriteError: the disk is full, the folder is read-only...
        RankError: one of these happened on another rank, or that rank has exited.
        ValueError: `dtype` is not a floating-point one, or `max_shard_size` not an amount.

    Example:
        >>> [path.name for path in save_checkpoint({"w": torch.ones(2)}, "saved")]
        ['model.safetensors']
    """
    ranks = Ranks.of(_values(model_or_state_dict), process_group)

    def planned() -> tuple[_Plan, int]:
        to = None if dtype is None else floating_dtype(dtype)
        return _plan(model_or_state_dict, to), _positive(max_shard_size)

    own, most = ranks.all(planned)
    plan, mine = _of_all(own, ranks)
    files = _shards(plan, most)
    folder = absolute(folder)

    def looked() -> list[Path]:
        earlier = _earlier(folder)
        _refuse_foreign({*(folder / name for name in files), *earlier})
        _refuse_offload_folder(folder)
        refuse_sources(own.sources, earlier)
        refuse_referenced(earlier)
        return earlier

    earlier = ranks.all(looked)
    beside = None

    def noted() -> Mapping[str, str]:
        nonlocal beside
        beside = _beside(model_or_state_dict, own, folder, earlier)
        return beside.note

    plan = replace(plan, metadata={**plan.metadata, **ranks.first(noted)})
    files = ranks.first(lambda: _with_free_names(folder, files))
    targets = [folder / name for name in files] + ([folder / _INDEX] if len(files) > 1 else [])
    with ExitStack() as stack:

        def begun() -> dict[Path, Path]:
            made_folder(folder, plan.nbytes)
            return stack.enter_context(replacing_all(targets, plan.nbytes))

        temporaries = ranks.first(begun)
        ranks.first(lambda: _write_all(plan, files, temporaries, mine if ranks.size == 1 else {}))
        if ranks.size > 1:
            ranks.all(lambda: _fill_all(plan, files, temporaries, mine, shown=ranks.rank == 0))
        ranks.first(stack.close)
    ranks.first(lambda: None if beside is None else beside.put(folder))
    ranks.first(lambda: _remove_all(path for path in earlier if path not in targets))
    log.info("saved %d values, %d bytes, in %d files in %s", len(plan.parts), plan.nbytes, len(files), folder)
    return targets


def save_file_by_file(
    tensors: Mapping[str, torch.Tensor], folder: PathLike, max_shard_size: int | str, *, dtype: torch.dtype | None
) -> None:
    """As `save_checkpoint`, to a folder that keeps each file once it is whole: those that are there are not made again.

    Args:
        tensors, max_shard_size, dtype: see `save_checkpoint`; they are those that the files there were made with.
        folder: one of ours.

    Raises: as `save_checkpoint`
    """
    plan, folder = _plan(tensors, dtype), absolute(folder)
    files = _shards(plan, _positive(max_shard_size))
    made_folder(folder, plan.nbytes)
    for path in [folder / name for name in files] + ([folder / _INDEX] if len(files) > 1 else []):
        if not is_there(path):
            with replacing_all([path], plan.nbytes) as temporaries:
                _write_all(plan, files, temporaries, plan.parts)


# What will be written


@dataclass(frozen=True, slots=True)
class _Part:
    """A value as it will be in its file.

    Attributes:
        tensor: all of it, or this rank's part.
        layout: of the whole.
        boxes: this rank's boxes: their start in the whole, their start in `tensor`, and their size.
    """

    tensor: torch.Tensor
    layout: Layout
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The contents of the files.

    Attributes:
        parts: the values by key.
        ties: the omitted names, each with the key that has its value.
        sources: the files that values come from, by name.
        metadata: of every file.
        parameters: number of elements of each value, for the index.
        dtype: to which floating-point values are converted, or None.
        quantization: what a transformers model's configuration has to say about packing.
    """

    parts: dict[str, _Part]
    ties: dict[str, str]
    sources: dict[str, list[Path]]
    metadata: dict[str, str]
    parameters: dict[str, int]
    dtype: torch.dtype | None = None
    quantization: Mapping[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.layout.nbytes for part in self.parts.values())


def _plan(source: nn.Module | Mapping[str, torch.Tensor] | Checkpoint, dtype: torch.dtype | None) -> _Plan:
    metadata: dict[str, str] = {}
    discarded: Iterable[str] = ()
    noted: Mapping[str, str] = {}
    quantization: Mapping[str, Any] | None = None
    if isinstance(source, Checkpoint):
        tensors: dict[str, Any] = dict(source.tensors())
        metadata = _metadata_of(source)
        noted = source.ties
    elif isinstance(source, nn.Module):
        tensors = dict(source.state_dict())
        packed: Any = getattr(source, "packed_as", None)
        if dtype is None and packed is not None and not any(map(is_dtensor, tensors.values())):
            pieces, others = packed_state(tensors)
            if pieces.keys().isdisjoint(others):
                tensors, quantization = {**others, **pieces, **packed.still_beside(others)}, packed.now(others)
        discarded = _discarded_names(source)
    elif isinstance(source, Mapping):
        tensors = dict(source)
    else:
        raise ArgumentTypeError(
            f"a module, tensors by name, or a checkpoint can be saved, not a {type(source).__name__}"
        )
    outers = {name: tensor for name, tensor in tensors.items() if is_dtensor(tensor)}
    tensors = {name: local_of(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        _check(name, tensor)
    ties = _ties(tensors, set(discarded))
    parts, more = _parts({name: tensor for name, tensor in tensors.items() if name not in ties}, dtype, metadata)
    parts = {key: _shared(part, outers[key], key) if key in outers else part for key, part in parts.items()}
    named = source.named_parameters() if isinstance(source, nn.Module) else _wholes(parts)
    sources = {name: files_of(tensor) for name, tensor in tensors.items()}
    numbers = {name: tensor.numel() for name, tensor in named}
    if isinstance(source, nn.Module) and is_of_transformers(source) and (more or not _is_by_torchao(source)):
        quantization = quantization or quantization_of(source.config)
    return _Plan(parts, {**noted, **ties}, sources, {**metadata, **more}, numbers, dtype, quantization)


def _is_by_torchao(model: Any) -> bool:
    """Whether a model was quantized by torchao; its values may be plain again by now."""
    return getattr(model, "quantization_method", None) == "torchao"


def _beside(source: Any, plan: _Plan, folder: Path, earlier: Iterable[Path]) -> Companions:
    """The files that a folder needs beside the weights, and those of an earlier checkpoint that it does not need."""
    files = companions_of(source, plan.dtype, plan.quantization) if isinstance(source, nn.Module) else None
    opened = [file for path in earlier if path.name != _INDEX and (file := _opened(path)) is not None]
    noted = {key: text for file in opened for key, text in file.header.metadata.items() if file.is_ours}
    return companions_in(folder, files, noted)


def _metadata_of(source: Checkpoint) -> dict[str, str]:
    """The metadata of a checkpoint's files: a quantized one can't be read without it."""
    files = {id(file): file for value in source.values() for file in value.files}
    found: dict[str, str] = {}
    for file in files.values():
        found = {**file.header.metadata, **found}
    return {key: text for key, text in found.items() if key not in _OWN_METADATA and key not in source.ties}


def _discarded_names(model: nn.Module) -> Iterable[str]:
    """The names that a transformers model ties to others, and expects under those."""
    tied: Iterable[str] | None = getattr(model, "all_tied_weights_keys", None)
    return tied or getattr(model, "_tied_weights_keys", None) or ()


def _check(name: object, tensor: object) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"the name of a tensor is text, not {name!r}")
    if name == "__metadata__" or not is_unicode(name):
        raise ArgumentError(f"no tensor in a safetensors file can be called {name!r}: rename it")
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(
            f"{name!r} is a {type(tensor).__name__}, not a tensor: save it elsewhere, and leave it out here"
        )
    checked_dense(tensor, name)
    if not is_subclass_value(tensor):  # for those, torchao decides later whether they can be stored
        refuse_lossy(tensor, name)


def _ties(tensors: Mapping[str, torch.Tensor], discarded: set[str]) -> dict[str, str]:
    """The names that need no value of their own, each with the one that has it.

    Of several names the first in alphabetical order is kept, as in `safetensors.torch.save_model`, but none of
    `discarded` if there is another.
    """
    same: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        same[identity_of(tensor)].append(name)
    ties: dict[str, str] = {}
    for names in same.values():
        kept = min([name for name in names if name not in discarded] or names)
        ties.update((name, kept) for name in sorted(names) if name != kept)
    return ties


def _parts(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, metadata: Mapping[str, str]
) -> tuple[dict[str, _Part], dict[str, str]]:
    """The entries of the files, and additions to their metadata."""
    of_quantized = prefixes_of_quantized(tensors, metadata)
    quantized = {name: value for name, tensor in tensors.items() if (value := subclass_value(tensor)) is not None}
    plain, notes = in_torchaos_form(tensors) if quantized else (tensors, {})
    for name, value in quantized.items():
        refuse_lossy(value, name)
    stay = {key for key in plain if key not in tensors or key.startswith(of_quantized)}
    return {key: _part(key, tensor, None if key in stay else dtype) for key, tensor in plain.items()}, notes


def _part(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> _Part:
    refuse_unstorable(tensor, name)
    converts = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
    layout = contiguous(dtype if dtype is not None and converts else tensor.dtype, tuple(tensor.shape))
    if not is_standard(layout):
        raise UnsupportedOpError(
            f"{name!r} is of {layout.dtype}, which safetensors does not support: convert it first, "
            "or keep it in an offload folder (OffloadedTensor.from_original_tensor, offload.disk_offload)"
        )
    return _Part(tensor.detach(), layout, (_whole(layout.shape),))


def _shards(plan: _Plan, most: int) -> dict[str, list[str]]:
    """The keys for each file, in file order."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        plan.parts,
        get_storage_size=lambda part: part.layout.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    files: dict[str, list[str]] = split.filename_to_tensors or {_SINGLE: []}
    return {name: sorted(keys, key=lambda key: -_step(plan.parts[key].layout.nbytes)) for name, keys in files.items()}


def _with_free_names(folder: Path, files: dict[str, list[str]]) -> dict[str, list[str]]:
    """The same shards with unused names: an existing index refers to complete shards until it is replaced."""
    if len(files) == 1:
        return files
    for number in count(1):
        named = {name if number == 1 else name.replace("-", f"-{number}-", 1): keys for name, keys in files.items()}
        if not any(is_there(folder / name) for name in named):
            return named
    raise AssertionError("unreachable")


def _step(nbytes: int) -> int:
    """The alignment that the end of a value of this size provides for the next one: entries have no gaps.

    With values sorted by decreasing step, each is aligned to its own step, which is at least its element size.
    """
    return min(nbytes & -nbytes, _LARGEST_STEP) or _LARGEST_STEP


def _positive(size: int | str) -> int:
    most = as_bytes(size, 0)
    if most < 1:
        raise ArgumentError(f"max_shard_size={size!r} leaves no room for any value: use '5GB', '500MiB', 4096...")
    return most


# Values that ranks share


def _values(source: Any) -> Iterable[object]:
    if isinstance(source, nn.Module):
        return chain(source.parameters(), source.buffers())
    return source.values() if isinstance(source, Mapping) else ()


def _whole(shape: Sequence[int]) -> Box:
    start = (0,) * len(shape)
    return start, start, tuple(shape)


def _wholes(parts: Mapping[str, _Part]) -> Iterable[tuple[str, torch.Tensor]]:
    """Meta tensors with the shapes of the values."""
    return ((key, torch.empty(part.layout.shape, device="meta")) for key, part in parts.items())


def _shared(part: _Part, outer: Any, name: str) -> _Part:
    """This rank's part of a DTensor."""
    if any(placement.is_partial() for placement in outer.placements):
        raise UnsupportedOpError(
            f"{name!r} is placed as {outer.placements}: redistribute it to Shard or Replicate first"
        )
    runs = runs_of(outer, name)
    layout = contiguous(part.layout.dtype, tuple(outer.shape))
    sides = [runs.get(dim, [(0, side)]) for dim, side in enumerate(outer.shape)]
    firsts = [list(accumulate((end - begin for begin, end in side), initial=0)) for side in sides]
    boxes = []
    for numbers in product(*(range(len(side)) for side in sides)):
        cuts = [side[number] for side, number in zip(sides, numbers, strict=True)]
        start = tuple(begin for begin, _ in cuts)
        inside = tuple(first[number] for first, number in zip(firsts, numbers, strict=True))
        boxes.append((start, inside, tuple(end - begin for begin, end in cuts)))
    return replace(part, layout=layout, boxes=tuple(boxes))


def _of_all(own: _Plan, ranks: Ranks) -> tuple[_Plan, dict[str, _Part]]:
    """The plan of all ranks, and what this rank writes; a shard on several ranks goes to the one with least so far.

    Raises:
        CheckpointError: the ranks disagree about a value of the same name, or lack parts of one.
    """
    if ranks.size == 1:
        return own, own.parts
    said = {key: (part.layout, [(start, sides) for start, _, sides in part.boxes]) for key, part in own.parts.items()}
    every = ranks.gather((said, own.ties, own.metadata, own.parameters))
    ties = {name: kept for _, tied, _, _ in every for name, kept in tied.items()}
    holders: dict[str, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    layouts: dict[str, Layout] = {}
    for rank, (had, *_) in enumerate(every):
        for key, (layout, boxes) in had.items():
            if layouts.setdefault(key, layout) != layout:
                raise CheckpointError(f"{key!r} is {layouts[key]} on one rank, and {layout} on rank {rank}")
            for box in boxes:
                holders[key][box].append(rank)
    loads, mine = [0] * ranks.size, {}
    for key, layout in layouts.items():
        if key in ties:
            continue
        if sum(prod(sides) for _, sides in holders[key]) != prod(layout.shape):
            raise CheckpointError(
                f"{key!r} of shape {list(layout.shape)}: the ranks do not have each element of it once"
            )
        chosen = []
        for (start, sides), having in holders[key].items():
            writer = min(having, key=loads.__getitem__)
            loads[writer] += prod(sides) * layout.dtype.itemsize
            if writer == ranks.rank and prod(sides):
                chosen.append((start, sides))
        if chosen:
            part = own.parts[key]
            mine[key] = replace(part, boxes=tuple(box for box in part.boxes if (box[0], box[2]) in chosen))
    parts = {key: _Part(torch.empty(0), layout, ()) for key, layout in layouts.items() if key not in ties}
    metadata = {key: text for _, _, noted, _ in every for key, text in noted.items()}
    numbers = {name: count for *_, counted in every for name, count in counted.items()}
    return _Plan(parts, ties, own.sources, metadata, numbers), mine


# Files


def _write_all(
    plan: _Plan, files: Mapping[str, list[str]], temporaries: Mapping[Path, Path], mine: Mapping[str, _Part]
) -> None:
    """Create the files and write this rank's values, leaving room for the others."""
    nbytes = sum(plan.parts[key].layout.nbytes for path in temporaries for key in files.get(path.name, ()))
    with progress_in_bytes(nbytes, "saving", shown=bool(mine)) as advance:

        def fill(fd: int, key: str, start: int) -> None:
            if key in mine:
                _write_part(fd, start, mine[key])
                advance(mine[key].layout.nbytes)

        for target, temporary in temporaries.items():
            log.debug("writing %s", target)
            if target.name == _INDEX:
                _write_index(target, temporary, plan, files)
            else:
                layouts = {key: plan.parts[key].layout for key in files[target.name]}
                write_beside(temporary, target, layouts, _said_in(plan, files), fill)


def _fill_all(
    plan: _Plan,
    files: Mapping[str, list[str]],
    temporaries: Mapping[Path, Path],
    mine: Mapping[str, _Part],
    *,
    shown: bool,
) -> None:
    """Write this rank's values into files created by another rank."""
    with progress_in_bytes(plan.nbytes, "saving", shown=shown) as advance:
        for target, temporary in temporaries.items():
            keys = files.get(target.name, [])
            if mine.keys().isdisjoint(keys):
                continue
            head = build({key: plan.parts[key].layout for key in keys}, {}, _said_in(plan, files))
            with writing(target, head.size), closed_after(os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)) as fd:
                for key in keys:
                    if key in mine:
                        _write_part(fd, head.start(key), mine[key])
                    advance(plan.parts[key].layout.nbytes)
                os.fsync(fd)


def _said_in(plan: _Plan, files: Mapping[str, list[str]]) -> dict[str, str]:
    """The metadata of each file; if there are several, the index has the ties."""
    return plan.metadata if len(files) > 1 else {**plan.ties, **plan.metadata}


def _write_part(fd: int, at: int, part: _Part) -> None:
    for start, inside, sides in part.boxes:
        box = part.tensor
        for dim, (first, side) in enumerate(zip(inside, sides, strict=True)):
            box = box if side == box.shape[dim] else box.narrow(dim, first, side)
        write_box(fd, at, box, part.layout.dtype, part.layout.shape, start)


def _write_index(target: Path, temporary: Path, plan: _Plan, files: Mapping[str, list[str]]) -> None:
    weight_map = {key: name for name, keys in files.items() for key in keys}
    numbers = {"total_parameters": sum(plan.parameters.values()), "total_size": plan.nbytes}
    index = {"metadata": {**plan.ties, **numbers, **_KIND.stamp["metadata"]}, "weight_map": weight_map}
    data = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    with writing(target, len(data)), new_file(temporary, len(data), like=target) as fd:
        write_all(fd, memoryview(data), 0)


def _remove_all(earlier: Iterable[Path]) -> None:
    for path in earlier:
        _remove_earlier(path)


def _remove_earlier(path: Path) -> None:
    """Remove a file of the earlier checkpoint; the index durably, before any shard that it names."""
    try:
        path.unlink()
    except OSError as error:
        reason = f"the new checkpoint is written, but this file of the earlier one stays ({error.strerror}): remove it"
        raise WriteError(error.errno, reason, str(path)) from error
    if path.name == _INDEX:
        sync_folder(path.parent)


def _earlier(folder: Path) -> list[Path]:
    """The files of the existing checkpoint in a folder, index first: a new one replaces or removes them.

    These include our shards that no index names: a killed process left them.
    """
    found = [path for path in (folder / _INDEX, folder / _SINGLE) if is_there(path)]
    with reading(folder):
        shards = [path for path in sorted(folder.glob("model-*.safetensors")) if _SHARD.fullmatch(path.name)]
    return found + [path for path in shards if _is_ours(path)]


def _refuse_foreign(paths: Iterable[Path]) -> None:
    for path in sorted(paths):
        if is_there(path) and not _is_ours(path):
            raise ForeignFileError(
                f"{path} exists and is not part of a checkpoint that offload saved: it is left as it is. "
                "Save to another folder, or move it away first."
            )


def _refuse_offload_folder(folder: Path) -> None:
    """A checkpoint among single-value files would hide them: it would be opened in their place."""
    with reading(folder):
        found = list(folder.glob("*.safetensors"))
    for path in found:
        file = _opened(path)
        if file is not None and file.notes.get("name") is not None:
            raise ForeignFileError(f"{folder} is an offload folder ({path.name}...): save to another one")


def _opened(path: Path) -> TensorFile | None:
    """A file of tensors; None if it is not one."""
    try:
        return TensorFile.open(path)
    except ReadError:
        raise
    except OffloadError:
        return None


def _is_ours(path: Path) -> bool:
    """Whether `save_checkpoint` wrote it."""
    with reading(path):
        is_link = path.is_symlink()
    if is_link:
        return False
    if path.name == _INDEX:
        return state_if_ours(path, _KIND) is not None
    file = _opened(path)
    return file is not None and file.is_ours
