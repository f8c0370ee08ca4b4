"""A checkpoint that several ranks write together.

Always true:
- each rank writes its own ranges of the same files, and no value is sent
- an error on one rank is an error on all, and leaves nothing behind
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from offload.checkpoints.companions import companions_in
from offload.checkpoints.writing import (
    Contents,
    Part,
    earlier_in,
    metadata_of_files,
    notes_in,
    remove_earlier,
    shards,
    targets_in,
    with_free_names,
    write_files,
    write_part,
)
from offload.distributed.placing import runs_of
from offload.distributed.together import Ranks
from offload.errors import CheckpointError, UnsupportedOpError
from offload.models import log
from offload.progress import progress_in_bytes
from offload.storage.header import build
from offload.storage.layout import Layout, contiguous
from offload.storage.reasons import writing
from offload.storage.regular import owned
from offload.storage.replacing import made_folder, replacing_all


def write_together(
    ranks: Ranks, planned: Callable[[], tuple[Contents, dict[str, bytes] | None, int]], folder: Path
) -> list[Path]:
    """`write_checkpoint` by several ranks.

    Args:
        planned: gives what this rank has, the files beside the weights, and the bytes of a file.
    """
    own, files_beside, most = ranks.all(planned)
    contents, mine = _of_all(own, ranks)
    files = shards(contents, most)
    earlier = ranks.all(lambda: earlier_in(folder, files, own.sources))
    beside = ranks.first(lambda: companions_in(folder, files_beside, notes_in(earlier)))
    contents = contents.noting(beside.note)
    files = ranks.first(lambda: with_free_names(folder, files))
    targets = targets_in(folder, files)
    with ExitStack() as stack:

        def begun() -> dict[Path, Path]:
            made_folder(folder, contents.nbytes)
            temporaries = stack.enter_context(replacing_all(targets, contents.nbytes))
            write_files(contents, files, temporaries, {})
            return temporaries

        temporaries = ranks.first(begun)
        ranks.all(lambda: _fill_all(contents, files, temporaries, mine, shown=ranks.rank == 0))
        ranks.first(stack.close)
    ranks.first(lambda: beside.put(folder))
    ranks.first(lambda: remove_earlier(path for path in earlier if path not in targets))
    log.info("saved %d values, %d bytes, in %d files in %s", len(contents.parts), contents.nbytes, len(files), folder)
    return targets


def own_parts(contents: Contents, outers: Mapping[str, Any]) -> Contents:
    """The contents with this rank's parts of DTensors (by name), whose local tensors it has so far."""
    parts = {key: _own_part(part, outers[key], key) if key in outers else part for key, part in contents.parts.items()}
    return replace(contents, parts=parts, parameters={key: prod(part.layout.shape) for key, part in parts.items()})


def _own_part(part: Part, outer: Any, name: str) -> Part:
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


def _of_all(own: Contents, ranks: Ranks) -> tuple[Contents, dict[str, Part]]:
    """The plan of all ranks, and what this rank writes; a shard on several ranks goes to the one with least so far.

    Raises:
        CheckpointError: the ranks disagree about a value of the same name, or lack parts of one.
    """
    described = {
        key: (part.layout, [(start, sides) for start, _, sides in part.boxes]) for key, part in own.parts.items()
    }
    every = ranks.gather((described, own.ties, own.metadata, own.parameters))
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
                f"{key!r} of shape {list(layout.shape)}: the ranks together do not have every element exactly once"
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
    parts = {key: Part(torch.empty(0), layout, ()) for key, layout in layouts.items() if key not in ties}
    metadata = {key: text for _, _, noted, _ in every for key, text in noted.items()}
    numbers = {name: count for *_, counted in every for name, count in counted.items()}
    return Contents(parts, ties, own.sources, metadata, numbers), mine


def _fill_all(
    contents: Contents,
    files: Mapping[str, list[str]],
    temporaries: Mapping[Path, Path],
    mine: Mapping[str, Part],
    *,
    shown: bool,
) -> None:
    """Write this rank's values into files created by another rank."""
    with progress_in_bytes(contents.nbytes, "saving", shown=shown) as advance:
        for target, temporary in temporaries.items():
            keys = files.get(target.name, [])
            if mine.keys().isdisjoint(keys):
                continue
            head = build({key: contents.parts[key].layout for key in keys}, {}, metadata_of_files(contents, files))
            with writing(target, head.size), owned(os.open, temporary, os.O_WRONLY | os.O_CLOEXEC) as opened:
                for key in keys:
                    if key in mine:
                        write_part(opened.fileno(), head.start(key), mine[key])
                    advance(contents.parts[key].layout.nbytes)
                os.fsync(opened)
