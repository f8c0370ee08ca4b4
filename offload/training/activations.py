"""Tensors that autograd saves for backward, on disk until backward asks for them.

Always true:
- what is written is what only the graph holds in memory: parameters, inputs, and whatever somebody else keeps, stay
  where they are, since writing them would free nothing
- a storage is written once, whichever ops saved it and through whichever views; its file goes with the graph
- a tensor that was modified after it was saved is an error in backward, as it is without hooks
- until its file is whole, the value is in memory; where the disk does not take it, it stays there
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
from offload.memory import as_bytes, available_bytes, count_freed
from offload.prefetch.engine import expect
from offload.storage.background import Background
from offload.storage.handle import Handle
from offload.storage.locks import Waiters
from offload.storage.modes import no_functions, no_modes
from offload.storage.regular import absolute
from offload.tensor.guests import CPU, metadata_of, sent_to, twin_with
from offload.tensor.wrapper import OffloadedTensor, handle_of, value_on_cpu, wrap_handle
from offload.torch_api import not_compiled, storage_id, storage_uses, version_of
from offload.training.optimizer import log

_MOST_PENDING = 64 << 20  # bytes that may wait for the writer before forward waits for it


@not_compiled
@contextmanager
def offload_activations(
    *, offload_dir: str | os.PathLike[str] | None = None, min_bytes: int | float | str = "1MiB"
) -> Iterator[None]:
    """Inside, what autograd saves for backward goes to disk, as soon as nobody else holds it in memory.

    Backward reads it ahead, in reverse order, and may run after the block. Gradients are those of plain tensors, bit
    for bit. Only graphs that are recorded by this thread inside the block are concerned. It works together with
    `torch.utils.checkpoint`: the inputs of the checkpoints are what goes to disk then.

    Args:
        offload_dir: where the files are while the graph lives, in a folder of their own that nothing stays in; None for
            the temporary folder.
        min_bytes: storages smaller than this stay in memory: bytes, "1MiB", or a fraction (0.01) of the memory that is
            free.

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
    block = _Block(None if offload_dir is None else absolute(offload_dir), as_bytes(min_bytes, available_bytes()))
    with torch.autograd.graph.saved_tensors_hooks(block.pack, block.unpack):
        yield
    _DISK.look()
    block.tell()


class _Content:
    """The bytes of one storage: in memory, or in a file, of which `storage` is the mapping once it was read."""

    __slots__ = ("__weakref__", "block", "storage", "stored", "turn")

    def __init__(self, storage: torch.UntypedStorage, block: _Block, turn: int) -> None:
        self.storage: torch.UntypedStorage | None = storage  # the object itself: one use, whether tensors have others
        self.stored: OffloadedTensor | None = None
        self.block = block
        self.turn = turn

    @property
    def is_alone(self) -> bool:
        """Whether nobody else holds the memory."""
        return self.storage is not None and storage_uses(storage_id(self.storage)) == 1


class _Saved:
    """A tensor as an op saved it, at which version: the whole of it, or which part of which content."""

    __slots__ = ("content", "cut", "version", "witness")

    def __init__(self, tensor: torch.Tensor, content: _Content | None = None) -> None:
        self.witness = tensor.detach()  # has the version counter of `tensor`, and its memory only if that stays
        self.version = version_of(tensor)
        self.content = content
        if content is not None:
            self.cut = metadata_of(tensor)
            self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


