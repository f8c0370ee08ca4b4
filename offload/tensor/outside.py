"""How a value looks to those outside torch's ops: arrays, numbers, text, addresses, pickles.

Always true:
- an array over the file is read-only where the file is not ours to write
- an address tells which value a tensor is of, and where in it; nothing computes with it
- a pickle holds the plain value, and loads where `offload` is not installed
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunctionSubclass

from offload.errors import ExportError, MissingFileError, OffloadError
from offload.storage.handle import Handle
from offload.storage.modes import no_functions, no_modes
from offload.tensor.traced import Traced

CPU = torch.device("cpu")
_Self = TypeVar("_Self", bound="SeenFromOutside")


class SeenFromOutside(torch.Tensor):
    """What `OffloadedTensor` shows to numpy, DLPack, `print`, pickle and those who look for shared memory."""

    _handle: Handle | Traced
    _twin: torch.Tensor
    _target: torch.device

    def _file_handle(self) -> Handle:
        raise NotImplementedError

    def _on_cpu(self) -> torch.Tensor:
        """The value over the mapping, as a tensor of its own."""
        raise NotImplementedError

    # Numbers and arrays

    def numpy(self, *, force: bool = False) -> Any:
        """The value as an array over the file; read-only where the file is not ours to write."""
        if self._target != CPU and not force:
            raise ExportError(
                f"can't convert {self._target} device type tensor to numpy: use .cpu() first. "
                f"It is {self._file_handle().name!r}."
            )
        graph = torch.is_grad_enabled()
        asks_for_grad = self.requires_grad and not force
        with no_functions(), no_modes(), torch.set_grad_enabled(graph):
            array = self._on_cpu().requires_grad_(asks_for_grad).numpy(force=force)
        if not self._file_handle().owned:
            array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        array = self.numpy()
        if copy:
            return numpy.array(array, dtype=dtype, copy=True)
        return numpy.asarray(array, dtype=dtype)

    def tolist(self) -> Any:
        """The value as nested lists of Python numbers."""
        with no_functions(), no_modes():
            return self._on_cpu().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise ExportError(
                f"Can't export tensors that require gradient, use tensor.detach(). It is {self._file_handle().name!r}."
            )
        with no_functions(), no_modes():
            shared = self._target != CPU or self._file_handle().owned
            plain: torch.Tensor = self._guest if shared else self._on_cpu().clone()  # type: ignore[attr-defined]
            return plain.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        with no_functions(), no_modes():
            return torch.empty(0, device=self._target).__dlpack_device__()

    # Text

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        handle = self._handle
        if type(handle) is not Handle:
            return f"OffloadedTensor({handle.base()!r})"
        extra = "" if self._target == CPU else f", device='{self._target}'"
        extra += ", requires_grad=True" if self.requires_grad else ""
        try:
            with no_functions(), no_modes():
                value = self._on_cpu()
                if handle.is_subclass:
                    text = repr(value)
                else:
                    text = torch._tensor_str._str(value, tensor_contents=tensor_contents)
        except OffloadError as error:  # who debugs that looks at it
            why = "file missing" if isinstance(error, MissingFileError) else f"not readable: {type(error).__name__}"
            kind = f"shape={tuple(self._twin.shape)}, dtype={self._twin.dtype}"
            return f"OffloadedTensor(({why}), {kind}{extra}, name={handle.name!r}, file={str(handle.path)!r})"
        return f"OffloadedTensor({text.partition('(')[2].removesuffix(')')}{extra}, name={handle.name!r})"

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    # Addresses, for those who find shared memory by them

    def untyped_storage(self) -> torch.UntypedStorage:
        """The bytes of the whole value, mapped: its own address, in a storage that no op computes with."""
        if type(self._handle) is Traced:
            with DisableTorchFunctionSubclass():
                return super().untyped_storage()
        handle = self._file_handle()
        with no_functions(), no_modes():
            if not handle.is_subclass:
                return handle.pointers()
            handle.base()
            return handle.file.storage(next(iter(handle.file.entries.values())), shared=handle.owned)

    def data_ptr(self) -> int:
        """An address of the mapped value; views of one file have addresses inside the same storage."""
        return self.untyped_storage().data_ptr() + int(self._twin.storage_offset()) * self._twin.itemsize

    def storage(self) -> Any:
        return self._typed_storage()

    def _typed_storage(self) -> torch.storage.TypedStorage:
        return torch.storage.TypedStorage(wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True)

    def share_memory_(self: _Self) -> _Self:
        """A file is shared as it is."""
        return self

    def is_shared(self) -> bool:
        return True

    # Pickles

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor or parameter, over the mapped file: pickled in bounded memory, loaded without `offload`."""
        plain = self._on_cpu()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        else:
            plain = plain.detach().requires_grad_(self.requires_grad)
        return plain.__reduce_ex__(protocol)
