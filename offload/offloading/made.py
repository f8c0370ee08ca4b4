"""Results of ops on disk: where they go, under which names, and those computed straight into their file.

Always true:
- a name is used once, even by other processes that use the same folder
- tensors without dense values of their own, or on the meta device, are not taken
- what is computed into its file is never in memory as a whole: the kernel is the same, and random numbers come in the
  same order; shape, strides and dtype are those of the op on meta tensors, and without a meta kernel it is not done
- tensors that the op reads are not written to
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from offload.annotations import Args, Kwargs, Op
from offload.storage.folders import discard
from offload.storage.layout import Layout
from offload.storage.owning import allocate_value, create_value, writable_base
from offload.system.modes import no_functions, no_modes
from offload.tensor.guests import CPU
from offload.tensor.rules import call, guests_of, named_guests, tensors_in
from offload.tensor.views import handle_of, target_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor, is_offloaded, wrap_handle
from offload.torch_api import OpOverload, op_schema

log = logging.getLogger("offload.offloading")


@dataclass(frozen=True)
class Destination:
    """A folder for large results."""

    folder: Path | None  # the user's; None for a private one
    min_bytes: int  # from which a result is large
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def name(self, what: str) -> str:
        """A name that is new in the folder, even if processes were forked inside the context."""
        return f"{what}.{next(self._numbers)}.{secrets.token_hex(8)}"

    def takes(self, tensor: object, what: str) -> bool:
        """Whether this result of `what` is a large plain tensor that can be stored as it is."""
        if type(tensor) is not torch.Tensor or tensor.is_meta:
            return False
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            log.debug("%s: a result stays in memory, since it is sparse, quantized or nested", what)
            return False
        if tensor.numel() * tensor.itemsize < max(self.min_bytes, 1):
            return False
        layout = Layout(tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.is_conj() or tensor.is_neg() or not layout.is_dense:
            log.debug("%s: %s stays in memory, since its elements overlap or are lazily changed", what, layout)
            return False
        return True

    def put(self, tensor: torch.Tensor, what: str) -> OffloadedTensor:
        with no_functions(), no_modes():
            handle = create_value(tensor, self.name(what), self.folder)
            log.debug("%s: written to %s", what, handle.path)
            return wrap_handle(handle, tensor.device)


Fill: TypeAlias = Callable[[torch.Tensor, Args, Kwargs], object]

_aten = torch.ops.aten
_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")


def made_on_disk(destination: Destination, func: OpOverload, args: Args, kwargs: Kwargs) -> OffloadedTensor | None:
    """The large result of an op, computed into its file; None for one to compute as usual. Raises `WriteError`."""
    fill = _way_of(func)
    if fill is None or not _are_here(args, kwargs) or not _may_be_large(destination, func, args):
        return None
    layout = _layout_of_result(func, args, kwargs)
    if layout is None or layout.nbytes < max(destination.min_bytes, 1) or not layout.is_dense:
        return None
    what = func.overloadpacket.__name__
    with no_functions(), no_modes():
        handle = allocate_value(layout, destination.name(what), destination.folder)
        try:
            fill(writable_base(handle), args, kwargs)
        except BaseException:
            discard(handle.path)
            raise
    log.debug("%s: computed in %s", what, handle.path)
    return wrap_handle(handle, CPU)


@cache
def _way_of(func: Op) -> Fill | None:
    """How to fill in the result of an op; None if unknown."""
    if not isinstance(func, OpOverload) or op_schema(func).is_mutable or func.is_view:
        return None
    packet = func.overloadpacket
    if packet in _FILLS:
        return _FILLS[packet]
    if packet in _STREAMED or torch.Tag.pointwise in func.tags:
        variant = _out_variant(func)
        return None if variant is None else partial(_run_into, variant)
    return None


def _out_variant(func: OpOverload) -> OpOverload | None:
    """The overload that does the same with a given output tensor."""
    if [str(returned.type) for returned in op_schema(func).returns] != ["Tensor"]:
        return None
    wanted = [(one.name, str(one.type)) for one in op_schema(func).arguments if one.name not in _OPTIONS]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        outs = [one.name for one in op_schema(variant).arguments if one.is_out]
        rest = [(one.name, str(one.type)) for one in op_schema(variant).arguments if not one.is_out]
        if outs == ["out"] and rest == wanted:
            return variant  # type: ignore[no-any-return]
    return None


def _run_into(variant: Op, out: torch.Tensor, args: Args, kwargs: Kwargs) -> None:
    memo: dict[int, torch.Tensor] = {}
    options = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    call(variant, guests_of(args, memo), {**named_guests(options, memo), "out": out})


def _copy_into(out: torch.Tensor, args: Args, _kwargs: Kwargs) -> None:
    [source] = guests_of(args[:1], {})
    call(_aten.copy_.default, [out, source], {})


def _fill_with_integers(out: torch.Tensor, args: Args, kwargs: Kwargs) -> None:
    low, high = (0, *args[1:])[-2:]
    out.random_(low, high, generator=kwargs.get("generator"))


def _are_here(args: Args, kwargs: Kwargs) -> bool:
    """Whether all tensors and the result are on the CPU, and the tensors are plain or offloaded."""
    device = kwargs.get("device")
    return (
        (device is None or torch.device(device) == CPU)
        and kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
        and all(_is_dense_here(tensor) for tensor in tensors_in(*args, *kwargs.values()))
    )


def _is_dense_here(tensor: torch.Tensor) -> bool:
    if is_offloaded(tensor):
        return target_of(tensor) == CPU and handle_of(tensor).subclass is None
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device == CPU
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
    )


def _may_be_large(destination: Destination, func: OpOverload, args: Args) -> bool:
    """False for an op on small tensors; no op here returns more elements than the product of its inputs' sizes."""
    sizes = [tensor.numel() for tensor in tensors_in(*args)]
    return not sizes or func.overloadpacket in _SIZED or math.prod(sizes) * 16 >= destination.min_bytes


