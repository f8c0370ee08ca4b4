"""Fill a model's empty weights from a checkpoint, each where the device map says.

Always true:
- a value on disk in the model's dtype is referenced in its checkpoint: nothing is copied or written, except pickled
  values that can't be mapped
- tied weights stay one parameter, over one file
- a model returned by `load_checkpoint_and_dispatch` has no tensor without data, unless the map says "meta"
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offload.annotations import Kwargs
from offload.budget import Amount, MaxMemory, expect_context, pool_for
from offload.checkpoints.checkpoint import Checkpoint, open_checkpoint
from offload.checkpoints.companions import is_of_transformers, quantization_of
from offload.checkpoints.forms.formats import refuse_scaled
from offload.errors import ArgumentError, ArgumentTypeError, CheckpointError, MetaTensorError
from offload.memory import uncollected
from offload.models import log
from offload.models.device_map import (
    AUTOMATIC,
    ON_DISK,
    DeviceMap,
    Place,
    execution_devices,
    infer_device_map,
    move_activations,
    places,
    refuse_held,
    warn_of_strangers,
)
from offload.models.experts import prefer_experts
from offload.models.pretrained import Fitted, as_in, let_save, quantized_by_torchao
from offload.models.slots import (
    Slot,
    at_place,
    folder_of,
    is_meta,
    place_of_slot,
    place_tensors,
    share_of,
    tensor_slots,
    tied_slots,
)
from offload.prefetch.engine import count_in, expect
from offload.prefetch.plan import SMALL, Pool
from offload.progress import progress, progress_in_bytes
from offload.storage.file import TensorFile
from offload.storage.handle import MADE_OF, Handle
from offload.storage.owning import open_stored, store_recipe
from offload.storage.subclasses import refuse_lossy
from offload.system.modes import inside, no_inference
from offload.system.reasons import some
from offload.system.regular import is_folder
from offload.tensor.arguments import computing_device, floating_dtype
from offload.tensor.deferred import DeferredTensor, as_dtype, deferred, refuse_to_share
from offload.tensor.locals import local_of
from offload.tensor.products import compute_exactly
from offload.tensor.recipes import Recipe, stored_in
from offload.tensor.views import handle_of
from offload.tensor.wrapper import OffloadedTensor, PathLike, is_offloaded
from offload.torch_api import DisableTorchFunctionSubclass, blocks_of, buffers_of, parameters_of

Model = TypeVar("Model", bound=nn.Module)

_MOST_OF_A_FILE = 0.75  # share of a file from which it is read including the gaps between a model's values
_REFERENCED = "referenced"
_IN_MEMORY = "in memory"


@dataclass(frozen=True)
class HeldForm:
    """Values of a model that are held in the same way."""

    values: int
    nbytes: int  # what a pass over them reads from disk, as stored

    def __str__(self) -> str:
        return f"{self.values} ({self.nbytes:,} bytes)"


@dataclass(frozen=True)
class LoadReport:
    """What did not match between a model and a checkpoint, and how the model's values are held.

    Attributes:
        missing_keys: tensors of the model that the checkpoint does not have.
        unexpected_keys: tensors of the checkpoint that the model does not have.
        mismatched_keys: each name with its shapes in the checkpoint and in the model; only in the text of an error.
        forms: how many values are "referenced" in the checkpoint, "stored" from recipes in the `offload_dir`, "in files
            of their own", "in memory", and recipes, by what is done when they are read: "cast", "joined", "laid out
            anew", "decoded from fp8, joined"...

    Example:
        >>> from safetensors.torch import save_file
        >>> save_file({"weight": torch.ones(1, 2)}, "layer.safetensors")
        >>> report = load_checkpoint_in_model(nn.Linear(2, 1, device="meta"), "layer.safetensors", strict=False)
        >>> report.missing_keys, report.differs
        (['bias'], True)
    """

    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched_keys: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    forms: Mapping[str, HeldForm] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether anything did not match."""
        return bool(self.missing_keys or self.unexpected_keys or self.mismatched_keys)

    def __str__(self) -> str:
        mismatched = [f"{name} (checkpoint {theirs}, model {ours})" for name, theirs, ours in self.mismatched_keys]
        lines = {"missing": self.missing_keys, "unexpected": self.unexpected_keys, "mismatched": mismatched}
        texts = [f"{len(names)} {what}: {some(names)}" for what, names in lines.items() if names] or ["all match"]
        if self.forms.keys() - {_REFERENCED, _IN_MEMORY}:
            texts += [f"{what}: {form}" for what, form in self.forms.items()]
        return "; ".join(texts)


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: PathLike,
    device_map: DeviceMap = ON_DISK,
    offload_dir: PathLike | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    strict: bool = False,
    max_memory: MaxMemory = None,
    read_ahead: Amount | bool | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    store: bool = False,
) -> Model:
    """Fill a model from a checkpoint and make it ready to run.

    Args:
        model: a model with empty weights (`init_empty_weights`), or one whose values are replaced.
        checkpoint: see `open_checkpoint`.
        device_map: see `offload.models.device_map.places`; also accelerate's "auto", "balanced", "sequential". None,
            which is accelerate's default, loads into the CPU's memory.
        offload_dir: where values go that are stored or later written to; None for a private folder.
        dtype: of the floating-point values; None for that of the model's tensors. Others are converted when they are
            read.
        strict: missing and unexpected keys are errors, too.
        max_memory: what of the values on disk may stay in memory between ops, for this model (`offload.set_max_memory`
            for all); with an automatic device map, what may be placed on each device, as in accelerate.
        read_ahead: see `offload.budget.set_read_ahead`, for this model.
        no_split_module_classes: for an automatic device map, as in accelerate.
        offload_buffers: whether buffers of modules on disk are on disk too; else they are on the executing device.
        skip_keys: for a map over several devices: keyword arguments of forward that are not moved.
        store: whether values that have to be joined, cast or decoded are so once, into files in `offload_dir`, and not
            each time that they are read. What an earlier loading has stored there is used, in any case.

    Returns:
        The same model.

    Raises:
        MissingFileError, CorruptFileError, ReadError, DeviceMapError
        CheckpointError: shapes differ; it is another model's checkpoint; nothing was changed.
        ValueError: `dtype` is not a floating-point one, or values should be stored without an `offload_dir`.
        MetaTensorError: tensors are left without data; the message names them.
        UnsupportedOpError: hooks of accelerate, or another library, hold the model's values.

    Example:
        >>> from safetensors.torch import save_file
        >>> save_file({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, "model.safetensors")
        >>> model = nn.Linear(2, 3, device="meta")
        >>> load_checkpoint_and_dispatch(model, "model.safetensors")(torch.ones(2)).tolist()
        [2.0, 2.0, 2.0]
    """
    refuse_to_store_nowhere(offload_dir, store=store)
    dtype = None if dtype is None else floating_dtype(dtype)
    pool = pool_for(None if device_map in AUTOMATIC else max_memory, read_ahead)
    device_map = infer_device_map(
        model,
        device_map,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=dtype,
        offload_buffers=offload_buffers,
    )
    slots = tied_slots(model)
    where: Kwargs = {"offload_dir": offload_dir, "offload_buffers": offload_buffers}
    report = _fill(model, slots, checkpoint, _placed(slots, device_map), dtype=dtype, strict=strict, **where)
    finish_loading(model, device_map, report, pool=pool, skip_keys=skip_keys, store=store, **where)
    prefer_experts(model)
    return model


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: DeviceMap = ON_DISK,
    offload_dir: PathLike | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    strict: bool = False,
    offload_buffers: bool = False,
    store: bool = False,
) -> LoadReport:
    """Fill a model's parameters and persistent buffers from a checkpoint; what it does not have is left as it was.

    Args and errors: as `load_checkpoint_and_dispatch`.

    Returns:
        What did not match, and how the values are held.

    Example:
        >>> from safetensors.torch import save_file
        >>> save_file({"weight": torch.ones(3, 2), "other": torch.zeros(3)}, "some.safetensors")
        >>> report = load_checkpoint_in_model(nn.Linear(2, 3), "some.safetensors")
        >>> report.missing_keys, report.unexpected_keys
        (['bias'], ['other'])
    """
    refuse_to_store_nowhere(offload_dir, store=store)
    dtype = None if dtype is None else floating_dtype(dtype)
    slots = [slot for slot in tied_slots(model) if slot.keys]
    placed = _placed(slots, device_map)
    warn_of_strangers(device_map, (name for name, _ in model.named_modules()), placed)
    report = _fill(
        model, slots, checkpoint, placed, offload_dir, dtype=dtype, strict=strict, offload_buffers=offload_buffers
    )
    _stored_once(slots, store=store)
    _read_apart(stored_in(handle_of(slot.tensor) for slot in slots if is_offloaded(slot.tensor)))
    return replace(report, forms=_forms(slots))


