"""A checkpoint with the names and formats of a transformers model.

Always true:
- transformers' own loader renames, stacks, splits, casts and ties; it is given deferred tensors
- nothing is read or written by that
- a model never saves itself over the files that its weights are in, and saves without reading whole weights into memory

transformers is imported only when there is one of its models to fill.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, reduce, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.annotations import Args, Config, Kwargs, Pretrained, Settings
from offload.checkpoints.checkpoint import Checkpoint
from offload.checkpoints.companions import is_of_transformers, quantization_of
from offload.checkpoints.forms.decoding import method_of
from offload.checkpoints.forms.formats import Form, Packed, Values, values_in
from offload.checkpoints.forms.torchao import PARTS_NOTE, in_torchaos_form, rebuilt
from offload.errors import CheckpointError, OffloadError
from offload.memory import uncollected
from offload.models import log
from offload.models.saving import refuse_shares
from offload.storage.replacing import put_file
from offload.storage.state_file import read_json
from offload.system.locks import fork_safe_lock
from offload.system.modes import no_functions, no_grad, no_inference, no_modes
from offload.system.regular import absolute
from offload.tensor.deferred import DeferredTensor, deferred, refuse_to_share
from offload.tensor.guests import mapped_value
from offload.tensor.saved import refuse_referenced
from offload.tensor.wrapper import OffloadedTensor, is_offloaded

# Files that are replaced or removed by transformers, diffusers and others that save in the same way.
_WEIGHTS = re.compile(r"(\w+_)?model(\.\w+)?(-\d+){0,2}(-of-\d+)?\.(safetensors|bin)")

_FEATURES: list[Callable[[Any], dict[str, Any]]] = []


def feature(members: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Register a function that gives the members, by name, that a class of transformers' models gets."""
    _FEATURES.append(members)
    return members


def note_form(model: Pretrained, values: Values) -> None:
    """Have a model that was filled from these values save itself in the form in which they are stored."""
    if values.form is Form.DECODED:
        assert values.quantization is not None
        without_quantization(model.config)
        model.packed_as = Packed.of(model, values.quantization, values.beside)


def without_quantization(config: Config) -> Config:
    for one in (config, config.get_text_config(decoder=True)):
        if getattr(one, "quantization_config", None) is not None:
            delattr(one, "quantization_config")
    return config


@dataclass(frozen=True)
class Fitted:
    """A checkpoint in the format of a model: tensors by its names, deferred in the widest dtype if converted."""

    tensors: Mapping[str, torch.Tensor]
    report: Kwargs
    note: Callable[[Any], None]  # has a model that is filled from these save itself in the checkpoint's form


def as_in(
    model: Pretrained, source: Checkpoint, offload_dir: str | os.PathLike[str] | None, dtype: torch.dtype | None = None
) -> Fitted:
    """The tensors of a checkpoint with the names and format of a transformers model; may raise `CheckpointError`."""
    values = values_in(source, quantization_of(model.config), offload_dir, model=model, dtype=dtype)
    note = partial(note_form, values=values)
    if values.form is Form.REBUILT:
        from offload.transformers_api import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(dict(values.quantization or {}), pre_quantized=True)
        note = partial(note_quantizer, quantizer=quantizer)
    elif values.form in (Form.FOR_MODULES, Form.LEFT):
        raise CheckpointError(
            f"a checkpoint quantized by {method_of(values.quantization or {})} does not fill an empty "
            f"{type(model).__name__}: use offload.from_pretrained"
        )
    config = without_quantization(copy.deepcopy(model.config))
    dtypes = {one.dtype for one in values.tensors.values() if one.is_floating_point() and one.itemsize > 1}
    dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32  # which can represent all values
    full, report = filled(model.__class__, config, source.path, values.tensors, dtype, ignore_mismatched_sizes=True)
    named = full.state_dict(keep_vars=True)  # of tied ones, the same tensor under each name
    alone = {id(tensor): tensor.detach() for tensor in named.values() if isinstance(tensor, DeferredTensor)}
    fitted = {name: alone[id(tensor)] for name, tensor in named.items() if id(tensor) in alone}
    return Fitted(fitted, report, note)


