"""torchao: its `quantize_` over a model on disk.

Always true:
- torchao decides what is quantized, and how: its configurations, filters and handlers are called as they are
- a quantized weight takes the place of the old value, in its file, as soon as torchao hands it to a module
- a weight that others are tied to gets a file of its own, as torchao unties it in memory: the others stay
- what this thread quantizes no other thread sees
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offload.errors import ArgumentTypeError, NameInUseError
from offload.memory import return_freed
from offload.pretrained import is_of_transformers, let_quantizer_save, mapped_state
from offload.saving import in_torchaos_form
from offload.slots import tensor_slots
from offload.tensor.saved import subclass_value
from offload.tensor.wrapper import OffloadedTensor, dressed

Filter: TypeAlias = Callable[[nn.Module, str], bool]

_THEIRS = "TorchAoConfig"
_log = logging.getLogger("offload")
_AT_WORK: ContextVar[_Replacing | None] = ContextVar("offload_quantizing", default=None)


def quantize_(
    model: nn.Module, config: Any, filter_fn: Filter | None = None, device: torch.device | str | int | None = None
) -> None:
    """torchao's `quantize_`, of a model whose weights are on disk, and stay there.

    Weights are quantized one at a time: in memory is what torchao needs for one. What was quantized before stays as it
    is, so that after an interruption, which leaves a model that works, a second call does the rest; but torchao's
    `FqnToConfig`, which takes no filter, should name what is left.

    A transformers model is told of it, so that its `save_pretrained` writes a checkpoint that transformers and
    `offload.from_pretrained` load again, where torchao's safetensors form knows the classes of its weights.

    Args:
        model: on disk, in memory, or both: each weight stays where it is.
        config: a configuration of torchao; or transformers' `TorchAoConfig` of one, for a transformers model, of which
            then the layers are quantized that transformers would: not its head.
        filter_fn: which modules, by module and full name; None for torchao's choice, the linear layers.
        device: the device to bring a module to first, as torchao has it.

    Raises:
        TypeError: a `TorchAoConfig` with a filter, or for another model than one of transformers.
        UnknownSubclassError: a weight became a tensor subclass that is not known; the old value stands.
        WriteError: the disk is full...; the old value stands. And what torchao raises.

    Example:
        >>> import offload
        >>> from torchao.quantization import Int8WeightOnlyConfig
        >>> model = offload.disk_offload(nn.Sequential(nn.Linear(8, 4)))
        >>> offload.quantize_(model, Int8WeightOnlyConfig())
        >>> offload.is_offloaded(model[0].weight), type(model[0].weight.materialize()).__name__
        (True, 'Int8Tensor')
    """
    from torchao.quantization import FqnToConfig
    from torchao.quantization import quantize_ as torchaos

    quantizer = _quantizer_for(model, config, filter_fn)
    if type(config).__name__ == _THEIRS:
        config, filter_fn = config.quant_type, _as_by(quantizer, model)
    by_name = isinstance(config, FqnToConfig)  # of which torchao wants no filter
    with _replacing(model) as replacing, torch.no_grad():
        try:
            torchaos(model, config, None if by_name else _not_yet(filter_fn or _torchaos_choice()), device)
        finally:
            replacing.finish()
            if replacing.has_quantized and quantizer is not None:
                _tell(model, quantizer)


def _torchaos_choice() -> Filter:
    from torchao.quantization import quantize_ as torchaos

    choice: Filter = signature(torchaos).parameters["filter_fn"].default
    return choice


def _not_yet(wanted: Filter) -> Filter:
    """The same filter, but for modules with a weight that is quantized already."""

    def chosen(module: nn.Module, name: str) -> bool:
        weights = (weight for weight in module._parameters.values() if weight is not None)
        return wanted(module, name) and all(subclass_value(weight) is None for weight in weights)

    return chosen


# Weights


class _Replacing:
    """Puts what replaces a weight on disk where the weight was.

    Attributes:
        has_quantized: whether a weight is quantized now that was not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.has_quantized = False
        self._model = model
        self._slots = tensor_slots(model)  # also keeps the tensors, whose identity tells them apart
        self._holders = Counter({id(slot.tensor): len(slot.owners) for slot in self._slots})
        self._names = {id(module): name for name, module in model.named_modules()}

    def __call__(self, module: nn.Module, name: str, new: Any) -> Any:
        """What torch asks when a module is given a parameter: what is to be registered; None for that one itself."""
        old = module._parameters.get(name)
        if _AT_WORK.get() is not self or old is None or new is None or new is old:
            return None
        prefix = self._names.get(id(module))
        full_name = name if prefix == "" else f"{prefix}.{name}" if prefix else ""
        return self._stored(old, new, full_name)

    def finish(self) -> None:
        """Bring to disk what replaced a weight in another way: in a module that took another's place."""
        before = {name: slot.tensor for slot in self._slots for name in slot.names}
        for slot in tensor_slots(self._model):
            old = before.get(slot.name)
            stored = None if old is None else self._stored(old, slot.tensor, slot.name)
            if stored is not None:
                slot.fill(stored)

    def _stored(self, old: torch.Tensor, new: torch.Tensor, name: str) -> torch.Tensor | None:
        if type(new) is OffloadedTensor:
            return None
        self.has_quantized |= subclass_value(new) is not None and subclass_value(old) is None
        if type(old) is not OffloadedTensor:
            return None
        return_freed()  # what torchao computed with
        if self._holders[id(old)] > 1:
            self._holders[id(old)] -= 1
            stored = _beside(old, new, name)
        else:
            old.update_values(new.detach(), strict_shape=False, strict_dtype=False)
            stored = old.detach()  # type: ignore[assignment]
        _log.debug("quantized %s to a %s in %s", name, type(new).__name__, stored.offload_path)
        return dressed(stored, requires_grad=new.requires_grad, is_parameter=True)


