"""peft: merging an adapter into a base on disk.

Always true:
- peft itself computes: each of its layers merges as in memory, on copies of its base's values
- a merged value replaces the old one in one step, in its own file, which notes the merged layer
- no layer is merged twice in a run, even after a kill; after a failure the model is without adapters
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoints.adapters import has_adapter, refuse_lone_adapter
from offload.checkpoints.checkpoint import open_checkpoint
from offload.checkpoints.companions import companions_of, put_files
from offload.checkpoints.conversion import companions_beside, identities_of, resumable_folder, target_outside
from offload.errors import CheckpointError, JournalError, MapError, OffloadError, UnsupportedOpError
from offload.integrations.adapters import layers_over
from offload.integrations.transformers import from_pretrained
from offload.memory import return_freed
from offload.models.journal import Journal
from offload.models.slots import Slot, same_bits
from offload.models.values import ANY_KIND, MapReport, Replacing, is_done, journal_for, marks_on, replace, values_of
from offload.progress import progress_in_bytes
from offload.storage.modes import inside, no_grad
from offload.storage.reasons import first_line, reading
from offload.storage.regular import absolute, as_file, is_folder, is_same_folder, open_regular, text_of
from offload.storage.replacing import replacing_folder, sync_whole
from offload.tensor.saved import subclass_value
from offload.tensor.views import handle_of
from offload.tensor.wrapper import PathLike, is_offloaded
from offload.torch_api import parameters_of, version_of

log = logging.getLogger("offload.integrations")

_BLOCK = 1 << 20  # bytes per read


def merge_lora(model: nn.Module, adapter: PathLike, *, resume: bool | str = False, progress: bool = True) -> MapReport:
    """Merge an adapter of peft into its base, layer by layer; values on disk stay on disk.

    The values are those of `PeftModel.from_pretrained(model, adapter).merge_and_unload()`, bit for bit, for every kind
    of adapter that peft merges: LoRA in all its forms, IA3, LoHa, OFT..., also with `modules_to_save`, trainable tokens
    and adapted experts. Only what peft needs for one layer, and the adapter, is in memory.

    Where the values have an `offload_dir`, a journal there records which layers are done, and the same lines with
    `resume` continue after a kill, as with `map_values`.

    Args:
        model: the base, on disk, in memory, or both; each value stays where it is.
        adapter: a folder that peft saved, or a name on the hub.
        resume: continue the run of this name; True for that of this adapter, by its content.
        progress: show a bar, on a terminal.

    Returns:
        What was done, by the names of the base's values.

    Raises:
        CheckpointError: there is no adapter, or it belongs to another model.
        UnsupportedOpError: peft does not merge adapters of this kind, the base is quantized, or has an adapter. Nothing
            is changed.
        MapError: peft failed on a layer; the message names it. Those before it are done.
        JournalError: the journal is of another run, or there is no folder for one.
        MetaTensorError, WriteError

    Example:
        >>> from peft import LoraConfig, get_peft_model
        >>> base = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> config = LoraConfig(target_modules=["0"], init_lora_weights=False)
        >>> get_peft_model(nn.Sequential(*base), config).save_pretrained("adapter")
        >>> merge_lora(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "adapter").replaced
        ('0.weight',)
    """
    adapter = text_of(adapter)
    if _layers_of(model):
        raise UnsupportedOpError(
            f"this {type(model).__name__} has an adapter already: load its base alone, as "
            "offload.from_pretrained(..., adapter=False)"
        )
    name = resume if isinstance(resume, str) else _name_of(adapter)
    values = values_of(model)
    places = Replacing(model, "merged")
    kind = _kind_of(adapter)
    with _as_it_was(model), warnings.catch_warnings():
        tuner, read = _with_adapter(model, adapter, kind, values, is_resumed=bool(resume))
        journal = journal_for(values, name, resume=bool(resume))
        for value in values:
            if value.name in read and marks_on(value.tensor):  # it has been merged into, and is as before that again
                replace(value, _copy_of(value.tensor), (), ANY_KIND)
        before = [value.name for value in values if is_done(value, journal)]
        merging = _Merging(journal, {id(value.tensor): value for value in values}, replaced=read)
        for value in values:
            merging.values.update((id(other), value) for other in value.others)
        layers = _layers_of(model)
        with (
            journal.kept_up(),
            progress_in_bytes(merging.nbytes_of(layers.values()), "merging", shown=progress) as merging.advance,
        ):
            with merging.of(layers):
                _merged_by(tuner, adapter, kind, merging)
            merging.replaced.extend(places.finish(merging.marks_for_whole()))
    log.info("merged %s: %d layers, %d values replaced", adapter, merging.done, len(merging.replaced))
    return MapReport(tuple(name for name in dict.fromkeys(merging.replaced) if name not in before), (), tuple(before))


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

    Args:
        source: the folder of the base, or a GGUF file, which is decoded first.
        adapter: see `merge_lora`.
        target: the new folder; it may be there if it is empty.
        dtype: that the model computes in, and is merged in; None for the one it has, which is float32 for a GGUF file
            that is packed.
        max_shard_size: see `save_checkpoint`.
        resume: go on with a run that was killed, from the folder `target` + ".partial".
        progress: show a bar, on a terminal.

    Returns:
        What was merged.

    Raises:
        ForeignFileError: `target` is there and not empty, or in a folder that is read.
        JournalError: a run was begun, and `resume` does not say to go on; or it was one of another adapter or base.
        CheckpointError, UnsupportedOpError, MapError, WriteError: as `merge_lora`.
    """
    folder, target = absolute(source), target_outside(target, source, adapter)
    refuse_lone_adapter(folder)
    if has_adapter(folder) and not is_same_folder(folder, adapter):
        raise CheckpointError(
            f"{folder} holds an adapter of its own: merge that first (offload merge-lora {folder} {folder} MERGED), "
            "then the other into the result"
        )
    found = identities_of(open_checkpoint(folder))
    run = {"adapter": _name_of(text_of(adapter)), "dtype": str(dtype), "source": found}
    with resumable_folder(target, run, resume=resume) as work:
        model = from_pretrained(folder, dtype=dtype, offload_dir=work, adapter=False)
        files = companions_beside(folder, dtype) or companions_of(model)  # a GGUF file has them within
        files = {name: data for name, data in files.items() if not name.startswith("adapter_")}  # it is merged
        report = merge_lora(model, adapter, resume=resume, progress=progress)
        with replacing_folder(target) as made:
            put_files(made, files)
            model.save_pretrained(made, max_shard_size=max_shard_size)
            sync_whole(made)
        del model
    return report