def quantized_by_torchao(
    source: Checkpoint, offload_dir: str | os.PathLike[str] | None, shapes: Mapping[str, torch.Size]
) -> Fitted | None:
    """The tensors of a checkpoint of any other model, if its files say that torchao has quantized some."""
    metadata = source.metadata
    if PARTS_NOTE not in metadata:
        return None
    tensors = rebuilt(source.tensors(offload_dir), metadata)
    known = {name: (tensor.shape, shapes[name]) for name, tensor in tensors.items() if name in shapes}
    mismatched = [(name, *both) for name, both in known.items() if both[0] != both[1]]
    report = {"missing_keys": (), "unexpected_keys": tensors.keys() - known.keys(), "mismatched_keys": mismatched}
    return Fitted(tensors, report, lambda _: None)


def note_quantizer(model: Pretrained, quantizer: Any) -> None:
    """Set the attributes on a transformers model that loading a quantized one would set."""
    model.is_quantized = True
    model.quantization_method = quantizer.quantization_config.quant_method
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    known, get = model.all_tied_weights_keys, model.get_parameter
    ties = {name: other for name, other in known.items() if get(name) is get(other)}
    if len(ties) < len(known):
        model.all_tied_weights_keys = ties
        model.config.get_text_config(decoder=True).tie_word_embeddings = False
    let_save(model)


def let_save(model: nn.Module) -> None:
    """Have a model, and models inside it, check a folder before they save to it, and keep nothing in memory."""
    if is_of_transformers(model):
        from offload.transformers_api import PrefixChange, get_model_conversion_mapping

        if getattr(model, "_weight_conversions", None) is None:  # it was not loaded: the usual ones are undone
            usual = get_model_conversion_mapping(model, add_legacy=False)
            model._weight_conversions = [one for one in usual if not isinstance(one, PrefixChange)] or None
        conversions = model._weight_conversions
        if conversions and not isinstance(conversions, _Streaming):
            model._weight_conversions = _Streaming(conversions)
        is_torchao = getattr(model, "quantization_method", None) == "torchao"
        if is_torchao and getattr(model, "hf_quantizer", None) is not None:
            model.hf_quantizer.get_state_dict_and_metadata = _in_torchaos_form
    for module in model.modules():
        if hasattr(module, "save_pretrained") and not isinstance(module, _SavesFromDisk):
            kind: Any = type(module)
            module.__class__ = _kind_from_disk(kind)


class _SavesFromDisk:
    """How a model saves itself whose weights may be on disk.

    `__class__` is the library's own class, for tables and for readers of pickles without `offload`; `type` is a
    subclass of both.
    """

    _own_class: Any

    @property
    def __class__(self) -> Any:
        return self._own_class

    @__class__.setter
    def __class__(self, kind: type) -> None:  # as torch's parametrizations and FSDP do
        object.__dict__["__class__"].__set__(self, _kind_from_disk(kind))

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        reduced = super().__reduce_ex__(protocol)
        return object.__new__, (self._own_class,), *reduced[2:]

    def __copy__(self) -> Any:
        copied: Any = object.__new__(type(self))
        copied.__setstate__(self.__reduce_ex__(4)[2])
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = getattr(self._own_class, "__deepcopy__", None)  # as of FSDP's classes, which refuse
        if own is not None:
            return own(self, memo)
        copied: Any = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__reduce_ex__(4)[2], memo))
        return copied


@cache
def _kind_from_disk(kind: Any) -> Any:
    """A subclass of a model's class that saves itself as `_save` does, with what the features add."""

    @wraps(kind.save_pretrained)
    def save_pretrained(self: Any, *args: object, **options: object) -> Any:
        return _save(self, partial(kind.save_pretrained, self), args, options)

    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    for members in _FEATURES:
        own.update(members(kind))
    return type(kind.__name__, (_SavesFromDisk, kind), {**own, "_own_class": kind, "save_pretrained": save_pretrained})


