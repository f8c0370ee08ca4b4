"""The class: a tensor that knows its file, how it is cut, and where it computes.

Always true:
- `_handle` is shared by all the views of a value, `_twin` is this view's own: a meta tensor with its metadata
- the wrapper's metadata, as torch sees it, are those of its twin
- a guest, the plain tensor that stands for it in an op, is not kept and not handed out
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch._C import DisableTorchFunctionSubclass

from offload.errors import DtypeMismatchError, ShapeMismatchError, StaleViewError, UnsupportedOpError
from offload.storage.file import TensorFile
from offload.storage.handle import Handle, plain_world
from offload.storage.header import Layout, contiguous_stride
from offload.tensor.cuts import cut, same_cut, sent_to, whole_twin, with_bits_of
from offload.tensor.tables import BY_SCHEMA, FUNCTIONS, OUT, RULES
from offload.tensor.traced import Traced

PathLike: TypeAlias = "str | os.PathLike[str]"

_log = logging.getLogger("offload")
CPU = torch.device("cpu")
_make_wrapper = torch.Tensor._make_wrapper_subclass
_set_metadata = torch._C.TensorBase.data.__set__


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
        cls,
        path: PathLike,
        key: str | None = None,
        device: torch.device | str | int = "cpu",
        *,
        offload_dir: PathLike | None = None,
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
            text = torch._tensor_str._str(cut(self._handle.base(), self._twin), tensor_contents=tensor_contents)
        extra = "" if self._target == CPU else f", device='{self._target}'"
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
            return guest if guest.device != CPU else guest.clone()

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
            same_value = (
                type(value) is OffloadedTensor and value._handle is self._handle and same_cut(value._twin, self._twin)
            )
            if not same_value:
                store(self, value)
            redress(self, self._twin, value.device)

    def numpy(self, *, force: bool = False) -> Any:
        """The value as an array over the file; read-only where the file is not ours to write."""
        if self._target != CPU and not force:
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
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol: detach() first"
            )
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
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = FUNCTIONS[OUT] if kwargs and kwargs.get("out") is not None else FUNCTIONS.get(func)
        if rule is None or torch.compiler.is_compiling():
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return rule(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = RULES.get(func)
        if rule is None:
            rule = RULES[func] = RULES[BY_SCHEMA](func)
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
        return cut(self._handle.base(), current_twin(self)).detach()


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
    if twin.is_conj() or twin.is_neg():
        with_bits_of(wrapper, twin)
    return wrapper


def wrap_handle(handle: Handle, target: torch.device) -> OffloadedTensor:
    """An offloaded tensor over the whole value of `handle`."""
    with plain_world():
        return wrap(handle, whole_twin(handle.layout), target)


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


def _dressed(stored: OffloadedTensor, like: torch.Tensor) -> OffloadedTensor:
    """`stored` as a parameter, and requiring grad, where `like` is and does."""
    stored.requires_grad_(like.requires_grad)
    if isinstance(like, torch.nn.Parameter):
        stored._is_param = True
    return stored


def redress(wrapper: OffloadedTensor, twin: torch.Tensor, target: torch.device) -> None:
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
    return sent_to(cut(tensor._handle.base(), current_twin(tensor)), tensor._target)


def current_twin(tensor: OffloadedTensor) -> torch.Tensor:
    """How `tensor` is cut, if that still fits what is stored."""
    if tensor._generation != tensor._handle.generation:
        raise StaleViewError(
            f"the value {tensor._file_handle().name!r} was replaced by one of another shape or dtype, "
            "and this tensor is an old view of it: cut the view again"
        )
    return tensor._twin


def store(tensor: OffloadedTensor, values: torch.Tensor) -> None:
    """Make `values` the whole stored value, and `tensor` the whole of it, on its own device."""
    handle = tensor._file_handle()
    with DisableTorchFunctionSubclass(), torch.no_grad():
        handle.replace(guest_of(values.detach()))
        with plain_world():
            twin = whole_twin(handle.layout)
        redress(tensor, twin, tensor._target)