@dataclass
class _Merging:
    """Merges peft's layers into the values of the base."""

    journal: Journal
    values: dict[int, Slot]
    advance: Callable[[int], object] = int
    at: str = ""
    replaced: list[str] = field(default_factory=list)
    done: int = 0

    def nbytes_of(self, layers: Any) -> int:
        return sum(value.nbytes for layer in layers for _, _, value in self._held_by(layer))

    @contextmanager
    def of(self, layers: Mapping[str, Any]) -> Iterator[None]:
        """In this context, the layers' `merge` is the one below."""
        try:
            for name, layer in layers.items():
                layer.merge = partial(self.merge, layer, name, layer.merge)
            yield
        finally:
            for layer in layers.values():
                vars(layer).pop("merge", None)

    @inside(no_grad)
    def merge(self, layer: Any, name: str, merge: Callable[..., None], *args: object, **options: object) -> None:
        """`layer.merge` on copies of the base's values; those that it has changed are stored."""
        self.at = name
        held, mark = list(self._held_by(layer)), f"{self._run} {name}"
        if self._run and held and all(mark in marks_on(value.tensor) for _, _, value in held):
            return
        stored: dict[Any, Any] = {(module, key): parameters_of(module)[key] for module, key, _ in held}
        try:
            for (module, key), parameter in stored.items():
                parameters_of(module)[key] = nn.Parameter(_copy_of(parameter), requires_grad=False)
            merge(*args, **options)
            new: dict[object, Any] = {(module, key): getattr(module, key).detach() for module, key in stored}
        finally:
            for (module, key), parameter in stored.items():
                parameters_of(module)[key] = parameter
        for module, key, value in held:
            if mark not in marks_on(value.tensor) and not same_bits(value.tensor, new[module, key]):
                marks = dict.fromkeys((*marks_on(value.tensor), *self.journal.key, mark)) if self._run else ()
                replace(value, new[module, key], tuple(marks), ANY_KIND)
                self.replaced.append(value.name)
                self.journal.note(value.name, replaced=True)
            self.advance(value.nbytes)
        self.done += 1
        return_freed()

    def marks_for_whole(self) -> tuple[str, ...]:
        """The note in the file of a value taken whole from the adapter."""
        return (self._run, f"{self._run} whole") if self._run else ()

    @property
    def _run(self) -> str:
        return "".join(self.journal.key)

    def _held_by(self, layer: Any) -> Iterator[tuple[nn.Module, str, Slot]]:
        """The base's values under a layer."""
        for module in layer.get_base_layer().modules():
            for key, parameter in parameters_of(module).items():
                if id(parameter) in self.values:
                    yield module, key, self.values[id(parameter)]


