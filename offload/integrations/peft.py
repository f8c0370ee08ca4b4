"""peft: merging an adapter into a base on disk.

Always true:
- peft itself computes: each of its layers merges as in memory, on copies of its base's values
- a value is replaced in one step, when all layers that hold it are merged
- from file to file, each layer is merged into what the base's own files hold; a file of a merged value says so, and is
  not computed again after a kill
- after a failure the model is without adapters; if values were merged it says so, and no adapter is merged into it
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoints.checkpoint import open_checkpoint
from offload.checkpoints.companions import companions_of, has_adapter, put_files, refuse_lone_adapter
from offload.checkpoints.conversion import companions_beside, identities_of, resumable_folder, target_outside
from offload.errors import CheckpointError, MapError, OffloadError, UnsupportedOpError
from offload.integrations.adapters import layers_over
from offload.integrations.transformers import from_pretrained
from offload.memory import return_freed
from offload.models.slots import Slot, same_bits
from offload.models.values import ANY_KIND, MapReport, Replacing, adopt, marks_on, replace, values_of
from offload.progress import progress_in_bytes
from offload.storage.replacing import replacing_folder, sync_whole
from offload.system.modes import inside, no_grad
from offload.system.reasons import first_line, reading
from offload.system.regular import absolute, as_file, is_folder, is_same_folder, open_regular, text_of
from offload.tensor.saved import subclass_value
from offload.tensor.views import handle_of
from offload.tensor.wrapper import PathLike, is_offloaded
from offload.torch_api import parameters_of, version_of

log = logging.getLogger("offload.integrations")

_MARK = ("merged",)  # in a file of a run, which has one adapter
_HALF = "_offload_half_merged"  # attribute of a model: the adapter whose merge failed half-way


def merge_lora(model: nn.Module, adapter: PathLike, *, progress: bool = True) -> MapReport:
    """Merge an adapter of peft into its base, layer by layer; values on disk stay on disk.

    The values are those of `PeftModel.from_pretrained(model, adapter).merge_and_unload()`, bit for bit, for every kind
    of adapter that peft merges: LoRA in all its forms, IA3, LoHa, OFT..., also with `modules_to_save`, trainable tokens
    and adapted experts. Only what peft needs for one layer, and the adapter, is in memory.

    A merge that was interrupted is repeated with the base loaded again, as a new model; its checkpoint is not written
    to. The command `offload merge-lora` writes a new checkpoint, and can be resumed.

    Args:
        model: the base, on disk, in memory, or both; each value stays where it is.
        adapter: a folder that peft saved, or a name on the hub.
        progress: show a bar, on a terminal.

    Returns:
        What was done, by the names of the base's values.

    Raises:
        CheckpointError: there is no adapter, or it belongs to another model.
        UnsupportedOpError: peft does not merge adapters of this kind, the base is quantized, or has an adapter, or an
            earlier merge into it failed half-way. Nothing is changed.
        MapError: peft failed on a layer; the message names it. Those before it are done.
        MetaTensorError, WriteError

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> base = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> config = LoraConfig(target_modules=["0"], init_lora_weights=False)
        >>> get_peft_model(nn.Sequential(*base), config).save_pretrained("adapter")
        >>> merge_lora(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "adapter").replaced
        ('0.weight',)
    """
    return _merged(model, text_of(adapter), (), progress=progress)


def _merged(model: nn.Module, adapter: str, mark: tuple[str, ...], *, progress: bool) -> MapReport:
    """Merge an adapter; the values whose files have the `mark`, in the folder of the model's, are taken from there."""
    if _layers_of(model):
        raise UnsupportedOpError(
            f"this {type(model).__name__} has an adapter already: load its base by from_pretrained(..., adapter=False)"
        )
    if _HALF in vars(model):
        raise UnsupportedOpError(
            f"merging {vars(model)[_HALF]} into this {type(model).__name__} failed half-way, and its first layers "
            "would be merged twice: load the base again, as a new model"
        )
    values, places, kind = values_of(model), Replacing(model, "merged"), _kind_of(adapter)
    with _as_it_was(model), _half_merged(model, adapter, values) as begun, warnings.catch_warnings():
        tuner, read = _with_adapter(model, adapter, values)
        for value in values if mark else ():
            adopt(value, *mark)
        before = [value.name for value in values if mark and mark[0] in marks_on(value.tensor)]
        merging = _Merging(_layers_of(model), values, mark, before, begun)
        with progress_in_bytes(merging.nbytes, "merging", shown=progress) as merging.advance:
            with merging.instead():
                _merge_by(tuner, adapter, kind, merging)
            replaced = [*read, *begun, *places.finish()]
    log.info("merged %s: %d layers, %d values replaced", adapter, merging.done, len(replaced))
    return MapReport(tuple(name for name in dict.fromkeys(replaced) if name not in before), (), tuple(before))


