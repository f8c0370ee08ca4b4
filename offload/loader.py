"""Fill a model's empty weights from a checkpoint, each where the device map says.

Always true:
- a value on disk in the model's dtype is referenced in its checkpoint: nothing is copied or written
- tied weights stay one parameter, over one file
- a model that `load_checkpoint_and_dispatch` returns has no tensor without data, but where the map says "meta"
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from offload.budget import Amount, pool_for
from offload.checkpoint import Checkpoint, StoredValue, open_checkpoint
from offload.device_map import AUTOMATIC, ON_DISK, DeviceMap, Place, infer_device_map, places
from offload.errors import CheckpointError, DeviceMapError, MetaTensorError
from offload.prefetch import expect
from offload.progress import progress
from offload.residency import SMALL, Pool
from offload.storage.handle import Handle
from offload.tensor.arguments import checked_device
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handle

PathLike: TypeAlias = "str | os.PathLike[str]"
Model = TypeVar("Model", bound=nn.Module)

_log = logging.getLogger("offload")


@dataclass(frozen=True)
class LoadReport:
    """What did not match between a model and a checkpoint.

    Attributes:
        missing_keys: tensors of the model that the checkpoint has not.
        unexpected_keys: tensors of the checkpoint that the model has not.
        mismatched_keys: name, shape in the checkpoint, shape in the model.
    """

    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched_keys: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __str__(self) -> str:
        mismatched = [f"{name} (checkpoint {theirs}, model {ours})" for name, theirs, ours in self.mismatched_keys]
        lines = {"missing": self.missing_keys, "unexpected": self.unexpected_keys, "mismatched": mismatched}
        return (
            "; ".join(f"{len(names)} {what}: {_some(names)}" for what, names in lines.items() if names) or "all match"
        )


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: PathLike,
    device_map: DeviceMap = ON_DISK,
    offload_dir: PathLike | None = None,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    max_memory: Amount | Mapping[int | str, Amount] | None = None,
    read_ahead: Amount | bool | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Model:
    """Fill a model from a checkpoint and make it ready to run.

    Args:
        model: a model with empty weights (`init_empty_weights`), or one whose values are replaced.
        checkpoint: see `open_checkpoint`.
        device_map: see `offload.device_map.places`; also accelerate's "auto", "balanced", "sequential".
        offload_dir: where values go that are converted or later written to; None for a private folder.
        dtype: of the floating-point values; None for that of the model's tensors. Others are converted once, to disk.
        strict: missing, unexpected and mismatched keys are errors.
        max_memory: what of the values on disk may stay in memory between ops, for this model (`offload.set_max_memory`
            for all); with an automatic device map, what may be placed on each device, as in accelerate.
        read_ahead: see `offload.set_read_ahead`, for this model.
        no_split_module_classes: for an automatic device map, as in accelerate.
        offload_buffers: whether buffers of modules on disk are on disk too; else they are on the executing device.
        skip_keys: for a map over several devices: keyword arguments of forward that are not moved.

    Returns:
        The same model.

    Raises:
        MissingFileError, CorruptFileError, CheckpointError, DeviceMapError
        MetaTensorError: tensors are left without data; the message names them.
    """
    pool = pool_for(None if device_map in AUTOMATIC else max_memory, read_ahead)
    if isinstance(device_map, str) and device_map in AUTOMATIC:
        device_map = infer_device_map(
            model, device_map, max_memory=max_memory, no_split_module_classes=no_split_module_classes, dtype=dtype
        )
    report = load_checkpoint_in_model(
        model, checkpoint, device_map, offload_dir, dtype=dtype, strict=strict, offload_buffers=offload_buffers
    )
    placed = places(_names(model), device_map)
    place_tensors(model, placed, offload_dir, offload_buffers=offload_buffers)
    refuse_meta(model, placed, report)
    expect_reads(model, pool)
    connect_devices(model, device_map, placed, skip_keys)
    return model


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: PathLike,
    device_map: DeviceMap = ON_DISK,
    offload_dir: PathLike | None = None,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    offload_buffers: bool = False,
) -> LoadReport:
    """Fill a model's parameters and persistent buffers from a checkpoint; what does not match is left as it was.

    Args and errors: as `load_checkpoint_and_dispatch`.

    Returns:
        What did not match.
    """
    tie_weights = getattr(model, "tie_weights", None)  # transformers
    if callable(tie_weights):
        tie_weights()
    source = open_checkpoint(checkpoint)
    slots = tensor_slots(model)
    placed = places([slot.name for slot in slots], device_map)
    report = _compare(slots, source)
    if strict and (report.missing_keys or report.unexpected_keys or report.mismatched_keys):
        raise CheckpointError(f"{source.path} does not fit this {type(model).__name__}: {report}")
    if slots and not any(name in source for slot in slots for name in slot.names):
        raise CheckpointError(
            f"{source.path} is of another model than this {type(model).__name__}: no name matches ({report})"
        )
    skipped = {name for name, _, _ in report.mismatched_keys}
    for slot in progress(slots, "loading"):
        key = _key_of(slot, source)
        place = placed[slot.name]
        if key is None or key in skipped or place.device.type == "meta":
            continue
        on_disk = place.on_disk and (slot.is_parameter or offload_buffers)
        stored = _referenced(source, key, place.device, offload_dir)
        slot.fill(_converted(stored, _dtype_for(slot.tensor, dtype), on_disk=on_disk))
    if report.missing_keys or report.unexpected_keys or report.mismatched_keys:
        _log.warning("%s: %s", source.path, report)
    return report


def disk_offload(
    model: Model,
    offload_dir: PathLike | None = None,
    *,
    execution_device: torch.device | str | int | None = None,
    offload_buffers: bool = False,
) -> Model:
    """Move the parameters of a model that is in memory to disk, one by one.

    Args:
        model: tied weights stay tied; what is on disk already stays where it is.
        offload_dir: the folder for the files, which then stay; None for a private one.
        execution_device: where ops run; None for the device that each tensor is on.
        offload_buffers: buffers too.

    Returns:
        The same model.

    Raises:
        MetaTensorError: some parameters have no data.
        WriteError, ForeignFileError, NameInUseError
    """
    slots = tensor_slots(model)
    empty = [slot.name for slot in slots if slot.tensor.is_meta]
    if empty:
        raise MetaTensorError(f"{len(empty)} tensors have no data to write: {_some(empty)}. Load them first.")
    device = None if execution_device is None else checked_device(execution_device)
    placed = {
        slot.name: Place(True, device or slot.tensor.device) for slot in tensor_slots(model, persistent_only=False)
    }
    place_tensors(model, placed, offload_dir, offload_buffers=offload_buffers)
    expect_reads(model)
    return model


def load_file(
    path: PathLike, device: torch.device | str | int = "cpu", offload_dir: PathLike | None = None
) -> dict[str, OffloadedTensor]:
    """The tensors of a `.safetensors` file by name, on disk: `safetensors.torch.load_file` without the reading.

    Args:
        path: the file; it is never written to.
        device: where ops run.
        offload_dir: where a tensor goes at its first write; None for a private folder.

    Raises:
        MissingFileError, CorruptFileError, CheckpointError
    """
    target = checked_device(device)
    source = open_checkpoint(path)
    return {name: _referenced(source, name, target, offload_dir) for name in source}


# A model's tensors


@dataclass(frozen=True)
class Slot:
    """A distinct tensor of a model, under all the names that it has there."""

    names: list[str]
    owners: list[tuple[dict[str, torch.Tensor | None], str]]
    tensor: torch.Tensor
    is_parameter: bool

    @property
    def name(self) -> str:
        return self.names[0]

    def fill(self, tensor: torch.Tensor) -> None:
        """Put a tensor in all its places."""
        if tensor is self.tensor:
            return
        if self.is_parameter and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=self.tensor.requires_grad and _can_require_grad(tensor))
        for members, name in self.owners:
            members[name] = tensor


def tensor_slots(model: nn.Module, *, persistent_only: bool = True) -> list[Slot]:
    """The parameters and buffers of a model, each once."""
    slots: dict[int, Slot] = {}
    for prefix, module in model.named_modules():
        for members, is_parameter in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in members.items():
                if tensor is None or (persistent_only and name in module._non_persistent_buffers_set):
                    continue
                slot = slots.setdefault(id(tensor), Slot([], [], tensor, is_parameter))
                slot.names.append(f"{prefix}.{name}" if prefix else name)
                slot.owners.append((members, name))
    return list(slots.values())


def place_tensors(
    model: nn.Module, placed: Mapping[str, Place], offload_dir: PathLike | None = None, *, offload_buffers: bool = False
) -> None:
    """Bring every tensor that has data to its place, one by one; what is there already stays as it is."""
    for slot in progress(tensor_slots(model, persistent_only=False), "placing"):
        place = placed[slot.name]
        if not slot.tensor.is_meta and place.device.type != "meta":
            on_disk = place.on_disk and (slot.is_parameter or offload_buffers)
            slot.fill(_placed(slot, on_disk, place.device, offload_dir))


def expect_reads(model: nn.Module, pool: Pool | None = None) -> None:
    """Say in which order the values on disk are likely to be read: block by block, in each the small ones first.

    Of embeddings rows are picked, and of stacks of matrices (experts) some: they are not read as wholes.
    """
    handles: dict[int, Handle] = {}
    for block in _blocks(model):
        modules = [module for module in block if not isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        members = [member for module in modules for member in (*module._parameters.values(), *module._buffers.values())]
        stored = [member for member in members if type(member) is OffloadedTensor and member.dim() != 3]
        for tensor in sorted(stored, key=lambda tensor: tensor.nbytes > SMALL):
            handles.setdefault(id(tensor._handle), tensor._file_handle())
    expect(handles.values(), pool)


def _blocks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """A module's parts in their order; what stands in a list is a block with all that is in it."""
    yield [module]
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (list(block.modules()) for block in child)
        else:
            yield from _blocks(child)


