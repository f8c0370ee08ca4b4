"""A table of rows that exceeds memory: written, read by index, and read from end to end.

Always true:
- each store holds the same rows, and everything that is read is checked, off the clock
- writing ends when the files are synced, even for peers that don't sync by themselves
- cold means nothing in the page cache; capped means in a memory cgroup of half the data plus an allowance, which is
  full of the store's own files when the clock starts
- an epoch is all rows once, in random batches, starting cold, without dropping anything in between
- the limit is the time of bare system calls: the better of row by row, and all rows announced first; for an epoch, a
  scan and then all batches row by row
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch

from bench import teachers
from bench.apart import run_apart
from bench.limits import MIB, sync
from bench.memory_cap import Group, memory_cap
from bench.page_cache import files_in, make_cold, warm
from bench.peers import absent
from bench.process import read_bytes
from bench.rounds import Figure, Rounds, in_turn
from bench.row_stores import ANNOUNCED, PACKAGES, RAW, STORES, TORCH_MAPPED, Reader, Writer, values_of
from bench.scale import Scale

BATCH = 256  # rows
ALLOWANCE = 32 * MIB  # batches, buffers
_COLUMNS = (2048, 128)  # rows of 8 KiB and of 512 B
_STEP = 8 * MIB  # bytes per part when everything is written or read
_COLD_BATCHES = 4
_CHECKED = 4  # batches that are read back after writing
_EPOCH = 2  # factor for the time limit
SCANNED = "a scan, then preadv"
_SAME_FILES = (ANNOUNCED, TORCH_MAPPED)  # other ways of reading files written by others


@dataclass(frozen=True)
class Table:
    """The table: rows of float32.

    Attributes:
        batches: random batches to read.
        seconds: time limit for reading.
        seed: for the random rows.
    """

    rows: int
    columns: int
    batches: int
    seconds: float
    seed: int = 1

    @property
    def row_bytes(self) -> int:
        return self.columns * 4

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def step(self) -> int:
        """Rows per part."""
        return _STEP // self.row_bytes

    def parts(self, step: int) -> Iterator[tuple[int, int]]:
        return ((start, min(start + step, self.rows)) for start in range(0, self.rows, step))

    def whole(self) -> Table:
        """The same table with batches of all rows."""
        return replace(self, batches=-(-self.rows // BATCH), seconds=self.seconds * _EPOCH)

    def random_rows(self, seed: int) -> Sequence[torch.Tensor]:
        """Batches of rows without repetition."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.rows, generator=generator)[: self.batches * BATCH].split(BATCH)


@dataclass(frozen=True)
class Timing:
    """Per batch, or per scan of the table: seconds, and bytes from the disk."""

    seconds: float
    bytes_read: int