def _beside(old: OffloadedTensor, new: torch.Tensor, name: str) -> OffloadedTensor:
    """`new` in a file of its own, in the folder and under the memory budget of `old`."""
    handle = old._file_handle()
    try:
        stored = OffloadedTensor.from_original_tensor(new.detach(), name or f"{handle.name}.quantized", handle.folder)
    except NameInUseError:  # the value that they were tied to has this one's name
        stored = OffloadedTensor.from_original_tensor(new.detach(), f"{name}.quantized", handle.folder)
    stored._file_handle().pool = handle.pool
    return stored


@contextmanager
def _replacing(model: nn.Module) -> Iterator[_Replacing]:
    replacing = _Replacing(model)
    token = _AT_WORK.set(replacing)
    hook = register_module_parameter_registration_hook(replacing)
    try:
        yield replacing
    finally:
        hook.remove()
        _AT_WORK.reset(token)


# transformers


def _quantizer_for(model: nn.Module, config: Any, filter_fn: Filter | None) -> Any:
    """transformers' quantizer, for a model of its and a configuration that its checkpoints can say; else None.

    Raises:
        TypeError: see `quantize_`.
    """
    is_theirs = type(config).__name__ == _THEIRS
    if is_theirs and (filter_fn is not None or not is_of_transformers(model)):
        raise ArgumentTypeError(
            f"a {_THEIRS} says which layers of a transformers model are quantized: give no filter_fn with it, and for "
            "other models its quant_type"
        )
    if not is_of_transformers(model):
        return None
    from transformers import TorchAoConfig
    from transformers.quantizers import AutoHfQuantizer

    try:
        said = config if is_theirs else TorchAoConfig(config)
        TorchAoConfig.from_dict(said.to_dict())
    except (NotImplementedError, TypeError, ValueError, AssertionError):
        return None
    return AutoHfQuantizer.from_config(said, pre_quantized=False)


def _as_by(quantizer: Any, model: Any) -> Filter:
    """The layers that transformers quantizes when it loads a model: torchao's choice, but not what it keeps or ties."""
    quantizer._process_model_before_weight_loading(model)
    choice = _torchaos_choice()

    def chosen(module: nn.Module, name: str) -> bool:
        weight = f"{name}.weight"
        is_tied = weight in model.all_tied_weights_keys
        return choice(module, name) and not is_tied and quantizer.param_needs_quantization(model, weight)

    return chosen


def _tell(model: Any, quantizer: Any) -> None:
    """Note on a transformers model what is noted when it is loaded quantized."""
    model.is_quantized = True
    model.quantization_method = quantizer.quantization_config.quant_method
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    ties = {name: other for name, other in model.all_tied_weights_keys.items() if _are_tied(model, name, other)}
    if len(ties) < len(model.all_tied_weights_keys):
        model.all_tied_weights_keys = ties
        model.config.get_text_config(decoder=True).tie_word_embeddings = False
    let_save_quantized(model)


def let_save_quantized(model: Any) -> None:
    """Have `save_pretrained` of a quantized model read its weights where they are; torchao's form copies none."""
    if getattr(model, "quantization_method", None) == "torchao":
        model.hf_quantizer.get_state_dict_and_metadata = _saved
    else:
        let_quantizer_save(model)


def _saved(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    return in_torchaos_form(mapped_state(model))


def _are_tied(model: nn.Module, name: str, other: str) -> bool:
    return model.get_parameter(name) is model.get_parameter(other)
