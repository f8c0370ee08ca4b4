"""Replacing many values, one at a time.

Always true:
- a distinct value is processed once, whatever its names; tied values stay tied
- at most `workers` values are in memory
- if ranks share values, the function gets this rank's shard of each
- finished values stay finished, whatever happens to the next one
- a resumed run passes no value that it has replaced to the function again: that is noted in the value's own file, which
  changes together with the value; the journal, a small file beside them, lists the runs and what they cover
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from offload.errors import ArgumentError, ArgumentTypeError, JournalError, MapError, MetaTensorError, MissingFileError
from offload.memory import count_freed, return_freed
from offload.models import log
from offload.models.slots import Slot, is_meta, tensor_slots
from offload.prefetch.value import page_state_of
from offload.progress import progress_in_bytes
from offload.storage.file import TensorFile
from offload.storage.folders import file_name, named_folder
from offload.storage.owning import Notes, create_value, open_owned, switch_to
from offload.storage.state_file import Kind, read_state, write_state
from offload.storage.subclasses import refuse_lossy
from offload.storage.write import refuse_earlier
from offload.system.modes import inside, no_grad, no_inference
from offload.system.reasons import short, some
from offload.system.regular import is_there
from offload.tensor.arguments import checked_count, checked_dense, refuse_other_kind
from offload.tensor.recipes import files_in
from offload.tensor.replacing import become, redress, replace_value
from offload.tensor.saved import identity_of
from offload.tensor.views import handle_of, is_part, meta_of, target_of
from offload.tensor.wrapper import OffloadedTensor, dressed, guest_of, is_offloaded, wrap_handle
from offload.torch_api import version_of

Function: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
Predicate: TypeAlias = Callable[[str, torch.Tensor], bool]
Select: TypeAlias = "str | type[nn.Module] | Sequence[str | type[nn.Module]] | Predicate | None"

ANY_KIND = {"strict_shape": False, "strict_dtype": False}
_TEMPORARIES = 8  # estimated peak memory of a function, as a multiple of its value
_MARKS = "_offload_runs"  # attribute of a tensor in memory: the runs that it has gone through


@dataclass(frozen=True)
class MapReport:
    """What `map_values` did, by the first name of each value.

    Attributes:
        replaced: those that have a new value.
        kept: those that the function gave back as they were.
        before: those that an earlier call had replaced before it was interrupted.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> report = map_values(lambda name, value: value * 2 if name == "bias" else value, model)
        >>> report.replaced, report.kept
        (('bias',), ('weight',))
    """

    replaced: tuple[str, ...]
    kept: tuple[str, ...]
    before: tuple[str, ...]


def map_values(
    fn: Function,
    model_or_tensors: nn.Module | MutableMapping[str, Any],
    *,
    select: Select = None,
    workers: int = 1,
    resume: bool | str = False,
    progress: bool = True,
    strict_shape: bool = True,
    strict_dtype: bool = True,
) -> MapReport:
    """Replace values with the results of a function, one at a time.

    A value on disk is replaced as `OffloadedTensor.update_values` does, and stays on disk; one in memory is replaced
    in memory. Tied weights are one value, and stay tied.

    Where the values have an `offload_dir`, a small journal there records what is done. A run that was interrupted or
    killed continues when the same lines are run again with `resume=True`, also in another process that loads the
    checkpoint anew: values that were replaced are taken from the folder, and none of these goes through `fn` twice.
    Those that are loaded anew (in another dtype, or into memory) are as in the checkpoint, and are computed again; and
    `fn` sees again what it left alone.

    Args:
        fn: called with a name, as in the state dict, and the tensor, which is on disk if it was: ops on it read what
            they need. What it returns becomes the value: a tensor, plain or offloaded, or a tensor subclass; the very
            tensor that it was given leaves the value alone. It runs without gradients. Of a DTensor it is given what
            this rank has, on which `placements` and `device_mesh` say what that is a share of, and returns that share.
            To be resumed it must not write to the tensor in place.
        model_or_tensors: a module, of which parameters and persistent buffers are taken, or a dictionary of tensors. Of
            a model give the model: through its `state_dict`, another shape or dtype does not reach it.
        select: which values: patterns of names (`"*.mlp.*"`), classes of the modules that hold them (`nn.Linear`),
            several of these, or a function of name and tensor. Of a tied value one name is enough. None for all.
        workers: threads; each holds the working set of one value.
        resume: continue the run of this name; True for that of the function. If there is none it starts.
        progress: show a bar, on a terminal.
        strict_shape, strict_dtype: refuse a value of another shape or dtype.

    Returns:
        What was done.

    Raises:
        MapError: `fn` failed; the message names the tensor. Those before it are done.
        ArgumentTypeError: `fn` did not return a tensor; likewise.
        JournalError: the journal is of another run, or there is no folder for one.
        ShapeMismatchError, DtypeMismatchError: of what `fn` returned; those before it are done.
        ValueError: a pattern or class selects nothing.
        MetaTensorError, WriteError, UnsupportedOpError

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> map_values(lambda name, tensor: tensor / 2, model, select="*.weight").replaced
        ('0.weight', '2.weight')
    """
    workers = checked_count(workers, "workers")
    values = _selected(values_of(model_or_tensors), select, model_or_tensors)
    journal = journal_for(values, _name_of_run(fn, resume), resume=bool(resume))
    before = [value.name for value in values if is_done(value, journal)]
    todo = [value for value in values if not is_done(value, journal)]
    with progress_in_bytes(sum(value.nbytes for value in todo), "values", shown=progress) as advance:
        strict = {"strict_shape": strict_shape, "strict_dtype": strict_dtype}
        walk = _Walk(fn, journal, len(before), len(values), advance, strict)
        _for_each(todo, walk.see, workers)
    journal.finish()
    log.info("%d values replaced, %d unchanged, %d done before", len(walk.replaced), len(walk.kept), len(before))
    return MapReport(tuple(walk.replaced), tuple(walk.kept), tuple(before))


def offloaded_like(
    fn: Callable[[torch.Tensor], object], tensor: torch.Tensor, suffix: str, *, exist_ok: bool = False
) -> Any:
    """The result of a function of a tensor: on disk if the tensor is, beside it, as `name.suffix`.

    Args:
        fn: called with the tensor; of one on disk, without gradients.
        tensor: plain or offloaded.
        suffix: is added to the tensor's name. If `fn` gives a tuple, list or dictionary, the place of each tensor in it
            is added too: `name.suffix.0`.
        exist_ok: whether files that earlier tensors left under these names are replaced.

    Returns:
        For an offloaded tensor the result with each tensor in it offloaded, in a file of its own in the same folder.
        For a plain tensor what `fn` gives.

    Raises:
        NameInUseError: a live tensor has such a name, or an earlier one left its file; then nothing is written.
        ForeignFileError, WriteError, UnknownSubclassError

    Example:
        >>> w = OffloadedTensor.full((2, 2), 3.0, name="w")
        >>> norms = offloaded_like(lambda weight: weight.sum(0), w, "norms")
        >>> norms.name, norms.tolist()
        ('w.norms', [6.0, 6.0])
    """
    if not is_offloaded(tensor):
        return fn(tensor)
    folder = handle_of(tensor).folder

    def look(result: torch.Tensor, name: str) -> torch.Tensor:
        if folder is not None and not exist_ok:
            refuse_earlier(folder / file_name(name), name)
        return result

    def store(result: torch.Tensor, name: str) -> torch.Tensor:
        return OffloadedTensor.from_original_tensor(result, name, folder, exist_ok=exist_ok)

    name = f"{tensor.name}.{suffix}"
    with no_inference(), no_grad():
        return _each_tensor(_each_tensor(fn(tensor), name, look), name, store)


def _each_tensor(result: object, name: str, put: Callable[[torch.Tensor, str], torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return put(result, name)
    if isinstance(result, dict):
        return {key: _each_tensor(one, f"{name}.{key}", put) for key, one in result.items()}
    if isinstance(result, list | tuple):
        parts = [_each_tensor(one, f"{name}.{at}", put) for at, one in enumerate(result)]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    return result


def replace(slot: Slot, new: torch.Tensor, marks: Sequence[str], strict: Mapping[str, bool]) -> None:
    """Replace a value in all its owners; its file notes these runs."""
    tensor = slot.tensor
    if slot.outer is not None:
        strict = {**strict, "strict_shape": True}  # the other ranks know its shape
    if is_offloaded(tensor) and (handle_of(tensor).owned or not is_part(tensor)):
        replace_value(tensor, new, _notes(marks), **strict)
        _follow(slot, tensor)
        return
    refuse_other_kind(tensor, checked_dense(new, slot.name), slot.name, **strict)
    if is_offloaded(tensor):
        refuse_lossy(new, slot.name)
        handle = create_value(guest_of(new.detach()), slot.name, slot.folder, _notes(marks))
        _follow(slot, wrap_handle(handle, target_of(tensor)))
        return
    new, tensors = _own(new), [tensor, *slot.others]
    if slot.outer is not None and type(new) is type(tensor) is torch.Tensor:
        for one in tensors:
            one.data = new
        slot.follow_dtype()
    elif all(isinstance(one, nn.Parameter) and _can_hold(one, new) for one in tensors):
        for one in tensors:  # the same objects stay, as an optimizer knows them
            one.data = new
    else:
        slot.fill(new)
    if marks or marks_on(slot.tensor):
        setattr(slot.tensor, _MARKS, tuple(marks))


def adopt(slot: Slot, key: str) -> None:
    """Take over what the run with this key has already stored for a value, if that is still up to date."""
    tensor = slot.tensor
    if not is_offloaded(tensor) or handle_of(tensor).owned or slot.folder is None:
        return
    is_cut, handle = is_part(tensor), handle_of(tensor)
    path = slot.folder / file_name(slot.name if is_cut else handle.name)
    if not is_there(path):
        return
    file = TensorFile.open(path)
    if not file.is_ours or key not in marks_of(file):
        return
    if is_cut:
        _follow(slot, wrap_handle(open_owned(file, slot.name), target_of(tensor)))
    else:
        switch_to(handle, file)
        redress(tensor, meta_of(handle), target_of(tensor))
        _follow(slot, tensor)


def _follow(slot: Slot, stored: OffloadedTensor) -> None:
    """Point all tensors of a value on disk at this one's file."""
    for tensor in (slot.tensor, *slot.others):
        if tensor is not stored and is_offloaded(tensor):
            become(tensor, stored)
    slot.follow_dtype()