class _Block:
    """One `with` block: where it writes to, and what came of that."""

    def __init__(self, folder: Path | None, min_bytes: int) -> None:
        self.folder = folder
        self.error: Exception | None = None
        self.written: weakref.WeakValueDictionary[int, _Content] = weakref.WeakValueDictionary()  # by their turn
        self.is_expected = True  # whether those who read ahead know of all that was written
        self._min_bytes = min_bytes

    @not_compiled
    def pack(self, tensor: torch.Tensor) -> _Saved:
        """What the graph holds in place of `tensor`."""
        self.tell()
        if not _has_memory(tensor) or tensor.untyped_storage().nbytes() < max(self._min_bytes, 1):
            return _Saved(tensor)
        with no_functions(), no_modes():
            return _DISK.save(tensor, self)

    @not_compiled
    def unpack(self, saved: _Saved) -> torch.Tensor:
        """The tensor that was saved."""
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
        """Raise what the writer met."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _expect(self) -> None:
        """Have what was written read ahead, the last first."""
        if self.is_expected:
            return
        self.is_expected = True
        contents = sorted(self.written.items(), reverse=True)
        expect([handle_of(content.stored) for _, content in contents if content.stored is not None])


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor with a storage: subclasses, sparse ones and those on disk keep themselves."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class _Disk(Background["tuple[weakref.ref[_Content], int]"]):
    """What the threads of a process share: which storages were saved, and the thread that writes them."""

    def __init__(self) -> None:
        super().__init__("offload-writer")
        self._ops = Waiters()  # for the writer to have written something
        self._contents: weakref.WeakValueDictionary[int, _Content] = (
            weakref.WeakValueDictionary()
        )  # by the address of storage
        self._waiting: weakref.WeakSet[_Content] = weakref.WeakSet()  # until nobody else holds them
        self._queue: deque[tuple[weakref.ref[_Content], int]] = deque()
        self._writing = 0  # bytes, just now
        self._turns = count()

    def save(self, tensor: torch.Tensor, block: _Block) -> _Saved:
        with self.lock:
            storage = tensor.untyped_storage()
            content = self._contents.get(storage_id(storage))
            if content is None:
                content = self._contents[storage_id(storage)] = _Content(storage, block, next(self._turns))
                self._waiting.add(content)
            saved = _Saved(tensor, content)
        self.look()
        self.wait(_MOST_PENDING)
        return saved

    def load(self, saved: _Saved, content: _Content) -> torch.Tensor:
        with self.lock:
            if content.stored is None:
                assert content.storage is not None
                return twin_with(_bytes_of(content.storage), saved.cut)
        mapped = value_on_cpu(content.stored)
        with self.lock:  # what backward saves of it, for a second one, is this content
            self._forget(content)
            content.storage = mapped.untyped_storage()
            self._contents[storage_id(content.storage)] = content
        count_freed(mapped.nbytes)  # of the gradients that came before
        return sent_to(twin_with(mapped, saved.cut), saved.witness.device)

    def look(self) -> None:
        """Have written what nobody else holds any more."""
        here: list[_Content] = []
        with self.lock:
            alone = [content for content in self._waiting if content.is_alone]
            for content in sorted(alone, key=lambda content: content.turn):
                assert content.storage is not None
                if content.storage.device == CPU:
                    self._queue.append((weakref.ref(content), content.storage.nbytes()))
                    self.wake()
                else:
                    here.append(content)  # in the order of the stream that computed it
                self._waiting.discard(content)
        for content in here:
            self._write(content)

    def wait(self, most: int) -> None:
        """Until at most so many bytes are still to be written."""
        while True:
            with self.lock:
                if self._writing + sum(nbytes for _, nbytes in self._queue) <= most:
                    return
                something = self._ops.add()
            something.acquire()

    def _forget(self, content: _Content) -> None:
        if content.storage is not None:
            self._contents.pop(storage_id(content.storage), None)

    # The writer

    def take(self) -> tuple[weakref.ref[_Content], int] | None:
        """The next in turn, and its bytes, which then are being written."""
        if not self._queue:
            return None
        found, self._writing = self._queue.popleft()
        return found, self._writing

    def carry_out(self, work: tuple[weakref.ref[_Content], int]) -> None:
        """Write it, unless the graph has gone."""
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
        if storage is None or not content.is_alone:  # backward has asked for it
            return
        try:
            handle = Handle.passing(_bytes_of(storage), f"activation-{content.turn}", block.folder)
        except Exception as error:  # whatever it is, it is for the thread that computes
            log.warning("an activation stays in memory: %s", error)
            block.error = error
            return
        with self.lock:
            if storage_uses(storage_id(storage)) > 1:  # backward has asked for it meanwhile
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
    """In a forked child nobody writes; what waited to be written stays in memory."""
    global _DISK
    _DISK = _Disk()


_DISK = _Disk()
os.register_at_fork(after_in_child=_begin_anew)