def _save(model: nn.Module, save: Callable[..., object], args: Args, options: Settings) -> object:
    """Save by the class's `save`; raises `ForeignFileError` if files that tensors refer to would be replaced."""
    given = inspect.signature(save).bind(*args, **options)
    folder = absolute(next(iter((*given.args, *given.kwargs.values()))))  # csm has unnamed arguments
    saves_adapter = getattr(model, "_hf_peft_config_loaded", False)
    files = [path for path in folder.glob("*model*") if _WEIGHTS.fullmatch(path.name)]
    replaced = [path for path in files if saves_adapter == path.name.startswith("adapter_")]
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    refuse_referenced(replaced)
    if not saves_adapter and not options.get("distributed_checkpoint"):
        refuse_shares(options.get("state_dict") or named)
    log.info("saving %s to %s, with its own save_pretrained", type(model).__name__, folder)
    packed = getattr(model, "packed_as", None)
    if saves_adapter or packed is None or options.get("state_dict") is not None:
        return save(*args, **options)
    return _save_packed(model, packed, folder, partial(save, *args), options)


def _save_packed(
    model: nn.Module, packed: Packed, folder: Path, save: Callable[..., object], options: Settings
) -> object:
    """Write what is still packed under its original names, from file to file."""
    from offload.transformers_api import revert_weight_conversion

    pieces, others = packed.split(model.state_dict())
    if not pieces or not options.get("save_original_format", True):
        return save(**options)
    dense = revert_weight_conversion(model, others)
    saved = save(**{**options, "state_dict": {**dense, **pieces}, "save_original_format": False})
    path = folder / "config.json"
    if options.get("is_main_process", True):
        config = {**read_json(path, "a model's configuration"), "quantization_config": packed.quantization}
        put_file(path, (json.dumps(config, indent=2) + "\n").encode())
    return saved


class _Streaming(list[Any]):
    """Conversions that are undone on deferred tensors; pickled as the usual ones, for readers without `offload`."""

    def __init__(self, usual: list[Any]) -> None:
        super().__init__(_streaming(conversion) for conversion in usual)
        self._usual = usual

    def __reduce__(self) -> tuple[object, ...]:
        return list, (self._usual,)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Streaming:
        return _Streaming(copy.deepcopy(self._usual, memo))


def _streaming(conversion: Any) -> Any:
    from offload.transformers_api import WeightConverter

    if not isinstance(conversion, WeightConverter):
        return conversion
    streaming = copy.copy(conversion)
    # The tensors to convert are on disk, and go through the following steps without being read. Shards are filled with
    # the results: mapped, each in a storage of its own.
    again = _Undone(lambda one: deferred(one.detach()) if is_offloaded(one) else one)  # type: ignore[arg-type]
    alone = _Undone(lambda tensor: tensor.alone() if isinstance(tensor, DeferredTensor) else tensor)
    streaming.operations = [alone, *conversion.operations, again]
    return streaming


class _Undone:
    """A step of a conversion in transformers' interface, for undoing: applies a function to each tensor."""

    supports_many_to_many = False

    def __init__(self, change: Callable[[Any], object]) -> None:
        self._change = change

    reverse_op = property(lambda self: self)

    def convert(self, input_dict: dict[str, Any], **_: object) -> dict[str, Any]:
        change = self._change
        pairs = input_dict.items()
        return {name: [*map(change, one)] if isinstance(one, list) else change(one) for name, one in pairs}