def source_of(slot: Slot) -> str | None:
    if not is_offloaded(slot.tensor) or handle_of(slot.tensor).owned:
        return None
    return ", ".join(map(words_of, files_in(handle_of(slot.tensor))))


def values_of(model_or_tensors: nn.Module | MutableMapping[str, Any]) -> list[Slot]:
    """The distinct values of a module or dictionary: tensors over the same bytes count as one."""
    if isinstance(model_or_tensors, nn.Module):
        slots = [slot for slot in tensor_slots(model_or_tensors) if slot.keys]
    elif isinstance(model_or_tensors, MutableMapping):
        slots, tensors = [], cast(dict[str, Any], model_or_tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                slots.append(Slot.of(tensor, is_parameter=isinstance(tensor, nn.Parameter)))
                slots[-1].names, slots[-1].keys, slots[-1].owners = [name], [name], [(tensors, name)]
    else:
        raise ArgumentTypeError(f"a module or a dictionary of tensors is needed, not {type(model_or_tensors).__name__}")
    joined: dict[Hashable, Slot] = {}
    for slot in slots:
        if (first := joined.setdefault(identity_of(slot.tensor), slot)) is not slot:
            first.join(slot)
    values = list(joined.values())
    empty = [slot.name for slot in values if is_meta(slot.tensor)]
    if empty:
        raise MetaTensorError(f"{len(empty)} tensors have no data, such as {empty[0]!r}: load them first")
    return values


def marks_on(tensor: torch.Tensor) -> tuple[str, ...]:
    if not is_offloaded(tensor):
        return getattr(tensor, _MARKS, ())
    handle = handle_of(tensor)
    if not handle.owned:
        return ()
    handle.base()  # switches to the current file, also after a replacement that was interrupted at its end
    return marks_of(handle.file)


def _notes(marks: Sequence[str]) -> Notes:
    return {RUNS: list(marks)} if marks else None


def _own(new: torch.Tensor) -> torch.Tensor:
    """An independent tensor: what a function returned may belong to it, or be another value."""
    detached = new.detach()
    if type(detached) is torch.Tensor:
        return detached.clone() if type(new) in (torch.Tensor, nn.Parameter) else new  # a class that would be lost
    return detached


def _can_hold(parameter: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether torch can give the tensor another value while it stays the same object."""
    is_plain = type(parameter) is nn.Parameter and type(new) is torch.Tensor and parameter.device == new.device
    return is_plain and not (parameter.requires_grad and not (new.is_floating_point() or new.is_complex()))


# New values that take the place of old ones on disk


class Replacing:
    """A model's values as they were, for storing others in their place; a new file of a used name gets `suffix`."""

    def __init__(self, model: nn.Module, suffix: str) -> None:
        self._model = model
        self._suffix = suffix
        self._slots = tensor_slots(model)  # also keeps the tensors alive, which are compared by identity
        tensors = [slot.tensor for slot in self._slots]
        self._handles = {handle_of(tensor) for tensor in tensors if is_offloaded(tensor)}
        self._holders = Counter({id(slot.tensor): len(slot.owners) for slot in self._slots})

    def stored(
        self, old: torch.Tensor, new: torch.Tensor, name: str, marks: Sequence[str] = ()
    ) -> OffloadedTensor | None:
        """The parameter over `new`, in place of `old` or in a file called `name`; None if it stays as it is."""
        if not is_offloaded(old) or (is_offloaded(new) and handle_of(new) in self._handles):
            return None
        return_freed()  # the memory used to compute the new one
        if self._holders[id(old)] > 1:
            self._holders[id(old)] -= 1
            stored = self._beside(old, new, name, marks)
        else:
            before = marks_on(old)
            if not marks or not set(marks) <= set(before):
                replace_value(old, new.detach(), _notes((*before, *marks) if marks else ()), **ANY_KIND)
            stored = old.detach()  # type: ignore[assignment]
        return dressed(stored, requires_grad=new.requires_grad, is_parameter=isinstance(new, nn.Parameter))

    def finish(self) -> list[str]:
        """Put on disk what replaced a value by way of a module that was replaced; returns the names."""
        before = {name: slot.tensor for slot in self._slots for name in slot.names}
        names = []
        new = [slot for slot in tensor_slots(self._model) if before.get(slot.name, slot.tensor) is not slot.tensor]
        for slot in sorted(new, key=lambda slot: slot.name == getattr(before[slot.name], "name", None)):
            stored = self.stored(before[slot.name], slot.tensor, slot.name)
            if stored is not None:
                slot.fill(stored)
                names.append(slot.name)
        return names

    def _beside(self, old: OffloadedTensor, new: torch.Tensor, name: str, marks: Sequence[str]) -> OffloadedTensor:
        """`new` in a separate file, in the folder and under the memory budget of `old`."""
        handle, value = handle_of(old), guest_of(new.detach())
        own_name = f"{handle.name}.{self._suffix}" if name in ("", handle.name) else name
        made = create_value(value, own_name, handle.folder, _notes(marks), exist_ok=True)
        page_state_of(made).pool = page_state_of(handle).pool
        self._handles.add(made)
        return wrap_handle(made, new.device)


# Selecting values


def _selected(values: list[Slot], select: Select, source: object) -> list[Slot]:
    if select is None:
        return values
    if callable(select) and not isinstance(select, type):
        return [value for value in values if select(value.name, value.tensor)]
    found: dict[int, Slot] = {}
    wishes = [select] if isinstance(select, str | type) or not isinstance(select, Iterable) else list(select)
    for wanted in wishes:
        if not isinstance(wanted, str | type):
            raise ArgumentTypeError(f"select: names, classes or a function are needed, not {repr(wanted)[:80]}")
        meant = [value for value in values if _is_meant(value, wanted, source)]
        if not meant:
            names = some((value.name for value in values), 3)
            raise ArgumentError(f"select: {wanted!r} is none of the {len(values)} values ({names})")
        found.update((id(value), value) for value in meant)
    return [value for value in values if id(value) in found]


def _is_meant(value: Slot, wanted: str | type[nn.Module], source: object) -> bool:
    if isinstance(wanted, str):
        return any(fnmatchcase(name, wanted) for name in value.names)
    if not isinstance(source, nn.Module):
        raise ArgumentTypeError(
            f"select={wanted!r} selects modules, but this is a dictionary of tensors: select by name"
        )
    return any(isinstance(source.get_submodule(name.rpartition(".")[0]), wanted) for name in value.names)


def journal_for(slots: Iterable[Slot], name: str, *, resume: bool, goes_on: bool = False) -> Journal:
    """A journal with a new run over values, or the run of that name with what it has stored; or a `JournalError`."""
    folders = {slot.folder for slot in slots} - {None}
    if len(folders) != 1:
        if not resume:
            return Journal()
        where = f"{len(folders)} folders" if folders else "memory or in a private folder, which go with the process"
        raise JournalError(f"{name!r} can't be resumed: its values are in {where}. Load them with one offload_dir.")
    folder = named_folder(folders.pop())  # type: ignore[arg-type]
    journal, sources = Journal.open(folder), {slot.name: source_of(slot) for slot in slots}
    if not resume:
        journal.begin(name, sources, (key for slot in slots for key in marks_on(slot.tensor)), goes_on=goes_on)
        return journal
    journal.resume(name, sources)
    for slot in slots:
        adopt(slot, *journal.key)
    log.info("resuming %r in %s", name, folder)
    return journal


def is_done(slot: Slot, journal: Journal) -> bool:
    """Whether the journal's run has replaced a value."""
    return not set(journal.key).isdisjoint(marks_on(slot.tensor))


def _name_of_run(fn: Function, resume: bool | str) -> str:
    if isinstance(resume, str):
        return resume
    inner = fn
    while isinstance(inner, partial):
        inner = inner.func
    name: str = getattr(inner, "__qualname__", type(inner).__qualname__)
    if resume and (not isinstance(fn, FunctionType) or fn.__closure__ or "<lambda>" in name):
        raise JournalError(
            f"resume=True names a run after its function, and others may be called {name!r} too (it is a lambda, a "
            f"closure or an object): give the run a name of its own, as resume='first pass'"
        )
    return name


@dataclass
class _Walk:
    fn: Function
    journal: Journal
    done: int
    most: int
    advance: Callable[[int], object]
    strict: Mapping[str, bool]
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    @inside(no_inference)  # inference tensors could not be trained later
    @inside(no_grad)
    def see(self, value: Slot) -> None:
        nbytes = value.nbytes
        is_new = self._is_replaced(value)
        log.debug("%s: %s", value.name, "replaced" if is_new else "kept")
        with self.lock:
            (self.replaced if is_new else self.kept).append(value.name)
            self.advance(nbytes)
        count_freed(nbytes * _TEMPORARIES)

    def _is_replaced(self, value: Slot) -> bool:
        given = value.tensor.detach()
        if (outer := value.outer) is not None:
            vars(given).update(device_mesh=outer.device_mesh, placements=outer.placements)  # type: ignore[attr-defined]
        version = version_of(given)
        new = self._called(value.name, given)
        is_new = new is not given or version_of(given) != version
        if is_new:
            replace(value, new, (*marks_on(value.tensor), *self.journal.key), self.strict)
        return is_new

    def _called(self, name: str, given: torch.Tensor) -> torch.Tensor:
        try:
            new = self.fn(name, given)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(f"interrupted at {name!r}: {self._so_far()}") from error
        except Exception as error:
            raise MapError(f"fn failed at {name!r} ({type(error).__name__}: {error}): {self._so_far()}") from error
        if not isinstance(new, torch.Tensor):
            raise ArgumentTypeError(
                f"fn returned {'None' if new is None else f'a {type(new).__name__}'} for {name!r}: it should return "
                f"the new value, or the same tensor to leave it unchanged. {self._so_far()}"
            )
        return new

    def _so_far(self) -> str:
        done, run = self.done + len(self.replaced) + len(self.kept), self.journal.run
        way_on = "" if run is None else f"; resume={run.name!r} continues from there"
        return f"{done} of {self.most} values were replaced and stay so{way_on}"


def _for_each(values: list[Slot], see: Callable[[Slot], None], workers: int) -> None:
    if workers == 1:
        for value in values:
            see(value)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="offload-map") as pool:
        waiting = [pool.submit(copy_context().run, see, value) for value in values]
        try:
            for one in as_completed(waiting):
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


# The record of the runs over a folder's values


NAME = ".offload-journal"  # no value's file name begins with a dot
RUNS = "runs"  # the note in a value's file
_KIND = Kind(what="a journal", stamp={"version": 1})


@dataclass
class Run:
    """A function applied to values."""

    name: str
    key: str  # noted in the files of values that it has replaced
    sources: dict[str, str | None]  # by value the file that it came from; None if in memory or in the folder
    finished: bool = False  # whether it has processed all of them


class Journal:
    """The runs over a folder's values, and the current one; without a path, nothing is kept.

    It is only replaced as a whole, and another file of its name is left as it is.
    """

    def __init__(self, path: Path | None = None, runs: Iterable[Run] = ()) -> None:
        self.path = path
        self.runs = list(runs)
        self.run: Run | None = None

    @property
    def key(self) -> tuple[str, ...]:
        return () if self.run is None else (self.run.key,)

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

    def resume(self, name: str, sources: Mapping[str, str | None]) -> None:
        """Continue the run of that name, or start one; `JournalError` if it had other values, or another is open."""
        self.run = next((run for run in self.runs if run.name == name), None)
        if self.run is not None:
            self._refuse_others(self.run, sources)
            return
        unfinished = next((run for run in self.runs if not run.finished), None)
        if unfinished is not None:
            raise JournalError(
                f"{self.path} is the journal of another run, {unfinished.name!r}, and {name!r} can't start before that "
                "ends: call it again with resume=True, take another offload_dir, or remove the journal to give it up"
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
                f"{self.path} has the unfinished run {half.name!r}, and these values are as it left them: call that "
                f"one with resume=True to finish it, load the values again to begin {name!r} anew, or remove the "
                "journal to go on from here"
            )
        self.runs = [run for run in self.runs if run.finished and run.name != name]
        self._add(name, sources)

    def finish(self) -> None:
        """Note that the run has processed all its values. Raises `WriteError`."""
        if self.run is not None:
            self.run.finished = True
            self._write()

    def _add(self, name: str, sources: Mapping[str, str | None]) -> None:
        self.run = Run(name, secrets.token_hex(8), dict(sources))
        self.runs.append(self.run)
        self._write()

    def _write(self) -> None:
        assert self.path is not None
        write_state(self.path, _KIND, {"runs": [asdict(run) for run in self.runs]})

    def _refuse_others(self, run: Run, sources: Mapping[str, str | None]) -> None:
        """A value that is still in a checkpoint must be in the same one as when the run began."""
        strangers = sorted(run.sources.keys() ^ sources.keys())
        both = run.sources.keys() & sources.keys()
        moved = sorted(name for name in both if sources[name] not in (None, run.sources[name]))
        if not (strangers or moved):
            return
        what = (
            f"over {len(run.sources)} values, this one is over {len(sources)}: {some(map(repr, strangers), 3)} differ"
        )
        if not strangers:
            was, now = run.sources[moved[0]] or "the folder", sources[moved[0]]
            what = f"over other files: {moved[0]!r} was in {was}, now it is in {now}"
        raise JournalError(
            f"{self.path} is the journal of another run: {run.name!r} is {what}. Take another offload_dir, or another "
            "name (resume='a name'), or remove the journal to start again"
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
    kinds = [type(part) for part in (run.name, run.key, run.sources, run.finished)]
    if kinds != [str, str, dict, bool] or not all(isinstance(source, str | None) for source in run.sources.values()):
        raise ValueError("a run is malformed")
    return run