def disk_offload(
    model: Model,
    offload_dir: PathLike | None = None,
    *,
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
) -> Model:
    """Move the parameters of a model to disk, one by one.

    A model that accelerate has dispatched, to the CPU's memory or to disk, is refused: its hooks hold the weights. Load
    such a model with `load_checkpoint_and_dispatch` or `from_pretrained`. Other hooks stay.

    Args:
        model: its parameters stay the same objects, so that what is tied to them, optimizers and lists follow. Of a
            pipeline of diffusers, give each model among its `components`, with a folder of its own.
        offload_dir: the folder for the files, which then stay; None for a private one. What is on disk already stays
            where it is; `save_checkpoint` copies it.
        execution_device: where ops run; None for the device that each tensor is on.
        offload_buffers: buffers too. Without, the folder has none: one that is to be loaded again, as of a BatchNorm's
            running mean, needs them.

    Returns:
        The same model.

    Raises:
        MetaTensorError: some parameters have no data.
        UnknownSubclassError: a parameter is of a subclass that can't be stored; nothing is changed.
        UnsupportedOpError: another library keeps the parameters, as accelerate's hooks or compressed-tensors do;
            nothing is changed.
        WriteError, ForeignFileError, NameInUseError

    Example:
        >>> model = disk_offload(nn.Linear(2, 3))
        >>> type(model.weight.data).__name__
        'OffloadedTensor'
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"a {type(model).__name__} is not a module: offload its parts one by one")
    refuse_held(model)
    slots = tensor_slots(model)
    empty = [slot.name for slot in slots if slot.keys and slot.tensor.is_meta]
    if empty:
        raise MetaTensorError(f"{len(empty)} tensors have no data to write: {some(empty)}. Load them first.")
    for slot in slots:
        if slot.is_parameter or offload_buffers:
            refuse_lossy(slot.tensor, slot.name)
    device = None if execution_device is None else computing_device(execution_device)
    placed = {slot.name: Place(True, device or slot.tensor.device) for slot in slots}
    place_tensors(slots, placed, offload_dir, offload_buffers=offload_buffers)
    _settle(model, None)
    prefer_experts(model)
    return model


def load_file(
    path: PathLike, device: torch.device | str | int = "cpu", *, offload_dir: PathLike | None = None
) -> dict[str, OffloadedTensor]:
    """The tensors of a file or folder by name, on disk: `safetensors.torch.load_file` without the reading.

    Args:
        path: see `open_checkpoint`; it is never written to.
        device: where ops run.
        offload_dir: where a tensor goes at its first write; None for a private folder.

    Returns:
        The tensors by their names in the file.

    Raises:
        MissingFileError, CorruptFileError, ReadError, CheckpointError

    Example:
        >>> from safetensors.torch import save_file
        >>> save_file({"w": torch.ones(3, 2)}, "file.safetensors")
        >>> load_file("file.safetensors")["w"].shape
        torch.Size([3, 2])
    """
    target = computing_device(device)
    source = open_checkpoint(path)
    source.refuse_own_folder(offload_dir)
    return source.tensors(offload_dir, dict.fromkeys(source, target))


# Filling, in the order of its steps


@inside(no_inference)  # inference tensors could not be trained later
def _fill(
    model: nn.Module,
    slots: list[Slot],
    checkpoint: PathLike,
    placed: Mapping[str, Place],
    offload_dir: PathLike | None,
    *,
    dtype: torch.dtype | None,
    strict: bool,
    offload_buffers: bool,
) -> LoadReport:
    refuse_held(model)
    source = open_checkpoint(checkpoint)
    source.refuse_own_folder(offload_dir)
    slots = _tied_as_noted(slots, source)
    keyed = _keyed(slots, source)
    report = _compare(keyed, source)
    fitted: Fitted | None = None
    if is_of_transformers(model) and (report.differs or _is_packed(model, source)):
        log.info("%s differs from %s: transformers converts it", source.path, type(model).__name__)
        fitted = as_in(model, source, offload_dir, dtype)
    elif report.differs:
        shapes = {key: slot.tensor.shape for slot in slots for key in slot.keys}
        fitted = quantized_by_torchao(source, offload_dir, shapes)
    if fitted is not None:
        named = fitted.tensors
        keyed = _keyed(slots, named)
        refuse_other_names(source, ((slot.keys, named[key]) for slot, key in keyed if key is not None), offload_dir)
        missing = [slot.keys[0] for slot, key in keyed if key is None]
        report = replace(report_of(fitted.report), missing_keys=missing)
    if fitted is None:
        filled = {key: source[key].layout for slot, key in keyed if key is not None and slot.held.is_floating_point()}
        stored_as = {key: layout.dtype for key, layout in filled.items() if layout is not None}
        refuse_scaled(source, stored_as, set(report.unexpected_keys))
    if report.mismatched_keys or (strict and report.differs):
        raise CheckpointError(f"{source.path} does not fit this {type(model).__name__}: {report}")
    if keyed and all(key is None for _, key in keyed):
        raise CheckpointError(
            f"{source.path} belongs to another model than this {type(model).__name__}: no name matches ({report})"
        )
    wanted = {
        key: (slot, place_of_slot(slot, placed, offload_buffers=offload_buffers))
        for slot, key in keyed
        if key is not None and placed[slot.name].device.type != "meta"
    }
    devices = {key: place.device for key, (_, place) in wanted.items()}
    tensors = source.tensors(offload_dir, devices) if fitted is None else fitted.tensors
    for key, (slot, place) in progress(wanted.items(), "loading", total=len(wanted)):
        tensor: torch.Tensor = tensors[key]
        with DisableTorchFunctionSubclass():  # answered by the wrapper's metadata: no rule is needed
            is_floating = slot.tensor.is_floating_point() and tensor.is_floating_point()
        if is_floating:
            tensor = as_dtype(tensor, dtype or slot.tensor.dtype)
        if slot.outer is not None:
            refuse_to_share(tensor, key)
            tensor = share_of(deferred(tensor) if is_offloaded(tensor) else tensor, slot.outer, key)
        slot.fill(at_place(tensor, slot, place, folder_of(slot, offload_dir), name=key))
    if fitted is not None:
        fitted.note(model)
    if report.differs:
        log.warning("%s: %s", source.path, report)
    return report


def _is_packed(model: Any, source: Checkpoint) -> bool:
    """Whether a transformers model's config says that the checkpoint is quantized; offload folders have own forms."""
    return quantization_of(model.config) is not None and not source.is_offload_folder