def _in_torchaos_form(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    named = model.state_dict().items()
    with no_functions(), no_modes():
        mapped = {name: mapped_value(value) if is_offloaded(value) else value for name, value in named}
    return in_torchaos_form(mapped)


# transformers' own loader, given tensors that are on disk


_SHARDING = ("tp_plan", "distributed_config", "device_mesh")  # options with which transformers shards weights


class Waiting:
    """A tensor of a checkpoint, deferred when a loader asks for its `[...]`: of tens of thousands, one by one."""

    __slots__ = ("_keeps_dtype", "_tensor")

    def __init__(self, tensor: OffloadedTensor, *, keeps_dtype: bool = False) -> None:
        self._tensor = tensor
        self._keeps_dtype = keeps_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return deferred(self._tensor, keeps_dtype=self._keeps_dtype)[index]


@uncollected()
def filled(
    model_class: Any,
    config: Config,
    path: Path,
    tensors: Mapping[str, torch.Tensor | Waiting],
    dtype: torch.dtype,
    **options: object,
) -> tuple[Pretrained, Kwargs]:
    """A class's model with deferred tensors, and transformers' loading info; or a `CheckpointError`."""
    named = tensors.items()
    state: dict[str, Any] = {name: Waiting(one) if is_offloaded(one) else one for name, one in named}
    is_shared = any(options.get(name) is not None for name in _SHARDING)
    looked_at = is_shared or quantization_of(config) is not None  # by others, before they are taken
    if looked_at:
        state = {name: one[...] if isinstance(one, Waiting) else one for name, one in state.items()}
    if is_shared:
        for name, tensor in state.items():
            refuse_to_share(tensor, name)
    options = {**options, "state_dict": state, "dtype": dtype, "output_loading_info": True}
    # Inference parameters can't be views of files, and transformers would follow the default device, even to "meta".
    in_turn = nullcontext() if looked_at else one_by_one()
    with in_turn, no_inference(), no_grad(), torch.device("cpu"):
        try:
            model, report = model_class.from_pretrained(None, config=config, **options)
        except (OffloadError, MemoryError):
            raise
        except Exception as error:  # it can raise anything for settings that it does not expect
            raise CheckpointError(
                f"transformers can't make a {model_class.__name__} from {path}: {error} (see its log)"
            ) from error
    return model, report


_SERIAL = "HF_DEACTIVATE_ASYNC_LOAD"
_LOCK = fork_safe_lock()
_LOADINGS: list[str | None] = []  # in progress: the environment variable before each


@contextmanager
def one_by_one() -> Iterator[None]:
    """Make transformers convert each tensor when it gets to it, not all ahead in threads, which are for reading."""
    with _LOCK:
        _LOADINGS.append(os.environ.get(_SERIAL))
        os.environ[_SERIAL] = "1"
    try:
        yield
    finally:
        with _LOCK:
            before = _LOADINGS.pop()  # the first one's, used when the last one ends
            if not _LOADINGS and before is None:
                os.environ.pop(_SERIAL, None)
            elif not _LOADINGS:
                os.environ[_SERIAL] = str(before)


def waiting(values: Values) -> dict[str, torch.Tensor | Waiting]:
    """The values as transformers takes them; those that it would not cast keep their dtype."""
    from offload.transformers_api import HfQuantizer

    is_fp8 = method_of(values.quantization or {}) == "fp8"
    if not hasattr(HfQuantizer, "get_new_dtype") or (is_fp8 and _casts_beside_fp8()):  # before 5.21, it casts all
        return dict(values.tensors)
    return {
        name: Waiting(tensor, keeps_dtype=True) if values.keeps_dtype(name) and is_offloaded(tensor) else tensor
        for name, tensor in values.tensors.items()
    }


def _casts_beside_fp8() -> bool:
    """Whether transformers casts a weight that an FP8 checkpoint stores without scales, as it does from 5.24 on."""
    from offload.transformers_api import Fp8Dequantize

    layer, weight = nn.Linear(1, 1, device="meta", dtype=torch.bfloat16), torch.empty(1, 1, device="meta")
    converted = Fp8Dequantize(None).convert({"weight": weight}, full_layer_name="weight", model=layer)
    return bool(converted["weight"].dtype == torch.bfloat16)
