"""Named rows, read by index: the user interface.

Always true:
- a batch is a dict of plain tensors, rows in the requested order, each equal to what was written
- a row that is not filled is never returned as if it were
- a cache may be passed to other processes: the folder's path is sent, not the data
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing import util
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import default_collate

from offload.cache.batches import Batches, RowDataset, order_of
from offload.cache.columns import Ragged, sent
from offload.cache.held import HeldStore, read_file, write_file
from offload.cache.incoming import cache_of, plain_values, rows_in_batch
from offload.cache.incoming import rows_of as rows_of_records
from offload.cache.indexing import rows_of
from offload.cache.missing import fill_missing
from offload.cache.schema import TENSOR, Column, Manifest, as_json, schema_of
from offload.cache.states import FILE as STATES
from offload.cache.store import Store, log
from offload.cache.topk import TopK, row_at
from offload.checkpoints.checkpoint import PICKLES
from offload.errors import ArgumentTypeError, CacheError, MissingRowsError, ShapeMismatchError, visible
from offload.memory import count_freed
from offload.progress import Bar
from offload.storage.replacing import made_folder
from offload.system.modes import no_functions, no_modes
from offload.system.reasons import some
from offload.system.regular import absolute, is_folder, is_there
from offload.tensor.arguments import as_names, checked_count, checked_device
from offload.tensor.guests import CPU


class TensorCache:
    """Columns of rows in a folder: written by index in any order, by one process or many, and read in batches.

    Make one with `create`, open it again with `open`. A row counts as filled once it is on the disk; after a crash
    every filled row is right, and `missing_rows()` lists the others.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> schema = {"logps": (torch.float32, ()), "hidden": (torch.bfloat16, (8,))}
        >>> cache = TensorCache.create(folder, schema, num_rows=4)
        >>> cache[[0, 2]] = {"logps": torch.tensor([0.5, 1.5]), "hidden": torch.ones(2, 8, dtype=torch.bfloat16)}
        >>> cache.missing_rows()
        tensor([1, 3])
        >>> cache[[2, 0]]["logps"]
        tensor([1.5000, 0.5000])
        >>> cache.close()
    """

    device: torch.device
    _store: Store | HeldStore
    _finish: Any

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, object] | None = None) -> None:
        """A cache of tensors that are there already: nothing is copied, and batches land where the tensors are.

        Args:
            tensors: by column, (rows, ...), plain or offloaded.
            metadata: what the rows are of, in words of JSON.

        Raises:
            ArgumentTypeError: they have no names.
            CacheError: there are no tensors, or they differ in length.

        Example:
            >>> cache = TensorCache(tensors={"chosen_logps": torch.tensor([0.5, 1.5, 2.5])})
            >>> cache[torch.tensor([2, 0])]
            {'chosen_logps': tensor([2.5000, 0.5000])}
        """
        store = HeldStore(tensors, as_json(metadata))
        self._begin(store, store.device)

    def _begin(self, store: Store | HeldStore, device: torch.device) -> None:
        self._store = store
        self._has_packed = any(column.top for column in store.schema.values())
        self.device = device
        self._finish = util.Finalize(self, store.close, exitpriority=10)  # also at the end of a worker process

    @classmethod
    def _over(cls, store: Store | HeldStore, device: torch.device) -> TensorCache:
        cache = cls.__new__(cls)
        cache._begin(store, device)
        return cache

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        schema: Mapping[str, object],
        num_rows: int = 0,
        *,
        exist_ok: bool = False,
        metadata: Mapping[str, object] | None = None,
        device: torch.device | str | int = "cpu",
    ) -> TensorCache:
        """A new cache, allocated at once: it takes no disk space before rows are written.

        Args:
            folder: where its files go; made if it is not there.
            schema: by column `(dtype, row_shape)`, with None as the first size where it differs from row to row;
                `"json"` (or `str`, `dict`, `list`) for text and JSON values; `topk(...)` for a teacher's
                log-probabilities. Or another cache's.
            num_rows: how many rows there are at first; `append` adds more.
            exist_ok: if the folder is a cache already, open it to write, provided that its columns, rows (any, with
                `num_rows=0`) and metadata are these.
            metadata: what the rows belong to, as plain JSON values; `open(expect=...)` compares it.
            device: where batches land.

        Returns:
            The cache, open to be written.

        Raises:
            CacheError: the folder is a cache already, or a different one; a column is described wrongly.
            ForeignFileError, WriteError
        """
        wanted = Manifest(schema_of(schema), checked_count(num_rows, "num_rows", least=0), as_json(metadata))
        where = checked_device(device)
        return cls._over(Store.create(absolute(folder), wanted, exist_ok=exist_ok), where)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        mode: str = "r",
        *,
        expect: Mapping[str, object] | None = None,
        device: torch.device | str | int = "cpu",
    ) -> TensorCache:
        """Open a cache that exists.

        Args:
            folder: what `create` was given.
            mode: "r" to read, "r+" to write as well.
            expect: metadata that it must have; others may be there too.
            device: where batches land.

        Returns:
            The cache, as it is now; rows that other processes flush later are seen, too.

        Raises:
            MissingFileError: there is none, or one of its files is missing.
            CorruptFileError: one of its files was truncated, or is something else.
            CacheError: it is of another version, or its metadata differs.
            WriteError: `mode` is "r+", and it can't be written to.
        """
        if mode not in ("r", "r+"):
            raise CacheError(f"unknown mode {mode!r}: 'r' reads, 'r+' also writes")
        where = checked_device(device)
        return cls._over(Store.open(absolute(folder), expect, writes=mode == "r+"), where)

    @classmethod
    def from_disk(
        cls,
        path: str | os.PathLike[str],
        device: torch.device | str | int | None = "cpu",
        *,
        expect: Mapping[str, object] | None = None,
    ) -> TensorCache:
        """What `to_disk` wrote, or any file with a dict of tensors; read in place, a batch at a time.

        Args:
            path: a file of `to_disk`, of `torch.save({name: tensor})` (nothing in it is run), any `.safetensors`; or
                the folder of a cache.
            device: where batches land; None is the CPU.
            expect: metadata that it must have.

        Returns:
            A cache to read from.

        Raises:
            MissingFileError, CorruptFileError, CheckpointError (a pickle with code in it)
            CacheError: the tensors differ in length, or the metadata differs.
        """
        path, where = absolute(path), checked_device("cpu" if device is None else device)
        if is_folder(path):
            return cls.open(path, expect=expect, device=where)
        store = read_file(path)
        store.manifest.check(expect, path)
        return cls._over(store, where)

    @classmethod
    def from_records(
        cls,
        records: Iterable[object],
        folder: str | os.PathLike[str] | None = None,
        *,
        schema: Mapping[str, object] | None = None,
        metadata: Mapping[str, object] | None = None,
        device: torch.device | str | int = "cpu",
    ) -> TensorCache:
        """A cache with one row per record; records are taken one by one, and one batch of them is in memory.

        The first record settles the columns. Tensors, arrays and numbers become columns of tensors, floats of torch's
        default dtype; text, lists and dicts become JSON, in which a value may be None; bytes become rows of uint8. What
        the first record doesn't tell is in `schema`.

        Args:
            records: dataclasses, NamedTuples, dicts, or tensordict's tensorclasses.
            folder: where the cache goes, as for `create`; None for a temporary one, which goes with the process.
            schema: as for `create`, of columns of several shapes or dtypes, and of `"json"` ones that may be lacking.
            metadata, device: as for `create`.

        Returns:
            The cache, with all rows filled.

        Raises:
            CacheError, DtypeMismatchError: a record does not fit; nothing is left in `folder`. Else as `create`.

        Example:
            >>> rows = [{"id": "a", "reward": 0.5}, {"id": "b", "reward": 1.5}]
            >>> cache = TensorCache.from_records(rows)
            >>> cache[:]
            {'id': ['a', 'b'], 'reward': tensor([0.5000, 1.5000])}
        """
        rows = rows_of_records(records, schema or {})
        return cache_of(rows, folder, partial(cls.create, metadata=metadata, device=device))

    # What it is

    @property
    def folder(self) -> Path | None:
        """The folder; of a single file, that; None for tensors in memory."""
        return self._store.folder

    @property
    def mode(self) -> str:
        """`"r"` or `"r+"`."""
        return "r+" if self._store.writes else "r"

    @property
    def schema(self) -> Mapping[str, Column]:
        """What each column holds, by name; `create` makes another cache of it."""
        return self._store.schema

    def keys(self) -> KeysView[str]:
        """The names of the columns.

        Returns:
            A view of them, in the order of the schema.
        """
        return self.schema.keys()

    def to(self, device: torch.device | str | int) -> Self:
        """Have batches land on `device` from now on. Nothing is copied.

        Returns:
            This cache.
        """
        self.device = checked_device(device)
        return self

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was given to `create`."""
        return self._store.manifest.metadata

    def __len__(self) -> int:
        return self._open().num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, filled or not."""
        return self._open().nbytes

    def missing_rows(self, columns: Iterable[str] | None = None) -> torch.Tensor:
        """The rows that still have to be computed.

        Args:
            columns: those that count; all if None.

        Returns:
            The numbers of rows that lack one of the columns, in order, int64.
        """
        return torch.from_numpy(self._open().missing(columns))

    @property
    def num_filled(self) -> int:
        """How many rows are filled, in all columns."""
        return self._open().count(None)

    def require_complete(self, columns: Iterable[str] | None = None) -> None:
        """Check that all rows are filled.

        Args:
            columns: those that count; all if None.

        Raises:
            MissingRowsError: rows are missing; names the first.
        """
        if missing := self.missing_rows(columns).tolist():
            what = f"{len(missing)} of {len(self)} rows of {self.folder}"
            raise MissingRowsError(f"{what} are not filled: {some(missing)}")

    def __repr__(self) -> str:
        if self._store.is_closed:
            return f"TensorCache({str(self.folder)!r}, closed)"
        place = str(self.folder or "in memory")
        lines = [f"TensorCache({place!r}, mode={self.mode!r}): {len(self)} rows, {self.num_filled} filled"]
        names = [visible(name) for name in self.schema]
        for name, column in zip(names, self.schema.values(), strict=True):
            what = f"{column.kind}  {column.shape_text}  {column.top.text if column.top else column.dtype}"
            lines.append(f"  {name:{max(map(len, names))}}  {what}")
        return "\n".join(lines)

    # Rows out

    def __getitem__(self, index: object) -> Any:
        """Rows, as `get` gives them; or, by its name, a column as an `OffloadedTensor` (rows, *row_shape)."""
        return self.column(index) if isinstance(index, str) else self.get(index)

    def get(
        self,
        rows: Any,
        columns: Iterable[str] | None = None,
        *,
        device: torch.device | str | int | None = None,
        pin_memory: bool = False,
        ragged: str = "list",
        padding: complex = 0,
    ) -> dict[str, Any]:
        """Rows of some columns.

        Args:
            rows: an int (which gives a row without a leading dimension), a slice, a range, or a 1-D list, tensor or
                array of bools or of integers of any dtype. Negative numbers count from the end.
            columns: their names; all if None.
            device: where the tensors land; that of the cache if None.
            pin_memory: give tensors in pinned memory.
            ragged: how rows of different lengths come: "list", or "padded" (rows, longest, ...).
            padding: the number that fills up the shorter rows of "padded", of `topk` both ids and log-probabilities.

        Returns:
            By column, (rows, *row_shape); a list for text and JSON.

        Raises:
            RowIndexError, ColumnError, MissingRowsError, CorruptFileError
        """
        store = self._open()
        target = self.device if device is None else checked_device(device)
        if not pin_memory:
            ready = store.taken(rows, columns)
            if ready is not None:
                ready = ready if target == CPU else {name: value.to(target) for name, value in ready.items()}
                return (
                    {n: _formed(value, self.schema[n].top) for n, value in ready.items()} if self._has_packed else ready
                )
        with no_functions(), no_modes():
            wanted = rows_of(rows, store.num_rows)
            values = store.read(wanted, columns)
            values = {name: sent(value, target, pinned=pin_memory) for name, value in values.items()}
        form = "list" if wanted.is_one else ragged
        values = {name: _formed(value, self.schema[name].top, form, padding) for name, value in values.items()}
        return {name: row_at(value, 0) for name, value in values.items()} if wanted.is_one else values

    def batches(
        self,
        sampler: int | Iterable[object],
        *,
        shuffle: int | None = None,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        columns: Iterable[str] | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        device: torch.device | str | int | None = None,
        ragged: str = "list",
        padding: complex = 0,
    ) -> Batches:
        """Batches one after another, read by a thread before they are asked for.

        They can be stopped and resumed: `state_dict()` tells where they are, and `load_state_dict(...)` goes there.
        They may be given to a `DataLoader(batches, batch_size=None)`, or to torchdata's `StatefulDataLoader`.

        Args:
            sampler: how many rows a batch has, for all rows, each once; or what names the rows of each batch, as
                `torch.utils.data.BatchSampler` does: to be resumed it must name the same again.
            shuffle: a seed: with the epoch it determines the order of the rows, on every machine; None for their own.
            drop_last: whether to leave out the rows that don't make a whole batch for each rank.
            rank, world_size: which of so many ranks takes these batches; each takes its share of every step. If fewer
                rows than ranks are left for the last step, some ranks have no batch there.
            columns, pin_memory, device, ragged, padding: as for `get`.
            prefetch: how many batches are read ahead; 0 for no thread.

        Returns:
            An iterator over the batches of an epoch, as `get` gives them; iterating again gives the next epoch.

        Raises:
            CacheError: a batch of no rows; a seed or ranks for a sampler; one that is resumed, and gives other rows.
                The rest as `get`, where the batch would have come.

        Example:
            >>> from offload import TensorCache
            >>> cache = TensorCache(tensors={"x": torch.arange(5)})
            >>> [batch["x"].tolist() for batch in cache.batches(2)]
            [[0, 1], [2, 3], [4]]
            >>> [batch["x"].tolist() for batch in cache.batches([[4, 0], [2]])]
            [[4, 0], [2]]
            >>> stopped, resumed = cache.batches(2, shuffle=7), cache.batches(2, shuffle=7)
            >>> first = next(stopped)
            >>> resumed.load_state_dict(stopped.state_dict())
            >>> [batch["x"].tolist() for batch in stopped] == [batch["x"].tolist() for batch in resumed]
            True
        """
        names, prefetch = as_names(columns), checked_count(prefetch, "prefetch", least=0)
        order = order_of(sampler, len(self), shuffle=shuffle, drop_last=drop_last, rank=rank, world_size=world_size)
        if self.mode == "r+":
            self.flush()  # worker processes see no other rows
        form: dict[str, Any] = {"pin_memory": pin_memory, "device": device, "ragged": ragged, "padding": padding}
        return Batches(order, partial(self.get, columns=names, **form), prefetch)

    def as_dataset(
        self, columns: Iterable[str] | None = None, *, ragged: str = "list", padding: complex = 0
    ) -> RowDataset:
        """A map-style dataset of torch: one dict per row; a `DataLoader` reads the rows of a batch together.

        What was written is flushed, as worker processes see no other rows. With
        `DataLoader(dataset, batch_size=None, sampler=BatchSampler(...))` batches come as they are read, uncollated.

        Args:
            columns: those to read; all if None.
            ragged, padding: as for `get`. With "padded", a `DataLoader` can stack the rows of a batch.

        Returns:
            A dataset; pickled, it holds the path, not the rows.

        Example:
            >>> from offload import TensorCache
            >>> data = TensorCache(tensors={"x": torch.arange(4)}).as_dataset()
            >>> data[1], len(data)
            ({'x': tensor(1)}, 4)
            >>> [batch["x"].tolist() for batch in torch.utils.data.DataLoader(data, batch_size=2)]
            [[0, 1], [2, 3]]
        """
        if self.mode == "r+":
            self.flush()
        return RowDataset(self, partial(self.get, columns=as_names(columns), ragged=ragged, padding=padding))

    # Rows in

    def __setitem__(self, rows: object, values: Mapping[str, object]) -> None:
        """Write rows, of all columns or of some. They are filled when they have been flushed.

        Raises:
            RowIndexError, ColumnError, ShapeMismatchError, DtypeMismatchError: nothing was written.
            CacheError: `values` is not a dictionary.
            WriteError: the disk is full; the rows count as missing.
        """
        store, given = self._open(), self._stored(values)
        with no_functions(), no_modes():
            store.write(rows_of(rows, store.num_rows), given)

    def append(self, values: Mapping[str, object]) -> range:
        """Add rows at the end. Several processes may append at once.

        Args:
            values: by column, the rows, as for `cache[rows] = values`.

        Returns:
            The numbers of the new rows.

        Raises: as `cache[rows] = values`.
        """
        given = self._stored(values)
        with no_functions(), no_modes():
            return self._open().append(given)

    def _stored(self, values: Mapping[str, object]) -> dict[str, Any]:
        given, known = plain_values(values), self.schema
        return {name: known[name].stored(value) if name in known else value for name, value in given.items()}

    def fill(
        self,
        fn: Callable[[Any], Mapping[str, object]],
        inputs: Any,
        *,
        batch_size: int = 32,
        columns: Iterable[str] | None = None,
        collate: Callable[[list[Any]], object] = default_collate,
        map_fn: Callable[[Callable[[Any], Any], Iterator[Any]], Iterable[Any]] = map,
        progress: bool = True,
    ) -> None:
        """Compute the rows that are missing, batch by batch, and write them, so that a stopped job can continue.

        Whatever stops it, finished rows are kept: after an error or an interrupt all of them, after a kill all but
        those of the last seconds. Several processes may call this on one folder: each row is computed by one of
        them, and this returns when all rows are filled.

        Args:
            fn: makes rows, a dict as for `cache[rows] = ...`, of the inputs of a batch.
            inputs: what row `i` is made of is `inputs[i]`: a tensor, an array or a cache, of which a batch is taken as
                `inputs[rows]`; or a dataset or list, of which it is what `collate` makes of the items.
            batch_size: rows that are computed at a time.
            columns: those that `fn` makes; all if None.
            collate: makes a batch of a list of items; torch's, as in a `DataLoader`. With `list` it is that list.
            map_fn: applies a function to batches, as `map` does. `partial(offload.map_batches, model=model)` reads a
                model that `fn` calls once for many batches.
            progress: whether a bar shows how far it is, on a terminal.

        Raises:
            ShapeMismatchError: there is not one input per row.
            CacheError: `fn` left out a column that these rows need.
            MapError: `fn`, or `inputs`, raised StopIteration. The rest as `cache[rows] = values`, and `fn`.

        Example:
            >>> import tempfile
            >>> cache = TensorCache.create(tempfile.mkdtemp(), {"square": (torch.int64, ())}, num_rows=4)
            >>> cache.fill(lambda batch: {"square": batch**2}, torch.arange(4), batch_size=3)
            >>> cache[:]["square"]
            tensor([0, 1, 4, 9])
        """
        count = None
        with suppress(TypeError):  # a tensor without dimensions
            count = len(inputs) if hasattr(inputs, "__getitem__") else None
        if count is None:
            raise ArgumentTypeError(f"inputs: a tensor, a list or a dataset with a length, not {repr(inputs)[:80]}")
        if count != len(self):
            raise ShapeMismatchError(f"there are {count} inputs, and the cache in {self.folder} has {len(self)} rows")
        size = checked_count(batch_size, "batch_size")
        columns = as_names(columns)
        total = len(self.missing_rows(columns))
        log.info("%s: %d of %d rows are missing and are computed", self.folder, total, len(self))
        is_taken_whole = isinstance(inputs, torch.Tensor | np.ndarray | TensorCache)

        store = self._open()
        if not total or not isinstance(store, Store):
            return

        def made(part: torch.Tensor) -> Any:
            values: Any = fn(inputs[part] if is_taken_whole else collate([inputs[row] for row in part.tolist()]))
            others = [name for name in columns or self.schema if isinstance(values, Mapping) and name not in values]
            if others and store.are_missing(others, part.numpy()).any():
                store.flush()  # `fn` may have written it
            if left := [name for name in others if store.are_missing([name], part.numpy()).any()]:
                raise CacheError(
                    f"fn gave {', '.join(values) or 'no column'}, and these rows need {', '.join(left)}, too: return "
                    "it, or say with columns= which ones fn makes"
                )
            return values

        with Bar(desc="rows", total=total, delay=1, disable=None if progress else True, leave=False) as bar:
            fill_missing(store, columns, count, made, self.__setitem__, batch_size=size, map_fn=map_fn, bar=bar)

    def flush(self) -> None:
        """Wait until what was written is on the disk: the rows are filled then, also after a power cut.

        Raises:
            WriteError: rows written since the last flush are missing.
        """
        self._open().flush()

    # Columns as tensors, and files of them

    def column(self, name: str) -> torch.Tensor:
        """A column as one tensor on disk, (rows, *row_shape), filled or not; in memory, if it is there.

        Ops on it read what they need; in-place ops write the file, and do not mark rows as filled. It has the
        rows that there are now: after `append`, ask for it again.

        Returns:
            An `OffloadedTensor`; a plain tensor where the cache is in memory.

        Raises:
            ColumnError
            UnsupportedOpError: its rows differ in length, or are packed, as those of `topk`.
            WriteError: at the first in-place op, if the disk has no room for all rows.
        """
        return self._open().tensor(name, self.device)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The columns as tensors, as `column` gives them: `torch.save(dict(cache.tensors), path)` copies none."""
        return MappingProxyType({name: self.column(name) for name in self.schema})

    def to_disk(self, path: str | os.PathLike[str], columns: Iterable[str] | None = None) -> None:
        """Write all rows to one safetensors file, a part at a time; `from_disk` opens it.

        Folders are made. A file that was there stays, whole, until the new one is; then it is replaced. It may be the
        one that this cache is from: if `to_disk` wrote it and `from_disk` opened it, this cache goes on reading it.

        Args:
            path: the file.
            columns: those to write; all if None.

        Raises:
            ColumnError, MissingRowsError: there is no such column, or rows are not filled.
            CacheError: there are columns of JSON, or of rows of any length: such a cache is its folder. Or
                `path` is in the folder of a cache, or has a suffix of `torch.save`.
            ForeignFileError: there is a file that offload did not write.
            WriteError
        """
        named = as_names(columns)
        names = list(self.schema) if named is None else named
        target = absolute(path)
        if not names:
            raise CacheError(f"{target}: columns= is empty: name at least one")
        if target.suffix in PICKLES:
            raise CacheError(f"{target}: to_disk writes safetensors; torch.save(dict(cache.tensors), path) writes that")
        self.require_complete(names)
        others = [name for name in names if self.schema[name].kind != TENSOR or self.schema[name].top]
        if others:
            raise CacheError(
                f"columns {', '.join(map(repr, others))} have no rows of one size, or packed ones: copy "
                f"{self.folder} instead"
            )
        if is_there(target.parent / STATES):
            raise CacheError(f"{target} is in the folder of a cache: choose another folder")
        made_folder(target.parent)
        blocks = {name: self._blocks(name) for name in names}
        write_file(target, {name: self.schema[name] for name in names}, len(self), blocks, self.metadata)

    def _blocks(self, name: str) -> Iterator[torch.Tensor]:
        step = rows_in_batch([self.schema[name].row_bytes])
        for batch in self.batches(step, columns=[name], device="cpu", prefetch=1):
            block = batch.pop(name).contiguous().resolve_conj().resolve_neg()
            nbytes = block.nbytes
            yield block
            del block
            count_freed(nbytes)

    # Closing, and passing to another process

    def close(self) -> None:
        """Flush, and let go of the files. A cache that is dropped, or whose process ends, is closed too."""
        self._finish()

    def __enter__(self) -> TensorCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        if isinstance(self._store, HeldStore):
            return TensorCache._over, (self._store, self.device)
        return partial(TensorCache.open, device=self.device), (self.folder, self.mode)

    def _open(self) -> Store | HeldStore:
        if self._store.is_closed:
            raise CacheError(f"the cache in {self.folder} is closed: open it again")
        return self._store


def _formed(value: Any, top: TopK | None, form: str = "list", padding: complex = 0) -> Any:
    if isinstance(value, Ragged):
        return value.formed(form, padding, top)
    return value if top is None else top.read(value)