def refuse_meta(model: nn.Module, placed: Mapping[str, Place], report: LoadReport) -> None:
    """Raises `MetaTensorError` for tensors that should have data and have none."""
    slots = tensor_slots(model, persistent_only=False)
    empty = [slot.name for slot in slots if slot.tensor.is_meta and placed[slot.name].device.type != "meta"]
    if empty:
        raise MetaTensorError(
            f"{len(empty)} tensors of the model have no data after loading: {_some(empty)} (checkpoint: {report}). "
            "Give a checkpoint that has them, or fill them first; init_empty_weights keeps buffers real by default."
        )


def connect_devices(
    model: nn.Module, device_map: DeviceMap, placed: Mapping[str, Place], skip_keys: str | list[str] | None
) -> None:
    """Where modules execute on several devices, let accelerate's hooks move the activations."""
    devices = {place.device for place in placed.values()} - {torch.device("meta")}
    if len(devices) < 2:
        return
    if not isinstance(device_map, Mapping):
        raise DeviceMapError(
            f"tensors are on several devices ({devices}), and {device_map!r} does not say which module goes where"
        )
    _move_activations(model, places(device_map, device_map), skip_keys=skip_keys)


def _move_activations(model: nn.Module, modules: Mapping[str, Place], *, skip_keys: str | list[str] | None) -> None:
    """Have accelerate's hooks bring the inputs of each mapped module to its device, and the outputs back."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    known = dict(model.named_modules())
    first = next(iter(modules.values())).device
    add_hook_to_module(
        model, AlignDevicesHook(execution_device=first, io_same_device=True, skip_keys=skip_keys), append=True
    )
    for name, place in modules.items():
        if name in known and name and place.device.type != "meta":
            add_hook_to_module(
                known[name], AlignDevicesHook(execution_device=place.device, skip_keys=skip_keys), append=True
            )


def _names(model: nn.Module) -> Iterator[str]:
    for slot in tensor_slots(model, persistent_only=False):
        yield from slot.names


def _compare(slots: Iterable[Slot], source: Checkpoint) -> LoadReport:
    report = LoadReport()
    expected = set()
    for slot in slots:
        expected.update(slot.names)
        key = _key_of(slot, source)
        if key is None:
            report.missing_keys.append(slot.name)
            continue
        layout = source[key].layout
        ours = tuple(slot.tensor.shape)
        if layout is not None and layout.shape != ours:
            report.mismatched_keys.append((key, layout.shape, ours))
    report.unexpected_keys.extend(name for name in source if name not in expected)
    return report


def _key_of(slot: Slot, source: Mapping[str, StoredValue]) -> str | None:
    return next((name for name in slot.names if name in source), None)


def _referenced(source: Checkpoint, name: str, device: torch.device, offload_dir: PathLike | None) -> OffloadedTensor:
    """The tensor in its checkpoint; in an offload folder that is `offload_dir` itself, open to be written."""
    value = source[name]
    if source.is_offload_folder and offload_dir is not None and os.path.abspath(offload_dir) == str(source.path):
        return wrap_handle(Handle.adopt(value.file, value.key), device)
    return wrap_handle(Handle.reference(value.file, value.key, offload_dir), device)


def _converted(stored: OffloadedTensor, dtype: torch.dtype | None, *, on_disk: bool) -> torch.Tensor:
    cast = dtype is not None and dtype != stored.dtype and stored.is_floating_point()
    if not on_disk:
        return stored.materialize().to(dtype if cast else stored.dtype)
    if cast:
        stored.update_values(stored.to(dtype), strict_dtype=False)
    return stored


def _dtype_for(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    if not tensor.is_floating_point():
        return None
    return dtype or tensor.dtype


def _placed(slot: Slot, on_disk: bool, device: torch.device, offload_dir: PathLike | None) -> torch.Tensor:
    tensor = slot.tensor
    if on_disk and not is_offloaded(tensor):
        tensor = OffloadedTensor.from_original_tensor(tensor.detach(), slot.name, offload_dir)
    elif not on_disk and is_offloaded(tensor):
        tensor = tensor.materialize()  # type: ignore[attr-defined]
    return tensor if tensor.device == device else tensor.detach().to(device)


def _can_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
