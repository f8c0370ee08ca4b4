"""The class: a tensor that knows its file, its view of it, and its compute device.

Always true:
- `_handle` is shared by all views of a value; `_view_spec` is a meta tensor with the metadata of this view
- what it does with its value is in `guests` (reading) and `replacing` (changing)
- an op enters through `__torch_function__` (above autograd) or `__torch_dispatch__` (below), and its rule is looked up
  in the tables of `registry`
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from typing_extensions import TypeIs

from offload.annotations import Args, Kwargs, Op
from offload.errors import ArgumentTypeError, ExportError, MissingFileError, OffloadError, UnsupportedOpError
from offload.prefetch.copies import retry_on_oom
from offload.prefetch.pages import Range
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.owning import allocate_value, create_value, duplicate, writable_base
from offload.storage.subclasses import extras_of, is_subclass_value, with_inner
from offload.system.modes import no_functions, no_grad, no_modes
from offload.tensor.arguments import checked_layout, computing_device, only_key, refuse_new_value, refuse_unstorable
from offload.tensor.blocks import in_shape, referenced
from offload.tensor.guests import CPU, copied, guest, mapped_value, sent_to, value_on_cpu, where_torch_expects
from offload.tensor.recipes import files_in
from offload.tensor.registry import BY_SCHEMA, FUNCTIONS, INNER, OUT, RULES
from offload.tensor.replacing import become, redress, replace_value, store_alone, unless_swapped, wrapper_over
from offload.tensor.views import Traced, handle_of, meta_of
from offload.torch_api import (
    PARAMETER_MARK,
    DisableTorchFunctionSubclass,
    HigherOrderOperator,
    OpOverload,
    memo_of_stager,
    op_schema,
    tensor_data,
    tensor_text,
    typed,
)

if TYPE_CHECKING:
    from offload.tensor.bound import BoundWeight

PathLike: TypeAlias = "str | os.PathLike[str]"

log = logging.getLogger("offload.tensor")
_attributes = vars(torch.Tensor)["__dict__"]


class OffloadedTensor(torch.Tensor):
    """A tensor that lives in a file and is materialized on its device during each op only.

    Make one with `from_original_tensor`, `from_file`, `empty`, `zeros`, `ones` or `full`; views, `detach` and
    `.to(device)` of one are offloaded too and share its file. Results of other ops are plain tensors.

    Example:
        >>> w = OffloadedTensor.from_original_tensor(torch.eye(2), "w")
        >>> w @ torch.tensor([1.0, 2.0])
        tensor([1., 2.])
        >>> w[0].mul_(3)[0].item(), w.sum().item()
        (3.0, 4.0)
    """

    _handle: Handle | Traced
    _view_spec: torch.Tensor
    _target: torch.device
    _generation: int
    _range: Range | None = None  # what is known about its pages
    _bound: BoundWeight | None = None  # products with it, made ready

    # For users: ways in

    @classmethod
    def from_original_tensor(
        cls,
        tensor: torch.Tensor,
        name: str,
        offload_dir: PathLike | None = None,
        suffix_log_msg: str = "",
        *,
        exist_ok: bool = False,
    ) -> OffloadedTensor:
        """Write a tensor to a file of its own, and give the offloaded tensor over it.

        Args:
            tensor: any dense tensor, or a wrapper subclass that `register_subclass` knows. A parameter stays one, and
                attributes that were set on it go along.
            name: its name; one live tensor per name and folder.
            offload_dir: the folder for its file, which then stays; None for a private one, which goes with the tensor.
            suffix_log_msg: added to the log line.
            exist_ok: whether a file that an earlier tensor left in `offload_dir` under that name is replaced.

        Returns:
            A tensor with that shape, dtype, strides and device, whose data is the file.

        Raises:
            NameInUseError: a live tensor has the name there, or an earlier one left its file.
            UnknownSubclassError: it is of a subclass that can't be stored.
            ForeignFileError, WriteError, UnsupportedOpError (not a dense tensor)
        """
        refuse_unstorable(tensor, name)
        handle = create_value(guest_of(tensor.detach()), name, offload_dir, exist_ok=exist_ok)
        stored = wrap_handle(handle, tensor.device)
        log.debug("offloaded %s to %s %s", name, stored.offload_path, suffix_log_msg)
        carry_attributes(tensor, stored)
        return _dressed_as(stored, tensor)

    @classmethod
    def from_file(
        cls,
        path: PathLike,
        key: str | None = None,
        device: torch.device | str | int = "cpu",
        *,
        offload_dir: PathLike | None = None,
    ) -> OffloadedTensor:
        """A tensor over an entry of a file, in place: nothing is copied, the file is never written to.

        Args:
            path: a `.safetensors` file of any origin, a `.gguf` one, or one of torch.save. Entries that can't be
                referenced in place are copied at once; packed ones are decoded at each read.
            key: the entry; may be left out where the file holds one value.
            device, offload_dir: where ops on it run; where a copy goes at the first write (None: a private folder).

        Returns:
            A tensor over that entry; nothing of it is read yet.

        Raises:
            MissingFileError, CorruptFileError, ReadError, CheckpointError, KeyError
        """
        file, target = TensorFile.open(path), computing_device(device)
        key = only_key(file, key)
        return in_shape(wrap_handle(referenced(file, key, offload_dir), target), file, key)

    @classmethod
    def empty(
        cls,
        shape: int | Sequence[int],
        *sizes: int,
        dtype: torch.dtype | None = None,
        name: str,
        offload_dir: PathLike | None = None,
        device: torch.device | str | int = "cpu",
        exist_ok: bool = False,
    ) -> OffloadedTensor:
        """A tensor of zeros that is allocated on disk: it takes no memory, and no data is written.

        Args:
            shape, sizes: as torch takes them: a sequence, or one number after the other.
            dtype: torch's default one if None.
            name, offload_dir, exist_ok: as in `from_original_tensor`.
            device: where ops on it run.

        Returns:
            A tensor whose disk space is reserved.

        Raises:
            NameInUseError, ForeignFileError, WriteError (also when the disk has no room for it)
            ArgumentTypeError, ArgumentError: no tensor has such a shape, or such a dtype.
        """
        layout, target = checked_layout(shape, sizes, dtype, name), computing_device(device)
        return wrap_handle(allocate_value(layout, name, offload_dir, exist_ok=exist_ok), target)

    zeros = empty

    @classmethod
    def full(
        cls,
        shape: int | Sequence[int],
        fill_value: complex,
        *,
        dtype: torch.dtype | None = None,
        name: str,
        offload_dir: PathLike | None = None,
        device: torch.device | str | int = "cpu",
        exist_ok: bool = False,
    ) -> OffloadedTensor:
        """A tensor of one number, filled on disk.

        Args:
            shape: as torch takes it.
            fill_value: the number.
            dtype: if None, that of `torch.full`.
            name, offload_dir, device, exist_ok: as for `empty`.

        Returns:
            A tensor whose data is the file.

        Raises: as `empty`.
        """
        target = computing_device(device)
        with no_functions(), no_modes():
            number = torch.full((), fill_value, dtype=dtype, device=CPU)  # an error if the dtype can't represent it
        stored = cls.empty(shape, dtype=number.dtype, name=name, offload_dir=offload_dir, exist_ok=exist_ok)
        stored.fill_(number)
        return wrap_handle(handle_of(stored), target)

    @classmethod
    def ones(cls, shape: int | Sequence[int], *sizes: int, **options: object) -> OffloadedTensor:
        """A tensor of ones, filled on disk.

        Args:
            shape, sizes, options: as for `empty`.

        Returns:
            A tensor whose data is the file.
        """
        return cls.full((shape, *sizes) if sizes else shape, 1.0, **options)  # type: ignore[arg-type]

    # What it is

    @property
    def name(self) -> str:
        """Its name, which is its key in the file."""
        return handle_of(self).name

    @property
    def offload_path(self) -> Path:
        """The file that holds the value now; of a recipe, the first of those that hold its pieces."""
        return handle_of(self).path

    @property
    def offload_dir(self) -> Path:
        """The folder that writes go to; before the first write to a referenced file, that file's folder."""
        handle = handle_of(self)
        return handle.folder or handle.path.parent

    # Values in and out

    def update_values(self, values: torch.Tensor, strict_shape: bool = True, strict_dtype: bool = True) -> None:
        """Replace the whole value, atomically: whatever happens, the file holds the old value or the new one.

        Args:
            values: the new value, plain or offloaded, on any device.
            strict_shape: refuse another shape.
            strict_dtype: refuse another dtype. With False the stored dtype becomes that of `values`.

        Raises:
            ShapeMismatchError, DtypeMismatchError, WriteError (the old value is kept)
            UnsupportedOpError: this tensor is a view of a part of the value.
        """
        replace_value(self, values, strict_shape=strict_shape, strict_dtype=strict_dtype)

    def materialize(self) -> torch.Tensor:
        """A plain, independent tensor with this value.

        Returns:
            A `torch.Tensor` with memory of its own, on the target device.
        """
        with DisableTorchFunctionSubclass(), no_grad():
            if self._target == CPU:
                return copied(value_on_cpu(self), CPU)
            value = guest if self._handle.source.composed is not None else value_on_cpu  # which is computed there
            return retry_on_oom(self._target, lambda: copied(value(self), self._target))

    def flush(self) -> None:
        """Wait until everything written to the file so far is on the disk."""
        handle_of(self).flush()

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd. Assigning replaces the stored value (and the target device).

        As in torch, other tensors keep what they had: those over the same file, the old value; and an offloaded tensor
        that is assigned is shared from then on.
        """
        with DisableTorchFunctionSubclass():
            return tensor_data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with DisableTorchFunctionSubclass(), no_grad():
            refuse_new_value(self, value, handle_of(self).name)
            if type(value) is OffloadedTensor:
                become(self, value)
                return
            before, target = self._target, value.device
            try:
                if target != before:
                    redress(self, self._view_spec, target)
                store_alone(self, value)
            except BaseException:
                redress(self, self._view_spec, before)
                raise

    # Numbers and arrays

    def numpy(self, *, force: bool = False) -> Any:
        """The value as an array over the file; read-only where the file is not ours to write."""
        if self._target != CPU and not force:
            raise ExportError(
                f"can't convert {self._target} device type tensor to numpy: use .cpu() first. "
                f"It is {handle_of(self).name!r}."
            )
        graph = torch.is_grad_enabled()
        asks_for_grad = self.requires_grad and not force
        with no_functions(), no_modes(), torch.set_grad_enabled(graph):
            array = self._on_cpu().requires_grad_(asks_for_grad).numpy(force=force)
        if not handle_of(self).owned:
            array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The value as nested lists of Python numbers."""
        with no_functions(), no_modes():
            return self._on_cpu().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return (numpy.array if copy else numpy.asarray)(self.numpy(), dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise ExportError(
                f"Can't export tensors that require gradient, use tensor.detach(). It is {handle_of(self).name!r}."
            )
        with no_functions(), no_modes():
            shared = self._target != CPU or handle_of(self).owned
            plain: torch.Tensor = self._guest if shared else self._on_cpu().clone()
            return plain.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        with no_functions(), no_modes():
            return torch.empty(0, device=self._target).__dlpack_device__()

    # Text

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        handle = self._handle
        if type(handle) is not Handle:
            return f"OffloadedTensor({handle.base()!r})"
        extra = "" if self._target == CPU else f", device='{self._target}'"
        extra += ", requires_grad=True" if self.requires_grad else ""
        try:
            with no_functions(), no_modes():
                value = self._on_cpu()
                text = repr(value) if handle.is_subclass else tensor_text(value, tensor_contents=tensor_contents)
        except OffloadError as error:  # someone who debugs that error may print the tensor
            why = "file missing" if isinstance(error, MissingFileError) else f"not readable: {type(error).__name__}"
            kind = f"shape={tuple(self._view_spec.shape)}, dtype={self._view_spec.dtype}"
            path = next((file.path for file in files_in(handle) if not file.is_current()), handle.path)
            return f"OffloadedTensor(({why}), {kind}{extra}, name={handle.name!r}, file={str(path)!r})"
        return f"OffloadedTensor({text.partition('(')[2].removesuffix(')')}{extra}, name={handle.name!r})"

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    # Copies

    def __copy__(self) -> OffloadedTensor:
        copy = _dressed_as(self.detach(), self)  # type: ignore[arg-type]
        carry_attributes(self, copy)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise UnsupportedOpError(
                f"{self.name!r} is not a leaf. Only Tensors created explicitly by the user support the deepcopy "
                "protocol: detach() it first."
            )
        handle = handle_of(self)
        if id(handle) not in memo:
            memo[id(handle)] = duplicate(handle)
            log.debug("%s: copied from %s to %s", handle.name, handle.path, memo[id(handle)].path)
        copy = _dressed_as(wrap(memo[id(handle)], self._view_spec, self._target), self)
        memo[id(self)] = copy
        if not isinstance(self, torch.nn.Parameter):  # as in torch
            copy.grad = None if self.grad is None else self.grad.__deepcopy__(memo)
            vars(copy).update(deepcopy(_more(self, copy), memo))
        return copy

    # For torch: executing ops

    @classmethod
    def __torch_function__(cls, func: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if len(types) > 1 and not all(issubclass(kind, torch.Tensor) for kind in types):
            return NotImplemented  # it is for what is no tensor, such as a dimension of functorch's
        weight = args[1] if len(args) > 1 else None
        if type(weight) is OffloadedTensor and weight._bound is not None:
            result = weight._bound.result(func, args, kwargs or {})
            if result is not None:
                return result
        if _holds_subclass(args) or (kwargs and _holds_subclass(kwargs.values())):
            rule = FUNCTIONS.get(INNER)
            if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
                args = tuple(one._guest if type(one) is OffloadedTensor else one for one in args)
                return func(*args, **{key: getattr(one, "_guest", one) for key, one in (kwargs or {}).items()})
        elif kwargs and kwargs.get("out") is not None:
            rule = FUNCTIONS[OUT]
        else:
            rule = FUNCTIONS.get(func)
        if rule is None or (torch.compiler.is_compiling() and not isinstance(func, HigherOrderOperator)):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return rule(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        rule = RULES.get(func) or RULES.setdefault(func, RULES[BY_SCHEMA](func))
        try:
            return rule(func, args, kwargs or {})
        except torch.OutOfMemoryError:
            if not isinstance(func, OpOverload) or op_schema(func).is_mutable:  # a part may have been written
                raise
        return retry_on_oom(accelerator_of(args), lambda: rule(func, args, kwargs or {}))

    # Values for code that computes with them itself

    def _on_cpu(self) -> torch.Tensor:
        """The value over the mapping, as a new tensor object."""
        with no_functions(), no_modes():  # a fake mode would create a fake tensor
            value = mapped_value(self)
            return value.detach() if self._handle.subclass is None else with_inner(value, lambda inner: inner)

    @property
    def _guest(self) -> torch.Tensor:
        """For compilers, a guest: a parameter, as they tell other tensors apart by `id`, which the next one may get."""
        if type(self._handle) is Traced and not torch.compiler.is_exporting():
            return self._handle.inner
        with no_functions(), no_modes():
            value = sent_to(where_torch_expects(mapped_value(self), self._handle, self._view_spec), self._target)
            return torch.nn.Parameter(value, requires_grad=False) if type(value) is torch.Tensor else value

    @unless_swapped
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_guest"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, outer_size: object, outer_stride: object
    ) -> OffloadedTensor:
        return wrap_traced(inner["_guest"])

    # Classes

    @staticmethod
    def __new__(cls: type[OffloadedTensor], *tensors: Any, **noted: Any) -> OffloadedTensor:
        """How accelerate and peft rebuild a parameter: `type(old)(tensor, requires_grad=...)`, also with `**vars(old)`.

        Raises:
            ArgumentTypeError: it is called in any other way.
        """
        requires_grad = noted.pop("requires_grad", None)
        is_rebuilt = len(tensors) == 1 and isinstance(tensors[0], torch.Tensor) and isinstance(requires_grad, bool)
        if not is_rebuilt or any(hasattr(cls, name) for name in noted.keys() - _OWN):
            raise ArgumentTypeError(
                "OffloadedTensor(...) stores nothing: use OffloadedTensor.from_original_tensor(tensor, name), or "
                "from_file, empty, zeros, ones, full"
            )
        [tensor] = tensors
        stored = tensor if is_offloaded(tensor) or tensor.is_meta else cls.from_original_tensor(tensor, "tensor")
        parameter = torch.nn.Parameter(stored.detach(), requires_grad)
        vars(parameter).update((name, value) for name, value in noted.items() if name not in _OWN)
        return parameter  # type: ignore[return-value]

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def as_subclass(self, cls: type[Any]) -> Any:
        """Itself, as a class that it is of.

        Raises:
            UnsupportedOpError: for any other class, since one tensor can't be objects of two.
        """
        if not issubclass(OffloadedTensor, cls):
            raise UnsupportedOpError(
                f"{self.name!r} is a tensor on disk, and can't also be a {cls.__name__}: materialize() it first"
            )
        return super().as_subclass(cls)

    # Addresses, for code that detects shared memory by them

    def untyped_storage(self) -> torch.UntypedStorage:
        """The bytes of the whole value, mapped: its own address, in a storage that no op computes with."""
        if type(self._handle) is Traced:
            with DisableTorchFunctionSubclass():
                return super().untyped_storage()
        with no_functions(), no_modes():
            storage = handle_of(self).pointers()
        if (memo := memo_of_stager(sys._getframe(1))) is not None:
            memo.setdefault(id(memo), []).append(storage)  # keeps it alive, or another one could get its id
        return storage

    def data_ptr(self) -> int:
        """An address of the mapped value, inside the storage of all its views; what has no file is stored first."""
        if self._handle.composed is not None:
            writable_base(handle_of(self))
        return self.untyped_storage().data_ptr() + int(self._view_spec.storage_offset()) * self._view_spec.itemsize

    def storage(self) -> Any:
        return self._typed_storage()

    def _typed_storage(self) -> torch.storage.TypedStorage:
        return typed(self.untyped_storage(), self.dtype)

    def share_memory_(self) -> OffloadedTensor:
        """A file is shared as it is."""
        return self

    def is_shared(self) -> bool:
        return True

    # For pickles

    def __reduce_ex__(self, protocol: object) -> Any:
        """A plain tensor or parameter with its attributes, over the mapped file: loaded without `offload`."""
        plain = self._on_cpu()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        else:
            plain = plain.detach().requires_grad_(self.requires_grad)
        carry_attributes(self, plain)
        return plain.__reduce_ex__(protocol)

    @property
    def __dict__(self) -> dict[str, Any]:
        """Its attributes; for torch's stager, which makes a copy in memory, only those set by others."""
        noted: dict[str, Any] = _attributes.__get__(self)
        return noted if memo_of_stager(sys._getframe(1)) is None else set_by_others(self)

    @__dict__.setter
    def __dict__(self, noted: dict[str, Any]) -> None:
        _attributes.__set__(self, noted)


# Making wrappers


def wrap(handle: Handle | Traced, view_spec: torch.Tensor, target: torch.device) -> OffloadedTensor:
    """An offloaded tensor over `handle`: the view that the meta tensor `view_spec` describes."""
    return wrapper_over(OffloadedTensor, handle, view_spec, target)


def wrap_handle(handle: Handle, target: torch.device) -> OffloadedTensor:
    """An offloaded tensor over the whole value of `handle`."""
    return wrap_handles([(handle, target)])[0]


def wrap_handles(handles: Iterable[tuple[Handle, torch.device]]) -> list[OffloadedTensor]:
    """Like `wrap_handle`, for many: the modes are left once."""
    with no_functions(), no_modes():
        return [wrap(handle, meta_of(handle), target) for handle, target in handles]


def wrap_traced(inner: torch.Tensor) -> OffloadedTensor:
    """An offloaded tensor that stands for a compiler's tensor."""
    return wrap(Traced(inner), inner, inner.device)


def is_offloaded(x: object) -> TypeIs[OffloadedTensor]:
    """True for a tensor whose data is on disk.

    Example:
        >>> is_offloaded(torch.ones(2))
        False
    """
    return type(x) is OffloadedTensor


def accelerator_of(args: Iterable[Any]) -> torch.device:
    """Where an op on these computes, and has had too little memory; the CPU if none of them is on disk."""
    flat = [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return next((one._target for one in flat if type(one) is OffloadedTensor and one._target != CPU), CPU)


def guest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that stands in for `tensor` during an op: its `guest`, or itself if it is plain."""
    return guest(tensor) if type(tensor) is OffloadedTensor else tensor


def dressed(stored: OffloadedTensor, *, requires_grad: bool, is_parameter: bool) -> OffloadedTensor:
    """`stored`, with `requires_grad` set, and marked as a parameter if it is one."""
    stored.requires_grad_(requires_grad)
    if is_parameter:
        setattr(stored, PARAMETER_MARK, True)
    return stored


def _dressed_as(stored: OffloadedTensor, like: torch.Tensor) -> OffloadedTensor:
    return dressed(stored, requires_grad=like.requires_grad, is_parameter=isinstance(like, torch.nn.Parameter))


def _holds_subclass(values: Iterable[Any]) -> bool:
    """Whether one of `values` is an offloaded tensor that holds a subclass, such as a quantized weight."""
    for value in values:
        kind = type(value)
        if kind is OffloadedTensor:
            if value._handle.source.subclass is not None:
                return True
        elif (kind is list or kind is tuple) and _holds_subclass(value):
            return True
    return False


# Python attributes that users and libraries set on a tensor follow its value


_OWN = {"_handle", "_view_spec", "_target", "_generation", "_range", "_bound", PARAMETER_MARK}


def set_by_others(tensor: OffloadedTensor) -> dict[str, Any]:
    """The attributes that users and libraries have set on a tensor."""
    return {name: value for name, value in _attributes.__get__(tensor).items() if name not in _OWN}


def carry_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give `target`, which stands for the value of `source`, its attributes, such as `ds_id`, `_is_hf_initialized`."""
    vars(target).update(_more(source, target))


def _more(source: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """The attributes of `source` that `target` lacks."""
    noted = set_by_others(source) if is_offloaded(source) else extras_of(source)
    keeps_tensors = is_offloaded(source) or not is_subclass_value(source)  # some keep their values as attributes
    return {
        name: value
        for name, value in noted.items()
        if name not in _OWN and name not in vars(target) and (keeps_tensors or not isinstance(value, torch.Tensor))
    }
