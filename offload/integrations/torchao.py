"""torchao: its `quantize_` for a model on disk.

Always true:
- torchao decides what is quantized, and how: its configurations, filters and handlers are called unchanged
- a quantized weight replaces the old value in its file as soon as torchao assigns it to a module
- a weight that is tied to others gets its own file, since torchao unties it in memory: the others stay
- quantizing affects only this thread
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offload.checkpoints.companions import is_of_transformers
from offload.errors import MapError, OffloadError, UnsupportedOpError
from offload.models.pretrained import note_quantizer
from offload.models.values import Replacing
from offload.progress import progress_in_bytes
from offload.system.modes import no_grad
from offload.tensor.locals import is_dtensor
from offload.tensor.saved import subclass_value
from offload.torch_api import parameters_of

log = logging.getLogger("offload.integrations")

Filter: TypeAlias = Callable[[nn.Module, str], bool]

_AT_WORK: ContextVar[_Quantizing | None] = ContextVar("offload_quantizing", default=None)


def quantize_(
    model: nn.Module,
    config: Any,
    filter_fn: Filter | None = None,
    device: torch.device | str | int | None = None,
    *,
    progress: bool = True,
) -> None:
    """torchao's `quantize_`, of a model whose weights are on disk, and stay there.

    Weights are quantized one at a time: only what torchao needs for one is in memory. What was quantized before stays
    as it is, so that after an interruption, which leaves a model that works, a second call does the rest; but torchao's
    `FqnToConfig`, which takes no filter, should name what is left.

    The configuration of a transformers model records it, so that `save_pretrained` writes one that transformers
    and `offload.from_pretrained` load again, where torchao's safetensors form knows the classes of its weights.

    Args:
        model: on disk, in memory, or both: each weight stays where it is.
        config: a configuration of torchao.
        filter_fn: which modules, by module and full name; None for torchao's choice, the linear layers.
        device: the device to move a module to first, as in torchao.
        progress: show a bar, on a terminal.

    Raises:
        MapError: torchao failed on a layer; the message names it. Those before it are done.
        UnknownSubclassError: a weight became an unknown tensor subclass; the old value is kept.
        WriteError: the disk is full...; the old value is kept.

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

    sharded = next((name for name, tensor in model.named_parameters() if is_dtensor(tensor)), None)
    if sharded is not None:
        raise UnsupportedOpError(
            f"{sharded!r} is sharded over ranks (a DTensor), and torchao needs the whole weight: quantize the model "
            "in one process, or load the ranks from a packed checkpoint (FP8, GPTQ...), decoded as it is read"
        )
    quantizer = _quantizer_for(model, config)
    by_name = isinstance(config, FqnToConfig)  # torchao takes no filter with it
    chosen = None if by_name else _not_yet(filter_fn or signature(torchaos).parameters["filter_fn"].default)
    total = sum(map(_nbytes, model.modules()))
    with (
        progress_in_bytes(total, "quantizing", shown=progress) as advance,
        _quantizing(model, advance) as quantizing,
        no_grad(),
    ):
        log.info("torchao quantizes %s by %s", type(model).__name__, type(config).__name__)
        try:
            quantizing.run(model, config, chosen, device)
        finally:
            quantizing.finish()
            if quantizing.has_quantized and quantizer is not None and is_of_transformers(model):
                note_quantizer(model, quantizer)


def _nbytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.itemsize for weight in parameters_of(module).values() if weight is not None)


def _not_yet(wanted: Filter) -> Filter:
    def chosen(module: nn.Module, name: str) -> bool:
        weights = (weight for weight in parameters_of(module).values() if weight is not None)
        return wanted(module, name) and all(subclass_value(weight) is None for weight in weights)

    return chosen


class _Quantizing:
    """Stores what replaces a weight on disk in its place; `at` is the layer that torchao is working on."""

    def __init__(self, model: nn.Module, advance: Callable[[int], object]) -> None:
        self.has_quantized = False
        self.at = ""
        self._model = model
        self._advance = advance
        self._places = Replacing(model, "quantized")
        self._names = {id(module): name for name, module in model.named_modules()}

    def __call__(self, module: nn.Module, name: str, new: Any) -> Any:
        """torch's hook for assigning a parameter to a module: returns the parameter to register, or None to keep it."""
        old = parameters_of(module).get(name)
        if _AT_WORK.get() is not self or old is None or new is None or new is old:
            return None
        prefix = self._names.get(id(module))
        full_name = name if prefix == "" else f"{prefix}.{name}" if prefix else ""
        self.has_quantized |= subclass_value(new) is not None and subclass_value(old) is None
        return self._places.stored(old, new, full_name)

    def run(self, model: nn.Module, config: Any, chosen: Filter | None, device: Any) -> None:
        from torchao.quantization import quantize_ as torchaos

        def noted(module: nn.Module, name: str) -> bool:
            self._advance(_nbytes(module))
            self.at = name
            return chosen is not None and chosen(module, name)

        try:
            torchaos(model, config, chosen and noted, device)
        except OffloadError:
            raise
        except Exception as error:
            raise MapError(
                f"torchao failed at {self.at!r} ({type(error).__name__}: {error}): the weights before it are quantized"
            ) from error

    def finish(self) -> None:
        """Put on disk what replaced a weight otherwise: by replacing its module."""
        for name in self._places.finish():
            self.has_quantized |= subclass_value(self._model.get_parameter(name)) is not None


@contextmanager
def _quantizing(model: nn.Module, advance: Callable[[int], object]) -> Iterator[_Quantizing]:
    quantizing, before = _Quantizing(model, advance), _AT_WORK.get()
    hook = None
    try:
        hook = register_module_parameter_registration_hook(quantizing)
        _AT_WORK.set(quantizing)
        yield quantizing
    finally:
        _AT_WORK.set(before)
        if hook is not None:
            hook.remove()


def _quantizer_for(model: nn.Module, config: Any) -> Any:
    """transformers' quantizer, for one of its models and a configuration that checkpoints support; else None."""
    if not is_of_transformers(model):
        return None
    from transformers import TorchAoConfig

    from offload.transformers_api import AutoHfQuantizer

    try:
        settings = TorchAoConfig(config)
        TorchAoConfig.from_dict(settings.to_dict())
    except (NotImplementedError, TypeError, ValueError, AssertionError):
        return None
    return AutoHfQuantizer.from_config(settings, pre_quantized=False)
