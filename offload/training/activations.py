"""Tensors that autograd saves for backward, on disk until backward needs them.

Always true:
- only what the graph alone keeps in memory is written: parameters, inputs, and whatever else is held elsewhere stay,
  since writing them would free nothing
- a storage is written once, whichever ops saved it, through whichever views; its file goes with the graph
- a tensor that was modified after it was saved is an error in backward, as it is without hooks
- until its file is complete, the value is in memory; if the disk fails, it stays there
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from offload.errors import SavedTensorError
from offload.memory import as_bytes, count_freed
from offload.prefetch.engine import expect
from offload.storage.owning import create_temporary
from offload.system.background import Background
from offload.system.locks import Waiters
from offload.system.modes import no_functions, no_modes
from offload.system.regular import absolute
from offload.tensor.guests import CPU, sent_to, value_on_cpu
from offload.tensor.views import handle_of, metadata_of, view_with
from offload.tensor.wrapper import OffloadedTensor, wrap_handle
from offload.torch_api import not_compiled, storage_id, storage_uses, version_of
from offload.training.optimizer import log

_MOST_PENDING = 64 << 20  # bytes that may wait for the writer before forward has to wait


@not_compiled
@contextmanager
def offload_activations(
    *, offload_dir: str | os.PathLike[str] | None = None, min_bytes: int | str = "1MiB"
) -> Iterator[None]:
    """Inside, tensors that autograd saves for backward go to disk as soon as nothing else holds them in memory.

    Backward reads it ahead, in reverse order, and may run after the block. Gradients are those of plain tensors, bit
    for bit. Only graphs that are recorded by this thread inside the block are concerned. It works together with
    `torch.utils.checkpoint`: the inputs of the checkpoints are what goes to disk then.

    Args:
        offload_dir: where the files are while the graph lives, in a folder of their own that nothing stays in; None for
            the temporary folder.
        min_bytes: storages smaller than this stay in memory: bytes, or "1MiB".

    Returns:
        A context manager.

    Raises:
        WriteError: the disk did not take something; what was saved is intact. Raised by a later op, or on leaving.
        SavedTensorError: in backward; a tensor was modified in place after an op had saved it.

    Example:
        >>> x = torch.ones(1000, requires_grad=True)
        >>> with offload_activations(min_bytes=1000):
        ...     y = x.exp().exp().sum()
        >>> y.backward()
        >>> torch.equal(x.grad, x.exp().exp() * x.exp())
        True
    """
    block = _Block(None if offload_dir is None else absolute(offload_dir), as_bytes(min_bytes))
    with torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack):
        yield
    _DISK.look()
    block.tell()


class _Content:
    """The bytes of one storage: in memory, or in a file, of which `storage` is the mapping once it has been read."""

    __slots__ = ("__weakref__", "block", "storage", "stored", "turn")

    def __init__(self, storage: torch.UntypedStorage, block: _Block, turn: int) -> None:
        self.storage: torch.UntypedStorage | None = storage  # the object itself counts as one use
        self.stored: OffloadedTensor | None = None
        self.block = block
        self.turn = turn

    @property
    def is_alone(self) -> bool:
        """Whether nothing else holds the memory."""
        return self.storage is not None and storage_uses(storage_id(self.storage)) == 1


class _Saved:
    """A tensor as an op saved it, with its version: either the tensor, or a cut of a content."""

    __slots__ = ("content", "cut", "version", "witness")

    def __init__(self, tensor: torch.Tensor, content: _Content | None = None) -> None:
        self.witness = tensor.detach()  # shares the version counter of `tensor`, and its memory only if that stays
        self.version = version_of(tensor)
        self.content = content
        if content is not None:
            self.cut = metadata_of(tensor)
            self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


class _Block:
    """One `with` block: its folder, what was written, and errors."""

    def __init__(self, folder: Path | None, min_bytes: int) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.written = weakref.WeakValueDictionary[int, _Content]()  # in order
        self.is_expected = True  # whether everything that was written has been announced to the prefetcher
        self._min_bytes = min_bytes

    @not_compiled
    def pack(self, tensor: torch.Tensor) -> _Saved:
        """The graph's replacement for `tensor`."""
        self.tell()
        if not _has_memory(tensor) or tensor.untyped_storage().nbytes() < max(self._min_bytes, 1):
            return _Saved(tensor)
        with no_functions(), no_modes():
            return _DISK.save(tensor, self)

    @not_compiled
    def unpack(self, saved: _Saved) -> torch.Tensor:
        """The saved tensor."""
        now = version_of(saved.witness)
        if now != saved.version:
            shape = saved.witness.shape if saved.content is None else saved.cut[0]
            raise SavedTensorError(
                f"a tensor of shape {tuple(shape)} and {saved.witness.dtype}, needed for gradient computation, was "
                f"modified by an inplace operation after it was saved (version {now}, not {saved.version}): clone it "
                "first, or use an op that is not in place"
            )
        if saved.content is None:
            return saved.witness
        self._expect()
        with no_functions(), no_modes():
            return _DISK.load(saved, saved.content)

    def tell(self) -> None:
        """Raise an error of the writer."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _expect(self) -> None:
        """Announce what was written for read-ahead, last first."""
        if self.is_expected:
            return
        with _DISK.lock:  # the writer adds to them
            self.is_expected = True
            contents = [content for _, content in sorted(self.written.items(), reverse=True)]
        expect([handle_of(content.stored) for content in contents if content.stored is not None])


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor with a storage: subclasses, sparse ones and those on disk are kept as they are."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class _Disk(Background["tuple[weakref.ref[_Content], int]"]):
    """Shared by the threads of a process: which storages were saved, and the writer thread."""

    def __init__(self) -> None:
        super().__init__("offload-writer")
        self._ops = Waiters()  # waiting for the writer
        self._contents = weakref.WeakValueDictionary[int, _Content]()  # by the storage's address
        self._waiting: weakref.WeakSet[_Content] = weakref.WeakSet()  # until nothing else holds them
        self._queue: deque[tuple[weakref.ref[_Content], int]] = deque()
        self._writing = 0  # bytes being written
        self._numbers = count()

    def save(self, tensor: torch.Tensor, block: _Block) -> _Saved:
        with self.lock:
            storage = tensor.untyped_storage()
            content = self._contents.get(storage_id(storage))
            if content is None:
                content = self._contents[storage_id(storage)] = _Content(storage, block, next(self._numbers))
                self._waiting.add(content)
            saved = _Saved(tensor, content)
        self.look()
        self.wait(_MOST_PENDING)
        return saved

    def load(self, saved: _Saved, content: _Content) -> torch.Tensor:
        with self.lock:
            if content.stored is None:
                assert content.storage is not None
                return view_with(_bytes_of(content.storage), saved.cut)
        mapped = value_on_cpu(content.stored)
        with self.lock:  # if backward saves it again for a second backward, it is this content
            self._forget(content)
            content.storage = mapped.untyped_storage()
            self._contents[storage_id(content.storage)] = content
        count_freed(mapped.nbytes)  # those of earlier gradients
        return sent_to(view_with(mapped, saved.cut), saved.witness.device)

    def look(self) -> None:
        """Queue for writing what nothing else holds any more."""
        own: list[_Content] = []
        with self.lock:
            alone = [content for content in self._waiting if content.is_alone]
            for content in sorted(alone, key=lambda content: content.turn):
                assert content.storage is not None
                if content.storage.device == CPU:
                    self._queue.append((weakref.ref(content), content.storage.nbytes()))
                    self.wake()
                else:
                    own.append(content)  # written by this thread, in the order of the stream that computed it
                self._waiting.discard(content)
        for content in own:
            self._write(content)

    def wait(self, most: int) -> None:
        """Wait until at most this many bytes are still to be written."""
        while True:
            with self.lock:
                if self._writing + sum(nbytes for _, nbytes in self._queue) <= most:
                    return
                something = self._ops.add()
            something.acquire()

    def _forget(self, content: _Content) -> None:
        if content.storage is not None:
            self._contents.pop(storage_id(content.storage), None)

    # The writer thread

    def take(self) -> tuple[weakref.ref[_Content], int] | None:
        """The next one in the queue and its size, now counted as being written."""
        if not self._queue:
            return None
        content, self._writing = self._queue.popleft()
        return content, self._writing

    def carry_out(self, work: tuple[weakref.ref[_Content], int]) -> None:
        """Write it, unless the graph is gone."""
        try:
            content = work[0]()
            if content is not None:
                with no_functions(), no_modes():
                    self._write(content)
            del content
        finally:
            with self.lock:
                self._writing = 0
                self._ops.wake()

    def _write(self, content: _Content) -> None:
        storage, block = content.storage, content.block  # the object only: a tensor over it would be another use
        if storage is None or not content.is_alone:  # backward has needed it
            return
        try:
            handle = create_temporary(_bytes_of(storage), f"activation-{content.turn}", block.folder)
        except Exception as error:  # any error is for the computing thread
            log.warning("an activation stays in memory: %s", error)
            block.error = error
            return
        with self.lock:
            if storage_uses(storage_id(storage)) > 1:  # backward has needed it meanwhile
                return
            self._forget(content)
            content.stored, content.storage = wrap_handle(handle, CPU), None
            block.written[content.turn] = content
            block.is_expected = False
        nbytes = storage.nbytes()
        log.debug("%s bytes of activations are in %s", nbytes, handle.path)
        del storage
        count_freed(nbytes)


def _begin_anew() -> None:
    """A forked child has no writer; what waited to be written stays in memory."""
    global _DISK
    _DISK = _Disk()


_DISK = _Disk()
os.register_at_fork(after_in_child=_begin_anew)
