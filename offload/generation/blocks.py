"""A folder of kept prompts: keys and values of blocks of tokens, one safetensors file per block.

Always true:
- a block is found by the hash of its model, its tokens, and all tokens before it: prompts share what they have in
  common; model, tokens and a checksum are in the file as well, and are compared
- a file gets its name when it is whole and on the disk; what a killed writer leaves is removed by the next one
- writers exclude each other; readers wait for nobody
- what is written never exceeds the budget: the block that was not used for longest goes first, later ones of a prompt
  before earlier ones
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

import torch

from offload.errors import CorruptFileError, FileError, ForeignFileError, MissingFileError
from offload.memory import as_bytes
from offload.prefetch.pages import announce, bring_in
from offload.storage.file import TensorFile
from offload.storage.header import build
from offload.storage.layout import Layout
from offload.storage.replacing import TEMPORARY, create_folder, remove, sweep
from offload.storage.write import bytes_of, from_values, put_values
from offload.system.locks import FolderLock
from offload.system.reasons import writing
from offload.system.regular import absolute, is_there, open_regular

log = logging.getLogger("offload.generation")

States: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # keys and values

TOKENS = 64  # in a block
LOCK = "prompts.lock"
_FORMAT = "offload.PromptCache 1"
_NAME = re.compile(r"\d{5}-[0-9a-f]{40}\.safetensors")
_NOTE, _SUM = "prompt", "crc32"


class Block:
    """Keys and values of some tokens, on their way into memory; `wait` for them."""

    def __init__(self, file: TensorFile, checksum: object) -> None:
        self.path = file.path
        self._file, self._checksum = file, checksum
        self._bytes = file.mapped(shared=False)
        announce(self._bytes.data_ptr(), self._bytes.nbytes())

    @classmethod
    def open(cls, path: Path, identity: str, tokens: list[int]) -> Block:
        """The block of these tokens of a model; raises `CorruptFileError` for another one, and as `TensorFile.open`."""
        file = TensorFile.open(path)
        noted = file.notes.get(_NOTE)
        checksum = noted.get(_SUM) if isinstance(noted, dict) else None
        if noted != _noted(identity, tokens, checksum):
            raise CorruptFileError(f"{path} is the block of other tokens, or of another model")
        return cls(file, checksum)

    def wait(self) -> None:
        """Read it; `CorruptFileError` if the disk does not return it, or something else than what was written."""
        try:
            bring_in(self._bytes.data_ptr(), self._bytes.nbytes())
        except OSError as error:
            raise CorruptFileError(f"{self.path} can't be read ({error.strerror})") from error
        entries = self._file.entries.items()
        if _checksum({key: self._file.tensor(entry, shared=False) for key, entry in entries}) != self._checksum:
            raise CorruptFileError(f"{self.path} is damaged: it does not match its checksum")

    def states(self, layer: int) -> States:
        """Keys and values of a layer, (1, heads, TOKENS, size), over the mapped file: do not write to them."""
        keys, values = (self._file.entry(name) for name in _keys_of(layer))
        return self._file.tensor(keys, shared=False), self._file.tensor(values, shared=False)


class Blocks:
    """The blocks in a folder, which is created if it is missing."""

    def __init__(self, folder: str | os.PathLike[str], max_disk: int | str) -> None:
        """`max_disk` is in bytes; `ForeignFileError` if the folder holds something else."""
        self.max_disk = as_bytes(max_disk)
        self.folder = absolute(folder)
        with writing(self.folder):
            create_folder(self.folder)
            names = os.listdir(self.folder)
        if LOCK not in names and not all(name.startswith(TEMPORARY) for name in names):
            raise ForeignFileError(f"{self.folder} is not empty, and has no kept prompts: take a new or an empty one")
        self._lock = FolderLock(self.folder / LOCK, lambda path, flags: open_regular(path, flags | os.O_CREAT))
        with self._lock.held():
            pass  # the file is there from now on

    def find(self, identity: str, tokens: list[int]) -> list[Block]:
        """The blocks that are there for the beginning of a prompt, in memory; they count as just used."""
        blocks = list(self._opened(identity, tokens))
        for depth, block in enumerate(blocks):
            try:
                block.wait()
            except FileError as error:
                self._leave_out(block.path, error)
                return blocks[:depth]
            _touch(block.path)
        return blocks

    def _opened(self, identity: str, tokens: list[int]) -> Iterator[Block]:
        for depth, name in enumerate(_names(identity, tokens)):
            path = self.folder / name
            try:
                yield Block.open(path, identity, _tokens_of(tokens, depth))
            except MissingFileError:
                return
            except FileError as error:
                self._leave_out(path, error)
                return

    def _leave_out(self, path: Path, error: FileError) -> None:
        log.warning("%s: its tokens are computed again", error)
        if isinstance(error, CorruptFileError):
            with suppress(FileError), self._lock.held():
                remove(path)

    def put(self, identity: str, tokens: list[int], known: int, states: Callable[[int], list[States]]) -> None:
        """Keep the blocks after `known` ones, as far as the budget allows; `states(number)` has a block's, by layer."""
        with self._lock.held():
            with writing(self.folder):
                sweep(self.folder)
            names = _names(identity, tokens)
            for depth, name in enumerate(names):
                path = self.folder / name
                if depth < known or is_there(path):
                    _touch(path)
                elif not self._write(path, identity, _tokens_of(tokens, depth), states(depth), names):
                    log.info("%s: %d blocks of %d fit in max_disk", self.folder, depth, len(names))
                    break

    def _write(self, path: Path, identity: str, tokens: list[int], states: list[States], staying: list[str]) -> bool:
        """Write one block; False if there is no room for it."""
        values = {
            key: part.detach().to("cpu").contiguous()
            for layer, parts in enumerate(states)
            for key, part in zip(_keys_of(layer), parts, strict=True)
        }
        layouts = {key: Layout(value.dtype, tuple(value.shape), value.stride()) for key, value in values.items()}
        notes = {_NOTE: _noted(identity, tokens, _checksum(values))}
        if not self._make_room(build(layouts, notes).size, staying):
            return False
        put_values(path, layouts, from_values(values, layouts), notes, durable=True)
        return True

    def _make_room(self, nbytes: int, staying: list[str]) -> bool:
        """Remove other blocks than those that stay until `nbytes` fit; False if that is impossible."""
        if nbytes > self.max_disk:
            return False
        with os.scandir(self.folder) as items:
            status = {item.name: item.stat(follow_symlinks=False) for item in items if _NAME.fullmatch(item.name)}
        free = self.max_disk - sum(one.st_size for one in status.values())
        for name in sorted(status.keys() - staying, key=lambda name: (status[name].st_atime_ns, -int(name[:5]))):
            if free >= nbytes:
                break
            remove(self.folder / name)
            free += 0 if is_there(self.folder / name) else status[name].st_size
        return free >= nbytes


