"""A folder of kept prompts: keys and values of blocks of tokens, one file per block.

Always true:
- a block is found by the hash of its model, its tokens, and all tokens before it: prompts share what they have in
  common; model and tokens are in the file as well, and are compared
- a file gets its name when it is whole and on the disk; what a killed writer leaves is removed by the next one
- writers exclude each other; readers wait for nobody
- what is written never exceeds the budget: the block that was not used for longest goes first, later ones of a prompt
  before earlier ones
- a block that does not match its checksum, a CRC of its forms and bytes, is not found
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeAlias
from zlib import crc32

import torch

from offload.annotations import Json
from offload.errors import CorruptFileError, FileError, ForeignFileError, MissingFileError
from offload.memory import as_bytes
from offload.prefetch.pages import announce, bring_in
from offload.storage.file import TensorFile
from offload.storage.header import build
from offload.storage.layout import Layout, dtype_name, dtype_named
from offload.storage.replacing import TEMPORARY, create_folder, remove, sweep
from offload.storage.state_file import Kind, read_state, write_state
from offload.storage.write import bytes_of, from_values, put_values
from offload.system.locks import FolderLock
from offload.system.reasons import first_line, writing
from offload.system.regular import absolute, is_there, open_regular

log = logging.getLogger("offload.generation")

States: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # keys and values

TOKENS = 64  # in a block
MANIFEST = "prompts.json"
LOCK = "prompts.lock"
_STAMP = {"format": "offload.PromptCache", "version": 1}
_KIND = Kind(
    what="the manifest of a folder of kept prompts", stamp=_STAMP, foreign=ForeignFileError, later=ForeignFileError
)
_NAME = re.compile(r"\d{5}-[0-9a-f]{40}\.safetensors")
_KEY = "states"
_NOTE = "prompt"


class Form(NamedTuple):
    """The keys and values of a token in a layer: how many heads, the sizes of a key and of a value, and the dtype."""

    heads: int
    key: int
    value: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.heads * TOKENS * (self.key + self.value) * self.dtype.itemsize

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Form:
        """Of states, (batch, heads, tokens, size)."""
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)


def _checksum(forms: list[Form], states: torch.Tensor) -> int:
    return crc32(bytes_of(states), crc32(repr(forms).encode()))


class Block:
    """Keys and values of some tokens, on their way into memory; `check` waits for them."""

    def __init__(self, file: TensorFile, forms: list[Form], checksum: int) -> None:
        self.forms = forms
        self.path = file.path
        self._file = file  # keeps the mapping
        self._bytes = file.tensor(file.entry(_KEY), shared=False)
        self._checksum = checksum
        self._begins = [0, *accumulate(form.nbytes for form in forms)]
        announce(self._bytes.data_ptr(), self._bytes.nbytes)

    @classmethod
    def open(cls, path: Path, identity: str, tokens: list[int]) -> Block:
        """The block of these tokens of a model; raises `CorruptFileError` for another one, and as `TensorFile.open`."""
        file = TensorFile.open(path)
        try:
            noted = file.notes[_NOTE]
            forms = [_form(form) for form in noted["forms"]]
            if noted["identity"] != identity or noted["tokens"] != tokens:
                raise CorruptFileError(f"{path} is the block of other tokens, or of another model")
            return cls(file, forms, noted["crc32"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CorruptFileError):
                raise
            raise CorruptFileError(f"{path} has no header of a block ({first_line(error)})") from error

    def check(self) -> None:
        """Read it; `CorruptFileError` if the disk does not return it, or something else than what was written."""
        try:
            bring_in(self._bytes.data_ptr(), self._bytes.nbytes)
        except OSError as error:
            raise CorruptFileError(f"{self.path} can't be read ({error.strerror})") from error
        if _checksum(self.forms, self._bytes) != self._checksum:
            raise CorruptFileError(f"{self.path} is damaged: it does not match its checksum")

    def states(self, layer: int) -> States:
        """Keys and values of a layer, (1, heads, TOKENS, size), over the mapped file: do not write to them."""
        form, begin = self.forms[layer], self._begins[layer]
        part = self._bytes[begin : begin + form.nbytes]
        keys, values = part.view(form.dtype).split([form.heads * TOKENS * size for size in (form.key, form.value)])
        shape = (1, form.heads, TOKENS)
        return keys.view(*shape, form.key), values.view(*shape, form.value)


class Blocks:
    """The blocks in a folder, which is created if it is missing."""

    def __init__(self, folder: str | os.PathLike[str], max_disk: int | float | str) -> None:
        """`max_disk` is in bytes, or a share of what is free; `ForeignFileError` if the folder holds something else."""
        as_bytes(max_disk, 0)
        self.folder = absolute(folder)
        with writing(self.folder):
            create_folder(self.folder)
            if not is_there(self.folder / MANIFEST):
                self._begin()
        read_state(self.folder / MANIFEST, _KIND)
        self.max_disk = as_bytes(max_disk, shutil.disk_usage(self.folder).free)
        self._lock = FolderLock(self.folder / LOCK, lambda path, flags: open_regular(path, flags | os.O_CREAT))

    def _begin(self) -> None:
        own = (MANIFEST, LOCK)
        others = [name for name in os.listdir(self.folder) if name not in own and not name.startswith(TEMPORARY)]
        if others:
            raise ForeignFileError(f"{self.folder} is not empty, and has no kept prompts: take a new or an empty one")
        write_state(self.folder / MANIFEST, _KIND, {})

    def find(self, identity: str, tokens: list[int]) -> list[Block]:
        """The blocks that are there for the beginning of a prompt, read and checked; they count as just used."""
        found = list(self._opened(identity, tokens))
        for depth, block in enumerate(found):
            try:
                block.check()
            except CorruptFileError as error:
                self._leave_out(block.path, error)
                return found[:depth]
            _touch(block.path)
        return found

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

    def put(self, identity: str, tokens: list[int], states: Callable[[int], list[States]]) -> None:
        """Keep missing blocks, as far as the budget allows; `states(number)` has a block's keys and values by layer."""
        with self._lock.held():
            with writing(self.folder):
                sweep(self.folder)
            names = _names(identity, tokens)
            quota = _Quota(self.folder, self.max_disk, names)
            for depth, name in enumerate(names):
                path = self.folder / name
                if is_there(path):
                    _touch(path)
                elif not self._write(path, identity, _tokens_of(tokens, depth), states(depth), quota):
                    log.info("%s: %d blocks of %d fit in max_disk", self.folder, depth, len(names))
                    break

    def _write(self, path: Path, identity: str, tokens: list[int], states: list[States], quota: _Quota) -> bool:
        """Write one block; False if there is no room for it."""
        forms = [Form.of(keys, values) for keys, values in states]
        nbytes = sum(form.nbytes for form in forms)
        whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        at = 0
        for layer, (keys, values) in zip(forms, states, strict=True):
            flat = torch.cat([part.detach().to("cpu").reshape(-1) for part in (keys, values)]).view(torch.uint8)
            whole[at : at + layer.nbytes] = flat
            at += layer.nbytes
        noted_forms = [[form.heads, form.key, form.value, dtype_name(form.dtype)] for form in forms]
        noted = {"identity": identity, "tokens": tokens, "forms": noted_forms, "crc32": _checksum(forms, whole)}
        layouts = {_KEY: Layout(torch.uint8, (nbytes,), (1,))}
        if not quota.make(build(layouts, {_NOTE: noted}).size):
            return False
        put_values(path, layouts, from_values({_KEY: whole}, layouts), {_NOTE: noted}, durable=True)
        quota.used += os.stat(path).st_size
        return True


