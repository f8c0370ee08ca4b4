"""Replacing many values, one at a time.

Always true:
- a distinct value is processed once, whatever its names; tied values stay tied
- one value at a time is in memory
- if ranks share values, the function gets this rank's shard of each
- finished values stay finished, whatever happens to the next one
- a resumed run passes no value that it has replaced to the function again: that is noted in the value's own file, which
  changes together with the value
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from offload.errors import ArgumentError, ArgumentTypeError, MapError, MetaTensorError
from offload.memory import count_freed, return_freed
from offload.models import log
from offload.models.slots import Slot, is_meta, tensor_slots
from offload.prefetch.value import page_state_of
from offload.progress import progress_in_bytes
from offload.storage.file import TensorFile
from offload.storage.folders import file_name
from offload.storage.owning import Notes, create_value, open_owned, switch_to
from offload.storage.subclasses import refuse_lossy
from offload.system.modes import inside, no_grad, no_inference
from offload.system.reasons import some
from offload.system.regular import is_there
from offload.tensor.arguments import checked_dense, refuse_other_kind
from offload.tensor.recipes import files_in
from offload.tensor.replacing import become, redress, replace_value
from offload.tensor.saved import identity_of
from offload.tensor.views import handle_of, is_part, meta_of, target_of
from offload.tensor.wrapper import OffloadedTensor, dressed, guest_of, is_offloaded, wrap_handle
from offload.torch_api import version_of

Function: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
Predicate: TypeAlias = Callable[[str, torch.Tensor], bool]
Select: TypeAlias = "str | type[nn.Module] | Sequence[str | type[nn.Module]] | Predicate | None"
Marks: TypeAlias = Mapping[str, str | None]  # the runs that a value has gone through, and what each was given

ANY_KIND = {"strict_shape": False, "strict_dtype": False}
_TEMPORARIES = 8  # estimated peak memory of a function, as a multiple of its value
_RUNS = "runs"  # the note in a value's file
_MARKS = "_offload_runs"  # the attribute of a tensor in memory
_UNNAMED = ""  # a run that can't be resumed: the earlier ones of a value are not taken up again after it


@dataclass(frozen=True)
class MapReport:
    """What `map_values` did, by the first name of each value.

    Attributes:
        replaced: those that have a new value.
        kept: those that the function gave back as they were.
        before: those that an earlier call of the same name had replaced.

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
    resume: str | None = None,
    progress: bool = True,
    strict_shape: bool = True,
    strict_dtype: bool = True,
) -> MapReport:
    """Replace values with the results of a function, one at a time.

    A value on disk is replaced as `OffloadedTensor.update_values` does, and stays on disk; one in memory is replaced
    in memory. Tied weights are one value, and stay tied.

    A run with a name, `resume="first pass"`, continues when the same lines are run again after an interruption: no
    value that it has replaced goes through `fn` twice. Where values have an `offload_dir`, that holds after a kill,
    too, in another process that loads the checkpoint anew: they are taken from the folder. What was loaded in another
    dtype, from other files, or into memory, is as in the checkpoint, and is computed again; so is what was copied,
    moved between disk and memory, or written to meanwhile. And `fn` sees again what it left alone.

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
        resume: a name for the run, which is continued if a part of it is done: another one for each function. None for
            a run that can't be continued.
        progress: show a bar, on a terminal.
        strict_shape, strict_dtype: refuse a value of another shape or dtype.

    Returns:
        What was done.

    Raises:
        MapError: `fn` failed; the message names the tensor. Those before it are done.
        ArgumentTypeError: `fn` did not return a tensor; likewise.
        ShapeMismatchError, DtypeMismatchError: of what `fn` returned; those before it are done.
        ValueError: a pattern or class selects nothing.
        MetaTensorError, WriteError, UnsupportedOpError

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> map_values(lambda name, tensor: tensor / 2, model, select="*.weight").replaced
        ('0.weight', '2.weight')
    """
    if type(resume) not in (str, type(None)) or resume == _UNNAMED:
        raise ArgumentTypeError(f"resume is the name of a run, as 'first pass', not {resume!r}")
    values = _selected(values_of(model_or_tensors), select, model_or_tensors)
    before, todo = [], []
    for value in values:
        if resume is not None:
            adopt(value, resume)
        if resume in marks_on(value.tensor):
            before.append(value.name)
        else:
            todo.append(value)
    with progress_in_bytes(sum(value.nbytes for value in todo), "values", shown=progress) as advance:
        strict = {"strict_shape": strict_shape, "strict_dtype": strict_dtype}
        walk = _Walk(fn, resume, len(before), len(values), advance, strict)
        for value in todo:
            walk.see(value)
    log.info("%d values replaced, %d unchanged, %d done before", len(walk.replaced), len(walk.kept), len(before))
    return MapReport(tuple(walk.replaced), tuple(walk.kept), tuple(before))