def _keyed(slots: Iterable[Slot], values: Container[str]) -> list[tuple[Slot, str | None]]:
    """Each tensor of a model with the last of its names that is in a checkpoint, as torch's own loading has it."""
    return [(slot, next((key for key in reversed(slot.keys) if key in values), None)) for slot in slots if slot.keys]


def _tied_as_noted(slots: list[Slot], source: Checkpoint) -> list[Slot]:
    """The slots, with empty ones joined to those that the checkpoint ties them to: `init_empty_weights` unties."""
    stored = {name: slot for slot in slots if any(key in source for key in slot.keys) for name in slot.keys}
    left = []
    for slot in slots:
        first = next((stored.get(source.ties[key]) for key in slot.keys if key in source.ties), None)
        is_empty = slot.name not in stored and is_meta(slot.tensor)
        kinds = [(one.is_parameter, one.held.shape, one.held.dtype) for one in (slot, first or slot)]
        if first and is_empty and kinds[0] == kinds[1]:
            first.join(slot)
        else:
            left.append(slot)
    return left


def _compare(keyed: Sequence[tuple[Slot, str | None]], source: Checkpoint) -> LoadReport:
    expected = {key for slot, _ in keyed for key in slot.keys}
    stored = [(key, source[key].layout, tuple(slot.held.shape)) for slot, key in keyed if key is not None]
    mismatched = [(key, held.shape, shape) for key, held, shape in stored if held is not None and held.shape != shape]
    missing = [slot.keys[0] for slot, key in keyed if key is None]
    return LoadReport(missing, [name for name in source if name not in expected], mismatched)