def _copy_of(value: torch.Tensor) -> torch.Tensor:
    return value.materialize() if is_offloaded(value) else value.detach().clone()


# The adapter


def _name_of(adapter: str) -> str:
    """The name of the run: the same for the same adapter, wherever it is."""
    folder = Path(adapter)
    if not is_folder(folder):
        return f"merge {adapter}"
    found = hashlib.sha256()
    with reading(folder):
        paths, own = sorted(folder.glob("adapter_*")), folder.resolve()
    for path in paths:
        found.update(os.fsencode(path.name))
        with reading(path), as_file(open_regular(path)) as file:
            while block := file.read(_BLOCK):
                found.update(block)
    return f"merge {own.name} {found.hexdigest()[:12]}"


def _kind_of(adapter: str) -> str:
    """The adapter's peft method, if it can be merged; does not touch the model."""
    if "/" not in adapter and not is_folder(Path(adapter)):  # every adapter on the hub has an organization
        raise CheckpointError(
            f"there is no folder {adapter}: give one that peft saved, or organization/name on the hub"
        )
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


def _with_adapter(
    model: nn.Module, adapter: str, kind: str, values: list[Slot], *, is_resumed: bool
) -> tuple[Any, list[str]]:
    """peft's model over the base, and the names of values that loading the adapter has changed."""
    quantized = next((value.name for value in values if subclass_value(value.tensor) is not None), None)
    if quantized is not None:
        raise UnsupportedOpError(
            f"{quantized!r} is quantized, and adapters can't be merged into quantized weights: merge into the dense "
            "base, then quantize it (offload.quantize_)"
        )
    before = [_state_of(value.tensor) for value in values]
    tuner = layers_over(model, adapter).base_model
    read = [value.name for value, state in zip(values, before, strict=True) if state != _state_of(value.tensor)]
    if is_resumed and read:
        _refuse_computed(adapter, kind, [value for value in values if value.name in read])
    return tuner, read


def _refuse_computed(adapter: str, kind: str, changed: list[Slot]) -> None:
    """Refuse values that peft has computed from themselves, as it would each time; those in the adapter are the same.

    Raises:
        JournalError
    """
    from peft.utils import load_peft_weights

    names = load_peft_weights(adapter, device="cpu")
    stored = {name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in names}
    value = next((value for value in changed if stored.isdisjoint(value.names)), None)
    if value is not None:
        raise JournalError(
            f"{adapter} changes {value.name!r} of the base when it is read ({kind}), so that a merge of it can't be "
            f"resumed: remove {value.folder or 'its values'}, load the base again, and call merge_lora without resume"
        )


def _state_of(tensor: torch.Tensor) -> tuple[object, ...]:
    identity = handle_of(tensor).file.identity if is_offloaded(tensor) else None
    return identity, version_of(tensor)


def _layers_of(model: nn.Module) -> dict[str, Any]:
    """The layers that peft has wrapped around those of the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def _merged_by(tuner: Any, adapter: str, kind: str, merging: _Merging) -> None:
    try:
        warnings.simplefilter("ignore")  # from peft, that embeddings are untied: the documentation says so
        tuner.merge_and_unload()
    except OffloadError:
        raise
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"interrupted at {merging.at!r}: {_so_far(merging)}") from error
    except Exception as error:
        if not merging.done:
            raise _unmergeable(
                adapter, kind, f"peft says at {merging.at!r}: {type(error).__name__}: {error}"
            ) from error
        raise MapError(
            f"peft failed at {merging.at!r} ({type(error).__name__}: {error}): {_so_far(merging)}"
        ) from error


def _so_far(merging: _Merging) -> str:
    way_on = f"resume={merging.journal.name!r} continues from there" if merging.journal.name else "load the base again"
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