def offloaded_like(
    fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, suffix: str, *, exist_ok: bool = False
) -> torch.Tensor:
    """The result of a function of a tensor: on disk if the tensor is, beside it, as `name.suffix`.

    Args:
        fn: called with the tensor, and gives one; of one on disk, without gradients.
        tensor: plain or offloaded.
        suffix: is added to the tensor's name.
        exist_ok: whether a file that an earlier tensor left under this name is replaced.

    Returns:
        For an offloaded tensor the result, offloaded in a file of its own in the same folder. For a plain one, the
        result as it is.

    Raises:
        NameInUseError: a live tensor has that name, or an earlier one left its file.
        ArgumentTypeError: `fn` did not return a tensor.
        ForeignFileError, WriteError, UnknownSubclassError

    Example:
        >>> w = OffloadedTensor.full((2, 2), 3.0, name="w")
        >>> norms = offloaded_like(lambda weight: weight.sum(0), w, "norms")
        >>> norms.name, norms.tolist()
        ('w.norms', [6.0, 6.0])
    """
    if not is_offloaded(tensor):
        return fn(tensor)
    with no_inference(), no_grad():
        name, folder = f"{tensor.name}.{suffix}", handle_of(tensor).folder
        return OffloadedTensor.from_original_tensor(fn(tensor), name, folder, exist_ok=exist_ok)


def replace(slot: Slot, new: torch.Tensor, run: str | None, strict: Mapping[str, bool]) -> None:
    """Replace a value in all its owners; its file notes the run of that name."""
    tensor, marks = slot.tensor, marks_after(slot.tensor, run)
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
    if marks or hasattr(slot.tensor, _MARKS):
        setattr(slot.tensor, _MARKS, (marks, *_content_of(slot.tensor)))


def adopt(slot: Slot, run: str) -> None:
    """Take over what the run of that name has already stored for a value, if it was made of what the value is now."""
    tensor = slot.tensor
    if not is_offloaded(tensor) or handle_of(tensor).owned or slot.folder is None:
        return
    is_cut, handle = is_part(tensor), handle_of(tensor)
    path = slot.folder / file_name(slot.name if is_cut else handle.name)
    if not is_there(path):
        return
    file = TensorFile.open(path)
    marks = _marks_of(file)
    if not file.is_ours or _UNNAMED in marks or marks.get(run) != source_of(tensor):
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


def source_of(tensor: torch.Tensor) -> str | None:
    """The files that a value refers to, and its dtype, as text; None for the only copy of a value."""
    if not is_offloaded(tensor) or handle_of(tensor).owned:
        return None
    files = ", ".join(
        f"{file.path.name} ({file.identity.size} bytes, modified {file.identity.modified})"
        for file in files_in(handle_of(tensor))
    )
    return f"{files}, as {tensor.dtype}"


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


def marks_on(tensor: torch.Tensor) -> Marks:
    """The runs that a value has gone through."""
    if not is_offloaded(tensor):
        marks, *content = getattr(tensor, _MARKS, ({},))
        return marks if content == _content_of(tensor) else {}
    handle = handle_of(tensor)
    if not handle.owned:
        return {}
    handle.base()  # switches to the current file, also after a replacement that was interrupted at its end
    return _marks_of(handle.file)


