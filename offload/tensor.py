"""A tensor whose data is a file.

Always true:
- the file is the only copy; what an op computes with is a guest and is never written back by itself
- shape, dtype, strides and target device are known without opening the file
- a view remembers how it was cut (its meta twin); writing through it writes the file

How an op is carried out, in this order:
1. a rule of its own, from the tables `FUNCTIONS` (`__torch_function__`) and `RULES` (`__torch_dispatch__`);
2. an op whose schema says that it gives a view: recorded on the twin, nothing is read;
3. all else: the arguments are materialized, the op runs on them, and what the schema says was mutated is written back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch._C import DisableTorchFunctionSubclass

from offload.errors import DtypeMismatchError, ShapeMismatchError, StaleViewError, UnsupportedOpError
from offload.storage.file import TensorFile
from offload.storage.handle import Handle, plain_world
from offload.storage.header import Layout, contiguous_stride
from offload.storage.subclasses import is_subclass_value

Rule: TypeAlias = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
PathLike: TypeAlias = "str | os.PathLike[str]"

_log = logging.getLogger("offload")
RULES: dict[Any, Rule] = {}
FUNCTIONS: dict[Any, Rule] = {}
_CPU = torch.device("cpu")
_make_wrapper = torch.Tensor._make_wrapper_subclass
_set_metadata = torch._C.TensorBase.data.__set__


class Traced:
    """Stands for a handle while a compiler traces: the value is a tensor of the compiler's."""

    __slots__ = ("generation", "inner")
    owned = True
    recipe = None

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner
        self.generation = 0

    def base(self) -> torch.Tensor:
        return self.inner

    writable_base = base


