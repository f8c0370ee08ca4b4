"""A record of the runs over a folder's values, in a small file beside them.

Always true:
- that a run has replaced a value is noted in the value's own file, which changes together with the value; the journal
  lists the runs and the values they cover, and is only ever replaced as a whole
- no value can have the journal's file name
- a file of that name which is not a journal is left as it is
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offload.errors import JournalError, MissingFileError, WriteError
from offload.storage.file import TensorFile
from offload.storage.state_file import Kind, read_state, write_state
from offload.system.reasons import short, some

NAME = ".offload-journal"  # no value's file name begins with a dot
RUNS = "runs"  # the note in a value's file
_KIND = Kind(what="a journal", stamp={"version": 1})
_PATIENCE = 1.0  # seconds between writes; what a killed process did not write is known from the files


@dataclass
class Run:
    """A function applied to values."""

    name: str
    key: str  # noted in the files of values that it has replaced
    sources: dict[str, str | None]  # by value the file that it came from; None if in memory or in the folder
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # left unchanged
    finished: bool = False  # whether it has processed all of them

    def __str__(self) -> str:
        done = len(self.replaced) + len(self.kept)
        return f"{self.name!r} ({done} of {len(self.sources)} values done)"


class Journal:
    """The runs over a folder's values, and the current one; without a path, nothing is kept."""

    def __init__(self, path: Path | None = None, runs: Iterable[Run] = ()) -> None:
        self.path = path
        self.runs = list(runs)
        self.run: Run | None = None
        self._written = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        return () if self.run is None else (self.run.key,)

    @property
    def name(self) -> str | None:
        """The name to pass to `resume`."""
        return None if self.run is None else self.run.name

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """The journal of a folder, perhaps an empty one. Raises `JournalError` for another file, and `ReadError`."""
        path = folder / NAME
        try:
            return cls(path, [_checked(run) for run in read_state(path, _KIND)["runs"]])
        except MissingFileError:
            return cls(path)
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(
                f"{path} can't be read as a journal ({type(error).__name__}: {short(error)}): remove it to start "
                "again, or take another offload_dir"
            ) from error

    def write(self) -> None:
        assert self.path is not None
        write_state(self.path, _KIND, {"runs": [asdict(run) for run in self.runs]})
        self._written = time.monotonic()

    def write_at_times(self) -> None:
        if time.monotonic() - self._written > _PATIENCE:
            self.write()

    def has(self, name: str, marks: Iterable[str]) -> bool:
        """Whether the run has done a value, given the runs that are noted in its file."""
        return self.run is not None and (self.run.key in marks or name in self.run.kept)

    def note(self, name: str, *, replaced: bool) -> None:
        if self.run is not None:
            (self.run.replaced if replaced else self.run.kept).append(name)
            self.write_at_times()

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Write out what was done in the block, and whether the block succeeded."""
        if self.run is None:
            yield
            return
        try:
            yield
        except BaseException:
            with suppress(WriteError):  # the error that stopped the run matters more; the files tell what was done
                self.write()
            raise
        self.run.finished = True
        self.write()

    def resume(self, name: str, sources: Mapping[str, str | None]) -> None:
        """Continue the run of that name, or start one; `JournalError` if it had other values, or another is open."""
        self.run = next((run for run in self.runs if run.name == name), None)
        if self.run is not None:
            self._refuse_others(self.run, sources)
            return
        unfinished = next((run for run in self.runs if not run.finished), None)
        if unfinished is not None:
            raise JournalError(
                f"{self.path} is the journal of another run, {unfinished}, and {name!r} can't start before that ends: "
                "call it again with resume=True, take another offload_dir, or remove the journal to give it up"
            )
        self._add(name, sources)

    def begin(
        self, name: str, sources: Mapping[str, str | None], marks: Iterable[str], *, goes_on: bool = False
    ) -> None:
        """Start a run in place of abandoned ones; one of this name `goes_on`, others are a `JournalError`."""
        seen = set(marks)
        half = next((run for run in self.runs if not run.finished and run.key in seen), None)
        if half is not None and goes_on and half.name == name:
            self.run = half
            return
        if half is not None:
            raise JournalError(
                f"{self.path} has the run {half}, and these values are as it left them: call that one with resume=True "
                f"to finish it, load the values again to begin {name!r} anew, or remove the journal to go on from here"
            )
        self.runs = [run for run in self.runs if run.finished and run.name != name]
        self._add(name, sources)

    def _add(self, name: str, sources: Mapping[str, str | None]) -> None:
        self.run = Run(name, secrets.token_hex(8), dict(sources))
        self.runs.append(self.run)
        self.write()

    def _refuse_others(self, run: Run, sources: Mapping[str, str | None]) -> None:
        """A value that is still in a checkpoint must be in the same one as when the run began."""
        strangers = sorted(run.sources.keys() ^ sources.keys())
        both = run.sources.keys() & sources.keys()
        moved = sorted(name for name in both if sources[name] not in (None, run.sources[name]))
        if strangers:
            differ = some(map(repr, strangers), 3)
            what = f"over {len(run.sources)} values, this one is over {len(sources)}: {differ} differ"
        elif moved:
            was, now = run.sources[moved[0]] or "the folder", sources[moved[0]]
            what = f"over other files: {moved[0]!r} was in {was}, now it is in {now}"
        else:
            return
        raise JournalError(
            f"{self.path} is the journal of another run: {run} is {what}. Take another offload_dir, or another name "
            "(resume='a name'), or remove the journal to start again"
        )


def words_of(file: TensorFile) -> str:
    """A file and its state as text that does not change when its folder is moved."""
    return f"{file.path.name} ({file.identity.size} bytes, modified {file.identity.modified})"


def marks_of(file: TensorFile) -> tuple[str, ...]:
    """The keys of the runs that the value in a file has gone through."""
    keys = file.notes.get(RUNS)
    return tuple(key for key in keys if isinstance(key, str)) if isinstance(keys, list) else ()


def _checked(raw: Mapping[str, Any]) -> Run:
    run = Run(**raw)
    texts = (run.name, run.key, *run.sources, *run.replaced, *run.kept)
    holders = [type(run.sources), type(run.replaced), type(run.kept), type(run.finished)]
    if not all(isinstance(text, str) for text in texts) or holders != [dict, list, list, bool]:
        raise ValueError("a run is malformed")
    if not all(isinstance(source, str | None) for source in run.sources.values()):
        raise ValueError("a run has a source that is not a file")
    return run
