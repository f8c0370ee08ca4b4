"""Damage files of every supported kind, and check that each is read correctly or refused with a proper error.

Always true:
- a trial is identified by its kind, number and seed: `--only KIND --trial NUMBER` repeats it
- trials run in a forked child; one that dies by a signal or hangs has failed, and the next child continues after it
- equal means bit for bit what safetensors, or `torch.load(weights_only=True)`, returns; if they refuse the file, or
  nothing else can read it, it only counts as read
- an error other than `OffloadError`, excessive memory or disk use, and a file changed or created by reading are
  failures, too
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import itertools
import mmap
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as their_load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import offload
from offload.checkpoints.verify import verify
from offload.errors import OffloadError
from offload.storage.file import TensorFile
from offload.storage.pickled import _tensors_in
from tests.conftest import contents
from tests.fuzz import models
from tests.fuzz.models import Files, Kind, Wrong, files_of
from tests.fuzz.mutations import bytes_damaged, json_file_damaged, safetensors_damaged, safetensors_made, zip_damaged
from tests.processes import ended, forked, kill

EQUAL, READ, REFUSED, FAILED = OUTCOMES = ("equal", "read", "refused", "failed")
_BATCH = 2000  # trials per child
_LIMIT = 20.0  # seconds per trial
_MEMORY = 2 << 30  # bytes that a child may map in addition
_GROWTH = 192 << 20  # memory that a trial may use: files are a few KB, and packed ones have their own limit
_DISK = 4 << 20  # bytes that it may write
_PERTURB = -6  # glibc's fill pattern for new memory
THEIRS = "theirs"  # told before and after another reader runs, whose end is not our failure


@dataclass
class Found:
    """The results of the trials of a kind."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return sum(self.counts.values())

    def add(self, outcome: str, number: int, what: str) -> None:
        self.counts[outcome] += 1
        if outcome == FAILED:
            self.failures.append({"trial": number, "what": what})


# A trial


def _trial(kind: Kind, seed: int, number: int, work: Path, sender: Connection) -> str:
    """The outcome of one trial.

    Raises:
        Exception: the trial has failed.
    """
    chance = random.Random(f"{seed} {kind.name} {number}")
    files = kind.damage(dict(chance.choice(kind.samples)), chance)
    folder = work / f"{number}"
    _put(folder, files)
    try:
        before, memory = contents(folder), _new_peak()
        try:
            values = kind.read(folder)
        except OffloadError as error:
            _require_words(error, work)
            return REFUSED
        finally:
            _require_modest(folder, work, _peak() - memory)
            if contents(folder) != before:
                raise Wrong("a file was changed, made or removed by looking")
        return _compared(kind, values, folder, sender)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compared(kind: Kind, values: Mapping[str, torch.Tensor], folder: Path, sender: Connection) -> str:
    notes = TensorFile.open(folder / _TENSORS).notes if kind.name == "safetensors" else {}
    if kind.theirs is None or "subclass" in notes:
        return READ
    sender.send((THEIRS, True))
    try:
        theirs = kind.theirs(folder)
    except Exception:
        return READ
    finally:
        sender.send((THEIRS, False))
    try:
        if values.keys() != theirs.keys():
            raise Wrong(f"names {sorted(values.keys() ^ theirs.keys())[:3]}")
        for name, value in values.items():
            (_require_same_bytes if notes else _require_same)(name, theirs[name].detach(), value)
    except Wrong:
        if _is_by_chance(kind, folder):
            return READ
        raise
    return EQUAL


def _is_by_chance(kind: Kind, folder: Path) -> bool:
    """Whether their result depends on old memory contents: torch.load leaves what it can't unpack uninitialized."""
    seen = []
    for filled_with in (0x55, 0xAA):
        ctypes.CDLL(None).mallopt(_PERTURB, filled_with)
        seen.append(
            {name: _flat(value.detach().resolve_conj()).tobytes() for name, value in kind.theirs(folder).items()}
        )
    ctypes.CDLL(None).mallopt(_PERTURB, 0)
    return seen[0] != seen[1]


