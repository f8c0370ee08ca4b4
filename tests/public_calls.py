"""Every public call that touches tensors or files, small, with what must hold after it was cut short.

For tests that apply something to all of them: interrupting them, or checking what they leave behind.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import offload
from offload import OffloadedTensor, TensorCache
from offload.checkpoints.conversion import convert_checkpoint
from offload.errors import CacheError, MissingRowsError
from offload.system.modes import no_grad

OLD, NEW = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) * 2 + 1
LARGE = torch.arange(1 << 16, dtype=torch.float32).reshape(256, 256)  # larger than what always stays in memory
_numbers = itertools.count()


@dataclass(frozen=True)
class Call:
    """A public call.

    Attributes:
        prepare: returns the argument of `act`, in a new folder.
        act: the call.
        check: asserts what must hold whether `act` succeeded or not; tries it again.
        changes: the global state that it is meant to change.
    """

    prepare: Callable[[Path], Any]
    act: Callable[[Any], object]
    check: Callable[[Any], None]
    changes: frozenset[str] = field(default=frozenset())


def old_or_new(weight: torch.Tensor) -> None:
    """A further op gives the same as on the plain tensor, with the old value or the new one."""
    value = weight.materialize() if isinstance(weight, OffloadedTensor) else weight
    assert torch.equal(OLD, value) or torch.equal(NEW, value), value
    assert torch.equal(value.sum() + 1, weight.sum() + 1)
    assert torch.equal(F.linear(torch.ones(2, 4), value), F.linear(torch.ones(2, 4), weight))


def _named(folder: Path) -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(OLD, "w", folder)


def _private(folder: Path) -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(OLD, "w")


def _referenced(folder: Path) -> OffloadedTensor:
    folder.mkdir(parents=True)
    save_file({"w": OLD}, folder / "of others.safetensors")
    return OffloadedTensor.from_file(folder / "of others.safetensors", "w")


_OPS: dict[str, Callable[[Any], object]] = {
    "sum": lambda w: w.sum(),
    "linear": lambda w: F.linear(torch.ones(2, 4), w),
    "view": lambda w: w[1:].t(),
    "cat": lambda w: torch.cat([w, w]),
    "to dtype": lambda w: w.to(torch.float64),
    "materialize": lambda w: w.materialize(),
    "repr": repr,
    "numpy": lambda w: w.numpy(),
    "tolist": lambda w: w.tolist(),
    "update_values": lambda w: w.update_values(NEW),
    "copy_": lambda w: w.copy_(NEW),
    "out": lambda w: torch.add(NEW, 0, out=w),
    "data": lambda w: setattr(w, "data", NEW),
    "flush": lambda w: w.flush(),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda w: torch.save(w, io.BytesIO()),
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "to another process": lambda w: bytes(ForkingPickler.dumps(w)),
    "offloaded_like": lambda w: offload.offloaded_like(torch.neg, w, ".neg"),
    "memory_summary": lambda w: str(offload.memory_summary()),
    "keep_resident": lambda w: offload.budget.keep_resident(w),
    "evict": lambda w: offload.budget.evict(w),
    "map_values": lambda w: offload.map_values(lambda name, value: NEW, {"w": w}),
}


def _in_inference_mode(weight: OffloadedTensor) -> None:
    with torch.inference_mode():
        weight[1:].sum()
        weight.materialize()


def _in_a_fake_mode(weight: OffloadedTensor) -> None:
    with torch.device("meta"):
        weight[1:].sum()
        OffloadedTensor.zeros((2,), name="zeros")


def _backward(weight: OffloadedTensor) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    F.linear(x, weight).sum().backward()
    assert torch.equal(weight.materialize().sum(0).expand(2, 4), x.grad)


# Files and models


def _make(folder: Path) -> Path:
    return folder


def _is_whole_or_not_there(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        assert torch.equal(OLD, OffloadedTensor.from_file(path).materialize())
        path.unlink()
    assert torch.equal(OLD, _named(folder).materialize())


def _checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"0.weight": OLD, "1.weight": OLD.t().contiguous()}, folder / "model.safetensors")
    return folder


def _pickled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    torch.save({"0.weight": OLD, "1.weight": OLD.t()}, folder / "model.bin")
    return folder


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False))


def _filled() -> nn.Module:
    model = _model()
    with no_grad():
        model[0].weight.copy_(OLD)
        model[1].weight.copy_(OLD.t())
    return model


def _map_batches(model: nn.Module) -> None:
    with no_grad():
        found = list(offload.map_batches(model, [torch.ones(1, 4), torch.zeros(2, 4)], model, progress=False))
    assert torch.equal(F.linear(F.linear(torch.ones(1, 4), OLD), OLD.t()), found[0])
    assert torch.equal(torch.zeros(2, 4), found[1])


def _load(folder: Path) -> nn.Module:
    with offload.init_empty_weights():
        model = _model()
    return offload.load_checkpoint_and_dispatch(model, folder, device_map="disk", offload_dir=folder / "work")


def _loads(folder: Path) -> None:
    assert torch.equal(_filled()(torch.ones(1, 4)), _load(folder)(torch.ones(1, 4)))


def _files(folder: Path) -> None:
    [path] = (*folder.glob("model.*"),)
    assert torch.equal(OLD, offload.load_file(path)["0.weight"].materialize())


def _has_old_values(model: nn.Module) -> None:
    assert torch.equal(_filled()(torch.ones(1, 4)), model(torch.ones(1, 4)))


def _to_save(folder: Path) -> tuple[nn.Module, Path]:
    model = offload.disk_offload(_filled(), folder / "work")
    offload.save_checkpoint(model, folder / "saved")
    with no_grad():
        model[0].weight.copy_(NEW)
    return model, folder


def _save(given: tuple[nn.Module, Path]) -> None:
    model, folder = given
    offload.save_checkpoint(model, folder / "saved")


def _was_saved(given: tuple[nn.Module, Path]) -> None:
    _, folder = given
    saved = offload.load_file(next((folder / "saved").glob("*.safetensors")))
    old_or_new(saved["0.weight"])
    del saved  # a live tensor over the file would keep it from being replaced
    _save(given)
    assert torch.equal(NEW, offload.load_file(folder / "saved" / "model.safetensors")["0.weight"])


def _convert(folder: Path) -> None:
    convert_checkpoint(folder / "model.safetensors", folder / "converted", dtype=torch.float64)


def _was_converted(folder: Path) -> None:
    if not (folder / "converted").exists():
        _convert(folder)
    assert torch.equal(OLD.double(), offload.load_file(folder / "converted")["0.weight"])


def _to_map(folder: Path) -> nn.Module:
    return offload.disk_offload(_filled(), folder)


def _double(model: nn.Module) -> None:
    offload.map_values(lambda name, value: value * 2, model, resume="double")


def _is_doubled_once(model: nn.Module) -> None:
    for layer in model:
        value = layer.weight.materialize()
        once = OLD if value.shape == OLD.shape else OLD.t()
        assert torch.equal(once, value) or torch.equal(once * 2, value)
    _double(model)
    assert torch.equal(OLD * 2, model[0].weight)
    assert torch.equal(OLD.t() * 2, model[1].weight)


# Rows, trees, training


def _cache(folder: Path) -> TensorCache:
    cache = TensorCache.create(folder, {"x": (torch.float32, (4,)), "text": "json"}, num_rows=3)
    cache[:] = {"x": OLD, "text": ["a", "b", "c"]}
    cache.flush()
    return cache


def _rows(cache: TensorCache) -> None:
    """Each row is old, new, or missing; and can be rewritten."""
    with TensorCache.open(cache.folder, mode="r") as reader:
        for row in range(3):
            try:
                found = reader[row]["x"]
            except MissingRowsError:
                continue
            assert torch.equal(OLD[row], found) or torch.equal(NEW[row], found)
    with suppress(CacheError):  # it is closed
        cache[:3] = {"x": NEW, "text": ["d", "e", "f"]}
        cache.flush()
        assert torch.equal(NEW, cache[:3]["x"])


def _fill_with_a_model(cache: TensorCache) -> None:
    inputs = torch.cat([OLD, torch.zeros(len(cache) - 3, 4)])
    model = offload.disk_offload(nn.Sequential(nn.utils.skip_init(nn.Linear, 4, 4)))
    cache[1] = {"x": NEW[1], "text": "d"}
    mapped = partial(offload.map_batches, model=model)
    with no_grad():  # torch's own can be interrupted while it is left
        cache.fill(lambda part: (model(part), {"x": part, "text": ["e"] * len(part)})[1], inputs, map_fn=mapped)


_CACHE: dict[str, Callable[[TensorCache], object]] = {
    "read": lambda cache: cache[torch.tensor([2, 0])],
    "read a column": lambda cache: cache.column("x").sum(),
    "write": lambda cache: cache.__setitem__(slice(0, 3), {"x": NEW, "text": ["d", "e", "f"]}),
    "append": lambda cache: cache.append({"x": NEW, "text": ["g", "h", "i"]}),
    "flush": lambda cache: (cache.__setitem__(0, {"x": NEW[0], "text": "d"}), cache.flush()),
    "fill, with a model": _fill_with_a_model,
    "missing_rows": lambda cache: cache.missing_rows(),
    "close": lambda cache: cache.close(),
}


def _tree(folder: Path) -> Path:
    offload.save_tree({"w": OLD, "n": 1}, folder)
    return folder


def _save_tree(folder: Path) -> None:
    offload.save_tree({"w": NEW, "n": 2}, folder)


def _is_tree(folder: Path) -> None:
    tree = offload.load_tree(folder)
    assert torch.equal(OLD if tree["n"] == 1 else NEW, tree["w"])
    _save_tree(folder)
    assert 2 == offload.load_tree(folder)["n"]


def _trained(folder: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    model = offload.disk_offload(_filled(), folder / "work")
    optimizer = offload.training.offload_optimizer(
        torch.optim.AdamW(model.parameters()), offload_dir=folder / "state", min_bytes=1
    )
    _step((folder, model, optimizer))
    offload.training.save_training(model, folder / "saved", optimizer)
    return folder, model, optimizer


def _step(given: tuple[Path, nn.Module, torch.optim.Optimizer]) -> None:
    _, model, optimizer = given
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def _save_training(given: tuple[Path, nn.Module, torch.optim.Optimizer]) -> None:
    folder, model, optimizer = given
    offload.training.save_training(model, folder / "saved", optimizer)


def _load_training(given: tuple[Path, nn.Module, torch.optim.Optimizer]) -> None:
    folder, model, optimizer = given
    offload.training.load_training(model, folder / "saved", optimizer)


def _trains(given: tuple[Path, nn.Module, torch.optim.Optimizer]) -> None:
    _step(given)
    _load_training(given)
    _step(given)
    _save_training(given)


def _with_activations(weight: torch.Tensor) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with offload.training.offload_activations(min_bytes=1):
        y = F.linear(x, weight).exp().exp().sum()
    y.backward()


def _offloading(weight: torch.Tensor) -> None:
    with offload.offloading(min_bytes=1):
        big = torch.ones(8, 8) @ torch.ones(8, 8)
    assert offload.is_offloaded(big)


# Read-ahead


def _large(folder: Path) -> list[OffloadedTensor]:
    weights = [OffloadedTensor.from_original_tensor(LARGE + k, f"w{k}", folder) for k in range(4)]
    for _ in range(2):
        _read_cold(weights)
    return weights


def _read_cold(weights: list[OffloadedTensor]) -> None:
    offload.budget.evict(*weights)
    for weight in weights:
        weight.sum()


def _reads(weights: list[OffloadedTensor]) -> None:
    _read_cold(weights)
    for k, weight in enumerate(weights):
        assert torch.equal(LARGE + k, weight.materialize())


CALLS: dict[str, Call] = {
    **{f"{op}, named": Call(_named, act, old_or_new) for op, act in _OPS.items()},
    **{f"{op}, private": Call(_private, act, old_or_new) for op, act in _OPS.items()},
    "copy_, referenced": Call(_referenced, _OPS["copy_"], old_or_new),
    "update_values, referenced": Call(_referenced, _OPS["update_values"], old_or_new),
    "inference mode": Call(_named, _in_inference_mode, old_or_new),
    "meta device": Call(_named, _in_a_fake_mode, old_or_new),
    "backward": Call(_named, _backward, old_or_new),
    "from_original_tensor": Call(_make, _named, _is_whole_or_not_there),
    "from_file": Call(_checkpoint, _files, _files),
    "load_file, pickled": Call(_pickled, _files, _files),
    "load_checkpoint_and_dispatch": Call(_checkpoint, _load, _loads),
    "load_checkpoint_and_dispatch, pickled": Call(_pickled, _load, _loads),
    "disk_offload": Call(lambda _: _filled(), offload.disk_offload, _has_old_values),
    "map_batches": Call(lambda folder: offload.disk_offload(_filled(), folder), _map_batches, _map_batches),
    "save_checkpoint": Call(_to_save, _save, _was_saved),
    "convert_checkpoint": Call(_checkpoint, _convert, _was_converted),
    "map_values, resumed": Call(_to_map, _double, _is_doubled_once),
    **{f"cache: {what}": Call(_cache, act, _rows) for what, act in _CACHE.items()},
    "cache: open": Call(_cache, lambda cache: TensorCache.open(cache.folder, mode="r+").close(), _rows),
    "save_tree": Call(_tree, _save_tree, _is_tree),
    "load_tree": Call(_tree, offload.load_tree, _is_tree),
    "offload_optimizer": Call(_trained, _step, _trains),
    "save_training": Call(_trained, _save_training, _trains),
    "load_training": Call(_trained, _load_training, _trains, frozenset({"random", "numpy", "torch"})),
    "offload_activations": Call(_private, _with_activations, old_or_new),
    "offloading": Call(_private, _offloading, old_or_new),
    "reads from the disk": Call(_large, _read_cold, _reads),
}


def new_folder(root: Path) -> Path:
    """A folder that does not exist yet."""
    return root / str(next(_numbers))