def report_of(info: Mapping[str, Any]) -> LoadReport:
    mismatched = [(name, tuple(theirs), tuple(ours)) for name, theirs, ours in sorted(info["mismatched_keys"])]
    return LoadReport(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), mismatched)


def refuse_other_names(
    source: Checkpoint, values: Iterable[tuple[list[str], torch.Tensor]], offload_dir: PathLike | None
) -> None:
    """Raises `CheckpointError` if values would go to a folder where the same names have other forms."""
    if not source.is_in(offload_dir):
        return
    others = [
        keys[0]
        for keys, value in values
        if isinstance(value, DeferredTensor) and not value.is_stored and not any(key in source for key in keys)
    ]
    if others:
        raise CheckpointError(
            f"{source.path} has {len(others)} tensors in another form, or under other names, than this model "
            f"({some(others)}), and can't hold both. Give another offload_dir."
        )


# The end of every load


def finish_loading(
    model: nn.Module,
    device_map: DeviceMap,
    report: LoadReport,
    *,
    offload_dir: PathLike | None,
    offload_buffers: bool,
    pool: Pool | None,
    skip_keys: str | list[str] | None,
    store: bool = False,
    exact: bool = False,
) -> LoadReport:
    """Move what is not in its place, see that nothing is empty, and make the model ready; the report with its forms."""
    slots = tensor_slots(model)
    placed = _placed(slots, device_map)
    warn_of_strangers(device_map, (name for name, _ in model.named_modules()), placed)
    place_tensors(slots, placed, offload_dir, offload_buffers=offload_buffers)
    empty = [slot.name for slot in slots if is_meta(slot.tensor) and placed[slot.name].device.type != "meta"]
    if empty:
        raise MetaTensorError(
            f"{len(empty)} tensors of the model have no data after loading: {some(empty)} (checkpoint: {report}). "
            "Give a checkpoint that has them, or fill them first; init_empty_weights keeps buffers real by default."
        )
    _stored_once(slots, store=store)
    connect_devices(model, slots, placed, skip_keys)
    _settle(model, pool)
    expect_context(model)
    for slot in tensor_slots(model) if exact else ():
        if is_offloaded(slot.tensor):
            compute_exactly(handle_of(slot.tensor))
    return replace(report, forms=_forms(tensor_slots(model)))