T = TypeVar("T")
Reading = Callable[[Reader, Table], Timing]


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Writing, and reading in three memory states, for large and small rows."""
    tables = [
        Table(scale.cache_bytes // (columns * 4), columns, scale.cache_batches, scale.cache_seconds)
        for columns in _COLUMNS
    ]
    found = run_apart(_writes, scratch, tables[0], scale.rounds)
    for table in tables:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            found += _reads(Path(folder), table, scale.rounds)
    return [*found, *run_apart(teachers.figures, scale.cache_bytes, scale.rounds, scratch)]


# Writing


def _writes(scratch: Path, table: Table, rounds: int) -> list[Figure]:
    missing = absent(PACKAGES)
    written = [arm for arm in STORES if arm not in _SAME_FILES]
    fixed = {arm: "it cannot grow" for arm in written if not STORES[arm].append}
    bulk = {arm: partial(_write_trial, arm, scratch, table, table.step, creating(arm, table)) for arm in written}
    grown = {arm: partial(_write_trial, arm, scratch, table, BATCH, appending(arm, table)) for arm in written}
    size = f"{table.nbytes / 1e6:.3g} MB"
    return [
        _write_figure(f"cache, written: {size} in parts of 8 MiB", in_turn(bulk, rounds, missing)),
        _write_figure(f"cache, appended: {size} in batches of {BATCH} rows", in_turn(grown, rounds, fixed | missing)),
    ]


def _write_figure(case: str, done: Rounds[float]) -> Figure:
    limit = done.take(RAW)
    return Figure(case, "s", done.results, limit, "pwrite", done.missing)


def creating(arm: str, table: Table) -> Callable[[Path], Writer]:
    """Opens a writer for a table of known size."""
    return lambda folder: STORES[arm].create(folder, table.rows, table.columns)


def appending(arm: str, table: Table) -> Callable[[Path], Writer]:
    """Opens a writer for a growing table."""
    return lambda folder: STORES[arm].append(folder, table.columns)


def _write_trial(arm: str, scratch: Path, table: Table, step: int, start: Callable[[Path], Writer]) -> float:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        seconds = write_all(Path(folder), table, step, start)
        reader = STORES[arm].open(Path(folder), table.columns)
        for rows in table.random_rows(0)[:_CHECKED]:
            _require(reader.batch(rows), rows)
        reader.close()
    return seconds


def write_all(folder: Path, table: Table, step: int, start: Callable[[Path], Writer]) -> float:
    """The time to write all rows to the disk."""
    clock = Clock()
    writer = clock.time(lambda: start(folder))
    for first, end in table.parts(step):
        values = values_of(torch.arange(first, end), table.columns)
        clock.time(partial(writer.write, first, values))
    clock.time(writer.close)
    clock.time(lambda: [sync(file) for file in files_in(folder)])
    return clock.seconds


# Reading


def _reads(folder: Path, table: Table, rounds: int) -> list[Figure]:
    arms = [arm for arm in STORES if arm not in _SAME_FILES]
    building = {arm: partial(run_apart, _build, arm, folder, table) for arm in arms}
    missing = absent(PACKAGES) | in_turn(building, 1, absent(PACKAGES)).missing
    return run_apart(_uncapped, folder, table, rounds, missing) + _capped(folder, table, rounds, missing)


def place(folder: Path, arm: str) -> Path:
    """The folder of a store's files; two ways of reading one format share it."""
    return folder / STORES[arm].create.__name__


def _build(arm: str, folder: Path, table: Table) -> None:
    place(folder, arm).mkdir()
    write_all(place(folder, arm), table, table.step, creating(arm, table))


def _uncapped(folder: Path, table: Table, rounds: int, missing: dict[str, str]) -> list[Figure]:
    """All stores in one process, in turn."""
    found = []
    for what, read in _readings(table).items():
        for state, trial in (("warm", warm_trial), ("cold", cold_trial)):
            trials = {arm: partial(trial, arm, folder, table, read) for arm in STORES}
            found.append(_read_figure(f"cache, {state}: {what}", in_turn(trials, rounds, missing)))
    return [*found, _epoch_figure(folder, table, rounds, missing)]


def _epoch_figure(folder: Path, table: Table, rounds: int, missing: dict[str, str]) -> Figure:
    trials = {arm: partial(fresh_trial, arm, folder, table, read_epoch, make_cold) for arm in STORES}
    for arm in (RAW, ANNOUNCED):
        del trials[arm]
    done = in_turn({**trials, SCANNED: partial(scanned_trial, folder, table)}, rounds, missing)
    limit = [one.seconds for one in done.take(SCANNED)]
    facts = {arm: {"bytes read": results[-1].bytes_read} for arm, results in done.results.items()}
    case = f"cache, first epoch: {table.nbytes / 1e6:.3g} MB in batches of {BATCH} random rows of {table.row_bytes} B"
    return Figure(case, "s", done.values(lambda one: one.seconds), limit, SCANNED, done.missing, facts)


def scanned_trial(folder: Path, table: Table) -> Timing:
    """All rows in order, starting cold, and then in random batches."""
    scan = fresh_trial(RAW, folder, table, read_all, make_cold)
    with opened(RAW, folder, table) as reader:
        epoch = read_epoch(reader, table)
    return Timing(scan.seconds + epoch.seconds, scan.bytes_read + epoch.bytes_read)


def _capped(folder: Path, table: Table, rounds: int, missing: dict[str, str]) -> list[Figure]:
    """Each trial in a separate process and group; or the reason why there are none."""
    found = []
    for what, read in _readings(table).items():
        trials = {arm: partial(_in_group, arm, folder, table, read) for arm in STORES}
        try:
            with memory_cap(ALLOWANCE):
                pass
            found.append(_read_figure(f"cache, capped: {what}", in_turn(trials, rounds, missing)))
        except OSError as error:
            found.append(Figure(f"cache, capped: {what}", "", {}, [], "", {"no arm": str(error)}))
    return found