class _Quota:
    """How much of the budget is used, and by what; under the lock."""

    def __init__(self, folder: Path, most: int, staying: list[str]) -> None:
        self._most = most
        self.used = 0
        self._unused: list[tuple[int, int, int, Path]] = []
        with os.scandir(folder) as items:
            for item in items:
                if _NAME.fullmatch(item.name):
                    status = item.stat(follow_symlinks=False)
                    self.used += status.st_size
                    if item.name not in staying:
                        place = Path(item.path)
                        self._unused.append((status.st_atime_ns, -int(item.name[:5]), status.st_size, place))
        self._unused.sort(reverse=True)

    def make(self, nbytes: int) -> bool:
        """Remove blocks until `nbytes` fit; False if that is impossible."""
        if nbytes > self._most:
            return False
        while self.used + nbytes > self._most and self._unused:
            *_, size, path = self._unused.pop()
            remove(path)
            if not is_there(path):
                log.debug("%s goes: it was not used for longest", path)
                self.used -= size
        return self.used + nbytes <= self._most


def _names(identity: str, tokens: Sequence[int]) -> list[str]:
    """The names of the files of a prompt's whole blocks, each a hash over all that is before it."""
    names, digest = [], sha256(identity.encode())
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


def _form(noted: Json) -> Form:
    heads, key, value, dtype = noted
    found = dtype_named(dtype)
    if found is None or not all(type(size) is int and size > 0 for size in (heads, key, value)):
        raise CorruptFileError(f"a layer of the form {noted!r} is not possible")
    return Form(heads, key, value, found)