def _layout_of_result(func: Op, args: Args, kwargs: Kwargs) -> Layout | None:
    """The layout of the op's result on meta tensors; None if that fails: the op itself gives the better error."""
    options = {name: value for name, value in kwargs.items() if name != "generator"}
    if any(argument.name == "device" for argument in op_schema(func).arguments):
        options["device"] = "meta"
    with no_functions(), no_modes(), suppress(Exception):
        result = func(*map(_meta_of, args), **{name: _meta_of(value) for name, value in options.items()})
        return Layout(result.dtype, tuple(result.shape), result.stride())
    return None


def _meta_of(value: Any) -> Any:
    """The meta tensor of a tensor, also in lists; scalars stay, since a number counts differently for the dtype."""
    if isinstance(value, (list, tuple)):
        return [*map(_meta_of, value)]
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and not is_offloaded(value)):
        return value
    if is_offloaded(value):
        return view_spec_of(value)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


_FILLS: dict[object, Fill] = {
    **dict.fromkeys((_aten.zeros, _aten.zeros_like, _aten.new_zeros), lambda *_: None),  # it reads as zeros already
    **dict.fromkeys((_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted), lambda *_: None),
    **dict.fromkeys((_aten.new_empty, _aten.new_empty_strided), lambda *_: None),
    **dict.fromkeys((_aten.ones, _aten.ones_like, _aten.new_ones), lambda out, *_: out.fill_(1)),
    **dict.fromkeys((_aten.full, _aten.full_like, _aten.new_full), lambda out, args, _: out.fill_(args[-1])),
    **dict.fromkeys((_aten.clone, _aten._to_copy), _copy_into),
    _aten.rand_like: lambda out, _, kwargs: out.uniform_(generator=kwargs.get("generator")),
    _aten.randn_like: lambda out, _, kwargs: out.normal_(generator=kwargs.get("generator")),
    _aten.randint_like: _fill_with_integers,
}
_SIZED = {_aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones, _aten.new_full}
_STREAMED = {
    *(_aten.rand, _aten.randn, _aten.randint, _aten.randperm, _aten.normal, _aten.arange, _aten.linspace),
    *(_aten.logspace, _aten.eye, _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.cat, _aten.index_select),
}