def merge_checkpoint(
    source: PathLike,
    adapter: PathLike,
    target: PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    resume: bool = False,
    progress: bool = True,
) -> MapReport:
    """Write a checkpoint of transformers anew, with an adapter of peft merged into it.

    `source` is a folder, or a GGUF file, which is decoded first; `target` may be there if it is empty. `dtype` is
    that the model computes and is merged in; None for the one it has, which is float32 for a packed GGUF file.
    `resume` goes on with a run that was killed, in `target` + ".partial". Raises `ForeignFileError` if `target` is
    not empty, or in a folder that is read; `JournalError` if a run was begun, and `resume` does not say to go on,
    or it had another adapter or base; and as `merge_lora`.
    """
    folder, target = absolute(source), target_outside(target, source, adapter)
    refuse_lone_adapter(folder)
    if has_adapter(folder) and not is_same_folder(folder, adapter):
        raise CheckpointError(
            f"{folder} holds an adapter of its own: merge that first (offload merge-lora {folder} {folder} MERGED), "
            "then the other into the result"
        )
    found = identities_of(open_checkpoint(folder))
    run = {"adapter": _content_of(text_of(adapter)), "dtype": str(dtype), "source": found}
    with resumable_folder(target, run, resume=resume) as work:
        model = from_pretrained(folder, dtype=dtype, offload_dir=work, adapter=False)
        files = companions_beside(folder, dtype) or companions_of(model)  # a GGUF file has them within
        files = {name: data for name, data in files.items() if not name.startswith("adapter_")}  # it is merged
        report = _merged(model, text_of(adapter), _MARK, progress=progress)
        with replacing_folder(target) as made:
            put_files(made, files)
            model.save_pretrained(made, max_shard_size=max_shard_size)
            sync_whole(made)
        del model
    return report


class _Merging:
    """Merges peft's layers into the values of the base, with a `mark` in the files of merged values.

    Values named in `before` are merged already; `begun` gets their names, each before it is replaced. `advance` is
    called with the bytes that are done, `at` is the layer that is being merged, and `done` counts layers.
    """

    def __init__(
        self, layers: Mapping[str, Any], values: list[Slot], mark: tuple[str, ...], before: list[str], begun: list[str]
    ) -> None:
        self.advance: Callable[[int], object] = int
        self.at, self.done = "", 0
        self._begun = begun
        self.is_resumable = bool(mark)
        self._mark, self._before, self._layers = mark, before, layers
        slots = {id(tensor): value for value in values for tensor in (value.tensor, *value.others)}
        self._held = {name: _held_by(layer, slots) for name, layer in layers.items()}
        self._left = Counter(value.name for held in self._held.values() for value in held.values())
        self._new: dict[str, torch.Tensor] = {}  # values that other layers are still to be merged into
        self.nbytes = sum(value.nbytes for held in self._held.values() for value in held.values())

    @contextmanager
    def instead(self) -> Iterator[None]:
        """In this context, the layers' `merge` is the one below."""
        try:
            for name, layer in self._layers.items():
                layer.merge = partial(self.merge, name, layer.merge)
            yield
        finally:
            for layer in self._layers.values():
                vars(layer).pop("merge", None)

    @inside(no_grad)
    def merge(self, name: str, merge: Callable[..., None], *args: object, **options: object) -> None:
        """`layer.merge` on copies of the base's values; those that no other layer is merged into are stored."""
        self.at, held = name, self._held[name]
        if held and all(value.name in self._before for value in held.values()):
            return
        parameters = {(module, key): parameters_of(module)[key] for module, key in held}
        try:
            for (module, key), value in held.items():
                copied, tensor = self._new.pop(value.name, None), value.tensor
                if copied is None:
                    copied = tensor.materialize() if is_offloaded(tensor) else tensor.detach().clone()
                parameters_of(module)[key] = nn.Parameter(copied, requires_grad=False)
            merge(*args, **options)
            merged = {value.name: (value, getattr(module, key).detach()) for (module, key), value in held.items()}
        finally:
            for (module, key), parameter in parameters.items():
                parameters_of(module)[key] = parameter
        for value, new in merged.values():
            self._put(value, new)
        self.done += 1
        return_freed()

    def _put(self, value: Slot, new: torch.Tensor) -> None:
        """Store a value, unless another layer is to be merged into it, or it was stored before."""
        self._left[value.name] -= 1
        if self._left[value.name]:
            self._new[value.name] = new
        elif value.name not in self._before and not same_bits(value.tensor, new):
            self._begun.append(value.name)
            replace(value, new, (*marks_on(value.tensor), *self._mark), ANY_KIND)
        self.advance(value.nbytes)