def _noted(identity: str, tokens: list[int], checksum: object) -> dict[str, object]:
    """What a file says of its block."""
    return {"identity": identity, "tokens": tokens, _SUM: checksum}


def _checksum(values: Mapping[str, torch.Tensor]) -> int:
    """Of names, dtypes, shapes and bytes."""
    checksum = 0
    for name, value in sorted(values.items()):
        checksum = crc32(bytes_of(value), crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), checksum))
    return checksum


def _keys_of(layer: int) -> tuple[str, str]:
    return f"{layer}.keys", f"{layer}.values"


def _names(identity: str, tokens: Sequence[int]) -> list[str]:
    """The names of the files of a prompt's whole blocks, each a hash over all that is before it."""
    names, digest = [], sha256(f"{_FORMAT} {identity}".encode())
    for depth in range(len(tokens) // TOKENS):
        digest.update(repr(_tokens_of(tokens, depth)).encode())
        names.append(f"{depth:05d}-{digest.hexdigest()[:40]}.safetensors")
    return names


def _tokens_of(tokens: Sequence[int], depth: int) -> list[int]:
    return list(tokens[depth * TOKENS : (depth + 1) * TOKENS])


def _touch(path: Path) -> None:
    """Note that a block was used: in its access time, since the time of its change belongs to its identity."""
    with suppress(OSError):  # another user's, or just removed
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))