class OffloadedTensor(torch.Tensor):
    """A tensor that lives in a file and is materialized on its device during each op only.

    Make one with `from_original_tensor`, `from_file`, `empty` or `zeros`; views, `detach` and `.to(device)` of one are
    offloaded too and share its file. Results of other ops are plain tensors.

    Example:
        >>> w = OffloadedTensor.from_original_tensor(torch.eye(2), "w")
        >>> w @ torch.tensor([1.0, 2.0])
        tensor([1., 2.])
        >>> w[0].mul_(3)[0].item(), w.sum().item()
        (3.0, 4.0)
    """

    _handle: Handle | Traced
    _twin: torch.Tensor
    _target: torch.device
    _generation: int

    @staticmethod
    def __new__(cls: type[OffloadedTensor], tensor: torch.Tensor, requires_grad: bool = False) -> OffloadedTensor:
        """The form in which accelerate rebuilds a parameter: `type(param)(tensor, requires_grad=...)`."""
        if type(tensor) is not OffloadedTensor:
            tensor = cls.from_original_tensor(tensor, "tensor")
        return tensor.detach().requires_grad_(requires_grad)  # type: ignore[return-value]

    def __init__(self, tensor: torch.Tensor, requires_grad: bool = False) -> None:
        super().__init__()

    # Ways in

    @classmethod
    def from_original_tensor(
        cls, tensor: torch.Tensor, name: str, offload_dir: PathLike | None = None, suffix_log_msg: str = ""
    ) -> OffloadedTensor:
        """Write a tensor to a file of its own, and give the offloaded tensor over it.

        Args:
            tensor: any dense tensor, or a wrapper subclass that `register_subclass` knows. A parameter stays one.
            name: its name; one live tensor a name and folder.
            offload_dir: the folder for its file, which then stays; None for a private one, which goes with the tensor.
            suffix_log_msg: added to the log line.

        Raises:
            NameInUseError, ForeignFileError, WriteError, UnknownSubclassError, UnsupportedOpError (not a dense tensor)
        """
        _refuse_unstorable(tensor, name)
        stored = wrap_handle(Handle.create(guest_of(tensor.detach()), name, offload_dir), tensor.device)
        _log.debug("offloaded %s to %s %s", name, stored.offload_path, suffix_log_msg)
        return _dressed(stored, tensor)

    @classmethod
    def from_file(
        cls, path: PathLike, key: str | None = None, device: torch.device | str | int = "cpu", *, offload_dir: PathLike | None = None
    ) -> OffloadedTensor:
        """A tensor over an entry of a safetensors file, in place: nothing is copied, the file is never written to.

        Args:
            path: a `.safetensors` file of any origin.
            key: the entry; may be left out where the file holds one value.
            device: where ops on it run.
            offload_dir: where a copy goes at the first write; None for a private folder.

        Raises:
            MissingFileError, CorruptFileError, KeyError
        """
        file = TensorFile.open(path)
        return wrap_handle(Handle.reference(file, _only_key(file, key), offload_dir), checked_device(device))

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        name: str,
        offload_dir: PathLike | None = None,
        device: torch.device | str | int = "cpu",
    ) -> OffloadedTensor:
        """A tensor of zeros allocated on disk, without memory and without writing its data.

        Args:
            shape: the sizes.
            dtype: torch's default one if None.
            name, offload_dir: as in `from_original_tensor`.
            device: where ops on it run.

        Raises:
            NameInUseError, ForeignFileError, WriteError (also when the disk has no room for it)
        """
        sizes = tuple(shape)
        layout = Layout(dtype or torch.get_default_dtype(), sizes, contiguous_stride(sizes))
        return wrap_handle(Handle.allocate(layout, name, offload_dir), checked_device(device))

    zeros = empty

    # What it is

    @property
    def name(self) -> str:  # type: ignore[override]
        """Its name, which is its key in the file."""
        return self._file_handle().name

    @property
    def offload_path(self) -> Path:
        """The file that holds the value now."""
        return self._file_handle().path

    @property
    def offload_dir(self) -> Path:
        """The folder that writes go to; before the first write to a referenced file, that file's folder."""
        handle = self._file_handle()
        return handle.folder or handle.path.parent

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if type(self._handle) is Traced:
            return f"OffloadedTensor({self._handle.inner!r})"
        with plain_world():
            text = torch._tensor_str._str(_cut(self._handle.base(), self._twin), tensor_contents=tensor_contents)
        extra = "" if self._target == _CPU else f", device='{self._target}'"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"OffloadedTensor({text.partition('(')[2].removesuffix(')')}{extra}{grad}, name={self._handle.name!r})"

    # Values in and out

    def update_values(self, values: torch.Tensor, strict_shape: bool = True, strict_dtype: bool = True) -> None:
        """Replace the whole value, atomically: whatever happens, the file holds the old value or the new one.

        Args:
            values: the new value, plain or offloaded, on any device.
            strict_shape: refuse another shape.
            strict_dtype: refuse another dtype. With False the stored dtype becomes that of `values`.

        Raises:
            ShapeMismatchError, DtypeMismatchError, WriteError (the old value stands)
            UnsupportedOpError: this tensor is a view of a part of the value.
        """
        handle = self._file_handle()
        _refuse_unstorable(values, handle.name)
        if self._is_part():
            raise UnsupportedOpError(
                f"update_values replaces a whole value, and this is a view of a part of {handle.name!r}: "
                "use copy_ on the view, or update_values on the tensor that it was cut from"
            )
        if strict_shape and values.shape != self.shape:
            raise ShapeMismatchError(
                f"{handle.name!r} has shape {tuple(self.shape)}, the new value {tuple(values.shape)}: "
                "pass strict_shape=False to change it"
            )
        if strict_dtype and values.dtype != self.dtype:
            raise DtypeMismatchError(
                f"{handle.name!r} has dtype {self.dtype}, the new value {values.dtype}: "
                "pass strict_dtype=False to change it"
            )
        store(self, values)
        torch.autograd.graph.increment_version(self)

    def materialize(self) -> torch.Tensor:
        """A plain, independent tensor with this value, on the target device."""
        with DisableTorchFunctionSubclass(), torch.no_grad():
            guest = guest_of(self)
            return guest if guest.device != _CPU else guest.clone()

    def flush(self) -> None:
        """Wait until everything written to the file so far is on the disk."""
        self._file_handle().flush()

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor without autograd. Assigning replaces the stored value (and the target device)."""
        with DisableTorchFunctionSubclass():
            return torch._C.TensorBase.data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with DisableTorchFunctionSubclass(), torch.no_grad():
            same_value = type(value) is OffloadedTensor and value._handle is self._handle and _same(value._twin, self._twin)
            if not same_value:
                store(self, value)
            _redress(self, self._twin, value.device)

    def numpy(self, *, force: bool = False) -> Any:
        """The value as an array over the file; read-only where the file is not ours to write."""
        if self._target != _CPU and not force:
            raise TypeError(f"can't convert {self._target} device type tensor to numpy: use .cpu() first")
        with DisableTorchFunctionSubclass(), torch.no_grad():
            guest = self._on_cpu()
        array = guest.requires_grad_(self.requires_grad and not force).numpy(force=force)
        array.flags.writeable = self._handle.owned
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.array(self.numpy(), dtype=dtype, copy=True if copy else None)

    def tolist(self) -> Any:
        """The value as nested lists of Python numbers."""
        with DisableTorchFunctionSubclass():
            return self._on_cpu().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        with DisableTorchFunctionSubclass():
            guest = guest_of(self) if self._handle.owned else self.materialize()
            return guest.requires_grad_(self.requires_grad).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        with DisableTorchFunctionSubclass():
            return torch.empty(0, device=self._target).__dlpack_device__()

    # Pointers, for those who find shared memory by them

    def untyped_storage(self) -> torch.UntypedStorage:
        """The bytes of the whole value, mapped: its own address, in a storage that no op computes with."""
        with plain_world():
            return self._file_handle().pointers()

    def data_ptr(self) -> int:
        """An address of the mapped value; views of one file have addresses inside the same storage."""
        return self.untyped_storage().data_ptr() + self._twin.storage_offset() * self._twin.itemsize

    def storage(self) -> Any:
        return self._typed_storage()

    def _typed_storage(self) -> torch.storage.TypedStorage:
        return torch.storage.TypedStorage(wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True)

    def share_memory_(self) -> OffloadedTensor:
        """A file is shared as it is."""
        return self

    def is_shared(self) -> bool:
        return True

    # Copies and pickles

    def __copy__(self) -> OffloadedTensor:
        return _dressed(self.detach(), self)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol: detach() first")
        handle = self._file_handle()
        if id(handle) not in memo:
            memo[id(handle)] = handle.duplicate()
        copy = _dressed(wrap(memo[id(handle)], self._twin, self._target), self)
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor or parameter, over the mapped file: in bounded memory, and loads without `offload`."""
        with DisableTorchFunctionSubclass(), torch.no_grad():
            plain = self._on_cpu()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        else:
            plain.requires_grad_(self.requires_grad)
        return plain.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_guest"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, outer_size: Any, outer_stride: Any
    ) -> OffloadedTensor:
        return wrap_traced(inner["_guest"])

    @property
    def _guest(self) -> torch.Tensor:
        with DisableTorchFunctionSubclass(), torch.no_grad():
            return guest_of(self)

    # How ops are carried out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        rule = FUNCTIONS.get(func)
        if rule is None and kwargs and kwargs.get("out") is not None:
            rule = write_out
        if rule is None or torch.compiler.is_compiling():
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return rule(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        rule = RULES.get(func)
        if rule is None:
            rule = RULES[func] = _rule_of(func)
        return rule(func, args, kwargs or {})

    def _file_handle(self) -> Handle:
        handle = self._handle
        if type(handle) is not Handle:
            raise UnsupportedOpError("a tensor that is being traced has no file: call this outside compile or export")
        return handle

    def _is_part(self) -> bool:
        layout = self._file_handle().layout
        return (tuple(self._twin.shape), self._twin.dtype) != (layout.shape, layout.dtype) or (
            self._twin.stride() != layout.stride and self._twin.numel() > 1
        )

    def _on_cpu(self) -> torch.Tensor:
        """The value over the mapping, as a tensor of its own."""
        return _cut(self._handle.base(), current_twin(self)).detach()


# Making wrappers


def wrap(handle: Handle | Traced, twin: torch.Tensor, target: torch.device) -> OffloadedTensor:
    """An offloaded tensor over `handle`, cut as the meta tensor `twin` is."""
    wrapper: OffloadedTensor = _make_wrapper(
        OffloadedTensor,
        twin.shape,
        strides=twin.stride(),
        storage_offset=twin.storage_offset(),
        dtype=twin.dtype,
        device=target,
        storage_size=twin.untyped_storage().nbytes(),
    )
    wrapper._handle = handle
    wrapper._twin = twin
    wrapper._target = target
    wrapper._generation = handle.generation
    if twin.is_conj():
        torch._C._set_conj(wrapper, True)
    if twin.is_neg():
        torch._C._set_neg(wrapper, True)
    return wrapper


def wrap_handle(handle: Handle, target: torch.device) -> OffloadedTensor:
    """An offloaded tensor over the whole value of `handle`."""
    with plain_world():
        return wrap(handle, _whole_twin(handle.layout), target)


def wrap_traced(inner: torch.Tensor) -> OffloadedTensor:
    """An offloaded tensor that stands for a tensor of a compiler's."""
    return wrap(Traced(inner), inner, inner.device)


def is_offloaded(x: object) -> bool:
    """True for a tensor whose data is on disk.

    Example:
        >>> is_offloaded(torch.ones(2))
        False
    """
    return type(x) is OffloadedTensor


def checked_device(device: torch.device | str | int) -> torch.device:
    """The device with its index, as torch reports it.

    Raises:
        RuntimeError, AssertionError: torch's own, if there is no such device here.
    """
    with plain_world():
        return torch.empty(0, device=device).device


def _whole_twin(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def _dressed(stored: OffloadedTensor, like: torch.Tensor) -> OffloadedTensor:
    """`stored` as a parameter, and requiring grad, where `like` is and does."""
    stored.requires_grad_(like.requires_grad)
    if isinstance(like, torch.nn.Parameter):
        stored._is_param = True
    return stored


def _redress(wrapper: OffloadedTensor, twin: torch.Tensor, target: torch.device) -> None:
    """Give a wrapper other metadata in place."""
    _set_metadata(wrapper, wrap(wrapper._handle, twin, target))
    wrapper._twin = twin
    wrapper._target = target
    wrapper._generation = wrapper._handle.generation


def _only_key(file: TensorFile, key: str | None) -> str:
    if key is not None:
        return key
    if "name" in file.notes:
        return str(file.notes["name"])
    if len(file.entries) != 1:
        some = ", ".join(sorted(file.entries)[:5])
        raise KeyError(f"{file.path} holds {len(file.entries)} tensors ({some}...): say which one with key=")
    return next(iter(file.entries))


def _refuse_unstorable(tensor: object, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r}: a torch.Tensor is needed, not {type(tensor).__name__}")
    if tensor.is_meta:
        raise UnsupportedOpError(f"{name!r} is on the meta device: it has no values to write")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsupportedOpError(
            f"{name!r} is not a dense tensor (layout {tensor.layout}, quantized {tensor.is_quantized}, nested {tensor.is_nested}): "
            "store its parts, or its to_dense() / dequantize()"
        )


# Guests: what ops compute with


def guest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that stands for `tensor` in an op: over the mapped file on the CPU, a copy elsewhere.

    It is not to be written to, nor handed out.

    Raises:
        StaleViewError, and as `Handle.base`.
    """
    if type(tensor) is not OffloadedTensor:
        return tensor
    return _sent(_cut(tensor._handle.base(), current_twin(tensor)), tensor._target)


def current_twin(tensor: OffloadedTensor) -> torch.Tensor:
    """How `tensor` is cut, if that still fits what is stored."""
    if tensor._generation != tensor._handle.generation:
        raise StaleViewError(
            f"the value {tensor._file_handle().name!r} was replaced by one of another shape or dtype, "
            "and this tensor is an old view of it: cut the view again"
        )
    return tensor._twin


def guests_of(args: Iterable[Any], memo: dict[int, torch.Tensor]) -> list[Any]:
    """`args` with guests for the offloaded tensors, also inside lists and tuples; one guest a tensor."""
    guests = []
    for arg in args:
        kind = type(arg)
        if kind is OffloadedTensor:
            guest = memo.get(id(arg))
            if guest is None:
                guest = memo[id(arg)] = guest_of(arg)
            guests.append(guest)
        elif isinstance(arg, (list, tuple)):
            guests.append(guests_of(arg, memo))
        else:
            guests.append(arg)
    return guests


def _named_guests(kwargs: dict[str, Any], memo: dict[int, torch.Tensor]) -> dict[str, Any]:
    return dict(zip(kwargs, guests_of(kwargs.values(), memo), strict=True)) if kwargs else kwargs


def _cut(base: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """A tensor over the storage of `base`, cut as `twin` is."""
    if base is twin or is_subclass_value(base):
        return base
    if base.dtype == twin.dtype:
        guest = base.as_strided(twin.shape, twin.stride(), twin.storage_offset())
    else:
        guest = torch.empty(0, dtype=twin.dtype, device=base.device)
        guest.set_(base.untyped_storage(), twin.storage_offset(), twin.shape, twin.stride())
    if twin.is_conj():
        torch._C._set_conj(guest, True)
    if twin.is_neg():
        torch._C._set_neg(guest, True)
    return guest


def _sent(guest: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy of `guest` on `target`, with the same strides; sends the bytes that it spans and no others."""
    if guest.device == target:
        return guest
    if is_subclass_value(guest):
        return guest.to(target)
    span = 1 + sum((size - 1) * step for size, step in zip(guest.shape, guest.stride(), strict=True))
    sent = guest.as_strided((max(span, 0) if guest.numel() else 0,), (1,)).to(target)
    return sent.as_strided(guest.shape, guest.stride(), 0)


def store(tensor: OffloadedTensor, values: torch.Tensor) -> None:
    """Make `values` the whole stored value, and `tensor` the whole of it, on its own device."""
    handle = tensor._file_handle()
    with DisableTorchFunctionSubclass(), torch.no_grad():
        handle.replace(guest_of(values.detach()))
        with plain_world():
            twin = _whole_twin(handle.layout)
        _redress(tensor, twin, tensor._target)


# The rules that a schema implies


def _rule_of(func: Any) -> Rule:
    if not isinstance(func, torch._ops.OpOverload):
        return read
    if written_arguments(func):
        return _write_inplace_view if torch.Tag.inplace_view in func.tags else write
    return _view if func.is_view else read


def written_arguments(func: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Position and name of the arguments that an op writes to."""
    unannotated = UNANNOTATED_WRITES.get(func, ())
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if position in unannotated or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


UNANNOTATED_WRITES = {
    # Running mean and variance: the schemas do not say that training updates them (torch 2.13).
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op on guests, with lazy conjugation, negation and zeros understood inside it.

    Below Python dispatch these keys are excluded, and composite kernels that rely on them give wrong values.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set() - _LAZY_KEYS
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        return func(*args, **kwargs)


_LAZY_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.Negative)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor)
)


def read(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on guests; the result is plain."""
    memo: dict[int, torch.Tensor] = {}
    return call(func, guests_of(args, memo), _named_guests(kwargs, memo))


def _view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Cut the twin: nothing is read."""
    base = args[0]
    if type(base) is not OffloadedTensor or (base._handle.recipe is not None and func not in _SAME_VALUE):
        return read(func, args, kwargs)
    twins = func(current_twin(base), *args[1:], **kwargs)
    with _normal_unless_inference(base):
        if isinstance(twins, torch.Tensor):
            return _view_of(base, twins)
        return [_view_of(base, twin) for twin in twins]


_SAME_VALUE = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def _view_of(base: OffloadedTensor, twin: torch.Tensor) -> OffloadedTensor:
    return wrap_traced(twin) if type(base._handle) is Traced else wrap(base._handle, twin, base._target)


def _normal_unless_inference(base: OffloadedTensor) -> Any:
    """A view of a normal tensor is a normal tensor, also in inference mode."""
    if torch.is_inference_mode_enabled() and not torch._C.TensorBase.is_inference(base):
        return torch.inference_mode(False)
    return DisableTorchFunctionSubclass()


def _write_inplace_view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`t_`, `squeeze_`...: only the metadata change."""
    tensor = args[0]
    if type(tensor) is not OffloadedTensor:
        return write(func, args, kwargs)
    twin = func(current_twin(tensor).detach(), *args[1:], **kwargs)
    if type(tensor._handle) is Traced:
        tensor._handle.inner = twin
    _redress(tensor, twin, tensor._target)
    return tensor


def write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on guests over the writable file; what the schema returns as mutated is the argument itself."""
    written = written_arguments(func)
    names = [name for _, name in written]
    changed = [args[place] if place < len(args) else kwargs.get(name) for place, name in written]
    results = write_into(changed, lambda guests, named: call(func, guests, named), args, kwargs)
    returns = func._schema.returns
    if not isinstance(results, (tuple, list)) or len(returns) == 1:
        return _argument_for(func, returns[0], names, changed, results) if returns else results
    pairs = zip(returns, results, strict=True)
    return tuple(_argument_for(func, returned, names, changed, result) for returned, result in pairs)


def _argument_for(func: Any, returned: Any, names: list[str], changed: list[Any], result: Any) -> Any:
    """The argument that a return value stands for, else the value."""
    if returned.alias_info is None or not returned.alias_info.is_write:
        return result
    aliased = returned.alias_info.before_set
    for argument in func._schema.arguments:
        if argument.name in names and argument.alias_info and argument.alias_info.before_set == aliased:
            return changed[names.index(argument.name)]
    return result


def write_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call with `out=`: run as for plain tensors (some composite ops never write the `out` of a subclass)."""
    out = kwargs["out"]
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args, *kwargs.values())):
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    with DisableTorchFunctionSubclass():
        results = write_into(outs, lambda guests, named: func(*guests, **named), args, kwargs)
        for tensor in outs:
            if type(tensor) is OffloadedTensor:
                torch.autograd.graph.increment_version(tensor)
    if isinstance(results, torch.Tensor):
        return out
    return type(results)(outs) if type(results) in (tuple, list) else results.__class__(outs)


def _tensors(*values: Any) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(*value)


def write_into(
    changed: Iterable[Any], run: Callable[[list[Any], dict[str, Any]], Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run with writable guests for the offloaded tensors in `changed`, then store what became of them."""
    targets = [tensor for tensor in _tensors(*changed) if type(tensor) is OffloadedTensor]
    guests = {id(tensor): _writable_guest(tensor) for tensor in targets}
    before = [_metadata(guests[id(tensor)]) for tensor in targets]
    try:
        memo = dict(guests)
        results = run(guests_of(args, memo), _named_guests(kwargs, memo))
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        guests = {id(tensor): guest_of(tensor).clone() for tensor in targets}
        before = [None] * len(targets)  # type: ignore[list-item]
        memo = dict(guests)
        results = run(guests_of(args, memo), _named_guests(kwargs, memo))
    for tensor, metadata in zip(targets, before, strict=True):
        _settle(tensor, guests[id(tensor)], metadata)
    return results


def _writable_guest(tensor: OffloadedTensor) -> torch.Tensor:
    twin = current_twin(tensor)
    base = tensor._handle.writable_base()
    if tensor._handle.recipe is not None:
        return guest_of(tensor).clone()
    guest = _sent(_cut(base, twin), tensor._target)
    return guest.detach() if guest is base else guest


def _metadata(guest: torch.Tensor) -> tuple[Any, ...]:
    return guest.shape, guest.stride(), guest.storage_offset(), guest.untyped_storage().data_ptr()


def _settle(tensor: OffloadedTensor, guest: torch.Tensor, before: tuple[Any, ...] | None) -> None:
    """After a write: nothing to do for a guest over the file; else bring its value, or its new shape, home."""
    handle, twin = tensor._handle, tensor._twin
    if type(handle) is Traced:
        return
    if handle.recipe is not None:
        store(tensor, guest)
    elif before == _metadata(guest):
        if tensor._target != _CPU:
            _cut(handle.writable_base(), twin).copy_(guest)
    elif before is None and guest.shape == twin.shape:
        _cut(handle.writable_base(), twin).copy_(guest)
    elif before is not None and before[3] == guest.untyped_storage().data_ptr() and tensor._target == _CPU:
        with plain_world():
            _redress(tensor, _like(twin, guest), tensor._target)
    elif tensor._is_part():
        raise UnsupportedOpError(f"this op would resize {tensor.name!r} through a view of a part of it: resize the tensor itself")
    else:
        store(tensor, guest)


def _like(twin: torch.Tensor, guest: torch.Tensor) -> torch.Tensor:
    """A cut of the value that `twin` is a cut of, with the metadata of `guest`."""
    return torch.empty(0, dtype=guest.dtype, device="meta").set_(
        twin.untyped_storage(), guest.storage_offset(), guest.shape, guest.stride()
    )


def _same(twin: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        twin is other
        or (twin.shape, twin.stride(), twin.storage_offset(), twin.dtype, twin.is_conj(), twin.is_neg())
        == (other.shape, other.stride(), other.storage_offset(), other.dtype, other.is_conj(), other.is_neg())
    )  # fmt: skip