def _content_of(tensor: torch.Tensor) -> list[object]:
    """Equal as long as nothing was written to a tensor in memory, and it is over the same memory."""
    return [version_of(tensor), identity_of(tensor)]


def marks_after(tensor: torch.Tensor, run: str | None) -> Marks:
    """The same, after a run of that name, or, if some are noted, of none."""
    before = marks_on(tensor)
    if run is None:
        return {**before, _UNNAMED: None} if before else {}
    return {**before, run: source_of(tensor)}


def _marks_of(file: TensorFile) -> Marks:
    marks = file.notes.get(_RUNS)
    return marks if isinstance(marks, dict) else {}


def _notes(marks: Marks) -> Notes:
    return {_RUNS: dict(marks)} if marks else None


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

    def stored(self, old: torch.Tensor, new: torch.Tensor, name: str) -> OffloadedTensor | None:
        """The parameter over `new`, in place of `old` or in a file called `name`; None if it stays as it is."""
        if not is_offloaded(old) or (is_offloaded(new) and handle_of(new) in self._handles):
            return None
        return_freed()  # the memory used to compute the new one
        if self._holders[id(old)] > 1:
            self._holders[id(old)] -= 1
            stored = self._beside(old, new, name)
        else:
            replace_value(old, new.detach(), _notes(marks_after(old, None)), **ANY_KIND)
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

    def _beside(self, old: OffloadedTensor, new: torch.Tensor, name: str) -> OffloadedTensor:
        """`new` in a separate file, in the folder and under the memory budget of `old`."""
        handle, value = handle_of(old), guest_of(new.detach())
        own_name = f"{handle.name}.{self._suffix}" if name in ("", handle.name) else name
        new_handle = create_value(value, own_name, handle.folder, exist_ok=True)
        page_state_of(new_handle).pool = page_state_of(handle).pool
        self._handles.add(new_handle)
        return wrap_handle(new_handle, new.device)


# Selecting values


def _selected(values: list[Slot], select: Select, source: object) -> list[Slot]:
    if select is None:
        return values
    if callable(select) and not isinstance(select, type):
        return [value for value in values if select(value.name, value.tensor)]
    selected: dict[int, Slot] = {}
    wishes = [select] if isinstance(select, str | type) or not isinstance(select, Iterable) else list(select)
    for wanted in wishes:
        if not isinstance(wanted, str | type):
            raise ArgumentTypeError(f"select: names, classes or a function are needed, not {repr(wanted)[:80]}")
        meant = [value for value in values if _is_meant(value, wanted, source)]
        if not meant:
            names = some((value.name for value in values), 3)
            raise ArgumentError(f"select: {wanted!r} is none of the {len(values)} values ({names})")
        selected.update((id(value), value) for value in meant)
    return [value for value in values if id(value) in selected]


def _is_meant(value: Slot, wanted: str | type[nn.Module], source: object) -> bool:
    if isinstance(wanted, str):
        return any(fnmatchcase(name, wanted) for name in value.names)
    if not isinstance(source, nn.Module):
        raise ArgumentTypeError(
            f"select={wanted!r} selects modules, but this is a dictionary of tensors: select by name"
        )
    return any(isinstance(source.get_submodule(name.rpartition(".")[0]), wanted) for name in value.names)


# Walking over them


@dataclass
class _Walk:
    fn: Function
    run: str | None
    done: int
    most: int
    advance: Callable[[int], object]
    strict: Mapping[str, bool]
    replaced: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @inside(no_inference)  # inference tensors could not be trained later
    @inside(no_grad)
    def see(self, value: Slot) -> None:
        nbytes = value.nbytes
        is_new = self._is_replaced(value)
        log.debug("%s: %s", value.name, "replaced" if is_new else "kept")
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
            replace(value, new, self.run, self.strict)
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
        done = self.done + len(self.replaced) + len(self.kept)
        way_on = "" if self.run is None else f"; resume={self.run!r} continues from there"
        return f"{done} of {self.most} values were replaced and stay so{way_on}"