def _require_same_bytes(name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    """For files whose header tells us the dtype and strides of the bytes."""
    if _flat(expected).tobytes() != _flat(found._on_cpu()).tobytes():
        raise Wrong(f"{name!r} has other bytes")


def _require_same(name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        raise Wrong(f"{name!r} is {found.dtype} {tuple(found.shape)} for {expected.dtype} {tuple(expected.shape)}")
    if expected.numel() * expected.itemsize > 1 << 20:  # expanded
        index = (slice(0, 2),) * expected.dim()
        expected, found = expected[index], found[index]
    if expected.dtype == torch.bool:  # a byte other than 0 and 1 is also true
        expected, found = expected.logical_and(expected), found.logical_and(found)
    expected, found = expected.resolve_conj().resolve_neg().contiguous(), offload.materialize(found)
    if _flat(expected).tobytes() != _flat(found.resolve_conj().resolve_neg().contiguous()).tobytes():
        raise Wrong(f"{name!r} has other values")


def _flat(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor in memory order."""
    count = min(tensor.numel(), 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
    flat = torch.empty(0, dtype=torch.uint8)
    start = tensor.storage_offset() * tensor.itemsize
    return flat.set_(tensor.untyped_storage(), start, (max(count, 0) * tensor.itemsize,), (1,)).numpy()


def _require_words(error: OffloadError, work: Path) -> None:
    """Check that an error names a file or a tensor, and does not claim that the disk is full: nothing was written."""
    text = str(error)
    if str(work) not in text:
        raise Wrong(f"an error without a path: {type(error).__name__}: {text}") from error
    if isinstance(error, offload.errors.WriteError):
        raise Wrong(f"something was written: {text}") from error


def _new_peak() -> int:
    """Reset the memory peak, and return it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _peak()


def _peak() -> int:
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


def _require_modest(folder: Path, work: Path, grown: int) -> None:
    if grown > _GROWTH:
        raise Wrong(f"{grown >> 20} MiB of memory were taken")
    for at, _, names in os.walk(work):
        if not at.startswith(str(folder)):
            size = sum(os.stat(os.path.join(at, name)).st_blocks * 512 for name in names)
            if size > _DISK:
                raise Wrong(f"{size >> 20} MiB were written to {at}")


def _put(folder: Path, files: Files) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# Child processes


def campaign(
    kinds: Sequence[Kind], seed: int, work: Path, *, seconds: float = 0, trials: int = 0, start: int = 0
) -> dict[str, Found]:
    """Try each kind for its share of the time, or a number of trials."""
    whole, numbers = sum(kind.weight for kind in kinds), range(start, start + (trials or 10**12))
    found = {}
    for kind in kinds:
        ends = time.monotonic() + (seconds * kind.weight / whole if seconds else 10**9)
        found[kind.name] = _tried(kind, seed, work, numbers, ends)
    return found


def _tried(kind: Kind, seed: int, work: Path, numbers: range, ends: float) -> Found:
    found = Found()
    while numbers and time.monotonic() < ends:
        work.mkdir(exist_ok=True)
        receiver, sender = Pipe(duplex=False)
        pid = forked(partial(_try_many, kind, seed, numbers[:_BATCH], ends, work, sender))
        sender.close()
        numbers = numbers[_followed(pid, receiver, found, numbers.start) :]
        shutil.rmtree(work, ignore_errors=True)
    return found


def _followed(pid: int, receiver: Connection, found: Found, first: int) -> int:
    """Counts what a child says of its trials, and what the last one dies of; returns how many there were."""
    before, is_theirs = found.tried, False
    while receiver.poll(_LIMIT):
        try:
            outcome, what = receiver.recv()
        except EOFError:
            code = ended(pid)
            what = "" if not code else signal.Signals(-code).name if code < 0 else f"exit code {code}"
            break
        is_theirs = outcome == THEIRS and what
        if outcome != THEIRS:
            found.add(outcome, first + found.tried - before, what)
    else:
        kill(pid)
        what = "it hangs"
    if what:
        found.add(READ if is_theirs else FAILED, first + found.tried - before, what)
    return found.tried - before


def _try_many(kind: Kind, seed: int, numbers: range, ends: float, work: Path, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    tempfile.tempdir = str(work)
    os.chdir(work)
    size = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for number in itertools.takewhile(lambda _: time.monotonic() < ends, numbers):
        try:
            outcome, what = _trial(kind, seed, number, work, sender), ""
        except Exception as error:
            trace = traceback.extract_tb(error.__traceback__)
            ours = [f"{Path(step.filename).name}:{step.lineno}" for step in trace if "offload" in step.filename]
            outcome, what = FAILED, f"{type(error).__name__}: {str(error)[:300]} ({' '.join(ours[-3:])})"
        sender.send((outcome, what))


# The kinds


def kinds(folder: Path, only: Sequence[str] = ()) -> list[Kind]:
    """All kinds, or those of these names; samples are created below `folder`."""
    made = [
        Kind("safetensors", _tensor_samples(folder), _damage_tensors, _read_file, _their_tensors, 5),
        Kind("pickle", _pickle_samples(), partial(_damage_one, zip_damaged), _read_file, _their_pickle, 4),
        Kind("folder", [_folder_sample(folder)], _damage_any, _read_folder),
        Kind("index", [_index_sample(folder)], _damage_any, _read_folder),
        Kind("cache", [_cache_sample(folder)], _damage_any, _read_cache),
        Kind("tree", [_tree_sample(folder)], _damage_any, _read_tree),
        Kind("training", [_training_sample(folder)], _damage_any, _read_training),
    ]
    with contextlib.suppress(ImportError):
        made.append(Kind("memmap", [_memmap_sample(folder)], _damage_any, _read_memmap))
    return [*(kind for kind in made if kind.name in (only or kind.name)), *models.kinds(folder, only)]


_TENSORS, _PICKLE = "x.safetensors", "x.bin"


def _damage_one(damage: Callable[[bytes, random.Random], bytes], files: Files, chance: random.Random) -> Files:
    return {name: damage(data, chance) for name, data in files.items()}


def _damage_tensors(files: Files, chance: random.Random) -> Files:
    data = files[_TENSORS] or safetensors_made(chance)
    return {_TENSORS: safetensors_damaged(data, chance) if chance.random() < 0.85 else data}


def _damage_any(files: Files, chance: random.Random) -> Files:
    """One file is damaged in a way specific to its format, or missing, or replaced by another."""
    names = sorted(files)
    small = [name for name in names if name.endswith(".json")]
    name = chance.choice(small if small and chance.random() < 0.6 else names)
    data = files[name]
    if chance.random() < 0.05:
        del files[name]
    elif chance.random() < 0.05:
        files[name] = files[chance.choice(names)]
    elif name in small:
        files[name] = json_file_damaged(data, chance)
    elif name.endswith(".safetensors"):
        files[name] = safetensors_damaged(data, chance)
    else:
        files[name] = bytes_damaged(data, chance)
    return files


def _read_file(folder: Path) -> Mapping[str, torch.Tensor]:
    (path,) = folder.iterdir()
    return _read_folder(path)


def _read_folder(folder: Path) -> Mapping[str, torch.Tensor]:
    verify(folder)
    return _looked_at(offload.load_file(folder))


def _looked_at(found: Any) -> Any:
    """Read every small value, and run ops on it."""
    for value in found.values() if isinstance(found, Mapping) else found:
        if isinstance(value, torch.Tensor) and value.numel() * value.itemsize < 1 << 20:
            offload.materialize(value)
            if value.dim() and len(value) and value.layout == torch.strided and type(value) is offload.OffloadedTensor:
                value.clone(), value[-1:], torch.cat([value[:1], value[:1]])
    return found


def _their_tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    return their_load_file(folder / _TENSORS)


def _their_pickle(folder: Path) -> Mapping[str, torch.Tensor]:
    return _tensors_in(torch.load(folder / _PICKLE, weights_only=True))


def _tensor_samples(folder: Path) -> list[Files]:
    """Our own files with every kind of note; and a seed without files, for new ones."""
    offload.register_subclass(TwoTensor)
    weight = torch.arange(24.0).reshape(2, 3, 4)
    values = {
        "plain": weight,
        "turned": weight.permute(2, 0, 1),
        "wide": torch.arange(6.0).to(torch.complex128),
        "half": torch.ones(2, 3, dtype=torch.complex32),
        "packed": TwoTensor(torch.randn(8, 64), torch.randn(8, 64)),
    }
    tensors = [offload.OffloadedTensor.from_original_tensor(value, name, folder) for name, value in values.items()]
    own = [{_TENSORS: tensor.offload_path.read_bytes()} for tensor in tensors]
    return [*own, *[{_TENSORS: b""}] * (3 * len(own))]


def _pickle_samples() -> list[Files]:
    base, c = torch.arange(24.0).reshape(4, 6), torch.arange(5.0).to(torch.complex64)
    states: list[Any] = [
        {"w": base, "b": torch.arange(3, dtype=torch.int64)},
        {"view": base[1:], "turned": base.t()},
        {"model": nn.Linear(3, 2).state_dict(), "step": 7, "name": "x", "betas": (0.9, 0.99)},
        {"p": nn.Parameter(base[0].clone()), "half": base.half(), "bool": base > 3, "none": torch.ones(0, 3)},
        {"c": c, "wide": c.to(torch.complex128), "s": torch.tensor(3)},
    ]
    made = []
    for state in states:
        data = io.BytesIO()
        torch.save(state, data)
        made.append({_PICKLE: data.getvalue()})
    return made


def _folder_sample(folder: Path) -> Files:
    place = folder / "values"
    offload.register_subclass(TwoTensor)
    two = TwoTensor(torch.randn(8, 64), torch.randn(8, 64))
    values = {"a.weight": torch.ones(3, 4), "b": torch.arange(5), "c": two}
    tensors = [offload.OffloadedTensor.from_original_tensor(value, name, place) for name, value in values.items()]
    assert len(tensors) == len(list(place.iterdir()))
    return files_of(place)


def _index_sample(folder: Path) -> Files:
    place = folder / "sharded"
    state = {f"layer.{at}.weight": torch.full((8, 8), float(at)) for at in range(5)}
    offload.save_checkpoint(state, place, max_shard_size=600)
    return files_of(place)


def _cache_sample(folder: Path) -> Files:
    place = folder / "cache"
    columns = {"x": (torch.float32, (3,)), "y": (torch.int64, (None,)), "said": "json", "raw": (torch.uint8, (None,))}
    cache = offload.TensorCache.create(place, columns, metadata={"model": "m"})
    rows = [torch.arange(n) for n in range(6)]
    for at in (0, 3):
        said = {"said": [{"a": at}, "b", None], "raw": [b"", b"a", b"bc"]}
        cache.append({"x": torch.ones(3, 3), "y": rows[at : at + 3], **said})
    cache.close()
    return {name: data[: 64 << 10] for name, data in files_of(place).items()}


def _read_cache(folder: Path) -> Mapping[str, torch.Tensor]:
    with offload.TensorCache.open(folder) as cache:
        missing = cache.missing_rows()
        for name in cache.schema:
            with contextlib.suppress(OffloadError):
                cache.column(name).sum()
        if len(cache) < 1000:
            cache[sorted({*range(len(cache))} - {*missing.tolist()})]
    return {}


@dataclass
class _Record:
    """A dataclass, as trees may contain."""

    step: int
    weight: torch.Tensor


def _tree_sample(folder: Path) -> Files:
    tied = torch.ones(2, 2)
    tree = {
        "record": _Record(3, torch.arange(4.0)),
        "list": [1, 2.5, None, True, "text", b"bytes", float("inf"), 10**30, 1j, {3: tied, (1, 2): tied}],
        "more": (torch.float16, torch.device("cpu"), torch.Size([2, 3]), nn.Parameter(tied)),
    }
    offload.save_tree(tree, folder / "tree")
    return files_of(folder / "tree")


def _read_tree(folder: Path) -> Mapping[str, torch.Tensor]:
    found = offload.load_tree(folder, types=[_Record])
    _looked_at(list(_leaves(found)))
    return {}


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple | _Record):
        inner = tree.values() if isinstance(tree, Mapping) else [tree.weight] if isinstance(tree, _Record) else tree
        yield from (leaf for value in inner for leaf in _leaves(value))


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _training_sample(folder: Path) -> Files:
    model, optimizer = _model()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    offload.training.save_training(model, folder / "training", optimizer, step=3, notes={"a": [1, 2.5]})
    return files_of(folder / "training")


def _read_training(folder: Path) -> Mapping[str, torch.Tensor]:
    """Everything, or nothing."""
    model, optimizer = _model()
    before = _state_of(model, optimizer)
    try:
        offload.training.load_training(model, folder, optimizer)
    except OffloadError:
        if _state_of(model, optimizer) != before:
            raise Wrong("a training was loaded by half") from None
        raise
    return {}


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [value.tolist() for value in model.state_dict().values()]
    return repr((tensors, optimizer.state_dict(), random.getstate(), torch.get_rng_state().sum()))


def _memmap_sample(folder: Path) -> Files:
    from tensordict import TensorDict

    inner = TensorDict(a=torch.ones(4, 2), b=torch.arange(4), batch_size=[4])
    TensorDict({"inner": inner, "x": torch.zeros(4, 3, dtype=torch.bool), "text": "a"}, [4]).memmap(folder / "memmap")
    return files_of(folder / "memmap")


def _read_memmap(folder: Path) -> Mapping[str, torch.Tensor]:
    from offload.integrations.tensordict import load_memmap

    found = load_memmap(folder)
    return _looked_at({str(name): value for name, value in found.items(True, True) if torch.is_tensor(value)})


# The command


def table(found: Mapping[str, Found]) -> str:
    """The results as a table."""
    lines = [f"{'':12}{'tried':>9}{'equal':>9}{'read':>9}{'refused':>9}{'failed':>9}"]
    for name, one in found.items():
        lines.append(f"{name:12}{one.tried:9}" + "".join(f"{one.counts[outcome]:9}" for outcome in OUTCOMES))
    return "\n".join(lines)


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.campaign", description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=60, help="for all kinds together")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="kinds, with commas between them")
    options.add_argument("--trials", type=int, default=0, help="of each kind, in place of seconds")
    options.add_argument("--trial", type=int, help="one trial again")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        (samples := Path(place, "samples")).mkdir()
        every = kinds(samples, chosen.only.split(",") if chosen.only else ())
        trials = chosen.trials if chosen.trial is None else 1
        length = {"seconds": 0 if trials else chosen.seconds, "trials": trials}
        found = campaign(every, chosen.seed, Path(place, "work"), start=chosen.trial or 0, **length)
    for name, one in found.items():
        for failure in one.failures:
            print(f"{name} {failure['trial']}: {failure['what']!a}")
    print(table(found))
    return 1 if any(one.counts[FAILED] for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