def _readings(table: Table) -> dict[str, Reading]:
    readings: dict[str, Reading] = {f"{BATCH} random rows of {table.row_bytes} B": read_batches}
    if table.columns == max(_COLUMNS):
        readings[f"scan of {table.nbytes / 1e6:.3g} MB"] = read_all
    return readings


def _read_figure(case: str, done: Rounds[Timing]) -> Figure:
    """The limit is the better of the two ways of reading with system calls, per round."""
    pairs = zip(done.take(RAW), done.take(ANNOUNCED), strict=True)
    limit = [min(one.seconds, other.seconds) for one, other in pairs]
    facts = {arm: {"bytes read": results[-1].bytes_read} for arm, results in done.results.items()}
    return Figure(case, "s", done.values(lambda one: one.seconds), limit, "preadv", done.missing, facts)


def warm_trial(arm: str, folder: Path, table: Table, read: Reading) -> Timing:
    """With everything cached, after reading as many other batches from the store."""
    warm(files_in(place(folder, arm)))
    with opened(arm, folder, table) as reader:
        read_batches(reader, replace(table, seed=0))
        return read(reader, table)


def cold_trial(arm: str, folder: Path, table: Table, read: Reading) -> Timing:
    """With nothing cached before each batch; the mean of several. A scan is done once."""
    if read is not read_batches:
        return fresh_trial(arm, folder, table, read, make_cold)
    single = [replace(table, batches=1, seed=seed) for seed in range(min(_COLD_BATCHES, table.batches))]
    timings = [fresh_trial(arm, folder, one, read, make_cold) for one in single]
    return Timing(fmean(one.seconds for one in timings), int(fmean(one.bytes_read for one in timings)))


def fresh_trial(
    arm: str, folder: Path, table: Table, read: Reading, prepare: Callable[[Sequence[Path]], object]
) -> Timing:
    """A reader that has read nothing; another one was used before, so that nothing is imported or started now."""
    with opened(arm, folder, table) as rehearsed:
        rehearsed.batch(table.random_rows(0)[0])
    with opened(arm, folder, table) as reader:
        prepare(files_in(place(folder, arm)))
        return read(reader, table)


def _in_group(arm: str, folder: Path, table: Table, read: Reading) -> Timing:
    with memory_cap(table.nbytes // 2 + ALLOWANCE) as group:
        return run_apart(capped_trial, arm, folder, table, read, group)


def capped_trial(arm: str, folder: Path, table: Table, read: Reading, group: Group) -> Timing:
    """In a group that is full of the store's own files."""

    def prepare(files: Sequence[Path]) -> None:
        make_cold(files)
        group.join()
        warm(files)

    return fresh_trial(arm, folder, table, read, prepare)


@contextmanager
def opened(arm: str, folder: Path, table: Table) -> Iterator[Reader]:
    """A reader for a store's table."""
    reader = STORES[arm].open(place(folder, arm), table.columns)
    try:
        yield reader
    finally:
        reader.close()


def read_batches(reader: Reader, table: Table) -> Timing:
    """The average of a batch."""
    clock, before, count = Clock(), read_bytes(), 0
    for rows in table.random_rows(table.seed):
        _require(clock.time(partial(reader.batch, rows)), rows)
        count += 1
        if clock.seconds > table.seconds:
            break
    return Timing(clock.seconds / count, (read_bytes() - before) // count)


def read_epoch(reader: Reader, table: Table) -> Timing:
    """All rows in random batches; if that takes too long, some of them, extrapolated."""
    whole = table.whole()
    each = read_batches(reader, whole)
    return Timing(each.seconds * whole.batches, each.bytes_read * whole.batches)


def read_all(reader: Reader, table: Table) -> Timing:
    """From the first row to the last; if that takes too long, some of them, extrapolated."""
    clock, before, read = Clock(), read_bytes(), 0
    for start, stop in table.parts(table.step):
        _require(clock.time(partial(reader.part, start, stop)), torch.arange(start, stop))
        read = stop
        if clock.seconds > table.seconds:
            break
    return Timing(clock.seconds * table.rows / read, (read_bytes() - before) * table.rows // read)


def _require(found: torch.Tensor, rows: torch.Tensor) -> None:
    if not torch.equal(found, values_of(rows, found.shape[1])):
        raise ValueError("these are not the values of the rows that were asked for")


class Clock:
    """Accumulates the time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, act: Callable[[], T]) -> T:
        """The result of the call."""
        start = time.perf_counter()
        found = act()
        self.seconds += time.perf_counter() - start
        return found