def _held_by(layer: Any, slots: Mapping[int, Slot]) -> dict[tuple[nn.Module, str], Slot]:
    return {
        (module, key): slots[id(parameter)]
        for module in layer.get_base_layer().modules()
        for key, parameter in parameters_of(module).items()
        if id(parameter) in slots
    }


def _content_of(adapter: str) -> str:
    """What identifies an adapter, wherever its folder is."""
    folder = Path(adapter)
    if not is_folder(folder):
        return adapter
    found = hashlib.sha256()
    with reading(folder):
        paths = sorted(folder.glob("adapter_*"))
    for path in paths:
        found.update(os.fsencode(path.name))
        with reading(path), as_file(open_regular(path)) as file:
            found.update(hashlib.file_digest(file, "sha256").digest())  # type: ignore[arg-type]
    return found.hexdigest()


def _kind_of(adapter: str) -> str:
    """The adapter's peft method, if it can be merged; does not touch the model."""
    if "/" not in adapter and not is_folder(Path(adapter)):  # every adapter on the hub has an organization
        raise CheckpointError(f"there is no folder {adapter}: give one of peft, or organization/name on the hub")
    from peft import PeftConfig
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    try:
        config = PeftConfig.from_pretrained(adapter)
    except Exception as error:  # peft can raise anything for settings that it does not expect
        raise CheckpointError(
            f"{adapter} should be a folder with an adapter_config.json, as peft saves an adapter, or a name on the hub "
            f"({first_line(error)})"
        ) from error
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        raise _unmergeable(adapter, kind, "it adds virtual tokens, and changes no weights")
    if not hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type), "merge_and_unload"):
        raise _unmergeable(adapter, kind, "peft does not support it")
    return kind


def _unmergeable(adapter: str, kind: str, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{adapter}: an adapter of kind {kind} can't be merged ({why}): run the model with the adapter unmerged"
    )


def _with_adapter(model: nn.Module, adapter: str, values: list[Slot]) -> tuple[Any, list[str]]:
    """peft's model over the base, and the names of values that loading the adapter has changed."""
    quantized = next((value.name for value in values if subclass_value(value.tensor) is not None), None)
    if quantized is not None:
        raise UnsupportedOpError(
            f"{quantized!r} is quantized, and takes no adapter: merge into the dense base, then offload.quantize_ it"
        )
    before = [_state_of(value.tensor) for value in values]
    tuner = layers_over(model, adapter).base_model
    read = [value.name for value, state in zip(values, before, strict=True) if state != _state_of(value.tensor)]
    return tuner, read


def _state_of(tensor: torch.Tensor) -> tuple[object, ...]:
    identity = handle_of(tensor).file.identity if is_offloaded(tensor) else None
    return identity, version_of(tensor)


def _layers_of(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _merge_by(tuner: Any, adapter: str, kind: str, merging: _Merging) -> None:
    try:
        warnings.simplefilter("ignore")  # from peft, that embeddings are untied: the documentation says so
        tuner.merge_and_unload()
    except OffloadError:
        raise
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"interrupted at {merging.at!r}: {_so_far(merging)}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not merging.done:
            raise _unmergeable(adapter, kind, f"peft says at {merging.at!r}: {said}") from error
        raise MapError(f"peft failed at {merging.at!r} ({said}): {_so_far(merging)}") from error


def _so_far(merging: _Merging) -> str:
    way_on = "resume=True (--resume) goes on from there" if merging.is_resumable else "load the base again"
    return f"{merging.done} layers are merged, and stay; {way_on}"


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restore what peft changes in a model besides its values: the layers, if it failed, and flags."""
    grads = {name: tensor.requires_grad for name, tensor in model.named_parameters(remove_duplicate=False)}
    training = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        _unload(model)
        for module, was in training:
            module.training = was
        for name, tensor in model.named_parameters(remove_duplicate=False):
            tensor.requires_grad_(grads.get(name, tensor.requires_grad))


@contextmanager
def _half_merged(model: nn.Module, adapter: str, values: list[Slot]) -> Iterator[list[str]]:
    """Note on the model that a merge failed after values were changed: those that the caller lists, or peft did."""
    before, begun = [_state_of(value.tensor) for value in values], list[str]()
    try:
        yield begun
    except BaseException:
        if begun or before != [_state_of(value.tensor) for value in values]:
            vars(model)[_HALF] = adapter
        raise


def _unload(model: nn.Module) -> None:
    """Put the base's own modules back wherever peft's are left."""
    layers = _layers_of(model)
    wrapped = {name: module for name, module in model.named_modules() if hasattr(module, "original_module")}
    for name, module in {**layers, **wrapped}.items():
        parent_name, _, attribute = name.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
        except AttributeError:  # it was inside another one
            continue
        own = module.original_module if name in wrapped else module.get_base_layer()
        setattr(parent, attribute, own)
    if hasattr(model, "peft_config"):
        del model.peft_config