def refuse_to_store_nowhere(offload_dir: PathLike | None, *, store: bool) -> None:
    """Raises `ArgumentError` if values should be stored but no folder is named for them."""
    if store and offload_dir is None:
        raise ArgumentError("store=True needs offload_dir, the folder for the files that later loads use")


def _stored_once(slots: Iterable[Slot], *, store: bool) -> None:
    """Use the stored files of recipes in their folders, or create them, one by one and whole, if `store`."""
    tensors = (slot.tensor for slot in slots if is_offloaded(slot.tensor))
    stored = dict.fromkeys(map(handle_of, tensors))  # in the model's order
    named = {handle.folder for handle in stored if handle.folder is not None}
    folders: dict[Path | None, bool] = {folder: store or is_folder(folder) for folder in named}
    recipes = [(handle, handle.composed) for handle in stored if folders.get(handle.folder) and not handle.is_subclass]
    marked = [(handle, recipe.mark) for handle, recipe in recipes if isinstance(recipe, Recipe)]
    left = [(handle, mark) for handle, mark in marked if not open_stored(handle, mark)]
    if not store:
        return
    with progress_in_bytes(sum(handle.layout.nbytes for handle, _ in left), "storing") as advance:
        for handle, mark in left:
            store_recipe(handle, mark)
            log.debug("%s: stored in %s", handle.name, handle.path)
            advance(handle.layout.nbytes)


