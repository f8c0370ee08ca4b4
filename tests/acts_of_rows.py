"""Acts on a cache: each row is old, new, or missing if it was being written; and the cache goes on.

Part of the table in `tests/acts.py`. `tests/cache/test_cache_crash.py` kills writers at random moments.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offload
from offload import TensorCache
from offload.errors import MissingFileError
from offload.system.modes import no_grad
from tests.crashes import KILL, READS, WRITES, Act

COLUMNS: dict[str, Any] = {"x": (torch.float32, (3,)), "t": (torch.int32, (None,)), "note": "json"}
COUNT = 12
MOST = 6 * COUNT


def values(rows: Iterable[int], *, new: bool = False) -> dict[str, Any]:
    rows = [row + 1000 * new for row in rows]
    return {
        "x": torch.tensor(rows)[:, None].float().expand(-1, 3) + 1,
        "t": [torch.full((row % 7 + 1,), row, dtype=torch.int32) for row in rows],
        "note": [f"number {row}" for row in rows],
    }


def listed(batch: dict[str, Any]) -> list[Any]:
    """Rows, each as what its columns hold."""
    return [[x.tolist(), t.tolist(), note] for x, t, note in zip(batch["x"], batch["t"], batch["note"], strict=True)]


OLD, NEW = listed(values(range(MOST))), listed(values(range(MOST), new=True))


def folder_of(folder: Path) -> Path:
    """A cache of which all rows are filled: a copy of one."""
    first = folder.parent / "rows"
    if not first.exists():
        with TensorCache.create(first, COLUMNS, COUNT) as cache:
            cache[:] = values(range(COUNT))
    return shutil.copytree(first, folder)


def opened(folder: Path, mode: str = "r+") -> TensorCache:
    """One that was read, too."""
    cache = TensorCache.open(folder_of(folder), mode)
    cache[:]
    return cache


def about_to_close(folder: Path) -> TensorCache:
    cache = TensorCache.open(folder_of(folder), "r+")
    cache.append(values(range(COUNT, COUNT + 5), new=True))
    cache.flush()
    cache[0] = {name: value[0] for name, value in values([0], new=True).items()}
    return cache


def is_whole(cache: TensorCache, written: Iterable[int] = (), *, known: int = COUNT) -> None:
    """Rows are old or new; some may be missing of those that were `written`, and of later ones than are `known`."""
    gone = set(cache.missing_rows().tolist())
    assert gone <= {*written, *range(known, MOST)}, gone
    rows = [row for row in range(len(cache)) if row not in gone]
    assert rows[:1] in ([], [0], [1])
    for row, one in zip(rows, listed(cache[rows]), strict=True):
        assert one in (OLD[row], NEW[row]), row


def goes_on(cache: TensorCache) -> None:
    """All rows are written again, others are added; another one that opens it finds them, and adds one."""
    before = len(cache)
    cache[:] = values(range(before), new=True)
    assert range(before, before + 2) == cache.append(values(range(before, before + 2)))
    cache.flush()
    assert NEW[:before] == listed(cache[:before])
    cache.close()
    with TensorCache.open(cache.folder, "r+") as other:
        assert [*NEW[:before], *OLD[before : before + 2]] == listed(other[:])
        assert range(before + 2, before + 3) == other.append(values([0]))


def can_be_written(folder: Path) -> None:
    with TensorCache.open(folder, "r+") as cache:
        is_whole(cache, range(COUNT))
        goes_on(cache)


def has_old_rows(folder: Path) -> None:
    assert OLD[:COUNT] == listed(TensorCache.open(folder)[:])


def whole_or_made_again(folder: Path) -> None:
    if (folder / "manifest.json").exists():
        with TensorCache.open(folder, "r+") as cache:
            is_whole(cache, range(COUNT))
            cache[:] = values(range(COUNT))
    elif folder.exists():
        with pytest.raises(MissingFileError, match=r"no complete cache in this folder: TensorCache\.create creates"):
            TensorCache.open(folder)


def has_lost_nothing(cache: TensorCache) -> None:
    """It has let go of its files; what was flushed is there."""
    cache.close()
    with TensorCache.open(cache.folder, "r+") as other:
        assert COUNT + 5 == len(other)
        is_whole(other, [0], known=COUNT + 5)
        goes_on(other)


# Acts


def overwrite(cache: TensorCache) -> list[Any]:
    cache[3:9] = values(range(3, 9), new=True)
    cache.flush()
    return listed(cache[3:9])


def append(cache: TensorCache, *counts: int) -> None:
    for count in counts:
        rows = range(len(cache), len(cache) + count)
        assert rows == cache.append(values(rows, new=True))
        assert NEW[rows.start : rows.stop] == listed(cache[rows])
    cache.flush()


def write(folder: Path) -> list[Any]:
    with TensorCache.open(folder, "r+") as cache:
        append(cache, 3)
        return overwrite(cache)


def is_whole_again(folder: Path) -> None:
    is_whole(TensorCache.open(folder), range(3, 9))


def in_place(cache: TensorCache) -> None:
    cache.column("x")[4].mul_(1)
    cache.flush()


def create(folder: Path) -> None:
    TensorCache.create(folder, COLUMNS, COUNT, exist_ok=True).close()


def fill(folder: Path) -> list[Any]:
    """With a model, which is read once for all batches."""
    model = offload.disk_offload(nn.utils.skip_init(nn.Linear, 1, 1))
    mapped: Any = partial(offload.map_batches, model=model)
    with no_grad(), TensorCache.create(folder, COLUMNS, COUNT, exist_ok=True) as cache:  # torch's is interrupted, too
        cache.fill(
            lambda rows: (model(rows[:, None].float()), values(rows.tolist()))[1],
            torch.arange(COUNT),
            batch_size=5,
            map_fn=mapped,
            progress=False,
        )
        return listed(cache[:])


def to_disk(*, old: bool) -> Act:
    name = "x.safetensors"

    def write(folder: Path, number: int = 1) -> Any:
        place = folder / name
        TensorCache(tensors={"x": torch.arange(3) * number}, metadata={"number": number}).to_disk(place)
        return load_file(place)["x"]

    def check(folder: Path) -> None:
        left = [*folder.iterdir()] if folder.exists() else []
        assert [] == [path for path in left if path != folder / name and not path.name.startswith(".offload-tmp-")]
        if old or (folder / name).exists():
            cache = TensorCache.from_disk(folder / name)
            assert [0, cache.metadata["number"], 2 * cache.metadata["number"]] == cache[:]["x"].tolist()

    return Act(lambda folder: (old and write(folder, 7), folder)[1], write, check)


opened_to_read = partial(opened, mode="r")
READ: dict[str, Callable[[TensorCache], Any]] = {
    "rows": lambda cache: listed(cache[:]),
    "some rows": lambda cache: listed(cache[[5, 11, 2]]),
    "a row": lambda cache: cache[7]["note"],
    "batches": lambda cache: [batch["note"] for batch in cache.batches(8, prefetch=0)],
    "a column": lambda cache: cache.column("x")[5].tolist(),
    "missing rows": lambda cache: (cache.missing_rows(), cache.num_filled, len(cache)),
    "repr": lambda cache: repr(cache).replace(str(cache.folder), ""),
}
CHANGED = WRITES - {KILL}

ROWS = {
    **{f"cache: {what}": Act(opened, act, is_whole, crashes=READS) for what, act in READ.items()},
    **{f"cache, read: {what}": Act(opened_to_read, act, is_whole, crashes=READS) for what, act in READ.items()},
    "cache: open": Act(folder_of, lambda at: TensorCache.open(at, "r+").close(), can_be_written, crashes=READS),
    "cache: open and read": Act(folder_of, lambda at: listed(TensorCache.open(at)[:]), has_old_rows, crashes=READS),
    "cache: create": Act(lambda folder: folder, create, whole_or_made_again),
    "cache: overwrite": Act(opened, overwrite, partial(is_whole, written=range(3, 9)), crashes=CHANGED),
    "cache: append": Act(opened, lambda cache: append(cache, 9), is_whole, crashes=CHANGED),
    "cache: append beyond the room": Act(opened, lambda cache: append(cache, 12, 12), is_whole, crashes=CHANGED),
    "cache: write": Act(folder_of, write, is_whole_again, crashes=frozenset({KILL})),
    "cache: in place": Act(opened, in_place, is_whole, crashes=CHANGED),
    "cache: close": Act(about_to_close, TensorCache.close, has_lost_nothing, crashes=CHANGED),
    "cache: fill": Act(lambda folder: folder, fill, whole_or_made_again, crashes=CHANGED),
    "to_disk": to_disk(old=False),
    "to_disk over another": to_disk(old=True),
}