def _forms(slots: Iterable[Slot]) -> dict[str, HeldForm]:
    held: dict[str, list[Slot]] = {}
    for slot in slots:
        held.setdefault(_form(slot.tensor), []).append(slot)
    return {what: HeldForm(len(values), _stored_bytes(values)) for what, values in sorted(held.items())}


def _form(tensor: torch.Tensor) -> str:
    if not is_offloaded(tensor):
        return _IN_MEMORY
    handle = handle_of(tensor)
    if isinstance(handle.composed, Recipe):
        return handle.composed.form
    return "in files of their own" if handle.owned else "stored" if MADE_OF in handle.file.notes else _REFERENCED


def _stored_bytes(slots: Iterable[Slot]) -> int:
    handles = set(stored_in(handle_of(slot.tensor) for slot in slots if is_offloaded(slot.tensor)))
    return sum(handle.extent[1] for handle in handles)


def _placed(slots: Iterable[Slot], device_map: DeviceMap) -> dict[str, Place]:
    return places((name for slot in slots for name in slot.names), device_map)


def connect_devices(
    model: nn.Module, slots: Iterable[Slot], placed: Mapping[str, Place], skip_keys: str | list[str] | None
) -> None:
    at = {name: placed[slot.name] for slot in slots for name in slot.names}  # tied names have one place
    devices = execution_devices(at)
    if len(set(devices.values())) > 1:
        move_activations(model, devices, skip_keys=skip_keys)


@uncollected()
def _settle(model: nn.Module, pool: Pool | None) -> None:
    """Let a model save itself, and announce its values for read-ahead, by block, but those that ops pick from."""
    let_save(model)
    if pool is not None:
        all_of_them = [handle_of(slot.tensor) for slot in tensor_slots(model) if is_offloaded(slot.tensor)]
        count_in([*all_of_them, *stored_in(all_of_them)], pool)  # a recipe's, too: something may be stored in its place
    handles: dict[int, Handle] = {}
    for block in blocks_of(model):
        modules = [module for module in block if not isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        held = [{**parameters_of(module), **buffers_of(module)}.values() for module in modules]
        members = map(local_of, chain.from_iterable(held))
        stored = [member for member in members if is_offloaded(member) and member.dim() != 3]
        for tensor in sorted(stored, key=lambda tensor: tensor.nbytes > SMALL):
            handles.setdefault(id(handle_of(tensor)), handle_of(tensor))
    order = list(stored_in(handles.values()))
    _read_apart(order)
    expect(order, pool)
    if log.isEnabledFor(logging.INFO):
        forms = ", ".join(f"{what} {form}" for what, form in _forms(tensor_slots(model)).items())
        log.info("%s is ready; its values: %s", type(model).__name__, forms)


def _read_apart(handles: Iterable[Handle]) -> None:
    """If a large part of a file is not ours, as in a pipeline stage, read values without their neighbours."""
    of_files: dict[TensorFile, list[Handle]] = {}
    for handle in handles:
        of_files.setdefault(handle.file, []).append(handle)
    for file, held in of_files.items():
        whole = sum(entry.layout.nbytes for entry in file.entries.values())
        if sum(handle.extent[1] for handle in held) < _MOST_OF_A_FILE * whole:
            for handle in held:
                handle.read_apart()
